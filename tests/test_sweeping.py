"""Label parts that nothing names any more go; those of anybody else's checkpoint, or just written, never."""

import os
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest

from pencil_scale.label_table import LabelTable
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.part_files import LabelTableError
from pencil_scale.labels.part_store import PartStore
from pencil_scale.labels.sweeping import GRACE_S, manifests_of, sweep_storage
from pencil_scale.running.run_lock import alone, run_lock

NUM_CLASSES = 3
PLACES = (
    "labels/published/one.json",
    "runs/one/labels.json",
    "checkpoints/two/checkpoint-000000003/labels.json",
    "nights/0001/carried.json",
)


def tables(storage: Path, number: int) -> list[Manifest]:
    """So many snapshots into the store of a storage, no two of which share a part of labels."""
    table = LabelTable.create(storage / "work", np.zeros(2000, int), NUM_CLASSES)
    manifests = []
    for epoch in range(number):
        table.write(np.arange(2000), np.full((2000, NUM_CLASSES), epoch, np.float32), epoch)
        manifests.append(table.snapshot(storage / "labels"))
    return manifests


def parts_of(storage: Path) -> set[str]:
    return {path.stem for folder in ("parts", "ledger") for path in (storage / "labels" / folder).iterdir()}


def named(manifests: list[Manifest]) -> set[str]:
    entries = [entry for manifest in manifests for entry in manifest.parts.values()]
    return {piece.sha256 for entry in entries for piece in (*entry.labels, *entry.ledger)}


def grow_old(storage: Path) -> None:
    then = time.time() - GRACE_S - 60
    for path in (storage / "labels").rglob("*.arrow"):
        os.utime(path, (then, then))


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A storage with a manifest in every place that has some, and one snapshot that nothing names."""
    *kept, _ = tables(tmp_path, len(PLACES) + 1)
    for place, manifest in zip(PLACES, kept, strict=True):
        manifest.save(tmp_path / place)
    (tmp_path / "runs" / "one" / "summary.json").write_text('{"samples": 3}')
    (tmp_path / "catalogue").mkdir()
    (tmp_path / "catalogue" / "broken.json").write_text("{")
    return tmp_path


def test_whoever_is_alone_removes_what_no_manifest_of_the_storage_names_and_nothing_else(lake: Path) -> None:
    kept = manifests_of(str(lake))
    assert len(kept) == len(PLACES)
    waste = parts_of(lake) - named(kept)
    assert len(sweep_storage(str(lake), alone=True)) == len(waste) > 0
    assert parts_of(lake) == named(kept)


def test_whoever_is_not_alone_leaves_what_may_still_be_named(lake: Path) -> None:
    before = parts_of(lake)
    assert sweep_storage(str(lake), alone=False) == []
    grow_old(lake)
    assert sweep_storage(str(lake), alone=False)
    assert named(manifests_of(str(lake))) == parts_of(lake) < before


def test_a_writer_does_not_rely_on_a_part_that_is_old_enough_to_be_swept(lake: Path, tmp_path: Path) -> None:
    grow_old(lake)
    table = LabelTable.restore(Manifest.load(lake / PLACES[0]), tmp_path / "again")
    table.write(np.arange(2000), np.full((2000, NUM_CLASSES), 4, np.float32), epoch=4)
    manifest = table.snapshot(lake / "labels")  # the same labels as the snapshot that nothing names
    sweep_storage(str(lake), alone=False)
    assert named([manifest]) <= parts_of(lake)


def test_a_file_that_may_have_been_a_manifest_keeps_everything(lake: Path) -> None:
    (lake / "labels" / "published" / "two.json").write_text('{"kind": "pencil_scale labels", "par')
    before = parts_of(lake)
    with pytest.raises(
        LabelTableError, match=r"published/two\.json: not a whole JSON file .* nothing is swept"
    ):
        sweep_storage(str(lake), alone=True)
    assert parts_of(lake) == before


@pytest.mark.slow
def test_an_object_store_tells_the_age_of_its_files(s3_endpoint: str) -> None:
    fsspec.filesystem("s3").mkdir("lake")
    store = PartStore("s3://lake/labels")
    store.put("parts/one.arrow", b"1")
    assert store.holds("parts/one.arrow", 1)
    assert abs(store.age_s("parts/one.arrow")) < GRACE_S / 10


def test_nobody_is_alone_beside_another_run_or_a_night(tmp_path: Path) -> None:
    storage = str(tmp_path)
    with run_lock(storage, "mine"):
        with alone(storage, "mine") as is_alone:
            assert is_alone
        for other in ("other", ".nights"):
            with run_lock(storage, other), alone(storage, "mine") as is_alone:
                assert not is_alone
        with alone(storage, "mine") as is_alone:
            assert is_alone
    with alone("memory://lake", "mine") as is_alone:
        assert not is_alone


def test_a_run_begins_only_when_the_sweep_is_over(tmp_path: Path) -> None:
    begun = threading.Event()

    def begin() -> None:
        with run_lock(str(tmp_path), "other"):
            begun.set()

    with run_lock(str(tmp_path), "mine"), alone(str(tmp_path), "mine") as is_alone:
        assert is_alone
        other = threading.Thread(target=begin)
        other.start()
        assert not begun.wait(0.3)
    assert begun.wait(60)
    other.join()
