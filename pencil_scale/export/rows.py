"""Export rows: everything that is known about some rows of the catalogue, for an export.

The label of a row comes from the first of these that has one: a person who pinned it; the prediction of a row
that the run, or one of its trainings, watched; the learned labels, if a run trained on the row; the network,
for a sample that has no usable label or is held out; the shard.

    for table in export_tables(source, range(0, 65_536)):       # one per label part, in row order
        ...
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import ClassOrder, difference
from pencil_scale.catalogue.duplicates import Keys, contains, hashes_of
from pencil_scale.catalogue.ranges import IMAGE_COLUMNS, read_images
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.catalogue.schema import FOR_THE_MODEL
from pencil_scale.config.settings import Images
from pencil_scale.export.table import GIVEN, LABELS, MODEL, PERSON, WATCHED, Words, export_table, without
from pencil_scale.labels.columns import FREE, PINNED, key_bytes, scaled_one_hot
from pencil_scale.labels.pins import Pinned, read_pins, require_same_samples
from pencil_scale.labels.published import (
    LabelRows,
    Published,
    PublishedLabels,
    find_published,
    require_same_rows,
)
from pencil_scale.labels.report import NEVER, LabelMoves
from pencil_scale.method.decisions import UNLABELLED
from pencil_scale.storage.errors import PencilError

COLUMNS = ["row", "sample_id", "sample_key", "key", "noisy_class", "status", *IMAGE_COLUMNS]
STRETCH_ROWS = 1 << 17
PREDICT_BATCH = 64
Predict = Callable[[Catalogue, pa.Table, int], tuple[list[int], npt.NDArray[np.float32]]]


@dataclass(frozen=True)
class Source:
    """Where the facts of an export come from."""

    catalogue: Catalogue
    published: Published
    order: ClassOrder  # from the class numbers of the labels to those of the catalogue
    pins: Pinned
    excluded: Keys  # including those that the catalogue does not mark as excluded yet
    words: Words
    model: Predict | None


def find_source(
    storage: str,
    labels: str,
    exclude: str | None,
    top_k: int,
    model: Predict | None,
    moved: Mapping[str, str | None] | None = None,
    held: bool = False,
) -> Source:
    """Bring together published labels, the newest catalogue with their classes, and the pins.

    With `held`, the labels may be those of a held run.
    """
    published = find_published(storage, labels, held)
    catalogue = newest_of_classes(storage, published)
    names = catalogue.class_names
    order = ClassOrder.between(published.manifest.class_names, names, f"labels {published.name}")
    require_same_rows(published.manifest, catalogue)
    urls = tuple(entry.url for entry in catalogue.shards)
    words = Words(names, urls, catalogue.version, published.name, min(top_k, len(names)))
    pins = read_pins(storage).resolve(names, moved)
    return Source(catalogue, published, order, pins, make_overlay(exclude).excluded, words, model)


def newest_of_classes(storage: str, published: Published) -> Catalogue:
    """Open the newest catalogue that has the classes of the labels, in any order."""
    newest, wanted = Catalogue.open(storage), published.manifest.class_names
    if set(newest.class_names) == set(wanted):
        return newest
    for version in range(newest.version - 1, 0, -1):
        catalogue = Catalogue.open(storage, version)
        if set(catalogue.class_names) == set(wanted):
            print(
                f"labels {published.name}: the class list has changed since (the newest catalogue's "
                f"{difference(newest.class_names, wanted)}); using catalogue version {version}, the newest "
                "with their classes",
                flush=True,
            )
            return catalogue
    raise PencilError(
        f"{published.url}: its class list {difference(wanted, newest.class_names)}, compared with catalogue "
        f"version {newest.version}, and no version of the catalogue has its classes; choose labels of this "
        "class list, or run a night with nightly.remap"
    )


def stretches(source: Source) -> list[range]:
    """Cut all rows into stretches of complete label parts, and those newer than the labels likewise."""
    layout, num_rows = source.published.manifest.layout, source.catalogue.num_rows
    labelled = min(layout.num_rows, num_rows)
    step = max(1, STRETCH_ROWS // layout.part_rows) * layout.part_rows
    firsts = [*range(0, labelled, step), *range(labelled, num_rows, STRETCH_ROWS), num_rows]
    return [range(first, end) for first, end in pairwise(firsts)]


class Learned(NamedTuple):
    """What was learned about consecutive rows."""

    labels: LabelRows  # in the classes of the catalogue
    last_change: npt.NDArray[np.int32]


def export_tables(source: Source, rows: range) -> Iterator[pa.Table]:
    """Read the rows of a stretch, one label part at a time; excluded ids are left out."""
    known = source.catalogue.read(rows.start, rows.stop, COLUMNS)
    for learned in _learned(source, rows, known["noisy_class"]):
        here = slice(learned.labels.rows.start - rows.start, learned.labels.rows.stop - rows.start)
        yield _table(source, known[here], learned)


def _learned(source: Source, rows: range, noisy_class: pa.ChunkedArray) -> Iterator[Learned]:
    manifest, order = source.published.manifest, source.order
    given = noisy_class.fill_null(UNLABELLED).to_numpy().astype(np.int64)
    if rows.start >= manifest.layout.num_rows:
        labels = LabelRows.unseen(rows, manifest.layout.num_classes).under(order, given)
        yield Learned(labels, np.full(len(rows), NEVER, np.int32))
        return
    last_change = LabelMoves(source.published.history, manifest.layout).last_change(rows, order.back(given))
    for labels in PublishedLabels(manifest).batches(rows):
        here = slice(labels.rows.start - rows.start, labels.rows.stop - rows.start)
        # A row without a given class has a class in the history, too, which was never learned.
        changes = np.where(labels.last_epoch > 0, last_change[here], np.int32(NEVER))
        yield Learned(labels.under(order, given[here]), changes)


def _table(source: Source, known: pa.Table, learned: Learned) -> pa.Table:
    labels, last_change = learned
    rows, manifest = labels.rows, source.published.manifest
    logits, role, log_p = labels.logits.copy(), labels.role.copy(), labels.predicted_log_p.copy()
    kept = ~contains(source.excluded, hashes_of(known["sample_key"]))
    ok = pc.equal(known["status"], "ok").to_numpy()
    speaker = np.full(len(known), None, np.object_)
    speaker[ok] = GIVEN
    speaker[ok & (labels.last_epoch > 0) & ~labels.is_undecided] = LABELS
    speaker[ok & labels.is_unseen] = WATCHED
    if source.model is not None:
        unlabelled = pc.is_in(known["status"], pa.array(FOR_THE_MODEL)).to_numpy(zero_copy_only=False)
        wanted = np.flatnonzero(unlabelled & kept)
        if len(wanted):
            read, found = source.model(source.catalogue, known.take(wanted), logits.shape[1])
            logits[wanted[read]], speaker[wanted[read]] = source.order.logits(found), MODEL
            log_p[wanted[read]] = np.nan  # decided by these logits alone
    speaker[labels.pinned] = PERSON
    # Drop an older pin if the newest one is void: the sample has the class it was given.
    void = np.isin(np.array(rows), source.pins.void["row"].to_numpy()) & labels.pinned
    speaker[void], speaker[void & ok] = None, GIVEN
    role[void] = FREE
    # Apply the pins that were made after these labels were published.
    pins = source.pins.between(rows)
    here = pins.rows - rows.start
    require_same_samples(pins, key_bytes(known["sample_key"].take(pa.array(here))))
    logits[here] = scaled_one_hot(pins.classes, logits.shape[1], manifest.scale)
    speaker[here], role[here] = PERSON, PINNED
    labels = replace(labels, logits=logits, role=role, predicted_log_p=log_p)
    table = export_table(known, labels, speaker, last_change, source.words)
    return without(table.filter(pa.array(kept)), "excluded")


def predict(
    backbone: str, weights: str, images: Images, catalogue: Catalogue, rows: pa.Table, num_classes: int
) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Return the indices of the images that could be read, and their class logits."""
    # It imports torch, which takes seconds; an export without prediction need not wait for that.
    from pencil_scale.features.network import load_classifier, outputs_of

    network = load_classifier(backbone, num_classes, weights)
    readable, logits = [], [np.zeros((0, num_classes), np.float32)]
    for first in range(0, len(rows), PREDICT_BATCH):
        some = rows.slice(first, PREDICT_BATCH)
        found, problems = outputs_of(network, read_images(catalogue, some), images)
        read = [number for number in range(len(some)) if number not in problems]
        readable += [first + number for number in read]
        logits.append(found[read, 0])
    return readable, np.concatenate(logits)
