"""Samples whose truth is known, with given labels and the predictions of a network."""

from typing import NamedTuple

import numpy as np

from pencil_scale.method.evidence import NoiseModel, Predictions, judge, limit_changes

CLASSES = 10


class Crowd(NamedTuple):
    """Samples with their truth, their given labels, and what a network predicts."""

    true: np.ndarray
    given: np.ndarray
    predictions: Predictions


def crowd(num: int, noise: float, skill: float, seed: int = 1) -> Crowd:
    """Make samples; the network's logits favour the true class by `skill` in units of their spread."""
    random = np.random.default_rng(seed)
    true = random.integers(CLASSES, size=num)
    given = np.where(random.random(num) < noise, (true + random.integers(1, CLASSES, num)) % CLASSES, true)
    logits = random.normal(size=(num, CLASSES))
    logits[np.arange(num), true] += skill
    return Crowd(true, given, Predictions.from_logits(skill * logits))


def repaired(crowd: Crowd, noise: NoiseModel) -> np.ndarray:
    judged = judge(crowd.predictions, crowd.given, noise)
    noise = limit_changes(noise, judged.log_odds, noise.wrong_low)
    return np.where(judged.log_odds > noise.min_log_odds, judged.rival, crowd.given)
