"""Export rows: everything that is known about some rows of the catalogue, for an export.

The label of a row comes from the first of these that has one: a person who pinned it; the learned labels, if
a run trained on the row; the network, for a sample that has no usable label, is held out, or is newer than
the labels; the shard.

    for table in ExportRows(source).tables(range(0, 65_536)):       # one per label part, in row order
        ...
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import ClassOrder, difference
from pencil_scale.catalogue.duplicates import Keys, contains, hashes_of
from pencil_scale.catalogue.ranges import RangeReader
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.config.settings import Images
from pencil_scale.export.table import GIVEN, LABELS, MODEL, PERSON, Words, export_table, without
from pencil_scale.labels.columns import key_bytes, scaled_one_hot
from pencil_scale.labels.pins import Pinned, read_pins, require_same_samples
from pencil_scale.labels.published import Published, PublishedLabels, find_published, require_same_rows
from pencil_scale.labels.report import NEVER, LabelMoves
from pencil_scale.method.decisions import UNLABELLED
from pencil_scale.storage.errors import PencilError

COLUMNS = ["row", "sample_id", "sample_key", "shard", "key", "noisy_class", "status"]
PLACES = ["image_offset", "image_bytes"]
STRETCH_ROWS = 1 << 17
PREDICT_BATCH = 64

# Samples with an image but without a label to learn from, and those kept for evaluation.
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
    """The network that predicts, and how it sees images."""

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
    excluded: Keys  # including those that the catalogue does not mark as excluded yet
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
    newest = catalogue = Catalogue.open(storage)
    wanted = set(published.manifest.class_names)
    while set(catalogue.class_names) != wanted and catalogue.version > 1:
        catalogue = Catalogue.open(storage, catalogue.version - 1)
    if set(catalogue.class_names) != wanted:
        differs = difference(published.manifest.class_names, newest.class_names)
        raise PencilError(
            f"{published.url}: its class list {differs}, compared with catalogue version {newest.version}, "
            "and no version of the catalogue has its classes; choose labels of this class list, or run a "
            "night with nightly.remap"
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
    """Cut all rows into stretches of complete label parts, and those newer than the labels likewise."""
    layout, num_rows = source.published.manifest.layout, source.catalogue.num_rows
    labelled = min(layout.num_rows, num_rows)
    step = max(1, STRETCH_ROWS // layout.part_rows) * layout.part_rows
    cuts = [range(first, min(first + step, labelled)) for first in range(0, labelled, step)]
    newer = range(labelled, num_rows, STRETCH_ROWS)
    return cuts + [range(first, min(first + STRETCH_ROWS, num_rows)) for first in newer]


class ExportRows:
    """Reads rows for an export, one label part at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._manifest = source.published.manifest
        self._labels = PublishedLabels(self._manifest)
        self._moves = LabelMoves(source.published.history, self._manifest.layout)

    def tables(self, rows: range) -> Iterator[pa.Table]:
        """Read the rows of a stretch; excluded ids are left out."""
        known = self._source.catalogue.read(rows.start, rows.stop, COLUMNS + PLACES)
        layout = self._manifest.layout
        if rows.start >= layout.num_rows:
            logits = np.zeros((len(rows), layout.num_classes), np.float32)
            pinned, visited = np.zeros((2, len(rows)), np.bool_)
            yield self._table(known, rows, logits, pinned, visited, np.full(len(rows), NEVER, np.int32))
            return
        given = known["noisy_class"].fill_null(UNLABELLED).to_numpy().astype(np.int64)
        visited = self._labels.last_epoch(rows) > 0
        # A row without a given class has a class in the history, too, which was never learned.
        last_change = self._moves.last_change(rows, self._source.order.back(given))
        last_change = np.where(visited, last_change, np.int32(NEVER))
        for labels in self._labels.batches(rows):
            here = slice(labels.rows.start - rows.start, labels.rows.stop - rows.start)
            logits = self._source.order.logits(labels.logits).copy()
            learned = logits, labels.pinned, visited[here], last_change[here]
            yield self._table(known[here], labels.rows, *learned)

    def _table(
        self,
        known: pa.Table,
        rows: range,
        logits: npt.NDArray[np.float32],
        pinned: npt.NDArray[np.bool_],
        visited: npt.NDArray[np.bool_],
        last_change: npt.NDArray[np.int32],
    ) -> pa.Table:
        source, is_newer = self._source, rows.start >= self._manifest.layout.num_rows
        kept = ~contains(source.excluded, hashes_of(known["sample_key"]))
        ok = pc.equal(known["status"], "ok").to_numpy()
        speaker = np.full(len(known), None, np.object_)
        speaker[ok] = GIVEN
        speaker[ok & visited] = LABELS
        statuses = pa.array([*FOR_THE_MODEL, *(["ok"] if is_newer else [])])
        is_wanted = pc.is_in(known["status"], statuses).to_numpy(zero_copy_only=False) & kept
        wanted = np.flatnonzero(is_wanted)
        if source.model is not None and len(wanted):
            places = known.take(pa.array(wanted))
            found, is_readable = predict(source.model, source.catalogue, places, logits.shape[1])
            logits[wanted[is_readable]] = source.order.logits(found[is_readable])
            speaker[wanted[is_readable]] = MODEL
        speaker[pinned] = PERSON
        # Drop an older pin if the newest one is void: the sample has the class it was given.
        void = source.pins.void["row"].to_numpy() - rows.start
        void = void[(void >= 0) & (void < len(rows))]
        void = void[pinned[void]]
        speaker[void] = None
        speaker[void[ok[void]]] = GIVEN
        pinned[void] = False
        # Apply the pins that were made after these labels were published.
        pins = source.pins.between(rows)
        here = pins.rows - rows.start
        require_same_samples(pins, key_bytes(known["sample_key"].take(pa.array(here))))
        logits[here] = scaled_one_hot(pins.classes, logits.shape[1], self._manifest.scale)
        speaker[here], pinned[here] = PERSON, True
        table = export_table(known, logits, speaker, pinned, last_change, source.words)
        return without(table.filter(pa.array(kept)), ("excluded",))


# --- prediction --------------------------------------------------------------------------------------


def read_images(catalogue: Catalogue, places: pa.Table) -> list[bytes]:
    """Read the bytes of images, given their `shard`, `image_offset` and `image_bytes`."""
    columns = [places[name].to_numpy() for name in ("shard", *PLACES)]
    return RangeReader(catalogue.shards).read(*columns)


def predict(
    model: Model, catalogue: Catalogue, places: pa.Table, num_classes: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return class logits, and which images could be read; the logits of the others are zeros."""
    import torch  # takes seconds to import, which an export without prediction need not wait for

    from pencil_scale.images.augment import ImageSizeError, Recipe, centre
    from pencil_scale.images.decode import UndecodableError, decode

    recipe = Recipe.from_config(model.images)
    network, device = _network(model.backbone, num_classes, model.weights)
    logits = np.zeros((len(places), num_classes), np.float32)
    is_readable = np.zeros(len(places), np.bool_)
    for first in range(0, len(places), PREDICT_BATCH):
        data = read_images(catalogue, places.slice(first, PREDICT_BATCH))
        readable = {}
        for place, one in enumerate(data, first):
            with suppress(UndecodableError, ImageSizeError):
                pixels = torch.from_numpy(decode(one, model.images.resize).copy())
                readable[place] = centre(pixels.permute(2, 0, 1)[None], recipe)[0]
        if readable:
            with torch.no_grad():
                found = network(torch.stack(list(readable.values())).to(device)).float().cpu().numpy()
            logits[list(readable)], is_readable[list(readable)] = found, True
    return logits, is_readable


@lru_cache(maxsize=1)  # once in every process
def _network(backbone: str, num_classes: int, weights: str) -> tuple[Any, Any]:
    import torch

    from pencil_scale.method.backbones import build_backbone

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return build_backbone(backbone, num_classes, weights).to(device).eval(), device
