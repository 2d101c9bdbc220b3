"""The labels a run starts with: every catalogue row at its given class, or the labels of an earlier run.

A fresh run starts from `start_labels`. A night starts from published labels and changes as little of them as
it can: rows that the catalogue gained are appended, and rows are set to a class only where their given class
changed or people decided it. Only the parts that hold such rows are read and written; all other parts, and
every other row of those, stay as they are.

    manifest = grow(manifest, noisy_class_of_the_new_rows, their_sample_keys)
    manifest = regive(manifest, rows, classes)
    manifest = pin(manifest, read_pins(storage).resolve(class_names))

Another class list changes every row. The mapping names, for every new class, the old classes it is made of:

    remap(table, [[0], [1, 4], [3], []], names, folder)      # 1 and 4 merged, 2 dropped, one class added

A class made of one old class keeps its logits bit for bit. A merged class gets log(sum(exp(logits))), so it
has the probabilities of both together. An added class starts at 0, like every class that was not given.
Dropping a class leaves the other logits alone; their probabilities share what it had.
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.manifest import (
    LABELS_FOLDER,
    LEDGER_FOLDER,
    Manifest,
    StoredPart,
    get_part,
    put_batch,
)
from pencil_scale.labels.part_files import (
    LEDGER_SCHEMA,
    Int64s,
    Layout,
    TableHeader,
    fixed_batch,
    labels_schema,
)
from pencil_scale.labels.pins import Pinned, apply_pins, require_same_samples
from pencil_scale.labels.published import LabelRows, PublishedLabels
from pencil_scale.labels.table import LabelTable
from pencil_scale.labels.working_copy import (
    ClassSource,
    KeySource,
    checked_classes,
    new_columns,
    new_labels,
    new_ledger,
    scaled_one_hot,
    write_working_copy,
)
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage

log = logging.getLogger(__name__)
Classes = npt.NDArray[np.int32]
Mapping = Sequence[Sequence[int]]


def label_store(storage: str) -> str:
    """The folder with the parts of all label tables of a dataset."""
    return Storage(storage).path(Storage.labels)


def start_labels(
    catalogue: Catalogue,
    storage: str,
    scale: float,
    scratch: str | None,
    pins: Pinned | None = None,
    run: str | None = None,
) -> Manifest:
    """Make a fresh table over all rows of the catalogue and put it into the label store.

    A row without a usable class has logits too, with no class preferred: rows keep their numbers. Pinned rows
    start, and stay, as people decided.
    """
    if scratch is not None:
        Path(scratch).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pencil_scale-", dir=scratch) as folder:
        table = fresh_table(catalogue, folder, scale, run)
        if pins is not None:
            apply_pins(table, pins)
        return replace(table.snapshot(label_store(storage)), catalogue=catalogue.id)


def fresh_table(catalogue: Catalogue, folder: str, scale: float = 10.0, run: str | None = None) -> LabelTable:
    """Make a table in which every row of the catalogue has the class it was given."""
    classes = (table["noisy_class"].fill_null(-1).to_numpy() for table in catalogue.batches(["noisy_class"]))
    keys = (table["sample_key"] for table in catalogue.batches(["sample_key"]))
    return LabelTable.create(Path(folder) / "table", classes, catalogue.class_names, keys, scale, run)


def grow(manifest: Manifest, noisy_class: ClassSource, sample_keys: KeySource | None = None) -> Manifest:
    """Append new rows, at their given class; of the old parts only the last is written again, if short."""
    manifest.require_whole()
    old, store, parts = manifest.layout, Folder(manifest.store), dict(manifest.parts)
    with new_columns(noisy_class, sample_keys, old.num_classes, None, old.num_rows) as columns:
        layout = replace(old, num_rows=old.num_rows + len(columns[0]))
        for part in range(old.num_rows >> old.shift, layout.num_parts):
            rows = range(max(layout.rows_of(part).start, old.num_rows), layout.rows_of(part).stop)
            labels = new_labels(rows, columns, old.num_classes, manifest.scale, first_row=old.num_rows)
            ledger = new_ledger(len(rows))
            if part in parts:
                labels = pa.concat_batches([get_part(manifest, store, part, LABELS_FOLDER), labels])
                ledger = pa.concat_batches([get_part(manifest, store, part, LEDGER_FOLDER), ledger])
            parts[part] = StoredPart(
                put_batch(store, LABELS_FOLDER, labels, manifest.run),
                put_batch(store, LEDGER_FOLDER, ledger, manifest.run),
            )
    return replace(manifest, layout=layout, parts=parts)


def regive(manifest: Manifest, rows: Int64s, classes: Classes) -> Manifest:
    """Restart rows, in rising order, at their new given class; -1: no usable label. Pinned rows stay."""
    return _set(manifest, rows, classes, lambda was, pinned, to: ~pinned)


def release(manifest: Manifest, rows: Int64s, classes: Classes) -> Manifest:
    """Give pinned rows their given class back: their pins are void. Rows that are not pinned stay."""
    return _set(manifest, rows, classes, lambda was, pinned, to: pinned)


def pin(manifest: Manifest, pins: Pinned) -> Manifest:
    """Pin rows to classes, after checking that each row still is the sample that a person looked at."""
    pins = pins.between(range(manifest.layout.num_rows))
    return _set(manifest, pins.rows, pins.classes, lambda was, pinned, to: ~pinned | (was != to), pins)


def _set(
    manifest: Manifest, rows: Int64s, classes: Classes, changes: Any, pins: Pinned | None = None
) -> Manifest:
    """Set rows to classes, pinned if `pins` are given, where `changes(class, pinned, new class)` says so."""
    within = rows < manifest.layout.num_rows
    rows, classes = rows[within], classes[within]
    checked_classes(classes, manifest.layout.num_classes, lowest=-1 if pins is None else 0, rows=rows)
    store, parts = Folder(manifest.store), dict(manifest.parts)
    for labels in PublishedLabels(manifest).parts_with(rows):
        some = slice(*np.searchsorted(rows, [labels.rows.start, labels.rows.stop]).tolist())
        places, wanted = rows[some] - labels.rows.start, classes[some]
        if pins is not None:
            require_same_samples(pins.between(labels.rows), labels.sample_key[places])
        changed = changes(labels.noisy_class[places], labels.pinned[places], wanted)
        if changed.any():
            batch = _changed(labels, places[changed], wanted[changed], manifest.scale, pins is not None)
            part = labels.rows.start >> manifest.layout.shift
            parts[part] = replace(parts[part], labels=put_batch(store, LABELS_FOLDER, batch, manifest.run))
    return replace(manifest, parts=parts)


def _changed(
    labels: LabelRows, places: Int64s, classes: Classes, scale: float, pinned: bool
) -> pa.RecordBatch:
    """The part with some of its rows at a class, pinned or not."""
    all_classes, all_logits = labels.noisy_class.copy(), labels.logits.copy()
    all_pinned = labels.pinned.astype(np.uint8)
    num_classes = all_logits.shape[1]
    all_classes[places] = classes
    all_logits[places] = scaled_one_hot(classes, num_classes, scale)
    all_pinned[places] = pinned
    rows, schema = np.arange(labels.rows.start, labels.rows.stop), labels_schema(num_classes)
    return fixed_batch(schema, [rows, labels.sample_key, all_classes, all_pinned, all_logits])


def remap(table: LabelTable, mapping: Mapping, class_names: Sequence[str], folder: str | Path) -> LabelTable:
    """Make a table over the new classes in `folder`; it keeps the ledger, keys and pins.

    A row whose given class was dropped has class -1 from then on, and is no longer pinned.
    """
    last = table.layout.num_classes - 1
    for old, times in Counter(old for olds in mapping for old in olds).items():
        if not 0 <= old <= last:
            raise PencilError(f"mapping names class {old}; the table has classes 0 to {last}")
        if times > 1:
            raise PencilError(f"mapping names class {old} more than once; no label says how to split a class")
    if len(mapping) < 2:
        raise PencilError(f"mapping makes {len(mapping)} classes; labels need at least 2")
    layout = Layout.of(table.layout.num_rows, len(mapping))
    parts = tuple(range(layout.num_parts))
    header = TableHeader(layout, parts, table.first_epoch, table.scale, tuple(class_names), table.run)
    ranges = [layout.rows_of(part) for part in parts]
    labels = (_remapped(table, mapping, np.arange(rows.start, rows.stop)) for rows in ranges)
    epochs = (table.read_last_epoch(np.arange(rows.start, rows.stop)) for rows in ranges)
    ledger = (fixed_batch(LEDGER_SCHEMA, [last_epoch]) for last_epoch in epochs)
    write_working_copy(Path(folder), header, labels, ledger)
    return LabelTable.open(folder, writable_parts="all")


def _remapped(table: LabelTable, mapping: Mapping, rows: Int64s) -> pa.RecordBatch:
    # Old class to new; the last entry is where -1, no usable label, looks itself up.
    new_class = np.full(table.layout.num_classes + 1, -1, np.int32)
    for new, olds in enumerate(mapping):
        new_class[list(olds)] = new
    given = table.read_class(rows)
    noisy_class = new_class[given]
    lost = np.count_nonzero((noisy_class < 0) & (given >= 0))
    if lost:
        log.warning("rows %d to %d: %d had a class that was dropped; it is -1 now", rows[0], rows[-1], lost)
    pinned = table.read_pinned(rows) & (noisy_class >= 0)
    old_logits, logits = table.read(rows), np.zeros((len(rows), len(mapping)), np.float32)
    for new, olds in enumerate(mapping):
        if len(olds) == 1:
            logits[:, new] = old_logits[:, olds[0]]
        elif olds:
            logits[:, new] = np.logaddexp.reduce(old_logits[:, list(olds)].astype(np.float64), axis=1)
    logits[pinned] = scaled_one_hot(noisy_class[pinned], len(mapping), table.scale)
    schema, keys = labels_schema(len(mapping)), table.read_key(rows)
    return fixed_batch(schema, [rows, keys, noisy_class, pinned.astype(np.uint8), logits])
