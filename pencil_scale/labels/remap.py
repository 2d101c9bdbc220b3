"""Remap: the same samples under another list of classes.

The mapping names, for every new class, the old classes it is made of:

    remap(table, [[0], [1, 4], [3], []], names, folder)      # 1 and 4 merged, 2 dropped, one class added

A class made of one old class keeps its logits bit for bit. A merged class gets log(sum(exp(logits))), so it
has the probabilities of both together. An added class starts at 0, as every class does that was not given.
Dropping a class leaves the other logits alone; their probabilities share what it had.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.label_table import LabelTable
from pencil_scale.labels.part_files import (
    LEDGER_SCHEMA,
    Header,
    LabelTableError,
    choose_layout,
    fixed_batch,
    labels_schema,
)
from pencil_scale.labels.working_copy import scaled_one_hot, write_working_copy

log = logging.getLogger(__name__)

Mapping = Sequence[Sequence[int]]


def remap(table: LabelTable, mapping: Mapping, class_names: Sequence[str], folder: str | Path) -> LabelTable:
    """Make a table over the new classes in `folder`; ledger, keys and pins come along.

    A row whose given class was dropped has class -1 from then on, and is no longer pinned.
    """
    _check(mapping, table.layout.num_classes)
    layout = choose_layout(table.layout.num_rows, len(mapping))
    parts = tuple(range(layout.num_parts))
    header = Header(layout, parts, table.first_epoch, table.scale, tuple(class_names), table.run)
    row_ranges = [layout.rows_of(part) for part in header.parts]
    labels = (_remapped(table, mapping, np.arange(rows.start, rows.stop)) for rows in row_ranges)
    write_working_copy(Path(folder), header, labels, _ledger(table, row_ranges))
    return LabelTable.open(folder, writable_parts="all")


def _check(mapping: Mapping, num_classes: int) -> None:
    named = [old for olds in mapping for old in olds]
    for old in named:
        if not 0 <= old < num_classes:
            raise LabelTableError(f"mapping names class {old}; the table has classes 0 to {num_classes - 1}")
        if named.count(old) > 1:
            raise LabelTableError(
                f"mapping names class {old} more than once; no label says how to split a class"
            )
    if len(mapping) < 2:
        raise LabelTableError(f"mapping makes {len(mapping)} classes; labels need at least 2")


def _remapped(table: LabelTable, mapping: Mapping, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
    noisy_class = _new_class(mapping, table.layout.num_classes)[table.read_class(rows)]
    lost = np.count_nonzero((noisy_class < 0) & (table.read_class(rows) >= 0))
    if lost:
        log.warning("rows %d to %d: %d had a class that was dropped; it is -1 now", rows[0], rows[-1], lost)
    pinned = table.read_pinned(rows) & (noisy_class >= 0)
    logits = remapped_logits(table.read(rows), mapping)
    logits[pinned] = scaled_one_hot(noisy_class[pinned], len(mapping), table.scale)
    columns: list[npt.NDArray[Any]] = [
        rows,
        table.read_key(rows),
        noisy_class,
        pinned.astype(np.uint8),
        logits,
    ]
    return fixed_batch(labels_schema(len(mapping)), columns)


def _new_class(mapping: Mapping, num_classes: int) -> npt.NDArray[np.int32]:
    """Old class to new; the extra last entry is where -1, no usable label, looks itself up."""
    found = np.full(num_classes + 1, -1, np.int32)
    for new, olds in enumerate(mapping):
        found[list(olds)] = new
    return found


def remapped_logits(logits: npt.NDArray[np.float32], mapping: Mapping) -> npt.NDArray[np.float32]:
    """The same labels over the new classes: [B, C] to [B, len(mapping)]."""
    moved = np.zeros((len(logits), len(mapping)), np.float32)
    for new, olds in enumerate(mapping):
        if len(olds) == 1:
            moved[:, new] = logits[:, olds[0]]
        elif olds:
            moved[:, new] = np.logaddexp.reduce(logits[:, list(olds)].astype(np.float64), axis=1)
    return moved


def _ledger(table: LabelTable, row_ranges: list[range]) -> Iterator[pa.RecordBatch]:
    for rows in row_ranges:
        last_epoch = table.read_last_epoch(np.arange(rows.start, rows.stop))
        yield fixed_batch(LEDGER_SCHEMA, [last_epoch])
