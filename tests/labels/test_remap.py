from pathlib import Path

import numpy as np
import pytest
from label_making import names, new_table

from pencil_scale.labels.columns import FREE, PINNED
from pencil_scale.labels.start_labels import remap
from pencil_scale.labels.table import LabelTable

MERGED = [[0], [1, 4], [3], []]  # 1 and 4 are one class now, 2 is dropped, one class is new


def make_table(folder: Path) -> LabelTable:
    table = new_table(folder, [0, 1, 2, 3, 4, -1] * 400, names(5), pins={10: 4, 14: 2})
    logits = np.random.default_rng(0).normal(scale=4, size=(2400, 5)).astype(np.float32)
    table.write(np.arange(2400), logits, None, epoch=2)
    return table


def remapped(table: LabelTable, mapping: list[list[int]], folder: Path) -> LabelTable:
    manifest, freed = remap(table.snapshot(), mapping, names(len(mapping)))
    assert freed.tolist() == ([] if any(2 in olds for olds in mapping) else [14])  # it is pinned to class 2
    return LabelTable.restore(manifest, folder, class_names=names(len(mapping)))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(axis=1, keepdims=True)


def test_untouched_classes_keep_their_logits_bit_for_bit(tmp_path: Path) -> None:
    table = make_table(tmp_path / "old")
    moved = remapped(table, MERGED, tmp_path / "new")
    rows = np.setdiff1d(np.arange(2400), [10, 14])
    assert np.array_equal(moved.read(rows)[:, [0, 2]], table.read(rows)[:, [0, 3]])
    assert not moved.read(rows)[:, 3].any()


def test_merging_adds_probabilities(tmp_path: Path) -> None:
    table = make_table(tmp_path / "old")
    moved = remapped(table, [[0, 2], [1, 4], [3]], tmp_path / "new")
    rows = np.setdiff1d(np.arange(2400), [10, 14])
    before, after = softmax(table.read(rows)), softmax(moved.read(rows))
    expected = np.stack([before[:, 0] + before[:, 2], before[:, 1] + before[:, 4], before[:, 3]], axis=1)
    np.testing.assert_allclose(after, expected, atol=1e-6)


def test_renaming_and_reordering_changes_no_bit(tmp_path: Path) -> None:
    table = make_table(tmp_path / "old")
    moved = remapped(table, [[4], [3], [2], [1], [0]], tmp_path / "new")
    rows = np.arange(2400)
    assert np.array_equal(moved.read(rows), table.read(rows)[:, ::-1])
    given = table.read(rows, "noisy_class")
    assert np.array_equal(moved.read(rows, "noisy_class"), np.where(given < 0, -1, 4 - given))


def test_classes_pins_keys_and_ledger_come_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    moved = remapped(make_table(tmp_path / "old"), MERGED, tmp_path / "new")
    assert moved.read([0, 1, 2, 3, 4, 5], "noisy_class").tolist() == [0, 1, -1, 2, 1, -1]
    assert moved.read([10, 14], "role").tolist() == [PINNED, FREE]  # 14 was pinned to the class that is gone
    assert moved.read([10]).tolist() == [[0, 10, 0, 0]]
    assert moved.count_visited(2) == 2400
    assert "had a class that was dropped" in caplog.text
