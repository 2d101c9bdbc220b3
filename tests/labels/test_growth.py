from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from label_making import names

from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.start_labels import grow
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError, sample_key


def trained(tmp_path: Path, num_rows: int) -> tuple[Manifest, np.ndarray]:
    table = LabelTable.create(tmp_path / "old", np.arange(num_rows) % 3, names(3))
    logits = np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)
    table.write(np.arange(num_rows), logits, epoch=0)
    return table.snapshot(tmp_path / "store"), logits


def stamps(store: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in store.glob("*/*/*.arrow")}


@pytest.mark.parametrize("sizes", [(3000, 3001), (3000, 5000, 5000), (1024, 2048), (10, 5000, 9000, 9001)])
def test_growing_keeps_every_old_logit_and_rewrites_no_old_file(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    manifest, logits = trained(tmp_path, sizes[0])
    before = stamps(tmp_path / "store")
    for old, new in pairwise(sizes):
        manifest = grow(manifest, np.arange(old, new) % 3)
    after = stamps(tmp_path / "store")
    assert {path: after[path] for path in before} == before
    grown = LabelTable.restore(manifest, tmp_path / "new")
    assert np.array_equal(grown.read(np.arange(sizes[0])), logits)
    assert np.array_equal(grown.read_class(np.arange(sizes[-1])), np.arange(sizes[-1]) % 3)
    assert grown.visited(0).tolist() == [True] * sizes[0] + [False] * (sizes[-1] - sizes[0])
    assert grown._labels.batch(grown.parts[-1])["row"].to_pylist()[-1] == sizes[-1] - 1


def test_growing_writes_the_new_parts_and_at_most_one_old_part_again(tmp_path: Path) -> None:
    manifest, _ = trained(tmp_path, 3500)
    grown = grow(manifest, np.zeros(3000, np.int64))
    written = [part for part in grown.parts if grown.parts[part] != manifest.parts.get(part)]
    assert written == [3, 4, 5, 6]  # part 3 was short


def test_new_rows_bring_keys_and_come_in_chunks(tmp_path: Path) -> None:
    manifest, _ = trained(tmp_path, 1500)
    keys = [sample_key(str(row)) for row in range(600)]
    grown = grow(manifest, iter([np.zeros(500, int), np.ones(100, int)]), iter([keys[:7], keys[7:]]))
    table = LabelTable.restore(grown, tmp_path / "new")
    assert table.read_key(np.arange(1500, 2100)).tobytes() == b"".join(keys)
    assert table.read_class([1999, 2000]).tolist() == [0, 1]


def test_a_wrong_class_is_named_with_the_row_it_would_have_had(tmp_path: Path) -> None:
    manifest, _ = trained(tmp_path, 1500)
    with pytest.raises(PencilError, match="row 1,501: class 3 is not one of 3"):
        grow(manifest, np.array([0, 3]))
