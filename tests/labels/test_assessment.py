"""Watched samples and planted errors of a run whose truth is known."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from catalogue_making import Bench, sample
from label_making import packed

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import Evidence
from pencil_scale.labels.assessment import Assessment, assess
from pencil_scale.labels.columns import FREE, WATCHED
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.labels.roles import Roles, choose_roles
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.labels.table import LabelTable

NUM, CLASSES = 3000, 3
TRUE = np.arange(NUM) % CLASSES


class Made(NamedTuple):
    catalogue: Catalogue
    given: np.ndarray
    roles: Roles
    found: Assessment


def run(folder: Path, noise: float, skill: float, evidence: Evidence) -> Made:
    """Index noisy samples, give them roles, and predict each as a network of this skill would."""
    random, bench = np.random.default_rng(1), Bench(folder)
    wrong = (TRUE + random.integers(1, CLASSES, NUM)) % CLASSES
    given = np.where(random.random(NUM) < noise, wrong, TRUE)
    bench.shard("a.tar", [member for row in range(NUM) for member in sample(row, int(given[row]))])
    catalogue = bench.index().catalogue
    roles = choose_roles(catalogue, None, np.zeros(0, np.int64), evidence, seed=1)
    planted = roles.planted, roles.planted_class
    manifest = start_labels(catalogue, str(folder / "store"), 10.0, planted=planted, watched=roles.watched)
    table = LabelTable.restore(manifest, folder / "table")
    logits = random.normal(size=(NUM, CLASSES))
    logits[np.arange(NUM), TRUE] += skill
    table.mark(np.arange(NUM), packed(skill * logits), epoch=0)
    return Made(catalogue, given, roles, assess(table.snapshot(), catalogue, roles))


def test_a_good_network_repairs_and_the_gain_is_known(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.3, skill=4.0, evidence=Evidence(watched=0.3, planted=0.1))
    noise, gain = made.found.noise, made.found.gain
    assert noise is not None
    assert gain is not None
    assert noise.wrong == pytest.approx((made.given != TRUE).mean(), abs=0.05)
    decided = PublishedLabels(made.found.labels).rows(range(NUM)).decide()
    before, after = (made.given == TRUE).mean(), (decided.corrected_class == TRUE).mean()
    assert after > 0.9
    assert gain.gain == pytest.approx(after - before, abs=0.08)
    assert 0 < gain.low < gain.gain < gain.high
    watched = made.roles.watched
    assert (decided.corrected_class == TRUE)[watched].mean() > 0.9


def test_planted_errors_are_not_published(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.0, skill=4.0, evidence=Evidence(watched=0.2, planted=0.2))
    labels = PublishedLabels(made.found.labels).rows(range(NUM))
    assert labels.noisy_class.tolist() == made.given.tolist()
    assert set(labels.role.tolist()) == {FREE, WATCHED}
    decided = labels.decide()
    assert (decided.corrected_class == TRUE)[made.roles.planted].all()
    assert decided.num_changed <= 3


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_network_that_guesses_changes_next_to_nothing_and_has_no_power(
    tmp_path: Path, noise: float
) -> None:
    made = run(tmp_path, noise, skill=0.2, evidence=Evidence(watched=0.3, planted=0.1))
    decided = PublishedLabels(made.found.labels).rows(range(NUM)).decide()
    assert decided.num_changed <= 3
    assert made.found.power is not None
    assert made.found.power < 0.2


def test_without_evidence_nothing_is_concluded(tmp_path: Path) -> None:
    made = run(tmp_path, 0.3, 4.0, Evidence(watched=0, planted=0))
    assert made.found == Assessment(made.found.labels)
    assert made.found.labels.noise is None
