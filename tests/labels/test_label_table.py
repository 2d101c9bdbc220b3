import multiprocessing
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from label_making import keys_of, names, new_table

from pencil_scale.labels.columns import FREE, PINNED, Layout
from pencil_scale.labels.table import LABELS_FILE, LabelTable
from pencil_scale.storage.errors import PencilError, sample_key

NUM_ROWS, NUM_CLASSES = 3000, 5  # two full parts of 1,024 rows and a short one


def make_table(folder: Path, num_rows: int = NUM_ROWS, **options: object) -> LabelTable:
    noisy_class = np.arange(num_rows) % NUM_CLASSES
    return new_table(folder, noisy_class, names(NUM_CLASSES), **options)  # type: ignore[arg-type]


def visited(table: LabelTable, epoch: int) -> list[int]:
    """The rows that were last visited in this epoch."""
    last_epoch = table.read(np.arange(table.layout.num_rows), "last_epoch")
    return np.flatnonzero(last_epoch == table.manifest.first_epoch + epoch).tolist()


def logits_for(rows: np.ndarray, epoch: int) -> np.ndarray:
    """Logits that say whose they are: no two rows or epochs share them."""
    return (rows[:, None] * 10 + np.arange(NUM_CLASSES) + epoch / 8).astype(np.float32)


def test_a_new_row_is_scale_times_one_hot_of_its_given_class(tmp_path: Path) -> None:
    table = make_table(tmp_path, scale=7.0)
    assert table.read([2999, 1]).tolist() == [[0, 0, 0, 0, 7], [0, 7, 0, 0, 0]]
    assert table.read([2999, 1], "noisy_class").tolist() == [4, 1]


def test_a_row_without_a_usable_label_prefers_no_class(tmp_path: Path) -> None:
    table = new_table(tmp_path, [1, -1, 0], names(3))
    assert table.read([1]).tolist() == [[0, 0, 0]]
    assert table.read([0, 1, 2], "noisy_class").tolist() == [1, -1, 0]


def test_keys_come_back_as_they_were_given(tmp_path: Path) -> None:
    table = new_table(tmp_path, np.zeros(1500, np.int64), names(2), keys=keys_of(range(1500)))
    assert table.read([1499, 3], "sample_key").tobytes() == sample_key("1499") + sample_key("3")


def test_rows_are_written_and_read_in_any_order_across_parts(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    rows = np.random.default_rng(0).permutation(NUM_ROWS)[:2000]
    table.write(rows, logits_for(rows, 0), None, epoch=0)
    shuffled = rows[::-1]
    assert np.array_equal(table.read(shuffled), logits_for(shuffled, 0))
    untouched = np.setdiff1d(np.arange(NUM_ROWS), rows)
    assert np.array_equal(table.read(untouched).argmax(1), untouched % NUM_CLASSES)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, NUM_ROWS - 1), unique=True, max_size=40), max_size=8))
def test_the_table_agrees_with_a_plain_array(tmp_path_factory: pytest.TempPathFactory, batches: list) -> None:
    table = make_table(tmp_path_factory.mktemp("table"))
    plain = table.read(np.arange(NUM_ROWS))
    for epoch, batch in enumerate(batches):
        rows = np.array(batch, np.int64)
        table.write(rows, logits_for(rows, epoch), None, epoch)
        plain[rows] = logits_for(rows, epoch)
        assert visited(table, epoch) == sorted(batch)
    assert np.array_equal(table.read(np.arange(NUM_ROWS)), plain)


def test_refused_rows_are_named_and_nothing_of_their_batch_is_written(tmp_path: Path) -> None:
    whole = make_table(tmp_path)
    table = LabelTable.restore(whole.manifest, tmp_path / "some", parts=[0, 2])
    table.mark([7], None, epoch=0)
    rows_here = np.setdiff1d(np.arange(NUM_ROWS), np.arange(1024, 2048))
    before = table.read(rows_here)
    refused = {
        "row 3000: outside the table's 3,000 rows": [1, 3000],
        "row -1: outside": [1, -1],
        "row 4: given twice": [4, 1, 4],
        "row 1024 and 1 more: in a part that is not in this working copy": [1, 1024, 1025],
        "row 7: visited in epoch 1 already, written again in epoch 1": [1, 7],
        "list of row numbers": [1.5],
    }
    for message, rows in refused.items():
        with pytest.raises(PencilError, match=message):
            table.write(rows, np.ones((len(rows), NUM_CLASSES), np.float32), None, epoch=0)
    with pytest.raises(PencilError, match="row 2: given logits that are not finite"):
        table.write([1, 2], np.array([[0] * 5, [0, 0, np.nan, 0, 0]], np.float32), None, epoch=0)
    with pytest.raises(PencilError, match=r"logits of shape \(2, 4\); expected \(2, 5\)"):
        table.write([1, 2], np.zeros((2, 4), np.float32), None, epoch=0)
    assert np.array_equal(table.read(rows_here), before)
    assert table.count_visited(0) == 1


def test_a_row_marked_by_a_later_epoch_is_not_taken_back(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    table.mark([5], None, epoch=3)
    with pytest.raises(PencilError, match="row 5: visited in epoch 4 already, written again in epoch 3"):
        table.mark([5], None, epoch=2)
    table.mark([5], None, epoch=4)
    assert visited(table, 4) == [5]


def test_a_pinned_row_never_moves_but_is_marked(tmp_path: Path) -> None:
    table = make_table(tmp_path, pins={1024: 2, 3: 0})
    rows = np.array([3, 1024, 5])
    table.write(rows, logits_for(rows, 1), None, epoch=1)
    assert table.read([1024, 3]).tolist() == [[0, 0, 10, 0, 0], [10, 0, 0, 0, 0]]
    assert np.array_equal(table.read([5]), logits_for(np.array([5]), 1))
    assert table.read(rows, "noisy_class").tolist() == [0, 2, 0]
    assert table.read(rows, "role").tolist() == [PINNED, PINNED, FREE]
    assert visited(table, 1) == [3, 5, 1024]


def test_pinning_to_no_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match="row 7: class -1 is not one of 5"):
        make_table(tmp_path, pins={7: -1})


def test_marking_moves_no_label(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    before = table.read(np.arange(NUM_ROWS))
    table.mark(np.arange(0, NUM_ROWS, 2), None, epoch=0)
    assert np.array_equal(table.read(np.arange(NUM_ROWS)), before)
    assert visited(table, 0) == list(range(0, NUM_ROWS, 2))


def write_for_ever(folder: Path) -> None:
    table = make_table(folder)
    rng = np.random.default_rng(0)
    for epoch in range(10**9):
        for rows in rng.permutation(NUM_ROWS).reshape(-1, 100):
            table.write(rows, logits_for(rows, epoch % 8), None, epoch)


@pytest.mark.slow
def test_other_programs_open_the_table_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / LABELS_FILE
    writer = multiprocessing.get_context("spawn").Process(
        target=write_for_ever, args=(tmp_path,), daemon=True
    )
    writer.start()
    try:
        versions = set()
        while not path.exists():
            assert writer.is_alive()
        while len(versions) < 3:
            arrow = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            arrow.validate(full=True)
            arrow = arrow.drop_columns(["predicted_log_p"])  # DuckDB knows no 16-bit floats
            polars = pl.read_ipc(path)
            counted = duckdb.sql(
                "select count(*), min(row), max(row), count(label_logits) from arrow"
            ).fetchall()
            assert counted == [(NUM_ROWS, 0, NUM_ROWS - 1, NUM_ROWS)]
            assert polars.shape == (NUM_ROWS, 8)
            assert polars["row"].to_list() == list(range(NUM_ROWS))
            versions.add(float(polars["label_logits"].arr.first().sum()))
        assert writer.is_alive()
    finally:
        writer.kill()
        writer.join()


@pytest.mark.parametrize(
    ("num_classes", "part_rows"),
    [(2, 16384), (14, 16384), (1000, 16384), (1016, 16384), (1017, 8192), (10**8, 1)],
)
def test_the_part_size_follows_from_the_class_count_alone(
    num_classes: int, part_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the size of a real table
    for num_rows in (1, 16384, 16385, 10**6, 10**8):
        layout = Layout.of(num_rows, num_classes)
        assert layout.part_rows == part_rows
        assert layout.part_rows * (29 + 4 * num_classes) <= 64 * 2**20 or part_rows == 1
        last = layout.rows_of(layout.num_parts - 1)
        assert last.start < last.stop == num_rows


def test_an_impossible_epoch_is_refused(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    for epoch in (-1, 2**40):
        with pytest.raises(PencilError, match=rf"epoch {epoch}; a run counts its epochs from 0"):
            table.write([7], np.zeros((1, NUM_CLASSES), np.float32), None, epoch)


@pytest.mark.filterwarnings("error")
def test_a_logit_too_large_for_the_table_is_refused_without_a_warning(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    with pytest.raises(PencilError, match="row 4: given logits that are not finite numbers of 32 bits"):
        table.write([4], np.full((1, NUM_CLASSES), 1e300), None, epoch=0)
