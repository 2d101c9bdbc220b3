"""Regiving: some rows of published labels get another class, and no other row is touched.

A shard that was written again may give a sample another label than before. What was learned of the old one
says nothing of the new, so the row begins as every row does: scale * one-hot. A pinned row stays as it is,
until people pin it to another class. Only the parts that hold such rows are read, and written again.

    manifest = regive(manifest, rows, classes)
    manifest = pin(manifest, read_pins(storage).resolve(class_names))
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.manifest import Manifest, PartEntry
from pencil_scale.labels.part_files import fixed_width, labels_schema
from pencil_scale.labels.part_store import PartStore
from pencil_scale.labels.pins import Pinned, key_bytes, require_same_samples
from pencil_scale.labels.snapshot import LABELS_FOLDER, get_part, put_piece
from pencil_scale.labels.working_copy import checked_classes, scaled_one_hot

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
    store, parts = PartStore(manifest.store), dict(manifest.parts)
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
    store = PartStore(manifest.store)
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
