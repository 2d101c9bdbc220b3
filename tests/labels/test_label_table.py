import multiprocessing
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from label_making import names

from pencil_scale.labels.part_files import Layout
from pencil_scale.labels.table import LabelTable
from pencil_scale.labels.working_copy import LABELS_FILE
from pencil_scale.storage.errors import DamagedError, PencilError, sample_key

NUM_ROWS, NUM_CLASSES = 3000, 5  # two full parts of 1,024 rows and a short one


def make_table(folder: Path, num_rows: int = NUM_ROWS, **options: object) -> LabelTable:
    noisy_class = np.arange(num_rows) % NUM_CLASSES
    return LabelTable.create(folder, noisy_class, names(NUM_CLASSES), **options)  # type: ignore[arg-type]


def logits_for(rows: np.ndarray, epoch: int) -> np.ndarray:
    """Logits that say whose they are: no two rows or epochs share them."""
    return (rows[:, None] * 10 + np.arange(NUM_CLASSES) + epoch / 8).astype(np.float32)


def test_a_new_row_is_scale_times_one_hot_of_its_given_class(tmp_path: Path) -> None:
    table = make_table(tmp_path, scale=7.0)
    assert table.read([2999, 1]).tolist() == [[0, 0, 0, 0, 7], [0, 7, 0, 0, 0]]
    assert table.read_class([2999, 1]).tolist() == [4, 1]


def test_a_row_without_a_usable_label_prefers_no_class(tmp_path: Path) -> None:
    table = LabelTable.create(tmp_path, np.array([1, -1, 0]), names(3))
    assert table.read([1]).tolist() == [[0, 0, 0]]
    assert table.read_class([0, 1, 2]).tolist() == [1, -1, 0]


def test_keys_come_back_as_they_were_given(tmp_path: Path) -> None:
    keys = [sample_key(str(row)) for row in range(1500)]
    table = LabelTable.create(tmp_path, np.zeros(1500, np.int64), names(2), sample_keys=keys)
    assert table.read_key([1499, 3]).tobytes() == keys[1499] + keys[3]


def test_chunks_make_the_same_file_as_arrays(tmp_path: Path) -> None:
    classes = np.arange(NUM_ROWS) % NUM_CLASSES
    keys = np.frombuffer(b"".join(sample_key(str(row)) for row in range(NUM_ROWS)), np.uint8).reshape(-1, 16)
    LabelTable.create(tmp_path / "whole", classes, names(NUM_CLASSES), keys, run="a1b2")
    cuts = [0, 700, 700, 2048, NUM_ROWS]
    chunks = (classes[a:b] for a, b in pairwise(cuts))
    key_chunks = (keys[a : a + 100] for a in range(0, NUM_ROWS, 100))
    LabelTable.create(tmp_path / "chunks", chunks, names(NUM_CLASSES), key_chunks, run="a1b2")
    whole, chunked = (tmp_path / name / LABELS_FILE for name in ("whole", "chunks"))
    assert whole.read_bytes() == chunked.read_bytes()
    assert sorted(path.name for path in chunked.parent.iterdir()) == ["labels.arrow", "ledger.arrow"]


@pytest.mark.parametrize("source", [[5], [-2]])
def test_a_class_outside_the_list_is_named_with_its_row(tmp_path: Path, source: list[int]) -> None:
    with pytest.raises(PencilError, match=rf"row 3: class {source[0]} is not one of 5"):
        LabelTable.create(tmp_path, iter([np.zeros(3, np.int64), np.array(source)]), names(NUM_CLASSES))
    assert not (tmp_path / LABELS_FILE).exists()


def test_rows_are_written_and_read_in_any_order_across_parts(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    rows = np.random.default_rng(0).permutation(NUM_ROWS)[:2000]
    table.write(rows, logits_for(rows, 0), epoch=0)
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
        table.write(rows, logits_for(rows, epoch), epoch)
        plain[rows] = logits_for(rows, epoch)
        assert np.array_equal(np.flatnonzero(table.visited(epoch)), np.sort(rows))
    assert np.array_equal(table.read(np.arange(NUM_ROWS)), plain)


def test_refused_rows_are_named_and_nothing_of_their_batch_is_written(tmp_path: Path) -> None:
    make_table(tmp_path)
    table = LabelTable.open(tmp_path, writable_parts=[0, 2])
    table.mark([7], epoch=0)
    before = table.read(np.arange(NUM_ROWS))
    refused = {
        "row 3000: outside the table's 3,000 rows": [1, 3000],
        "row -1: outside": [1, -1],
        "row 4: given twice": [4, 1, 4],
        "row 1024 and 1 more: in a part that was not opened for writing": [1, 1024, 1025],
        "row 7: marked with epoch 0 already, written again in epoch 0": [1, 7],
        "list of row numbers": [1.5],
    }
    for message, rows in refused.items():
        with pytest.raises(PencilError, match=message):
            table.write(rows, np.ones((len(rows), NUM_CLASSES), np.float32), epoch=0)
    with pytest.raises(PencilError, match="row 2: given logits that are not finite"):
        table.write([1, 2], np.array([[0] * 5, [0, 0, np.nan, 0, 0]], np.float32), epoch=0)
    with pytest.raises(PencilError, match=r"logits of shape \(2, 4\); expected \(2, 5\)"):
        table.write([1, 2], np.zeros((2, 4), np.float32), epoch=0)
    assert np.array_equal(table.read(np.arange(NUM_ROWS)), before)
    assert table.count_visited(0) == 1


def test_a_row_marked_by_a_later_epoch_is_not_taken_back(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    table.mark([5], epoch=3)
    with pytest.raises(PencilError, match="row 5: marked with epoch 3 already, written again in epoch 2"):
        table.mark([5], epoch=2)
    table.mark([5], epoch=4)


def test_a_table_opened_for_reading_takes_no_write(tmp_path: Path) -> None:
    make_table(tmp_path)
    with pytest.raises(PencilError, match="not opened for writing"):
        LabelTable.open(tmp_path).write([0], np.zeros((1, NUM_CLASSES), np.float32), epoch=0)


def test_a_pinned_row_never_moves_but_is_marked(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    table.write([1024], np.ones((1, NUM_CLASSES), np.float32), epoch=0)
    table.pin([1024, 3], [2, 0])
    rows = np.array([3, 1024, 5])
    table.write(rows, logits_for(rows, 1), epoch=1)
    assert table.read([1024, 3]).tolist() == [[0, 0, 10, 0, 0], [10, 0, 0, 0, 0]]
    assert np.array_equal(table.read([5]), logits_for(np.array([5]), 1))
    assert table.read_class(rows).tolist() == [0, 2, 0]
    assert table.read_pinned(rows).tolist() == [True, True, False]
    assert table.visited(1)[rows].all()


def test_pinning_to_no_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match="class -1 is not one of 5"):
        make_table(tmp_path).pin([0], [-1])


def test_marking_moves_no_label(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    before = (tmp_path / LABELS_FILE).read_bytes()
    table.mark(np.arange(0, NUM_ROWS, 2), epoch=0)
    assert (tmp_path / LABELS_FILE).read_bytes() == before
    assert np.array_equal(np.flatnonzero(table.visited(0)), np.arange(0, NUM_ROWS, 2))


def test_what_one_process_wrote_another_opens(tmp_path: Path) -> None:
    make_table(tmp_path).write([9], np.full((1, NUM_CLASSES), 2.5, np.float32), epoch=4)
    again = LabelTable.open(tmp_path, writable_parts="all", class_names=names(NUM_CLASSES))
    assert again.read([9]).tolist() == [[2.5] * NUM_CLASSES]
    assert np.flatnonzero(again.visited(4)).tolist() == [9]


def write_for_ever(folder: Path) -> None:
    table = LabelTable.open(folder, writable_parts="all")
    rng = np.random.default_rng(0)
    for epoch in range(10**9):
        for rows in rng.permutation(NUM_ROWS).reshape(-1, 100):
            table.write(rows, logits_for(rows, epoch % 8), epoch)


@pytest.mark.slow
def test_other_programs_open_the_table_while_another_process_writes(tmp_path: Path) -> None:
    make_table(tmp_path)
    path = tmp_path / LABELS_FILE
    writer = multiprocessing.get_context("spawn").Process(
        target=write_for_ever, args=(tmp_path,), daemon=True
    )
    writer.start()
    try:
        versions = set()
        while len(versions) < 3:
            arrow = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            arrow.validate(full=True)
            polars = pl.read_ipc(path)
            counted = duckdb.sql(
                "select count(*), min(row), max(row), count(label_logits) from arrow"
            ).fetchall()
            assert counted == [(NUM_ROWS, 0, NUM_ROWS - 1, NUM_ROWS)]
            assert polars.shape == (NUM_ROWS, 5)
            assert polars["row"].to_list() == list(range(NUM_ROWS))
            versions.add(float(polars["label_logits"].arr.first().sum()))
        assert writer.is_alive()
    finally:
        writer.kill()
        writer.join()


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    make_table(tmp_path)
    path = tmp_path / LABELS_FILE
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(DamagedError, match=r"labels\.arrow: damaged Arrow file"):
        LabelTable.open(tmp_path)


def test_an_arrow_file_of_another_program_is_named(tmp_path: Path) -> None:
    make_table(tmp_path)
    pl.DataFrame({"row": [1]}).write_ipc(tmp_path / LABELS_FILE)
    with pytest.raises(PencilError, match="not a label table"):
        LabelTable.open(tmp_path)


def test_another_class_list_is_named(tmp_path: Path) -> None:
    make_table(tmp_path)
    with pytest.raises(PencilError, match="labels has in addition 'class-2', 'class-3', 'class-4'"):
        LabelTable.open(tmp_path, class_names=names(2))


def test_a_folder_without_a_table_and_a_folder_with_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match="no label table here"):
        LabelTable.open(tmp_path)
    make_table(tmp_path)
    with pytest.raises(PencilError, match="holds a label table already"):
        make_table(tmp_path)


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


def test_a_refused_pin_names_its_row_and_a_wild_epoch_is_refused(tmp_path: Path) -> None:
    table = LabelTable.create(tmp_path / "table", [0] * 30, names(3))
    with pytest.raises(PencilError, match="row 22: class 3 is not one of 3"):
        table.pin([21, 22], [1, 3])
    logits = np.zeros((1, 3), np.float32)
    for epoch in (-1, 2**40):
        with pytest.raises(PencilError, match=rf"epoch {epoch}; a run counts its epochs from 0"):
            table.write([7], logits, epoch)


def test_refusals_speak_of_what_was_given_and_of_writing_only_where_something_was_to_be_written(
    tmp_path: Path,
) -> None:
    table = LabelTable.create(tmp_path / "table", np.zeros(10, int), names(NUM_CLASSES))
    huge = np.array([3, 2**64 - 1], np.uint64)
    with pytest.raises(PencilError, match=r"row 18446744073709551615: outside the table's 10 rows$"):
        table.read(huge)
    with pytest.raises(PencilError, match=r"row 18446744073709551615: .* rows; nothing was written$"):
        table.mark(huge, epoch=0)
    with pytest.raises(PencilError, match="writable_parts is 'some'; give a list of part numbers, 'all'"):
        LabelTable.open(tmp_path / "table", "some")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_a_logit_too_large_for_the_table_is_refused_without_a_warning(tmp_path: Path) -> None:
    table = LabelTable.create(tmp_path / "table", np.zeros(10, int), names(NUM_CLASSES))
    with pytest.raises(PencilError, match="row 4: given logits that are not finite numbers of 32 bits"):
        table.write([4], np.full((1, NUM_CLASSES), 1e300), epoch=0)


@pytest.mark.parametrize("wrong", [{"noisy_class": [7]}, {"sample_keys": [b"short"]}])
def test_a_refused_table_leaves_no_folder_behind(tmp_path: Path, wrong: dict) -> None:
    (tmp_path / "there").mkdir()
    for folder in ("there", "not/there"):
        with pytest.raises(PencilError):
            LabelTable.create(
                tmp_path / folder, **{"noisy_class": [0], "class_names": names(NUM_CLASSES), **wrong}
            )
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
