"""The report on changed labels, against counts made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from catalogue_making import Bench, image
from label_making import names, new_table

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.report import LabelStudy, Share, study_labels

# Given and true classes of six samples; the last one's truth is not known.
GIVEN = [0, 0, 1, 1, 2, 2]
TRUE = [0, 1, 1, 1, 0, None]


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    bench = Bench(tmp_path)
    members: list[tuple[str, bytes]] = []
    for number, (given, true) in enumerate(zip(GIVEN, TRUE, strict=True)):
        fields = {} if true is None else {"true": true}
        members += [(f"{number}.png", image(number)), (f"{number}.cls", b"%d" % given)]
        members += [(f"{number}.json", json.dumps(fields).encode())]
    bench.shard("a.tar", members)
    return bench.index(truth="json:true").catalogue


def snapshot(folder: Path, learned: list[int], pins: dict[int, int] | None = None) -> Manifest:
    """Labels that have all moved to the classes in `learned`."""
    table = new_table(folder / "table", GIVEN, names(3), folder / "store", pins)
    logits = 20 * np.eye(3, dtype=np.float32)[learned]
    table.write(range(6), logits, None, epoch=0)
    return table.snapshot()


def test_changes_are_counted_from_class_to_class(tmp_path: Path, catalogue: Catalogue) -> None:
    report = study_labels(snapshot(tmp_path, [0, 1, 1, 1, 0, 2]), catalogue)
    assert report.transitions.tolist() == [[1, 1, 0], [0, 2, 0], [1, 0, 1]]
    assert (report.num_rows, report.num_corrected) == (6, 2)
    assert report.figures()["corrected_share"] == pytest.approx(1 / 3)
    assert report.figures()["label_entropy"] == pytest.approx(0, abs=1e-6)


def test_labels_are_right_or_wrong_where_the_truth_is_known(tmp_path: Path, catalogue: Catalogue) -> None:
    report = study_labels(snapshot(tmp_path, [0, 1, 1, 2, 0, 2]), catalogue)
    assert (report.given_right.num, report.given_right.of) == (3, 5)
    assert (report.corrected_right.num, report.corrected_right.of) == (4, 5)


def test_a_pinned_row_never_counts_as_right(tmp_path: Path, catalogue: Catalogue) -> None:
    report = study_labels(snapshot(tmp_path, [0, 0, 1, 1, 2, 2], pins={1: 1}), catalogue)
    assert report.transitions[0].tolist() == [1, 1, 0]  # changed, from the class as given
    assert (report.corrected_right.num, report.corrected_right.of) == (3, 4)


def test_rows_outside_the_subset_do_not_count(tmp_path: Path, catalogue: Catalogue) -> None:
    report = study_labels(snapshot(tmp_path, [1, 1, 1, 1, 1, 1]), catalogue, members=np.array([0, 4]))
    assert report.transitions.tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]


def test_a_class_that_loses_its_samples_is_named(tmp_path: Path, catalogue: Catalogue) -> None:
    report = study_labels(snapshot(tmp_path, [0, 0, 0, 0, 0, 2]), catalogue)
    assert report.shrunken_classes(0.4) == [(1, 1.0), (2, 0.5)]
    assert report.shrunken_classes(0.5) == [(1, 1.0)]


@pytest.mark.parametrize(
    ("num", "of", "low", "high"), [(9, 10, 0.596, 0.982), (0, 10, 0.0, 0.278), (0, 0, 0.0, 1.0)]
)
def test_the_interval_is_wilsons(num: int, of: int, low: float, high: float) -> None:
    # Worked out with the formula (p + z2/2n +- z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n), z = 1.96.
    assert Share(num, of).interval() == pytest.approx((low, high), abs=1e-3)


def study(catalogue: Catalogue, **options: object) -> LabelStudy:
    storage = catalogue.folder.removesuffix("/catalogue")
    return LabelStudy(storage, catalogue.version, "run", **options)  # type: ignore[arg-type]


def test_the_history_has_every_label_of_an_epoch(tmp_path: Path, catalogue: Catalogue) -> None:
    of_run = study(catalogue, history=True)
    of_run.of(snapshot(tmp_path, [0, 1, 1, 1, 0, 2]), epoch=7, moved=True, before={})
    with fsspec.open(f"{of_run.storage}/labels/history/run/epoch-00007.arrow", "rb") as file:
        found = pa.ipc.open_file(file).read_all()
    assert found["class"].to_pylist() == [0, 1, 1, 1, 0, 2]
    assert found["confidence"].to_pylist() == [1.0] * 6


def test_labels_that_did_not_move_or_got_worse_are_warned_about(tmp_path: Path, catalogue: Catalogue) -> None:
    of_run = study(catalogue, max_class_loss=0.4)
    first = of_run.of(snapshot(tmp_path / "1", [0, 1, 1, 1, 0, 2]), 0, moved=True, before={})
    assert first.warnings == {"classes_shrink": "classes that lose their samples: 1: class-2 lost 50%"}
    worse = of_run.of(snapshot(tmp_path / "2", [2, 2, 1, 1, 2, 2]), 1, moved=True, before=first.figures)
    assert worse.warnings["label_accuracy_falls"] == "label accuracy fell from 1.000 to 0.400"
    still = of_run.of(snapshot(tmp_path / "3", [2, 2, 1, 1, 2, 2]), 2, moved=True, before=worse.figures)
    assert "no label moved" in still.warnings["no_label_moved"]


def test_without_moved_labels_the_last_study_still_holds(tmp_path: Path, catalogue: Catalogue) -> None:
    of_run = study(catalogue)
    first = of_run.of(snapshot(tmp_path / "1", [0, 1, 1, 1, 0, 2]), 0, moved=True, before={})
    unreadable = replace(snapshot(tmp_path / "2", GIVEN), store=str(tmp_path / "nowhere"))
    later = of_run.of(unreadable, 1, moved=False, before=first.figures)
    assert later.figures == first.figures
    assert (later.warnings, later.transitions) == ({}, None)
