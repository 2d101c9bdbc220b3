"""The labels a run starts with: every catalogue row at its given class, or the labels of an earlier run.

A fresh run starts from `start_labels`. A night starts from published labels and changes as little of them as
it can: rows that the catalogue gained are appended, and rows are set to a class only where their given class
changed or people decided it. Only the parts that hold such rows are read and written; all other parts, and
every other row of those, stay as they are.

    manifest = grow(manifest, catalogue)
    manifest = regive(manifest, rows, classes)
    manifest = set_roles(manifest, (planted_rows, wrong_classes), watched_rows)
    manifest = unplant(manifest, (planted_rows, wrong_classes), classes)           # at the end of a run
    manifest = pin(manifest, read_pins(storage).resolve(class_names))

Another class list changes every row. The mapping names, for every new class, the old classes it is made of,
none of them twice:

    manifest, freed = remap(manifest, [[0], [1, 4], [3], []], names)    # 1, 4 merged, 2 dropped, one added

A class made of one old class keeps its logits bit for bit. A merged class gets log(sum(exp(logits))), so it
has the probabilities of both together. An added class starts at 0, like every class that was not given.
Dropping a class leaves the other logits alone; their probabilities share what it had.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.columns import (
    FREE,
    PINNED,
    PLANTED,
    WATCHED,
    Int64s,
    Keys,
    Layout,
    key_bytes,
    labels_schema,
    ledger_schema,
    new_ledger,
    scaled_one_hot,
    to_batch,
)
from pencil_scale.labels.manifest import (
    LABELS,
    LEDGER,
    PARALLEL_PARTS,
    Manifest,
    StoredPart,
    get_part,
    put_batch,
)
from pencil_scale.labels.pins import Pinned, require_same_samples
from pencil_scale.labels.published import LabelRows, PublishedLabels, is_decided
from pencil_scale.method.evidence import Predictions
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage

log = logging.getLogger(__name__)
STRETCH = 1 << 18  # rows of the catalogue in memory at a time: a multiple of the rows of a part
Classes = npt.NDArray[np.int32]
Roles = npt.NDArray[np.uint8]
Planted = tuple[Int64s, Classes]  # rows, in rising order, and their wrong classes
Mapping = Sequence[Sequence[int]]


def start_labels(
    catalogue: Catalogue,
    storage: str,
    scale: float,
    pins: Pinned | None = None,
    run: str | None = None,
    planted: Planted | None = None,
    watched: Int64s | None = None,
) -> Manifest:
    """Put a fresh table over all rows of the catalogue into the label store.

    A row without a usable class has logits too, with no class preferred: rows keep their numbers. Pinned rows
    start, and stay, as people decided, even if they are among the planted or watched rows.
    """
    store = Storage(storage).path(Storage.labels)
    empty = Manifest.empty(store, catalogue.class_names, scale, run)
    manifest = grow(replace(empty, catalogue=catalogue.id), catalogue, planted, watched)
    return manifest if pins is None else pin(manifest, pins)


def grow(
    manifest: Manifest, catalogue: Catalogue, planted: Planted | None = None, watched: Int64s | None = None
) -> Manifest:
    """Append the rows that the catalogue has beyond those of the manifest."""
    while (first := manifest.layout.num_rows) < catalogue.num_rows:
        stop = min((first // STRETCH + 1) * STRETCH, catalogue.num_rows)
        rows = catalogue.read(first, stop, ["noisy_class", "sample_key"])
        classes = rows["noisy_class"].fill_null(-1).to_numpy().copy()
        classes[classes >= catalogue.num_classes] = -1  # vanished before the class list was shortened
        role = _roles(range(first, stop), planted, watched)
        if planted is not None:
            classes[role == PLANTED] = planted[1][_within(planted[0], range(first, stop))]
        manifest = append(manifest, classes, rows["sample_key"], role)
    return manifest


def append(
    manifest: Manifest, noisy_class: npt.ArrayLike, sample_keys: Keys | None = None, role: Roles | None = None
) -> Manifest:
    """Append rows at scale * one-hot of their given class; -1: no usable label. Without keys, keys are zeros.

    Of the old parts only the last is written again, if it is short.
    """
    manifest.require_whole()
    old, store, run = manifest.layout, Folder(manifest.store), manifest.run
    classes = np.asarray(noisy_class)
    layout = replace(old, num_rows=old.num_rows + len(classes))
    classes = _checked(classes, range(old.num_rows, layout.num_rows), old.num_classes, lowest=-1)
    keys = np.zeros((len(classes), 16), np.uint8) if sample_keys is None else key_bytes(sample_keys)
    if len(keys) != len(classes):
        raise PencilError(f"{len(keys):,} sample keys for {len(classes):,} rows; give one per row")

    role = np.full(len(classes), FREE, np.uint8) if role is None else role

    def put(part: int) -> StoredPart:
        rows = layout.rows_of(part)
        rows = range(max(rows.start, old.num_rows), rows.stop)
        new = slice(rows.start - old.num_rows, rows.stop - old.num_rows)
        logits = scaled_one_hot(classes[new], old.num_classes, manifest.scale)
        labels = _labels(rows, keys[new], classes[new], role[new], logits)
        ledger = new_ledger(len(rows), old.num_classes)
        if part in manifest.parts:
            labels = pa.concat_batches([get_part(manifest, part, LABELS), labels])
            ledger = pa.concat_batches([get_part(manifest, part, LEDGER), ledger])
        return StoredPart(put_batch(store, LABELS, labels, run), put_batch(store, LEDGER, ledger, run))

    parts = range(old.num_rows >> old.shift, layout.num_parts)
    with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
        stored = dict(zip(parts, pool.map(put, parts), strict=True))
    return replace(manifest, layout=layout, parts={**manifest.parts, **stored})


def regive(manifest: Manifest, rows: Int64s, classes: Classes) -> Manifest:
    """Restart rows, in rising order, at their new given class; -1: no usable label. Pinned rows stay."""
    return _set(manifest, rows, classes, lambda labels, slots, to: ~labels.pinned[slots], FREE)


def unplant(manifest: Manifest, planted: Planted, classes: Classes) -> Manifest:
    """Give planted errors their original class back, and take the wrong one out of their predictions.

    The network was trained to predict the wrong class, so what it says of that class must not decide.
    """
    rows, wrong = planted
    manifest = regive(manifest, rows, classes)
    for labels in PublishedLabels(manifest).parts_with(rows):
        here = _within(rows, labels.rows)
        slots = rows[here] - labels.rows.start
        found, some = labels.predictions(), labels.predictions(slots).without(wrong[here].astype(np.int64))
        found.classes[slots], found.log_p[slots] = some.classes, some.log_p
        manifest = _with_predictions(manifest, labels, found)
    return manifest


def forget(manifest: Manifest, rows: Int64s) -> Manifest:
    """Drop the predictions of rows, in rising order: what they decided was another given label."""
    for labels in PublishedLabels(manifest).parts_with(rows):
        found = labels.predictions()
        found.log_p[rows[_within(rows, labels.rows)] - labels.rows.start] = np.nan
        manifest = _with_predictions(manifest, labels, found)
    return manifest


def cross(manifest: Manifest, folds: Sequence[Manifest]) -> Manifest:
    """Take each row's prediction from the training that watched it; a row that none watched has none."""
    for labels in PublishedLabels(manifest).batches():
        found = labels.predictions()
        found.log_p[(labels.role == FREE) | (labels.role == PLANTED)] = np.nan
        for fold in folds:
            there = PublishedLabels(fold).rows(labels.rows)
            watched = there.role == WATCHED
            some = there.predictions(watched)
            found.classes[watched], found.log_p[watched] = some.classes, some.log_p
        manifest = _with_predictions(manifest, labels, found)
    return manifest


def unmoved(manifest: Manifest, start: Manifest) -> Manifest:
    """The labels that a run started from; of its own only which rows it trained for the first time."""
    parts = dict(start.parts)
    for labels in PublishedLabels(manifest).batches():
        before, part = PublishedLabels(start).rows(labels.rows), labels.rows.start >> manifest.layout.shift
        is_new = np.isnan(before.predicted_log_p[:, 0]) & (before.last_epoch == 0)
        last_epoch = np.where(is_new, labels.last_epoch, before.last_epoch)
        batch = _ledger(last_epoch, before.predictions())
        ledger = put_batch(Folder(manifest.store), LEDGER, batch, manifest.run)
        parts[part] = replace(parts[part], ledger=ledger)
    return replace(manifest, parts=parts, noise=start.noise, earlier_noise=start.earlier_noise)


def keep_decided(manifest: Manifest, start: Manifest) -> Manifest:
    """Labels that earlier nights decided stay as they were at the start, and so do their predictions."""
    parts, store = dict(manifest.parts), Folder(manifest.store)
    for labels in PublishedLabels(manifest).batches():
        before, part = PublishedLabels(start).rows(labels.rows), labels.rows.start >> manifest.layout.shift
        old, found, was = is_decided(before), labels.predictions(), before.predictions()
        logits = np.where(old[:, None], before.logits, labels.logits)
        noisy_class = np.where(old, before.noisy_class, labels.noisy_class)
        batch = _labels(labels.rows, labels.sample_key, noisy_class, labels.role, logits)
        # Watched rows have been predicted again, but keep what the network before said.
        last_epoch = np.where(before.last_epoch == 0, 1 - manifest.first_epoch, before.last_epoch)
        found.classes[old], found.log_p[old] = was.classes[old], was.log_p[old]
        ledger = _ledger(np.where(old, last_epoch, labels.last_epoch), found)
        files = put_batch(store, LABELS, batch, manifest.run), put_batch(store, LEDGER, ledger, manifest.run)
        parts[part] = StoredPart(*files)
    return replace(manifest, parts=parts)


def _with_predictions(manifest: Manifest, labels: LabelRows, found: Predictions) -> Manifest:
    """Store other predictions of the rows of a part."""
    part = labels.rows.start >> manifest.layout.shift
    ledger = put_batch(Folder(manifest.store), LEDGER, _ledger(labels.last_epoch, found), manifest.run)
    return replace(manifest, parts={**manifest.parts, part: replace(manifest.parts[part], ledger=ledger)})


def release(manifest: Manifest, rows: Int64s, classes: Classes) -> Manifest:
    """Give pinned rows their given class back: their pins are void. Rows that are not pinned stay."""
    return _set(manifest, rows, classes, lambda labels, slots, to: labels.pinned[slots], FREE)


def pin(manifest: Manifest, pins: Pinned) -> Manifest:
    """Pin rows to classes, after checking that each row still is the sample that a person looked at."""

    def changes(labels: LabelRows, slots: Int64s, to: Classes) -> Any:
        require_same_samples(pins.between(labels.rows), labels.sample_key[slots])
        return ~labels.pinned[slots] | (labels.noisy_class[slots] != to)

    return _set(manifest, pins.rows, pins.classes, changes, PINNED)


def set_roles(manifest: Manifest, planted: Planted | None, watched: Int64s | None) -> Manifest:
    """Plant errors, and watch rows; all other rows but the pinned ones are free. Row numbers rise.

    A row that is not watched any more was last predicted by the network before, and stays as that decided.
    """
    if planted is not None:
        manifest = _set(manifest, *planted, lambda labels, slots, to: ~labels.pinned[slots], PLANTED)
    store, parts = Folder(manifest.store), dict(manifest.parts)
    for part, labels in enumerate(PublishedLabels(manifest).batches()):
        role = np.where(labels.pinned, np.uint8(PINNED), _roles(labels.rows, planted, watched))
        if (role != labels.role).any():
            batch = _labels(labels.rows, labels.sample_key, labels.noisy_class, role, labels.logits)
            parts[part] = replace(parts[part], labels=put_batch(store, LABELS, batch, manifest.run))
        left = (labels.role == WATCHED) & (role != WATCHED) & (labels.last_epoch == 0)
        if left.any():
            last_epoch = np.where(left, 1 - manifest.first_epoch, labels.last_epoch)
            ledger = put_batch(store, LEDGER, _ledger(last_epoch, labels.predictions()), manifest.run)
            parts[part] = replace(parts[part], ledger=ledger)
    return replace(manifest, parts=parts)


def _roles(rows: range, planted: Planted | None, watched: Int64s | None) -> Roles:
    role = np.full(len(rows), FREE, np.uint8)
    for some, kind in ((watched, WATCHED), (planted and planted[0], PLANTED)):
        if some is not None:
            role[some[_within(some, rows)] - rows.start] = kind
    return role


def _within(some: Int64s, rows: range) -> slice:
    """Which of some rows, in rising order, are in this range."""
    return slice(*np.searchsorted(some, [rows.start, rows.stop]).tolist())


def _set(
    manifest: Manifest, rows: Int64s, classes: Classes, changes: Callable[..., Any], role: int
) -> Manifest:
    """Give rows a class and a role where `changes(labels, slots, classes)` says so."""
    within = rows < manifest.layout.num_rows  # labels may be older than the newest pins
    rows, classes = rows[within], classes[within]
    _checked(classes, rows, manifest.layout.num_classes, lowest=0 if role == PINNED else -1)
    parts = dict(manifest.parts)
    for labels in PublishedLabels(manifest).parts_with(rows):
        here = _within(rows, labels.rows)
        slots = rows[here] - labels.rows.start
        changed = changes(labels, slots, classes[here])
        if changed.any():
            part = labels.rows.start >> manifest.layout.shift
            to = slots[changed], classes[here][changed], role
            parts[part] = _restarted(manifest, parts[part], labels, *to)
    return replace(manifest, parts=parts)


def _restarted(
    manifest: Manifest, stored: StoredPart, labels: LabelRows, slots: Int64s, classes: Classes, role: int
) -> StoredPart:
    """Store a part with some rows at the start of their class; their predictions stay."""
    columns: list[Any] = [labels.noisy_class.copy(), labels.role.copy(), labels.logits.copy()]
    scaled = scaled_one_hot(classes, manifest.layout.num_classes, manifest.scale)
    for column, values in zip(columns, (classes, role, scaled), strict=True):
        column[slots] = values
    batch = _labels(labels.rows, labels.sample_key, *columns)
    return replace(stored, labels=put_batch(Folder(manifest.store), LABELS, batch, manifest.run))


def remap(manifest: Manifest, mapping: Mapping, class_names: Sequence[str]) -> tuple[Manifest, Int64s]:
    """Store the table over new classes; it keeps the ledger, keys and pins.

    A row whose given class was dropped has class -1 from then on. If it was pinned, it no longer is; these
    rows are returned too.
    """
    layout = Layout.of(manifest.layout.num_rows, len(mapping))
    published, store, run = PublishedLabels(manifest), Folder(manifest.store), manifest.run

    def put(part: int) -> tuple[StoredPart, Int64s]:
        rows = layout.rows_of(part)
        old = published.rows(rows)
        labels, freed = _remapped(old, mapping, manifest)
        ledger = _remapped_ledger(old, mapping)
        files = put_batch(store, LABELS, labels, run), put_batch(store, LEDGER, ledger, run)
        return StoredPart(*files), freed

    with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
        stored = list(pool.map(put, range(layout.num_parts)))
    parts = {part: files for part, (files, _) in enumerate(stored)}
    changed = replace(manifest, layout=layout, parts=parts, class_names=tuple(class_names))
    return changed, np.concatenate([np.zeros(0, np.int64), *(freed for _, freed in stored)])


def _remapped(old: LabelRows, mapping: Mapping, manifest: Manifest) -> tuple[pa.RecordBatch, Int64s]:
    # Old class to new; the last entry is where -1, no usable label, looks itself up.
    new_class = np.full(manifest.layout.num_classes + 1, -1, np.int32)
    for new, olds in enumerate(mapping):
        new_class[list(olds)] = new
    noisy_class = new_class[old.noisy_class]
    lost = np.count_nonzero((noisy_class < 0) & (old.noisy_class >= 0))
    if lost:
        first, last = old.rows[0], old.rows[-1]
        log.warning("rows %d to %d: %d had a class that was dropped; it is -1 now", first, last, lost)
    freed = old.pinned & (noisy_class < 0)
    role, logits = np.where(freed, FREE, old.role), np.zeros((len(old.rows), len(mapping)), np.float32)
    for new, olds in enumerate(mapping):
        if len(olds) == 1:
            logits[:, new] = old.logits[:, olds[0]]
        elif olds:
            logits[:, new] = np.logaddexp.reduce(old.logits[:, list(olds)].astype(np.float64), axis=1)
    pinned = role == PINNED
    logits[pinned] = scaled_one_hot(noisy_class[pinned], len(mapping), manifest.scale)
    labels = _labels(old.rows, old.sample_key, noisy_class, role, logits)
    return labels, old.rows.start + np.flatnonzero(freed)


def _remapped_ledger(old: LabelRows, mapping: Mapping) -> pa.RecordBatch:
    """The ledger over new classes; a class that was not kept has an even share of what the others leave."""
    top, num_classes = old.predictions(), old.logits.shape[1]
    known = ~np.isnan(top.log_p[:, :1])
    kept = np.where(known, np.exp(top.log_p), 0.0)
    left = np.clip(1 - kept.sum(axis=1), 0, None) / max(num_classes - kept.shape[1], 1)
    shares = np.repeat(left[:, None], num_classes, axis=1)
    np.put_along_axis(shares, top.classes, kept, axis=1)
    shares = np.stack([shares[:, list(olds)].sum(axis=1) for olds in mapping], axis=1)
    found = Predictions.from_logits(np.log(np.maximum(shares, 1e-12)))
    return _ledger(old.last_epoch, replace(found, log_p=np.where(known, found.log_p, np.nan)))


def _ledger(last_epoch: npt.NDArray[np.int32], found: Predictions) -> pa.RecordBatch:
    schema = ledger_schema(found.num_classes)
    columns: list[npt.NDArray[Any]] = [last_epoch, found.classes, found.log_p]
    kinds = [getattr(kind, "value_type", kind).to_pandas_dtype() for kind in schema.types]
    cast = (values.astype(kind) for values, kind in zip(columns, kinds, strict=True))
    return to_batch(schema, dict(zip(schema.names, cast, strict=True)))


def _labels(
    rows: range,
    keys: npt.NDArray[np.uint8],
    classes: Classes,
    role: Roles,
    logits: npt.NDArray[np.float32],
) -> pa.RecordBatch:
    schema, numbers = labels_schema(logits.shape[1]), np.arange(rows.start, rows.stop)
    columns = (numbers, keys, classes, role.astype(np.uint8), logits)
    return to_batch(schema, dict(zip(schema.names, columns, strict=True)))


def _checked(
    classes: npt.NDArray[Any], rows: Sequence[int] | Int64s, num_classes: int, lowest: int
) -> Classes:
    """The classes of these rows as int32, all in [lowest, num_classes)."""
    if classes.ndim != 1 or (classes.size and classes.dtype.kind not in "iu"):
        raise PencilError(
            f"classes of type {classes.dtype} and shape {classes.shape}; give integers, one per row"
        )
    bad = np.flatnonzero((classes < lowest) | (classes >= num_classes))
    if bad.size:
        raise PencilError(
            f"row {rows[int(bad[0])]:,}: class {classes[bad[0]]} is not one of {num_classes} "
            f"({bad.size:,} such rows); classes are {lowest} to {num_classes - 1}"
        )
    return classes.astype(np.int32, copy=False)
