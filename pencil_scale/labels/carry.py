"""Regiving: some rows of published labels get another class, and no other row is touched.

A shard that was written again may give a sample another label than before. What was learned of the old one
says nothing of the new, so the row begins as every row does: scale * one-hot. A pinned row stays as it is,
until people pin it to another class. Only the parts that hold such rows are read, and written again.

    manifest = regive(manifest, rows, classes)
    manifest = pin(manifest, read_pins(storage).resolve(class_names))

Remap: the same samples under another list of classes.

The mapping names, for every new class, the old classes it is made of:

    remap(table, [[0], [1, 4], [3], []], names, folder)      # 1 and 4 merged, 2 dropped, one class added

A class made of one old class keeps its logits bit for bit. A merged class gets log(sum(exp(logits))), so it
has the probabilities of both together. An added class starts at 0, as every class does that was not given.
Dropping a class leaves the other logits alone; their probabilities share what it had.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.manifest import Manifest, PartEntry
from pencil_scale.labels.part_files import (
    LEDGER_SCHEMA,
    Header,
    choose_layout,
    fixed_batch,
    fixed_width,
    labels_schema,
)
from pencil_scale.labels.pins import Pinned, key_bytes, require_same_samples
from pencil_scale.labels.snapshot import LABELS_FOLDER, get_part, put_piece
from pencil_scale.labels.table import LabelTable
from pencil_scale.labels.working_copy import checked_classes, scaled_one_hot, write_working_copy
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder

Int64s = npt.NDArray[np.int64]
Classes = npt.NDArray[np.int32]


def regive(manifest: Manifest, rows: Int64s, classes: Classes) -> Manifest:
    """Write the parts of these rows again; `rows` rise, a class of -1 is no usable label."""
    within = rows < manifest.layout.num_rows
    return _set(manifest, rows[within], classes[within])


def pin(manifest: Manifest, pins: Pinned) -> Manifest:
    """Pin rows to classes, after checking that each row still is the sample that a person looked at."""
    pins = pins.within(manifest.layout.num_rows)
    return _set(manifest, pins.rows, pins.classes, pins)


def release(manifest: Manifest, rows: Int64s, classes: Classes) -> Manifest:
    """Give rows that are pinned their given class back: the pin is void. Others of these rows stay."""
    within = rows < manifest.layout.num_rows
    rows, classes = rows[within], classes[within]
    store, parts = Folder(manifest.store), dict(manifest.parts)
    for part in np.unique(rows >> manifest.layout.shift).tolist():
        here = manifest.layout.rows_of(part)
        some = slice(*np.searchsorted(rows, [here.start, here.stop]).tolist())
        batch = get_part(manifest, store, part, LABELS_FOLDER)
        pinned = batch.column("pinned").to_numpy()[rows[some] - here.start] != 0
        if pinned.any():
            places = (rows[some] - here.start)[pinned]
            fresh = _changed(batch, places, classes[some][pinned], manifest.scale, pin=False)
            parts[part] = PartEntry(
                (put_piece(store, LABELS_FOLDER, fresh, manifest.run),), parts[part].ledger
            )
    return replace(manifest, parts=parts)


def _set(manifest: Manifest, rows: Int64s, classes: Classes, pins: Pinned | None = None) -> Manifest:
    checked_classes(classes, manifest.layout.num_classes, lowest=-1 if pins is None else 0, rows=rows)
    parts = dict(manifest.parts)
    store = Folder(manifest.store)
    for part in np.unique(rows >> manifest.layout.shift).tolist():
        here = manifest.layout.rows_of(part)
        some = slice(*np.searchsorted(rows, [here.start, here.stop]).tolist())
        batch = get_part(manifest, store, part, LABELS_FOLDER)
        if pins is not None:
            keys = key_bytes(batch.column("sample_key").take(pa.array(rows[some] - here.start)))
            require_same_samples(pins.between(here), keys)
        fresh = _regiven(batch, rows[some] - here.start, classes[some], manifest.scale, pins is not None)
        if fresh is not None:
            piece = put_piece(store, LABELS_FOLDER, fresh, manifest.run)
            parts[part] = PartEntry((piece,), parts[part].ledger)
    return replace(manifest, parts=parts)


def _regiven(
    batch: pa.RecordBatch, places: Int64s, classes: Classes, scale: float, pin: bool
) -> pa.RecordBatch | None:
    """The part with its rows changed; None where every one is as it should be."""
    noisy_class, pinned = (batch.column(name).to_numpy()[places] for name in ("noisy_class", "pinned"))
    stays = (pinned != 0) & ((noisy_class == classes) if pin else True)
    return None if stays.all() else _changed(batch, places[~stays], classes[~stays], scale, pin)


def _changed(
    batch: pa.RecordBatch, places: Int64s, classes: Classes, scale: float, pin: bool
) -> pa.RecordBatch:
    """The part with some rows at a class, pinned or not."""
    noisy_class, pinned = (batch.column(name).to_numpy().copy() for name in ("noisy_class", "pinned"))
    logits = batch.column("label_logits").flatten().to_numpy().reshape(len(batch), -1).copy()
    noisy_class[places] = classes
    logits[places] = scaled_one_hot(classes, logits.shape[1], scale)
    pinned[places] = int(pin)
    changed = {"noisy_class": noisy_class, "pinned": pinned, "label_logits": logits}
    schema = labels_schema(logits.shape[1])
    columns = [
        fixed_width(changed[field.name], field.type) if field.name in changed else batch.column(field.name)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


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
            raise PencilError(f"mapping names class {old}; the table has classes 0 to {num_classes - 1}")
        if named.count(old) > 1:
            raise PencilError(f"mapping names class {old} more than once; no label says how to split a class")
    if len(mapping) < 2:
        raise PencilError(f"mapping makes {len(mapping)} classes; labels need at least 2")


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
