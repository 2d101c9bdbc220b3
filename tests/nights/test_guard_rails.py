"""Guard rails: label changes of a night are counted, and a night beyond the limits is held."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from catalogue_making import samples
from label_making import packed, pin_rows
from night_making import Nights, started

from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import NightlyJob
from pencil_scale.labels.published import published_url
from pencil_scale.labels.start_labels import forget, set_roles
from pencil_scale.nights.guard_rails import Evidence, check_night, count_moves, judge
from pencil_scale.nights.record import Night
from pencil_scale.nights.start import prepare

LIMITS = NightlyJob()


@pytest.fixture
def bench(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def test_changes_are_counted_separately_for_old_and_new_rows_and_never_for_pinned_ones(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    carried = pin_rows(bench.labels(bench.version()), {5: 0})
    table = bench.table(carried)
    table.write([0, 1, 4, 5], np.float32([[0, 9, 0], [0, 9, 0], [0, 0, 9], [0, 9, 0]]), None, epoch=0)
    labels = table.snapshot()
    figures, between = count_moves(carried, labels, trained=np.array([0, 1, 4, 5]), fresh=np.array([4]))
    assert figures == {
        "old_decided": 2,
        "old_changed": 1,
        "old_repaired": 0,
        "new_decided": 1,
        "new_repaired": 1,
        "undecided": 0,
    }
    assert between == {(0, 1): 1}


def test_watched_rows_count_and_so_does_any_other_old_label_that_changes(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    noise = {"temperature": 1.0, "replaced": 0.3, "wrong": 0.2, "wrong_low": 0.15, "wrong_high": 0.25}
    table = bench.table(set_roles(bench.labels(bench.version()), None, np.array([1, 4])))
    table.mark(range(6), packed(np.eye(3)[[0, 1, 2, 0, 1, 2]] * 9), epoch=0)  # all labels look right
    carried = replace(table.snapshot(), noise=noise).for_new_run("tonight")
    table = bench.table(carried)
    table.mark([1, 4], packed(np.eye(3)[[2, 0]] * 9), epoch=0)
    figures, between = count_moves(carried, table.snapshot(), trained=np.array([0]), fresh=np.array([4]))
    assert (figures["old_decided"], figures["old_changed"]) == (2, 1)
    assert (figures["new_decided"], figures["new_repaired"], figures["undecided"]) == (1, 1, 0)
    assert between == {(1, 2): 1}

    labels = forget(table.snapshot(), np.array([4]))
    figures, _ = count_moves(carried, labels, trained=np.array([0]), fresh=np.array([4]))
    assert (figures["new_decided"], figures["new_repaired"], figures["undecided"]) == (1, 0, 1)

    # Labels that nothing was learned about change with their noise model.
    sure = replace(carried, noise={**noise, "min_log_odds": -1e9})
    figures, _ = count_moves(carried, sure, trained=np.array([0]), fresh=np.array([4]))
    assert (figures["old_decided"], figures["old_changed"]) == (2, 5)


def test_a_night_is_compared_with_its_parent(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    before = bench.version()
    labels = published_url(bench.storage, "first")
    bench.labels(before).save(labels)
    made = {"class_names": before.class_names, "labels": labels, "model": f"{bench.storage}/models/first.pt"}
    figures = {"clean_accuracy": 0.9}
    bench.nights.save(Night("first", 0, None, 1, status="passed", figures=figures, clean="test a1", **made))
    bench.shard("b.tar", samples(range(6, 9)))
    started_night = started(1, "first", bench.version().version)
    prepared = prepare(load_config(bench.folder / "config.yaml"), bench.nights, started_night)
    assert prepared is not None
    findings = check_night(LIMITS, prepared, prepared.labels, 0.8, "test a1")
    assert findings.reasons == (
        "accuracy on the clean set fell from 0.9000 to 0.8000 (nightly.max_accuracy_fall 0.02)",
    )
    assert findings.facts == {
        "shards": "1 new, 0 changed, 0 vanished",
        "samples": "3 new, 0 given another class, 0 vanished",
        "new labels repaired": "0 of 3 trained on or watched",
        "undecided": "0, as given until a later night decides them",
        "old labels changed": "0 of 3 trained on or watched again",
        "clean accuracy": "0.8000, 0.9000 the night before",
    }
    assert (findings.figures["new_samples"], findings.figures["returned_samples"]) == (3, 0)
    on_other_samples = check_night(LIMITS, prepared, prepared.labels, 0.8, "test b2")
    assert on_other_samples.reasons == ()
    assert on_other_samples.facts["clean accuracy"].startswith("0.8000, not compared")


CALM = {"old_decided": 100, "old_changed": 1, "old_repaired": 20, "new_decided": 100, "new_repaired": 25}
EVEN = Evidence(CALM, ("a", "b"), np.array([500.0, 500, 0]), np.array([50, 50, 0]))


def night(parent_accuracy: float | None = None, **figures: float) -> Evidence:
    """A calm night, but for these figures."""
    return replace(EVEN, figures=CALM | figures, parent_accuracy=parent_accuracy)


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (night(0.9, clean_accuracy=0.89), None),
        (night(None, clean_accuracy=0.1), None),
        (night(0.9, clean_accuracy=0.8), "accuracy on the clean set fell from 0.9000 to 0.8000"),
        (night(old_changed=40), "40 of 100 old labels changed"),
        (night(new_repaired=80), "80.0% of 100 new labels were repaired, of old ones 20.0%"),
        (night(new_repaired=80, old_decided=0, old_changed=0, old_repaired=0), None),  # nothing to compare
        (replace(EVEN, tonight=np.array([500, 0, 0])), "b 0 where about 250 were"),
        (replace(EVEN, tonight=np.array([50, 0, 50])), "no usable label 50 where"),
        (replace(EVEN, tonight=np.array([2, 0, 0])), None),  # too few to tell from chance
        (replace(EVEN, archive=np.array([900, np.nan, 0])), None),  # b is new in the list
        (replace(EVEN, archive=np.zeros(3)), None),  # nothing to compare
    ],
)
def test_a_night_is_held_only_for_what_is_beyond_the_limits(evidence: Evidence, reason: str | None) -> None:
    reasons = judge(LIMITS, evidence)
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]
