"""Feature tables: every row keeps its own numbers, and what is damaged or incomplete is refused."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pencil_scale.features.manifest import (
    ABSENT,
    MANIFEST,
    READY,
    UNREADABLE,
    FeatureManifest,
)
from pencil_scale.features.table import FeatureTable
from pencil_scale.labels.columns import Layout
from pencil_scale.labels.manifest import file_name
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.storage import Storage

MADE_BY = {"backbone": "resnet50", "weights": "ab12"}


def made(storage: Storage, num_rows: int, views: int = 1, dimension: int = 3) -> FeatureManifest:
    """Features that start at the row's number; two of five rows have none."""
    manifest, parts = FeatureManifest(MADE_BY, views, dimension, "catalogue", num_rows), {}
    for number in range(manifest.layout.num_parts):
        columns = manifest.empty_part(number)
        columns["state"][:] = np.choose(columns["row"] % 5, [ABSENT, UNREADABLE, READY, READY, READY])
        ready = columns["state"] == READY
        columns["features"][ready] = columns["row"][ready, None] + np.arange(1, manifest.width + 1) / 8
        parts[number] = manifest.put_part(storage, columns)
    manifest = FeatureManifest(MADE_BY, views, dimension, "catalogue", num_rows, parts)
    storage.put(storage.features(manifest.key, MANIFEST), manifest.encode())
    return manifest


@pytest.mark.parametrize("num_rows", [1, 1023, 1024, 1025, 2500])
def test_a_row_has_its_own_features_wherever_its_part_ends(
    tmp_path: Path, num_rows: int, small_label_parts: None
) -> None:
    storage = Storage(tmp_path / "lake")
    key = made(storage, num_rows, views=2).key
    table = FeatureTable.open(storage, key, tmp_path)
    assert table.features.shape == (num_rows, 2, 3)
    for row in {0, 2, 1022, 1023, 1024, 2047, 2048, num_rows - 1} & set(range(num_rows)):
        expected = row + np.arange(1, 7, dtype=np.float16) / 8 if row % 5 > 1 else np.zeros(6)
        assert np.array_equal(table.features[row].ravel(), np.float16(expected))
    assert np.count_nonzero(table.state == READY) == table.manifest.counts["ready"]
    assert sum(table.manifest.counts.values()) == num_rows


def test_a_range_of_rows_is_a_view_of_the_mapped_file(tmp_path: Path, small_label_parts: None) -> None:
    storage = Storage(tmp_path / "lake")
    table = FeatureTable.open(storage, made(storage, 2500).key, tmp_path)
    found = table.read(range(1000, 1100))  # across the border of two parts
    assert np.shares_memory(found, table.features)
    assert not found.flags.writeable
    with pytest.raises(PencilError, match="not within the table's 2,500 rows"):
        table.read(range(2400, 2501))


def test_a_part_is_an_arrow_file_that_other_programs_can_open(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    manifest = made(storage, 10)
    with pa.memory_map(storage.path(file_name("features", manifest.parts[0].file))) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table["row"].to_pylist() == list(range(10))
    assert table["features"][2].as_py() == [2.125, 2.25, 2.375]


@pytest.mark.parametrize(("width", "expected"), [(512, 16_384), (2000, 16_384), (2048, 8192), (8192, 2048)])
def test_parts_have_the_rows_of_label_parts_unless_that_is_too_large(width: int, expected: int) -> None:
    manifest = FeatureManifest(MADE_BY, 1, width, "catalogue", 1_000_000)
    assert manifest.layout.part_rows == expected
    assert Layout.of(1_000_000, 14).part_rows % expected == 0


def test_what_made_the_features_names_their_folder() -> None:
    first = FeatureManifest(MADE_BY, 1, 8, "catalogue", 10)
    same = FeatureManifest(dict(reversed(MADE_BY.items())), 1, 8, "another", 20)
    others = [
        FeatureManifest({**MADE_BY, "weights": "cd34"}, 1, 8, "catalogue", 10),
        FeatureManifest(MADE_BY, 2, 8, "catalogue", 10),
        FeatureManifest(MADE_BY, 1, 9, "catalogue", 10),
    ]
    assert first.key == same.key
    assert len({first.key, *(other.key for other in others)}) == 4


def test_equal_features_are_stored_once(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    first = made(storage, 10)
    assert made(storage, 10) == first == FeatureManifest.load(storage, first.key)
    assert len(storage.names(storage.features(first.key))) == 2  # the part and the manifest


def test_damaged_parts_are_refused(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "lake")
    manifest = made(storage, 10)
    path = Path(storage.path(file_name("features", manifest.parts[0].file)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="damaged"):
        FeatureTable.open(storage, manifest.key, tmp_path)
    assert not (tmp_path / "features.npy").exists()


def test_features_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    manifest = FeatureManifest(MADE_BY, 1, 2, "catalogue", 4)
    columns = manifest.empty_part(0)
    columns["features"][2] = np.inf
    with pytest.raises(PencilError, match=r"1 row, such as row 2, are not finite as float16"):
        manifest.put_part(Storage(tmp_path), columns)


def test_missing_and_foreign_manifests_are_refused(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    with pytest.raises(PencilError, match="no features; run"):
        FeatureManifest.load(storage, "0123")
    key = made(storage, 10).key
    renamed = storage.features("0123", MANIFEST)
    storage.put(renamed, storage.get(storage.features(key, MANIFEST)))
    with pytest.raises(PencilError, match="the folder was renamed"):
        FeatureManifest.load(storage, "0123")
    storage.put(renamed, b'{"kind": "pencil_scale features", "version": 99}')
    with pytest.raises(PencilError, match="version 99; this program reads version 1"):
        FeatureManifest.load(storage, "0123")
