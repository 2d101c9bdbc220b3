"""Extraction: which rows need features, in windows of rows in row order, and the parts they end up in.

A row keeps the features that it has if its image is the same, by the hash in the catalogue; so a job that was
killed resumes, and a catalogue that has grown needs features for its new rows only. Rows that were excluded
or have vanished become zeros, and files with their features are removed.

    extraction = Extraction(storage, manifest, catalogue, excluded, lease)
    for number, found in run_tasks(extract, extraction.windows(), shared=job):
        extraction.add(number, found)
    manifest = extraction.publish()
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import Keys, contains, hashes_of
from pencil_scale.catalogue.ranges import IMAGE_COLUMNS, read_images
from pencil_scale.catalogue.schema import FOR_THE_MODEL
from pencil_scale.config.settings import Images
from pencil_scale.features.manifest import (
    ABSENT,
    FOLDER,
    MANIFEST,
    READY,
    UNFINISHED,
    UNREADABLE,
    Columns,
    FeatureManifest,
    FeaturePart,
)
from pencil_scale.features.similar import remove_outdated
from pencil_scale.labels.columns import key_bytes
from pencil_scale.labels.manifest import file_name
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage

COLUMNS = ["row", "sample_key", "status", "content_key", *IMAGE_COLUMNS]
FEWEST_ROWS, MOST_ROWS = 32, 1024  # of a window: few, so that all processes end together
WINDOWS = 256  # of a job, if their size allows
SAVE_EVERY_S = 30.0
EXAMPLES = 3


@dataclass(frozen=True)
class Job:
    """What a task needs to know besides its window."""

    catalogue: Catalogue
    backbone: str
    weights: str | None
    sha256: str  # of the weights
    images: Images
    views: int
    seed: int
    num_threads: int = 1


class Extracted(NamedTuple):
    """The features of a window."""

    features: npt.NDArray[np.float16]  # [rows, views * dimension]
    problems: dict[int, str]  # by number in the window: the images that cannot be decoded


def extract(job: Job, window: pa.Table) -> Extracted:
    """Compute the features of some rows."""
    # It imports torch, which takes seconds; the command's --help need not wait for that.
    from pencil_scale.features.network import load_frozen, outputs_of

    network, sha256 = load_frozen(job.backbone, job.weights, job.images.crop, job.seed)
    if sha256 != job.sha256:
        raise PencilError(
            f"features.weights: {job.backbone} has other weights on this machine than where the job was "
            "started; give every machine the same weights, or features.weights as a URL"
        )
    images = read_images(job.catalogue, window)
    outputs, problems = outputs_of(network, images, job.images, job.views, job.num_threads)
    with np.errstate(over="ignore"):  # the part refuses what is infinite
        return Extracted(outputs.reshape(len(window), -1).astype(np.float16), problems)


@dataclass
class OpenPart:
    """A part that waits for some of its windows."""

    columns: Columns
    keys: npt.NDArray[np.uint8]  # hashes of the images that it should have features of, [rows, 16]
    num_waiting: int


class Extraction:
    """The parts of a feature table on their way from an older state to that of a catalogue."""

    def __init__(
        self,
        storage: Storage,
        manifest: FeatureManifest,
        catalogue: Catalogue,
        excluded: Keys,
        lease: Lease,
    ) -> None:
        """Find out which rows need features; `manifest` names no parts yet."""
        self.manifest, self._storage, self._lease = manifest, storage, lease
        self._catalogue, self._excluded = catalogue, excluded
        self._parts: dict[int, FeaturePart] = {}
        self._open: dict[int, OpenPart] = {}
        self._places: list[tuple[int, npt.NDArray[np.int64]]] = []  # of the windows: part, and rows in it
        self._saved_at = time.monotonic()
        self.problems: list[str] = []  # the first images that cannot be decoded
        found = [FeatureManifest.find(storage, manifest.key, file) for file in (UNFINISHED, MANIFEST)]
        self._before = [one for one in found if one is not None and one.catalogue == manifest.catalogue]
        self._wanted = {part: self._missing(part) for part in range(manifest.layout.num_parts)}
        self.num_rows = sum(map(np.count_nonzero, self._wanted.values()))

    def _missing(self, part: int) -> npt.NDArray[np.bool_]:
        """Which rows of a part need features; a part that is stored as it should be is taken over."""
        keys = content_keys(self._read(part), self._excluded)
        known = [manifest.parts[part] for manifest in self._before if part in manifest.parts]
        for stored in known:
            file = stored.file
            if stored.inputs == hash_of(keys) and self._storage.holds(
                file_name(FOLDER, file), file.num_bytes
            ):
                self._parts[part] = stored
                return np.zeros(len(keys), np.bool_)
        return np.asarray(keys.any(1) & (self._columns(part, keys)["state"] == ABSENT))

    def _read(self, part: int) -> pa.Table:
        rows = self.manifest.layout.rows_of(part)
        return self._catalogue.read(rows.start, rows.stop, COLUMNS)

    def _columns(self, part: int, keys: npt.NDArray[np.uint8]) -> Columns:
        """A part with the features that are known already."""
        columns = self.manifest.empty_part(part)
        for number, manifest in enumerate(self._before):
            if part not in manifest.parts:
                continue
            try:
                stored = manifest.part(self._storage, part)
            except DamagedError as error:
                print(f"WARNING: {error}: its features are computed again", flush=True)
                others = {other: kept for other, kept in manifest.parts.items() if other != part}
                self._before[number] = replace(manifest, parts=others)
                continue
            both = min(len(keys), len(stored["row"]))
            same = (stored["content_key"][:both] == keys[:both]).all(1) & keys[:both].any(1)
            same &= (stored["state"][:both] != ABSENT) & (columns["state"][:both] == ABSENT)
            for name in ("content_key", "state", "features"):
                columns[name][:both][same] = stored[name][:both][same]
        return columns

    @property
    def is_small(self) -> bool:
        """Whether there is only one window to compute."""
        return self.num_rows <= FEWEST_ROWS

    # -- windows ------------------------------------------------------------------------------------

    def windows(self) -> Iterator[tuple[pa.Table]]:
        """Give what has to be computed, in row order; parts are opened as they are needed."""
        size = min(max(self.num_rows // WINDOWS, FEWEST_ROWS), MOST_ROWS)
        for part, wanted in self._wanted.items():
            if part in self._parts:
                continue
            table = self._read(part)
            keys, rows = content_keys(table, self._excluded), np.flatnonzero(wanted)
            self._open[part] = OpenPart(self._columns(part, keys), keys, -(-len(rows) // size))
            self._finish(part)
            table = table.select(["row", *IMAGE_COLUMNS])
            for first in range(0, len(rows), size):
                chosen = rows[first : first + size]
                self._places.append((part, chosen))
                yield (table.take(pa.array(chosen)),)

    def add(self, number: int, found: Extracted) -> None:
        """Take the features of a window, given its number."""
        part, rows = self._places[number]
        one = self._open[part]
        state = np.full(len(rows), READY, np.uint8)
        state[list(found.problems)] = UNREADABLE
        one.columns["features"][rows], one.columns["state"][rows] = found.features, state
        one.columns["content_key"][rows] = one.keys[rows]
        for place, reason in list(found.problems.items())[: EXAMPLES - len(self.problems)]:
            row = int(one.columns["row"][rows[place]])
            name = self._catalogue.read(row, row + 1, ["sample_id"])["sample_id"][0].as_py()
            self.problems.append(f"row {row:,} ({name!r}): {reason}")
        one.num_waiting -= 1
        self._finish(part)
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()

    def _finish(self, part: int) -> None:
        """Write a part that waits for nothing."""
        if not self._open[part].num_waiting:
            one = self._open.pop(part)
            self._parts[part] = self.manifest.put_part(self._storage, one.columns, hash_of(one.keys))

    # -- files --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Store all features that were computed, so that a job that is killed loses only some seconds."""
        started = {
            part: self.manifest.put_part(self._storage, one.columns)
            for part, one in self._open.items()
            if (one.columns["state"] != ABSENT).any()
        }
        # What an earlier job computed of parts that this one has not reached yet.
        layout, kept = self.manifest.layout, dict[int, FeaturePart]()
        for manifest in self._before:
            same = [part for part in manifest.parts if layout.rows_of(part) == manifest.layout.rows_of(part)]
            kept = {part: manifest.parts[part] for part in same} | kept
        unfinished = replace(self.manifest, parts=kept | self._parts | started)
        self._lease.put(self._storage.features(unfinished.key, UNFINISHED), unfinished.encode())
        sweep(self._storage, unfinished.key, unfinished, *self._before)
        self._saved_at = time.monotonic()

    def publish(self) -> FeatureManifest:
        """Write the manifest, and remove files that it does not name."""
        found = self.result
        self._lease.put(self._storage.features(found.key, MANIFEST), found.encode())
        self._storage.delete(self._storage.features(found.key, UNFINISHED))
        sweep(self._storage, found.key, found)
        remove_outdated(self._storage, found)
        return found

    @property
    def result(self) -> FeatureManifest:
        """What is complete so far."""
        return replace(self.manifest, parts=self._parts)


def content_keys(table: pa.Table, excluded: Keys) -> npt.NDArray[np.uint8]:
    """The hash of the image of each row that should have features, [rows, 16]; zeros for all others."""
    usable = pc.is_in(table["status"], pa.array(["ok", *FOR_THE_MODEL])).to_numpy(zero_copy_only=False)
    usable = usable & ~contains(excluded, hashes_of(table["sample_key"]))
    keys = key_bytes(table["content_key"].fill_null(bytes(16))).copy()
    keys[~usable] = 0
    return keys


def sweep(storage: Storage, key: str, *kept: FeatureManifest) -> None:
    """Remove files that no manifest names: an earlier state of a part, perhaps with excluded rows."""
    named = {file_name(FOLDER, part.file) for manifest in kept for part in manifest.parts.values()}
    for name in storage.names(storage.features(key)):
        if name.endswith(".arrow") and name not in named:
            storage.delete(name)


def hash_of(keys: npt.NDArray[np.uint8]) -> str:
    """What a part is known by: which of its rows should have features, and of which images."""
    return hashlib.sha256(keys.tobytes()).hexdigest()[:32]
