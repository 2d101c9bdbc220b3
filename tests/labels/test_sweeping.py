"""A run removes the label parts that it wrote itself and that nothing names any more, and nothing else."""

from pathlib import Path

import numpy as np
import pytest
from label_making import names, new_table

from pencil_scale.labels.manifest import Manifest, fold_id, manifests_of, sweep_run
from pencil_scale.storage.errors import PencilError

NUM_CLASSES = 3
# Runs may be called as our own folders are.
PLACES = (
    "labels/published/one.json",
    "labels/held/history.json",
    "runs/models/labels.json",
    "runs/models/fold-2-labels.json",
    "checkpoints/parts/0123456789abcdef-0001/checkpoint-000000003/labels.json",
    "nights/night-0001/carried.json",
)


def tables(storage: Path, run: str, number: int) -> list[Manifest]:
    """This many snapshots of one run, no two of which share a part of labels."""
    table = new_table(storage / f"work-{run}", [0] * 2000, names(NUM_CLASSES), storage / "labels", run=run)
    manifests = []
    for epoch in range(number):
        table.write(np.arange(2000), np.full((2000, NUM_CLASSES), epoch, np.float32), None, epoch)
        manifests.append(table.snapshot())
    return manifests


def parts_of(storage: Path, run: str) -> set[str]:
    folders = [storage / "labels" / kind / run for kind in ("parts", "ledger")]
    return {path.stem for folder in folders for path in folder.iterdir()}


def named(manifests: list[Manifest]) -> set[str]:
    parts = [part for manifest in manifests for part in manifest.parts.values()]
    return {file.sha256 for part in parts for file in (part.labels, part.ledger)}


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A storage with a manifest in every place that has some, and one snapshot that nothing names."""
    *kept, _ = tables(tmp_path, "mine", len(PLACES) + 1)
    for place, manifest in zip(PLACES, kept, strict=True):
        manifest.save(tmp_path / place)
    (tmp_path / "runs" / "models" / "summary.json").write_text('{"samples": 3}')
    (tmp_path / "catalogue").mkdir()
    (tmp_path / "catalogue" / "broken.json").write_text("{")
    return tmp_path


def test_a_run_removes_what_it_wrote_and_no_manifest_of_the_storage_names(lake: Path) -> None:
    kept = manifests_of(str(lake))
    assert len(kept) == len(PLACES)
    waste = parts_of(lake, "mine") - named(kept)
    assert len(sweep_run(str(lake), "mine")) == len(waste) > 0
    assert parts_of(lake, "mine") == named(kept)


def test_what_another_run_has_written_and_not_named_yet_stays(lake: Path) -> None:
    """Two runs that start from identical labels write the same parts, each under its own id."""
    tables(lake, "other", 2)
    before = parts_of(lake, "other")
    sweep_run(str(lake), "mine")
    assert parts_of(lake, "other") == before


def test_the_parts_of_a_fold_stay_as_long_as_its_manifest_and_are_swept_with_its_run(lake: Path) -> None:
    first, _ = tables(lake, fold_id("mine", 1), 2)
    tables(lake, fold_id("other", 1), 1)
    first.save(lake / "runs" / "models" / "fold-1-labels.json")
    sweep_run(str(lake), "mine")
    assert parts_of(lake, "mine-fold-1") == named([first])
    (lake / "runs" / "models" / "fold-1-labels.json").unlink()
    sweep_run(str(lake), "mine")
    assert parts_of(lake, "mine-fold-1") == set()
    assert parts_of(lake, "other-fold-1")


def test_parts_that_only_another_run_names_stay(lake: Path) -> None:
    manifests = manifests_of(str(lake))
    for place in PLACES:
        (lake / place).unlink()
    manifests[0].for_new_run("other").save(lake / "runs" / "other" / "labels.json")
    sweep_run(str(lake), "mine")
    assert parts_of(lake, "mine") == named(manifests[:1])


def test_a_file_that_may_have_been_a_manifest_keeps_everything(lake: Path) -> None:
    (lake / "labels" / "published" / "two.json").write_text('{"kind": "pencil_scale labels", "par')
    before = parts_of(lake, "mine")
    with pytest.raises(PencilError, match=r"two\.json: damaged JSON .* nothing is swept"):
        sweep_run(str(lake), "mine")
    assert parts_of(lake, "mine") == before
