"""The audit: samples are drawn at random, and intervals contain the truth as often as they promise."""

import json
from pathlib import Path

import numpy as np
import pytest

from pencil_scale.review.audit import (
    BINS,
    Bin,
    Findings,
    Stratum,
    draw,
    interval,
    read_audit,
    reliability,
    study,
)
from pencil_scale.storage.errors import PencilError


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match=r"gone\.json: no such file"):
        read_audit(str(tmp_path / "gone.json"))


def test_finding_one_in_two_of_four_means_one_to_three_in_all() -> None:
    # It is neither none nor all of the 4; with 1 or 3, the chance to find one in two draws is a half.
    assert interval(1, 2, 4) == (0.25, 0.75)


def test_the_interval_is_exact_if_all_were_judged_and_unbounded_if_none_were() -> None:
    assert interval(7, 20, 20) == (0.35, 0.35)
    assert interval(0, 0, 20) == (0.0, 1.0)


def test_bounds_for_a_large_dataset_are_those_of_clopper_and_pearson() -> None:
    low, high = interval(0, 100, 100_000_000)
    assert low == 0.0
    assert high == pytest.approx(1 - 0.025 ** (1 / 100), rel=1e-4)  # where (1 - p)^100 = 0.025
    assert interval(100, 100, 100_000_000)[0] == pytest.approx(0.025 ** (1 / 100), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong"), [(0.9, 0.03), (0.5, 0.2), (0.99, 0.002)])
def test_the_intervals_cover_the_truth_in_95_of_100_audits(right: float, wrong: float) -> None:
    """Labels whose truth is known are drawn and judged again in each audit."""
    chance = np.random.default_rng(5)
    repaired_well = chance.random(900) < right
    still_wrong = chance.random(4000) < wrong
    truth = (repaired_well.mean(), still_wrong.mean(), ((~repaired_well).sum() + still_wrong.sum()) / 4900)
    audits = [_audit(repaired_well, still_wrong, seed) for seed in range(300)]
    for true_share, name in zip(truth, ("precision", "missed", "remaining"), strict=True):
        found = [getattr(audit, name) for audit in audits]
        covered = np.mean([one.low <= true_share <= one.high for one in found])
        assert covered >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / len(audits)), name
        assert np.mean([one.high - one.low for one in found]) < 0.2  # narrow enough to be of use
        assert np.mean([one.share for one in found]) == pytest.approx(true_share, abs=0.01)


def test_the_gain_is_what_was_put_right_minus_what_was_spoiled() -> None:
    # All 100 changes of 1,000 labels are judged: 70 are right now, 20 were right before, 10 never.
    found = study(Stratum(70, 100, 100, num_given_right=20), Stratum(0, 0, 900)).gain
    assert found == pytest.approx((0.05, 0.05, 0.05))
    few = study(Stratum(7, 10, 100, num_given_right=2), Stratum(0, 0, 900)).gain
    assert few.share == pytest.approx(0.05)
    assert few.low < 0 < 0.05 < few.high  # ten judgements do not decide it
    assert study(Stratum(0, 0, 0), Stratum(5, 5, 900)).gain == (0, 0, 0)


def test_labels_are_as_often_right_as_their_confidence_says_or_not() -> None:
    changed = Stratum(1, 2, 20, confidence=((0.6, True), (0.65, False)))  # each stands for 10 labels
    unchanged = Stratum(2, 2, 60, confidence=((0.6, True), (1.0, True)))  # and each for 30
    low, high = reliability([changed, unchanged])
    assert low == Bin(0.5, 0.7, 3, pytest.approx((6 + 6.5 + 18) / 50), pytest.approx(40 / 50))
    assert high == Bin(BINS[-2], 1.0, 1, 1.0, 1.0)
    assert reliability([Stratum(0, 0, 20)]) == []


def _audit(repaired_well: np.ndarray, still_wrong: np.ndarray, seed: int) -> Findings:
    changed = repaired_well[draw(np.arange(len(repaired_well)), seed, 120)]
    unchanged = still_wrong[draw(np.arange(900, 900 + len(still_wrong)), seed, 150)]
    return study(Stratum(changed.sum(), 120, 900), Stratum((~unchanged).sum(), 150, len(still_wrong)))


def test_every_row_is_drawn_equally_often() -> None:
    drawn = np.bincount(np.concatenate([draw(np.arange(40), seed, 10) for seed in range(2000)]))
    # Each has a chance of a quarter: 500 of 2,000, and 4.5 standard deviations are 87.
    assert len(drawn) == 40
    assert np.abs(drawn - 500).max() < 90


def test_drawing_again_from_draws_of_stretches_gives_the_draw_from_all_rows() -> None:
    rows = np.arange(10_000)
    union = np.concatenate([some[draw(some, 3, 25)] for some in np.array_split(rows, 7)])
    np.testing.assert_array_equal(union[draw(union, 3, 25)], rows[draw(rows, 3, 25)])


# --- from a saved file -------------------------------------------------------------------------------


def saved(folder: Path, **changes: object) -> str:
    known = {"changed": {"all": 50, "drawn": 10}, "unchanged": {"all": 400, "drawn": 10}}
    head = {"kind": "pencil_scale decisions", "version": 3, "run": "t", "audit": known}
    path = folder / "decisions.json"
    path.write_text(json.dumps({**head, "decisions": [judged(1, 1)], **changes}))
    return str(path)


def judged(number: int | None, suggested: int, audit: str | None = "changed") -> dict[str, object]:
    given = 2 if audit == "changed" else suggested
    known = {"sample_id": "x", "class": number, "given": given, "suggested": suggested}
    return {**known, "audit": audit, "confidence": 0.75}


def test_only_audited_samples_that_got_the_suggested_class_count_as_right(tmp_path: Path) -> None:
    decisions = [judged(1, 1), judged(2, 1), judged(None, 1), judged(1, 1, None), judged(4, 4, "unchanged")]
    found = read_audit(saved(tmp_path, decisions=decisions))
    assert found.changed == Stratum(1, 3, 50, 1, ((0.75, True), (0.75, False), (0.75, False)))
    assert (found.unchanged, found.run) == (Stratum(1, 1, 400, 1, ((0.75, True),)), "t")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "shopping list"}, "not a file of decisions"),
        ({"version": 9}, "not a file of decisions of version 3"),
        ({"decisions": [judged(1, 1, None)]}, "nothing was judged in an audit"),
        ({"audit": {}}, "entries are missing or invalid"),
        ({"decisions": [judged(1, 1)] * 11}, "11 judged of 10 drawn of 50 changed"),
        ({"decisions": 7}, "entries are missing or invalid"),
    ],
)
def test_a_file_without_a_valid_audit_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(PencilError, match=said):
        read_audit(saved(tmp_path, **changes))
    (tmp_path / "decisions.json").write_text("[{")
    with pytest.raises(PencilError, match="not a complete JSON"):
        read_audit(str(tmp_path / "decisions.json"))
