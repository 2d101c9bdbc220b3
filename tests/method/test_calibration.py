"""Claims about labels are recalibrated by what people found: better, and in the same order."""

import numpy as np
import pytest

from pencil_scale.method.calibration import Calibration, calibration_error, fit_calibration
from pencil_scale.method.decisions import Decisions

NUM = 20_000


class World:
    """Labels of which more is claimed than is true: the log-odds are too large by a factor."""

    def __init__(self, factor: float) -> None:
        self.chance = np.random.default_rng(3)
        log_odds = self.chance.normal(2.0, 2.5, NUM)
        given_right = self.chance.random(NUM) < 1 / (1 + np.exp(-log_odds))
        score = 1 / (1 + np.exp(-factor * log_odds))
        self.changed = score < 0.5
        is_third = self.chance.random(NUM) < 0.05  # neither the given class nor its rival is right
        right = np.where(self.changed, ~given_right & ~is_third, given_right)
        self.claimed = np.stack([np.where(self.changed, 0.97 * (1 - score), score), score], axis=1)
        self.right = np.stack([right, given_right], axis=1)

    def audited(self, num: int) -> Calibration:
        """Judge as many changed labels as unchanged ones, which are many more."""
        strata = [np.flatnonzero(self.changed), np.flatnonzero(~self.changed)]
        rows = np.concatenate([self.chance.choice(stratum, num, replace=False) for stratum in strata])
        weight = np.repeat([len(stratum) / num for stratum in strata], num)
        return fit_calibration(self.claimed[rows], self.right[rows], weight)

    def error(self, calibration: Calibration | None, column: int) -> float:
        claimed = self.claimed if calibration is None else calibration.of(self.claimed)
        return calibration_error(claimed[:, column], self.right[:, column], np.ones(NUM))


def test_overconfident_claims_of_all_labels_become_true_by_judging_a_few_hundred() -> None:
    world = World(factor=3.0)
    found = world.audited(200)
    for column in (0, 1):  # confidence and score
        assert world.error(None, column) > 0.09
        assert world.error(found, column) < 0.03
    assert (found.num_judged, found.slope < 0.6) == (400, True)
    assert found.error_after < 0.5 * found.error_before


def test_timid_claims_are_raised() -> None:
    world = World(factor=0.5)
    found = world.audited(300)
    assert found.slope > 1.3
    assert max(world.error(found, 0), world.error(found, 1)) < 0.5 * world.error(None, 0)


def test_the_order_of_claims_stays_and_two_classes_never_exceed_1_together() -> None:
    share = np.concatenate([np.geomspace(1e-12, 0.5, 500), 1 - np.geomspace(0.5, 1e-7, 500)])
    for factor in (3.0, 0.5):
        found = World(factor).audited(100)
        mapped = found.of(share)
        assert (np.diff(mapped) > 0)[np.diff(share) > 0].all()
        assert (found.of(share) + found.of(1 - share) <= 1 + 1e-9).all()
    assert np.isfinite(found.of([0.0, 1.0])).all()


def test_few_judgements_change_little() -> None:
    world = World(factor=3.0)
    few, more = (np.mean([world.audited(num).slope for _ in range(5)]) for num in (3, 200))
    assert more < 0.55 < 0.8 < few < 1.1
    one = fit_calibration(np.array([[0.9, 0.9]]), np.array([[False, False]]), np.array([1000.0]))
    assert one.of(0.9) > 0.8  # one judgement, however many labels it stands for


def test_claims_that_are_true_are_left_nearly_as_they_are() -> None:
    world = World(factor=1.0)
    shares = np.array([0.02, 0.3, 0.7, 0.98])
    assert world.audited(1000).of(shares) == pytest.approx(shares, abs=0.06)


def test_only_some_rows_are_recalibrated_and_no_class_changes() -> None:
    shares = {"confidence": [0.9, 0.9, 0.4], "margin": [0.85, 0.85, 0.0], "score": [0.05, 0.05, 0.4]}
    before = Decisions(
        corrected_class=np.array([1, 1, 0]),
        changed=np.array([True, True, False]),
        **{name: np.array(values, np.float32) for name, values in shares.items()},
    )
    found = Calibration(-0.2, 0.5, 100, 0.1, 0.0)
    after = found.applied(before, np.array([True, False, True]))
    assert after.corrected_class is before.corrected_class
    assert after.confidence.tolist() == pytest.approx([found.of(0.9), 0.9, found.of(0.4)])
    assert after.margin.tolist() == pytest.approx([found.of(0.9) - found.of(0.05), 0.85, 0.0], abs=1e-6)
    assert after.score[2] == after.confidence[2]  # a label that was kept
    assert all(values.dtype == np.float32 for values in (after.confidence, after.margin, after.score))
