import hashlib
import json
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from label_making import names, new_labels, new_table, predicted

from pencil_scale.labels.columns import labels_schema, ledger_schema
from pencil_scale.labels.manifest import READS, Manifest, merge, remove_unnamed, visited
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder

NUM_ROWS, NUM_CLASSES = 3000, 5  # two full parts of 1,024 rows and a short one
ALL = np.arange(NUM_ROWS)


@pytest.fixture
def table(tmp_path: Path) -> LabelTable:
    return make_table(tmp_path, tmp_path / "store")


def make_table(folder: Path, store: str | Path) -> LabelTable:
    table = new_table(folder / "work", ALL % NUM_CLASSES, names(NUM_CLASSES), store, pins={5: 1, 2999: 2})
    write_a_third(table)
    return table


def write_a_third(table: LabelTable) -> None:
    some = ALL[::3]
    table.write(some, random_logits(len(some), seed=0), predicted(some, NUM_CLASSES), epoch=0)


def random_logits(num_rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, NUM_CLASSES)).astype(np.float32)


def files_of(store: Path, folder: str) -> set[str]:
    return {path.name for path in (store / folder).glob("*/*")}


def assert_same_table(one: LabelTable, two: LabelTable) -> None:
    for column in [*labels_schema(NUM_CLASSES).names, *ledger_schema(NUM_CLASSES).names]:
        assert one.read(ALL, column).tobytes() == two.read(ALL, column).tobytes(), column


@pytest.mark.parametrize("store", ["local", "memory://labels"])
def test_a_restored_table_is_the_same_bit_for_bit(tmp_path: Path, store: str) -> None:
    url = str(tmp_path / "store") if store == "local" else store
    table = make_table(tmp_path, url)
    table.snapshot().save(f"{url}/published/night.json")
    manifest = Manifest.load(f"{url}/published/night.json")
    assert_same_table(LabelTable.restore(manifest, tmp_path / "again", class_names=names(NUM_CLASSES)), table)


def test_a_part_is_named_by_the_hash_of_its_bytes_and_opens_alone(table: LabelTable, tmp_path: Path) -> None:
    manifest = table.snapshot()
    paths = list((tmp_path / "store").glob("*/*/*.arrow"))
    assert len(paths) >= 6  # labels and ledger of three parts
    for path in paths:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
    last = manifest.parts[2].labels
    alone = pa.ipc.open_file(
        str(tmp_path / "store" / "parts" / manifest.run / f"{last.sha256}.arrow")
    ).read_all()
    assert alone["row"].to_pylist() == list(range(2048, NUM_ROWS))


def test_a_stage_that_moves_no_labels_writes_no_logits(table: LabelTable, tmp_path: Path) -> None:
    store = tmp_path / "store"
    table.snapshot()
    before = {path: path.stat().st_mtime_ns for path in store.glob("parts/*/*")}
    table.mark(ALL, None, epoch=1)
    after = table.snapshot()
    assert {path: path.stat().st_mtime_ns for path in store.glob("parts/*/*")} == before
    assert visited(after, 1).all()


def test_only_the_part_that_moved_is_written(table: LabelTable, tmp_path: Path) -> None:
    first = table.snapshot()
    before = {folder: files_of(tmp_path / "store", folder) for folder in ("parts", "ledger")}
    table.write([1500], random_logits(1, seed=1), None, epoch=1)
    second = table.snapshot()
    changed = [part for part in range(3) if first.parts[part] != second.parts[part]]
    assert changed == [1]
    for folder in ("parts", "ledger"):
        assert len(files_of(tmp_path / "store", folder) - before[folder]) == 1


def test_a_restored_table_knows_what_its_store_has(table: LabelTable, tmp_path: Path) -> None:
    first = table.snapshot()
    for path in (tmp_path / "store").glob("*/*/*.arrow"):
        path.chmod(0o444)
    inodes = {path: path.stat().st_ino for path in (tmp_path / "store").glob("*/*/*.arrow")}
    again = LabelTable.restore(first, tmp_path / "again")
    assert again.snapshot() == first
    assert {path: path.stat().st_ino for path in (tmp_path / "store").glob("*/*/*.arrow")} == inodes


def test_a_snapshot_that_failed_is_made_good_by_the_next(table: LabelTable, tmp_path: Path) -> None:
    (tmp_path / "store" / "parts").rename(tmp_path / "away")
    (tmp_path / "store" / "parts").write_text("in the way")
    with pytest.raises(PencilError, match="cannot be written"):
        table.snapshot()
    (tmp_path / "store" / "parts").unlink()
    (tmp_path / "away").rename(tmp_path / "store" / "parts")
    assert_same_table(LabelTable.restore(table.snapshot(), tmp_path / "again"), table)


def test_an_owner_restores_its_own_parts_and_no_others(table: LabelTable, tmp_path: Path) -> None:
    manifest = table.snapshot()
    for part in (0, 1):
        (tmp_path / "store" / "parts" / manifest.run / f"{manifest.parts[part].labels.sha256}.arrow").unlink()
    mine = LabelTable.restore(manifest, tmp_path / "mine", parts=[2])
    assert np.array_equal(mine.read(ALL[2048:]), table.read(ALL[2048:]))
    with pytest.raises(PencilError, match="row 2047: in a part that is not in this working copy"):
        mine.read([2047])
    assert mine.count_visited(0) == len([row for row in ALL[2048:] if row % 3 == 0])


def test_owners_of_parts_write_partial_manifests_that_merge(table: LabelTable, tmp_path: Path) -> None:
    whole = table.snapshot()
    owners = [LabelTable.restore(whole, tmp_path / f"rank{r}", parts=range(r, 3, 2)) for r in range(2)]
    idle = LabelTable.restore(whole, tmp_path / "rank2", parts=[])  # a world larger than the number of parts
    for owner in owners:
        owner.mark([row for row in (1, 1025, 2049) if row >> 10 in owner.parts], None, epoch=9)
    partial = [owner.snapshot() for owner in [*owners, idle]]
    with pytest.raises(PencilError, match="2 of 3 parts are missing, the first is part 0"):
        merge(partial[1:])
    with pytest.raises(PencilError, match="merge the manifests of all ranks"):
        partial[0].save(tmp_path / "partial.json")
    with pytest.raises(PencilError, match="two manifests name part 0"):
        merge([partial[0], partial[0]])
    merged = merge(partial)
    assert np.flatnonzero(visited(merged, 9)).tolist() == [1, 1025, 2049]
    assert merged.newest_epoch == 10


def test_a_rank_may_own_no_part_of_a_table_with_many_classes(tmp_path: Path) -> None:
    manifest = new_labels(tmp_path / "store", [0] * 5, names(1000))
    idle = LabelTable.restore(manifest, tmp_path / "idle", parts=[])
    assert idle.count_visited(0) == 0
    assert pa.ipc.open_file(str(tmp_path / "idle" / "labels.arrow")).read_all().num_rows == 0
    with pytest.raises(PencilError, match="row 3: in a part that is not in this working copy"):
        idle.read([3])


def test_manifests_of_different_tables_do_not_merge(table: LabelTable, tmp_path: Path) -> None:
    manifest = table.snapshot()
    with pytest.raises(PencilError, match="manifests disagree: first_epoch is 1 and 2"):
        merge([manifest, manifest.for_new_run("tonight")])


def test_a_new_run_counts_from_zero_and_may_visit_every_row_again(table: LabelTable, tmp_path: Path) -> None:
    table.mark([4], None, epoch=6)
    tonight = table.snapshot().for_new_run("tonight")
    again = LabelTable.restore(tonight, tmp_path / "again")
    assert again.count_visited(0) == 0
    again.mark(ALL, None, epoch=0)
    assert visited(again.snapshot(), 0).all()
    assert again.read([4], "last_epoch").tolist() == [8]  # seven epochs were in the first run


def test_a_missing_part_is_named(table: LabelTable, tmp_path: Path) -> None:
    manifest = table.snapshot()
    name = f"{manifest.parts[1].labels.sha256}.arrow"
    (tmp_path / "store" / "parts" / manifest.run / name).unlink()
    with pytest.raises(DamagedError, match=f"{name}: missing"):
        LabelTable.restore(manifest, tmp_path / "again")
    assert not (tmp_path / "again" / "labels.arrow").exists()


@pytest.mark.parametrize("damage", ["a flipped bit", "a missing tail"])
def test_a_part_whose_hash_disagrees_is_named(table: LabelTable, tmp_path: Path, damage: str) -> None:
    manifest = table.snapshot()
    path = tmp_path / "store" / "parts" / manifest.run / f"{manifest.parts[1].labels.sha256}.arrow"
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data if damage == "a flipped bit" else path.read_bytes()[:-100])
    with pytest.raises(DamagedError, match=f"{path.name}: damaged"):
        LabelTable.restore(manifest, tmp_path / "again")


def test_a_part_that_was_changed_on_its_way_is_read_again(
    table: LabelTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, read, flips = table.snapshot(), Folder.get, [1] * (READS - 1)

    def flipped(folder: Folder, name: str) -> bytes:
        data = bytearray(read(folder, name))
        data[len(data) // 2] ^= flips.pop() if flips else 0
        return bytes(data)

    monkeypatch.setattr(Folder, "get", flipped)
    assert_same_table(LabelTable.restore(manifest, tmp_path / "again"), table)
    assert not flips


def test_a_part_cut_short_in_the_store_is_written_again(table: LabelTable, tmp_path: Path) -> None:
    before, manifest = table.manifest, table.snapshot()
    path = tmp_path / "store" / "parts" / manifest.run / f"{manifest.parts[1].labels.sha256}.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    repeated = LabelTable.restore(before, tmp_path / "repeated")  # as after a restart
    write_a_third(repeated)
    assert repeated.snapshot() == manifest
    assert_same_table(LabelTable.restore(manifest, tmp_path / "again"), table)


def test_manifests_of_another_kind_version_or_class_count_are_named(
    table: LabelTable, tmp_path: Path
) -> None:
    manifest = table.snapshot()
    found = json.loads(manifest.encode())
    reads = f"this program reads version {found['version']}"
    with pytest.raises(PencilError, match=rf"m\.json: a manifest of version 3; {reads}"):
        Manifest.decode(json.dumps(found | {"version": 3}).encode(), "m.json")
    with pytest.raises(PencilError, match=r"m\.json: JSON, but not a manifest"):
        Manifest.decode(b"{}", "m.json")
    with pytest.raises(DamagedError, match=r"m\.json: damaged manifest"):
        Manifest.decode(manifest.encode()[:-5], "m.json")
    with pytest.raises(PencilError, match="of these labels lacks 'class-5', 'class-6', compared"):
        LabelTable.restore(manifest, tmp_path / "again", class_names=names(7))
    with pytest.raises(PencilError, match="another order: class 0 is 'class-0', not 'class-4'"):
        LabelTable.restore(manifest, tmp_path / "again", class_names=names(5)[::-1])
    lying = replace(manifest, layout=replace(manifest.layout, num_classes=6))
    with pytest.raises(PencilError, match=r"\[5\]; the manifest names 1,024 of 6 classes"):
        LabelTable.restore(lying, tmp_path / "again")


def test_sweeping_removes_what_no_manifest_names_and_nothing_else(table: LabelTable, tmp_path: Path) -> None:
    store, start = tmp_path / "store", table.manifest
    remove_unnamed(store, start.run, [start])  # the parts as they were before the pins
    first = table.snapshot()
    table.write([1500], random_logits(1, seed=1), None, epoch=1)
    table.snapshot()
    table.write([2100], random_logits(1, seed=1), None, epoch=1)
    third = table.snapshot()
    unfinished = f"parts/{third.run}/abc.arrow.77.unfinished"
    (store / unfinished).write_bytes(b"left by a killed writer")
    assert remove_unnamed(store, third.run, [start, first, third]) == [unfinished]
    gone = remove_unnamed(store, third.run, [start, third])
    assert len(gone) == 4  # labels and ledger of the two parts that moved since the first
    assert_same_table(LabelTable.restore(third, tmp_path / "again"), table)
    assert remove_unnamed(store, "another run", []) == []


def test_a_deleted_remote_part_is_put_again_whatever_a_cache_remembers(tmp_path: Path) -> None:
    table = make_table(tmp_path, "memory://cached")
    before, manifest = table.manifest, table.snapshot()
    files = fsspec.filesystem("memory")
    files.rm_file(f"/cached/parts/{manifest.run}/{manifest.parts[0].labels.sha256}.arrow")
    repeated = LabelTable.restore(before, tmp_path / "repeated")
    write_a_third(repeated)
    assert_same_table(LabelTable.restore(repeated.snapshot(), tmp_path / "again"), table)


@pytest.fixture
def bucket(s3_endpoint: str) -> str:
    fsspec.filesystem("s3").mkdir("lake")
    return "s3://lake/labels"


@pytest.mark.slow
def test_snapshots_on_s3_are_complete_written_once_and_swept(tmp_path: Path, bucket: str) -> None:
    table = make_table(tmp_path, bucket)
    start = table.manifest
    remove_unnamed(bucket, start.run, [start])  # the parts as they were before the pins
    first = table.snapshot()
    first.save(f"{bucket}/night-1.json")
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    written = {path: files.info(path)["LastModified"] for path in files.find("lake/labels/parts")}
    table.write([1500], random_logits(1, seed=1), None, epoch=1)
    second = table.snapshot()
    files.invalidate_cache()
    assert {path: files.info(path)["LastModified"] for path in written} == written
    assert len(files.find("lake/labels/parts")) == len(written) + 1
    assert_same_table(LabelTable.restore(second, tmp_path / "again"), table)

    # Labels and ledger of the part that moved since the first snapshot.
    assert len(remove_unnamed(bucket, second.run, [start, second])) == 2
    with pytest.raises(DamagedError, match=r"s3://lake/labels/(parts|ledger)/\w+/\w+\.arrow: missing"):
        LabelTable.restore(Manifest.load(f"{bucket}/night-1.json"), tmp_path / "gone")
    files.invalidate_cache()
    name = f"lake/labels/parts/{second.run}/{second.parts[0].labels.sha256}.arrow"
    files.pipe_file(name, files.cat_file(name)[:-1])
    with pytest.raises(DamagedError, match="damaged"):
        LabelTable.restore(second, tmp_path / "damaged")
