"""Export rows: all that is known of some rows of the catalogue, brought together for an export.

For each row somebody is asked, in this order: a person who pinned it; the learned labels, if a run visited
it; the network, for a sample without a usable label, held out, or newer than the labels; else the shard.

    for table in ExportRows(source).tables(range(0, 65_536)):       # pa.Table a label part, in rows' order
        ...
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import ClassOrder, difference
from pencil_scale.catalogue.duplicates import Keys, contains
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.catalogue.update import hashes_of
from pencil_scale.config.settings import Images
from pencil_scale.export.files import ExportError
from pencil_scale.export.table import GIVEN, LABELS, MODEL, PERSON, Facts, Words, export_table, without
from pencil_scale.labels.history import NEVER, LabelMoves
from pencil_scale.labels.pins import Pinned, key_bytes, read_pins, require_same_samples
from pencil_scale.labels.published import Published, PublishedLabels, find_published, require_same_rows
from pencil_scale.labels.working_copy import scaled_one_hot
from pencil_scale.method.decisions import UNLABELLED

COLUMNS = ["row", "sample_id", "sample_key", "shard", "key", "noisy_class", "status"]
PLACES = ["image_offset", "image_bytes"]
STRETCH_ROWS = 1 << 17

# Samples with an image but no label to learn from, and those kept for evaluation.
FOR_THE_MODEL = (
    "unlabelled",
    "several_labels",
    "unknown_class",
    "held_out",
    "label_not_a_number",
    "label_out_of_range",
    "label_unreadable",
)


@dataclass(frozen=True)
class Model:
    """The network to ask."""

    backbone: str
    weights: str
    images: Images


@dataclass(frozen=True)
class Source:
    """Where the facts of an export come from."""

    catalogue: Catalogue
    published: Published
    order: ClassOrder  # from the class numbers of the labels to those of the catalogue
    pins: Pinned
    excluded: Keys  # also those that the catalogue does not know as excluded yet
    words: Words
    model: Model | None


def find_source(
    storage: str,
    labels: str,
    exclude: str | None,
    top_k: int,
    model: Model | None,
    moved: Mapping[str, str | None] | None = None,
    held: bool = False,
) -> Source:
    """Bring together published labels, the newest catalogue of their classes, and what people decided.

    With `held`, the labels may be those of a run that is held.
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
    """Open the newest catalogue whose classes are those of the labels, in whatever order."""
    newest = catalogue = Catalogue.open(storage)
    wanted = set(published.manifest.class_names)
    while set(catalogue.class_names) != wanted and catalogue.version > 1:
        catalogue = Catalogue.open(storage, catalogue.version - 1)
    if set(catalogue.class_names) != wanted:
        differs = difference(published.manifest.class_names, newest.class_names)
        raise ExportError(
            f"{published.url}: its class list {differs}, "
            f"compared with catalogue version {newest.version}, and no version of the catalogue has its "
            "classes; choose labels of this class list, or run a night with nightly.remap"
        )
    if catalogue is not newest:
        print(
            f"labels {published.name}: the class list has changed since (the newest catalogue's "
            f"{difference(newest.class_names, catalogue.class_names)}); using catalogue version "
            f"{catalogue.version}, the newest with their classes",
            flush=True,
        )
    return catalogue


def stretches(source: Source) -> list[range]:
    """Cut all rows into stretches of whole label parts; what the catalogue gained since has its own."""
    layout, num_rows = source.published.manifest.layout, source.catalogue.num_rows
    labelled = min(layout.num_rows, num_rows)
    step = max(1, STRETCH_ROWS // layout.part_rows) * layout.part_rows
    cuts = [range(first, min(first + step, labelled)) for first in range(0, labelled, step)]
    newer = range(labelled, num_rows, STRETCH_ROWS)
    return cuts + [range(first, min(first + STRETCH_ROWS, num_rows)) for first in newer]


class Learned(NamedTuple):
    """What the label table has for some rows."""

    logits: npt.NDArray[np.float32]
    pinned: npt.NDArray[np.bool_]
    visited: npt.NDArray[np.bool_]
    last_change: npt.NDArray[np.int32]


class ExportRows:
    """Reads rows for an export, a label part at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._manifest = source.published.manifest
        self._labels = PublishedLabels(self._manifest)
        self._moves = LabelMoves(source.published.history, self._manifest.layout)

    def tables(self, rows: range) -> Iterator[pa.Table]:
        """Read the rows of a stretch; excluded ids are left out."""
        known = self._source.catalogue.read(rows.start, rows.stop, COLUMNS + PLACES)
        if rows.start >= self._manifest.layout.num_rows:
            yield self._table(known, rows, None)
            return
        given = known["noisy_class"].fill_null(UNLABELLED).to_numpy().astype(np.int64)
        visited = self._labels.last_epoch(rows) > 0
        # A row without a given class has a class in the history, too, which was never learned.
        last_change = self._moves.last_change(rows, self._source.order.back(given))
        last_change = np.where(visited, last_change, np.int32(NEVER))
        for labels in self._labels.batches(rows):
            here = slice(labels.rows.start - rows.start, labels.rows.stop - rows.start)
            logits = self._source.order.logits(labels.logits).copy()
            learned = Learned(logits, labels.pinned, visited[here], last_change[here])
            yield self._table(known[here], labels.rows, learned)

    def _table(self, known: pa.Table, rows: range, learned: Learned | None) -> pa.Table:
        facts = self._facts(known, rows, learned)
        kept = ~contains(self._source.excluded, hashes_of(known["sample_key"]))
        table = export_table(facts, self._source.words).filter(pa.array(kept))
        return without(table, ("excluded",))

    def _facts(self, known: pa.Table, rows: range, learned: Learned | None) -> Facts:
        num_rows, num_classes = len(known), self._manifest.layout.num_classes
        pinned, visited = np.zeros((2, num_rows), np.bool_)
        logits, last_change = (
            np.zeros((num_rows, num_classes), np.float32),
            np.full(num_rows, NEVER, np.int32),
        )
        if learned is not None:
            logits, pinned, visited, last_change = learned
        ok = pc.equal(known["status"], "ok").to_numpy()
        speaker = np.full(num_rows, None, np.object_)
        speaker[ok] = GIVEN
        speaker[ok & visited] = LABELS
        self._ask_model(known, speaker, logits, newer=learned is None)
        speaker[pinned] = PERSON
        self._unpin(rows, speaker, pinned, ok)
        self._pin(known, rows, speaker, logits, pinned)
        return Facts(known.select(COLUMNS), logits, speaker, pinned, last_change)

    def _ask_model(self, known: pa.Table, speaker: npt.NDArray[np.object_], logits: Any, newer: bool) -> None:
        model = self._source.model
        statuses = [*FOR_THE_MODEL, *(["ok"] if newer else [])]
        wanted = np.flatnonzero(pc.is_in(known["status"], pa.array(statuses)).to_numpy(zero_copy_only=False))
        wanted = wanted[~contains(self._source.excluded, hashes_of(known["sample_key"]))[wanted]]
        if model is None or len(wanted) == 0:
            return
        from pencil_scale.export.prediction import Predictor

        predictor = Predictor.load(model.backbone, logits.shape[1], model.weights, model.images)
        found, readable = predictor.predict(self._source.catalogue, known.take(pa.array(wanted)))
        logits[wanted[readable]] = self._source.order.logits(found[readable])
        speaker[wanted[readable]] = MODEL

    def _unpin(
        self, rows: range, speaker: npt.NDArray[np.object_], pinned: Any, ok: npt.NDArray[np.bool_]
    ) -> None:
        """Leave out an older pin where the newest one is void: such a sample has the class it was given."""
        void = self._source.pins.void["row"].to_numpy() - rows.start
        void = void[(void >= 0) & (void < len(rows))]
        void = void[pinned[void]]
        speaker[void] = None
        speaker[void[ok[void]]] = GIVEN
        pinned[void] = False

    def _pin(
        self, known: pa.Table, rows: range, speaker: npt.NDArray[np.object_], logits: Any, pinned: Any
    ) -> None:
        """Lay over what people decided since these labels were published."""
        pins = self._source.pins.between(rows)
        here = pins.rows - rows.start
        require_same_samples(pins, key_bytes(known["sample_key"].take(pa.array(here))))
        logits[here] = scaled_one_hot(pins.classes, logits.shape[1], self._manifest.scale)
        speaker[here], pinned[here] = PERSON, True
