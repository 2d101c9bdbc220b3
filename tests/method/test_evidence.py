"""The model of label noise against labels whose truth is known."""

import numpy as np
import pytest
from crowd_making import CLASSES, crowd, repaired

from pencil_scale.method.evidence import (
    NoiseModel,
    Predictions,
    contradicted,
    fit_noise,
    judge,
    limit_changes,
    net_gain,
    suppose,
    unexplained,
)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3, 0.5])
def test_the_share_of_wrong_labels_is_estimated(noise: float) -> None:
    found = fit_noise(*_watched(noise, skill=4.0))
    assert found.wrong_low <= noise <= found.wrong_high + 0.01
    assert found.wrong == pytest.approx(noise, abs=0.02)


def _watched(noise: float, skill: float) -> tuple[Predictions, np.ndarray]:
    watched = crowd(4000, noise, skill, seed=2)
    return watched.predictions, watched.given


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0, 2.0, 4.0])
def test_no_network_however_weak_makes_labels_worse(noise: float, skill: float) -> None:
    model, others = fit_noise(*_watched(noise, skill)), crowd(8000, noise, skill)
    before, after = (others.given == others.true).mean(), (repaired(others, model) == others.true).mean()
    assert after >= before - 0.002


def test_a_good_network_repairs_most_labels() -> None:
    model, others = fit_noise(*_watched(0.3, 4.0)), crowd(8000, 0.3, 4.0)
    assert (repaired(others, model) == others.true).mean() > 0.95


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_a_network_that_is_sure_of_hard_samples_too_hides_no_noise(noise: float) -> None:
    watched = crowd(4000, noise, skill=2.0, seed=2)
    gap = watched.predictions.log_p[:, :1] - watched.predictions.log_p
    hot = _spread(watched.predictions.classes, -4 * gap**0.5)  # as after a long training
    found = fit_noise(Predictions.from_logits(hot), watched.given)
    assert found.power > 1
    assert found.wrong == pytest.approx(noise, abs=0.25 * noise + 0.01)


def _spread(classes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Scores of all classes; those that were not kept are lowest."""
    logits = np.repeat(scores.min(axis=1, keepdims=True) - 1.0, CLASSES, axis=1)
    np.put_along_axis(logits, classes, scores, axis=1)
    return logits


@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_weak_network_of_few_classes_is_not_taken_for_wrong_labels(num_classes: int) -> None:
    # Sure of itself, and yet right in three of four cases at most: what a network learns from 500 photos.
    random, num = np.random.default_rng(1), 1000
    true, lead = random.integers(num_classes, size=num), random.exponential(2.3, size=num)
    is_right = random.random(num) < np.minimum(1 / num_classes + lead / 8, 0.73)
    logits = np.zeros((num, num_classes))
    said = np.where(is_right, true, (true + random.integers(1, num_classes, num)) % num_classes)
    logits[np.arange(num), said] = lead
    found = fit_noise(Predictions.from_logits(logits), true)
    assert found.wrong > 0.1  # as it seems
    assert found.wrong_low == 0


def test_what_a_weak_network_surely_mistakes_is_not_taken_for_wrong_labels() -> None:
    seen, random = crowd(5000, noise=0.02, skill=2.0), np.random.default_rng(2)
    other = (seen.true + random.integers(1, CLASSES, 5000)) % CLASSES
    looks = np.where(random.random(5000) < 0.03, other, seen.true)
    logits = random.normal(size=(5000, CLASSES))
    logits[np.arange(5000), looks] += 2.0
    seen = seen._replace(predictions=Predictions.from_logits(2 * logits))
    assert 0.6 < (seen.predictions.classes[:, 0] == seen.true).mean() < 0.7
    found = fit_noise(seen.predictions, seen.given)
    assert found.wrong > 0.03  # more than there are
    assert found.wrong_low < 0.02
    assert (repaired(seen, found) == seen.true).mean() >= (seen.given == seen.true).mean()


def test_no_more_labels_change_than_are_surely_wrong() -> None:
    model, others = fit_noise(*_watched(0.1, 2.0)), crowd(8000, 0.1, 2.0)
    assert (repaired(others, model) != others.given).mean() <= model.wrong_low


@pytest.mark.parametrize(("noise", "skill"), [(0.3, 4.0), (0.3, 2.0), (0.1, 3.0)])
def test_the_estimated_gain_is_the_gain(noise: float, skill: float) -> None:
    model, others, planted = (
        fit_noise(*_watched(noise, skill)),
        crowd(8000, noise, skill),
        crowd(2000, 1.0, skill, 3),
    )
    # The original labels of planted errors have the same noise as all others.
    original = np.where(
        np.random.default_rng(4).random(2000) < noise, (planted.true + 1) % CLASSES, planted.true
    )
    judged = judge(others.predictions, others.given, model)
    model = limit_changes(model, judged.log_odds, model.wrong_low)
    after = np.where(judged.log_odds > model.min_log_odds, judged.rival, others.given)
    found = judge(planted.predictions, planted.given, model)
    changes = found.log_odds > model.min_log_odds
    gain = net_gain(changes, changes & (found.rival == original), (after != others.given).mean(), 8000, model)
    truth = (after == others.true).mean() - (others.given == others.true).mean()
    assert gain.gain == pytest.approx(truth, abs=0.03)
    assert gain.low < gain.gain < gain.high


def test_following_a_weak_network_blindly_is_estimated_as_a_loss() -> None:
    model = fit_noise(*_watched(0.05, 1.0))
    others, planted = crowd(8000, 0.05, 1.0), crowd(2000, 1.0, 1.0, 3)
    best, of_planted = others.predictions.classes[:, 0], planted.predictions.classes[:, 0]
    assert (best == others.true).mean() < (others.given == others.true).mean() - 0.3
    changed = (best != others.given).mean()
    gain = net_gain(of_planted != planted.given, of_planted == planted.true, changed, 8000, model)
    assert gain.high < 0


def test_a_prediction_keeps_its_most_likely_classes() -> None:
    logits = np.array([[5.0, 1, 0, 0, 0, 3, 0, 2, 0, 0]])
    kept = Predictions.from_logits(logits)
    assert kept.classes.tolist() == [[0, 5, 7, 1, 2, 3]]
    for temperature in (0.5, 1.0, 2.0):
        full = np.exp(logits[0] / temperature) / np.exp(logits[0] / temperature).sum()
        top, other = kept.calibrated(temperature, power=1.0)
        assert top[0] == pytest.approx(full[[0, 5, 7, 1, 2, 3]], rel=0.01)
        assert other[0] == pytest.approx(full[4], rel=0.01)
        assert kept.of_class(np.array([5]), top, other)[0] == top[0, 1]


def test_the_probabilities_of_a_judgement_are_calibrated() -> None:
    model, others = fit_noise(*_watched(0.3, 2.0)), crowd(20_000, 0.3, 2.0)
    judged = judge(others.predictions, others.given, model)
    for low in np.arange(0.0, 1.0, 0.2):
        some = (judged.given_right >= low) & (judged.given_right < low + 0.2)
        right = (others.given == others.true)[some].mean()
        assert right == pytest.approx(judged.given_right[some].mean(), abs=0.06)


def test_a_class_that_cannot_be_leaves_its_share_to_the_others() -> None:
    shares = np.log([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    known = Predictions.from_logits(shares).without(np.array([0, 1]))
    assert known.classes.tolist() == [[1, 2, 0], [2, 0, 1]]
    assert np.exp(known.log_p) == pytest.approx(np.array([[0.75, 0.25, 0], [0.75, 0.25, 0]]))
    assert np.isfinite(known.log_p.astype(np.float16)).all()
    memorised = Predictions(np.array([[0, 1, 2]]), np.array([[0.0, -8.0, -9.0]]), 3).without(np.array([0]))
    assert np.exp(memorised.log_p).sum() == pytest.approx(1)
    unknown = Predictions(np.zeros((1, 3), np.int64), np.full((1, 3), np.nan), 3).without(np.array([0]))
    assert np.isnan(unknown.log_p).all()


def test_errors_that_random_noise_does_not_explain_are_noticed_where_the_network_is_surest() -> None:
    clean, noisy = crowd(4000, 0.0, 3.0), crowd(4000, 0.2, 3.0)
    mixed_up = np.where(clean.true == 1, 2, clean.true)  # one class is always given as another
    shares = [
        num / of
        for num, of in (
            contradicted(clean.predictions, clean.given),
            contradicted(noisy.predictions, noisy.given),
            contradicted(clean.predictions, mixed_up),
        )
    ]
    assert shares == pytest.approx([0.0, 0.2, 1 / CLASSES], abs=0.04)


def test_what_random_errors_explain_and_what_may_be_chance_is_not_unexplained() -> None:
    noise = NoiseModel(1.0, 0.2, wrong=0.15, wrong_low=0.02, wrong_high=0.25)
    assert unexplained(noise, 50, 200) == 0
    assert unexplained(noise, 5, 10) == 0  # too few to tell
    assert unexplained(noise, 100, 200) == pytest.approx(0.5)
    assert unexplained(noise, 0, 0) == 0


def test_if_some_labels_are_supposed_to_be_wrong_those_change_that_the_network_is_surest_of() -> None:
    random, rows = np.random.default_rng(5), np.arange(4000)
    true = random.integers(CLASSES, size=4000)
    logits = random.normal(-9, 1, (4000, CLASSES))
    logits[rows, true], rival = 0.0, (true + 1) % CLASSES
    logits[rows, rival] = random.normal(-6, 2, 4000)  # the network has learned what is confused
    wrong = random.random(4000) < 0.2
    predictions, given = Predictions.from_logits(logits), np.where(wrong, rival, true)
    assert fit_noise(predictions, given).wrong < 0.02
    judged = judge(predictions, given, suppose(predictions, given, 0.2))
    changed = judged.log_odds > 0
    assert changed[wrong].mean() > 0.2
    assert (judged.rival == true)[changed].mean() > 0.95


def test_nothing_is_gained_where_no_label_changed() -> None:
    noise = NoiseModel(1.0, 0.01, 0.01, 0.0, 0.02)
    found = net_gain(np.ones(50, bool), np.ones(50, bool), 0.0, 1000, noise)
    assert (found.low, found.gain, found.high) == (0, 0, 0)
    assert found.found == 1


def test_no_more_is_gained_than_labels_changed_however_many_seem_wrong() -> None:
    noise = NoiseModel(1.0, 0.3, wrong=0.29, wrong_low=0.16, wrong_high=0.4)
    flags = np.arange(60) < 30
    found = net_gain(flags, flags, 0.1, 700, noise)  # half of 0.29 would have been found, and 0.1 changed
    assert found.low < found.gain == pytest.approx(0.1) == found.high
