from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from label_making import keys_of, names, new_table

from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.start_labels import append
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError


def trained(tmp_path: Path, num_rows: int) -> tuple[Manifest, np.ndarray]:
    table = new_table(tmp_path / "old", np.arange(num_rows) % 3, names(3), tmp_path / "store")
    logits = np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)
    table.write(np.arange(num_rows), logits, None, epoch=0)
    return table.snapshot(), logits


def stamps(store: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in store.glob("*/*/*.arrow")}


@pytest.mark.parametrize("sizes", [(3000, 3001), (3000, 5000, 5000), (1024, 2048), (10, 5000, 9000, 9001)])
def test_growing_keeps_every_old_logit_and_rewrites_no_old_file(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    manifest, logits = trained(tmp_path, sizes[0])
    before = stamps(tmp_path / "store")
    for old, new in pairwise(sizes):
        manifest = append(manifest, np.arange(old, new) % 3)
    after = stamps(tmp_path / "store")
    assert {path: after[path] for path in before} == before
    grown = LabelTable.restore(manifest, tmp_path / "new")
    assert np.array_equal(grown.read(np.arange(sizes[0])), logits)
    all_rows = np.arange(sizes[-1])
    assert np.array_equal(grown.read(all_rows, "row"), all_rows)
    assert np.array_equal(grown.read(all_rows, "noisy_class"), all_rows % 3)
    assert np.array_equal(grown.read(all_rows, "last_epoch"), all_rows < sizes[0])


def test_growing_writes_the_new_parts_and_at_most_one_old_part_again(tmp_path: Path) -> None:
    manifest, _ = trained(tmp_path, 3500)
    grown = append(manifest, np.zeros(3000, np.int64))
    written = [part for part in grown.parts if grown.parts[part] != manifest.parts.get(part)]
    assert written == [3, 4, 5, 6]  # part 3 was short


def test_new_rows_bring_their_keys(tmp_path: Path) -> None:
    manifest, _ = trained(tmp_path, 1500)
    table = LabelTable.restore(append(manifest, [0] * 600, keys_of(range(600))), tmp_path / "new")
    assert table.read(np.arange(1500, 2100), "sample_key").tobytes() == b"".join(
        keys_of(range(600)).to_pylist()
    )
    with pytest.raises(PencilError, match="7 sample keys for 600 rows; give one per row"):
        append(manifest, [0] * 600, keys_of(range(7)))


def test_a_wrong_class_is_named_with_the_row_it_would_have_had(tmp_path: Path) -> None:
    manifest, _ = trained(tmp_path, 1500)
    with pytest.raises(PencilError, match="row 1,501: class 3 is not one of 3"):
        append(manifest, np.array([0, 3]))
