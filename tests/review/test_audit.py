"""The audit: samples are random, and the intervals hold the truth as often as they say."""

import json
from pathlib import Path

import numpy as np
import pytest

from pencil_scale.review.audit import Findings, Stratum, draw, interval, read_judged, study
from pencil_scale.storage.errors import PencilError


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match=r"gone\.json: no such file"):
        read_judged(str(tmp_path / "gone.json"))


def test_one_of_two_drawn_from_four_leaves_one_to_three() -> None:
    # Of 4, none or all cannot have it; under 1 or 3, drawing one of two has a chance of a half.
    assert interval(1, 2, 4) == (0.25, 0.75)


def test_who_judged_all_knows_all_and_who_judged_none_knows_nothing() -> None:
    assert interval(7, 20, 20) == (0.35, 0.35)
    assert interval(0, 0, 20) == (0.0, 1.0)


def test_in_a_large_dataset_the_bounds_are_those_of_clopper_and_pearson() -> None:
    low, high = interval(0, 100, 100_000_000)
    assert low == 0.0
    assert high == pytest.approx(1 - 0.025 ** (1 / 100), rel=1e-4)  # of all: (1 - p)^100 = 0.025
    assert interval(100, 100, 100_000_000)[0] == pytest.approx(0.025 ** (1 / 100), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong"), [(0.9, 0.03), (0.5, 0.2), (0.99, 0.002)])
def test_the_intervals_cover_the_truth_in_95_of_100_audits(right: float, wrong: float) -> None:
    """On labels whose truth is known, drawn and judged again each time."""
    chance = np.random.default_rng(5)
    repaired_well = chance.random(900) < right
    left_wrong = chance.random(4000) < wrong
    truth = (repaired_well.mean(), left_wrong.mean(), ((~repaired_well).sum() + left_wrong.sum()) / 4900)
    audits = [_audit(repaired_well, left_wrong, seed) for seed in range(300)]
    for place, name in enumerate(("precision", "missed", "remaining")):
        found = [getattr(audit, name) for audit in audits]
        covered = np.mean([one.low <= truth[place] <= one.high for one in found])
        assert covered >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / len(audits)), name
        assert np.mean([one.high - one.low for one in found]) < 0.2  # covering by saying nothing is no art
        assert np.mean([one.share for one in found]) == pytest.approx(truth[place], abs=0.01)


def _audit(repaired_well: np.ndarray, left_wrong: np.ndarray, seed: int) -> Findings:
    changed = repaired_well[draw(np.arange(len(repaired_well)), seed, 120)]
    unchanged = left_wrong[draw(np.arange(900, 900 + len(left_wrong)), seed, 150)]
    return study(Stratum(changed.sum(), 120, 900), Stratum((~unchanged).sum(), 150, len(left_wrong)))


def test_every_row_is_drawn_equally_often() -> None:
    drawn = np.bincount(np.concatenate([draw(np.arange(40), seed, 10) for seed in range(2000)]))
    # Each has a chance of a quarter: 500 of 2,000, and 4.5 standard deviations are 87.
    assert len(drawn) == 40
    assert np.abs(drawn - 500).max() < 90


def test_drawing_from_parts_and_again_from_what_was_drawn_is_drawing_from_all() -> None:
    rows = np.arange(10_000)
    parts = [part[draw(part, 3, 25)] for part in np.array_split(rows, 7)]
    union = np.concatenate(parts)
    np.testing.assert_array_equal(union[draw(union, 3, 25)], rows[draw(rows, 3, 25)])


# --- from a saved file -------------------------------------------------------------------------------


def saved(folder: Path, **changes: object) -> str:
    known = {"changed": {"all": 50, "drawn": 10}, "unchanged": {"all": 400, "drawn": 10}}
    head = {"kind": "pencil_scale decisions", "version": 2, "audit": known}
    path = folder / "decisions.json"
    path.write_text(json.dumps({**head, "decisions": [judged(1, 1)], **changes}))
    return str(path)


def judged(number: int | None, suggested: int, audit: str | None = "changed") -> dict[str, object]:
    return {"sample_id": "x", "class": number, "suggested": suggested, "audit": audit}


def test_right_is_what_ends_at_the_suggested_class_and_only_the_audit_counts(tmp_path: Path) -> None:
    decisions = [judged(1, 1), judged(2, 1), judged(None, 1), judged(1, 1, None), judged(4, 4, "unchanged")]
    assert read_judged(saved(tmp_path, decisions=decisions)) == (Stratum(1, 3, 50), Stratum(1, 1, 400))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "shopping list"}, "not a file of decisions"),
        ({"version": 9}, "not a file of decisions of version 2"),
        ({"decisions": [judged(1, 1, None)]}, "nothing was judged in an audit"),
        ({"audit": {}}, "entries are missing or invalid"),
        ({"decisions": [judged(1, 1)] * 11}, "11 judged of 10 drawn of 50 changed"),
        ({"decisions": 7}, "entries are missing or invalid"),
    ],
)
def test_a_file_from_which_no_audit_follows_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(PencilError, match=said):
        read_judged(saved(tmp_path, **changes))
    (tmp_path / "decisions.json").write_text("[{")
    with pytest.raises(PencilError, match="not a complete JSON"):
        read_judged(str(tmp_path / "decisions.json"))
