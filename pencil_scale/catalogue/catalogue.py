"""Catalogue: every sample of the shards, one row each; a row number is a sample's identity for life.

Rows are stored in immutable Parquet segments. When a row changes, its segment is written again under a new
name. The manifest is written last and names every file, so a reader sees one complete version, and older
versions stay readable.

    catalogue = Catalogue.open("s3://lake/clothing1m")
    catalogue.num_rows, catalogue.num_ok, catalogue.num_classes, catalogue.version
    chunks = catalogue.chunks()                     # ok rows and their bytes per 4,096 rows
    table = catalogue.read(0, 5000, ["row", "sample_id", "status"])
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.schema import CHUNK_ROWS, DAMAGE, ROW
from pencil_scale.config.command import command
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import ShardVersion, filesystem_of, store_errors, version_of

FORMAT = 4
OPEN_FILES = 16
PLAN_COLUMNS = ["row", "shard", "image_offset", "image_bytes", "noisy_class", "status"]


@dataclass
class Shard:
    """One tar: as it was listed, then with what was found when it was read by the rules of this name."""

    url: str
    num_bytes: int
    tag: str
    rules: str
    num_expected: int | None = None  # the number of samples its writer counted, if known
    state: str = "indexed"  # or vanished
    num_samples: int = 0
    num_with_id: int = 0
    num_lost: int = 0  # samples in the damage table
    lost_bytes: int = 0  # bytes with an unknown number of samples
    statuses: dict[str, int] = field(default_factory=Counter)
    damage: dict[str, int] = field(default_factory=Counter)  # by kind
    unknown_labels: dict[str, int] = field(default_factory=Counter)  # the most common ones
    oddities: dict[str, int] = field(default_factory=Counter)
    skipped: dict[str, int] = field(default_factory=Counter)  # members that belong to no sample, by kind
    suffixes: dict[str, int] = field(default_factory=Counter)  # the most common ones of its members
    json_fields: dict[str, str] = field(default_factory=dict)  # of a sample without a label, with values
    sizes: dict[str, int] = field(default_factory=Counter)  # of its images, as "640x480"; the most common

    @property
    def version(self) -> ShardVersion:
        return ShardVersion(self.num_bytes, self.tag)

    def verify(self) -> None:
        """Refuse a shard that changed since it was indexed: its offsets are no longer valid."""
        found = version_of(self.url)
        if found is None:
            raise PencilError(
                f"shard {self.url} is missing since it was indexed; restore it, or run index_shards again"
            )
        if found != self.version:
            then, now = self.tag, found.tag
            if found.num_bytes != self.num_bytes:
                then, now = f"{self.num_bytes:,} bytes", f"{found.num_bytes:,}"
            found_now = f"changed since it was indexed: {then} then, {now} now"
            raise PencilError(f"shard {self.url} {found_now}; run index_shards again")


@dataclass(frozen=True)
class Segment:
    """A Parquet file with rows first_row to stop - 1, in row groups of `CHUNK_ROWS`."""

    file: str
    first_row: int
    num_rows: int

    @property
    def stop(self) -> int:
        return self.first_row + self.num_rows


class Chunks(NamedTuple):
    """The number of ok rows in each 4,096 rows of the catalogue, and the bytes of their images."""

    num_ok: npt.NDArray[np.int32]
    ok_bytes: npt.NDArray[np.int64]


class Catalogue:
    """A published catalogue, opened for reading; files are opened when their rows are read."""

    def __init__(self, folder: str, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.version = int(manifest["version"])
        self.id = str(manifest["id"])  # the same for all versions; a rebuilt catalogue has a new one
        self.num_rows = int(manifest["num_rows"])
        self.num_ok = int(manifest["num_ok"])
        self.class_names: tuple[str, ...] = tuple(manifest["classes"])
        self.num_classes = len(self.class_names)
        self.shards = tuple(Shard(**entry) for entry in manifest["shards"])
        self.segments = tuple(Segment(**entry) for entry in manifest["segments"])
        self._filesystem, self._root = filesystem_of(folder)
        self._file = lru_cache(maxsize=OPEN_FILES)(self._open_file)

    def __reduce__(self) -> tuple[Any, ...]:
        return Catalogue, (self.folder, self.manifest)  # open files do not travel to other processes

    @classmethod
    def open(cls, storage: str, version: int | None = None, clean_set: str = "") -> "Catalogue":
        """Open the newest catalogue or an older version; `clean_set` is `validation` or `test`."""
        lake = Storage(storage)
        folder = lake.path(lake.catalogue(clean_set))
        manifest = read_manifest(folder, version)
        if manifest is None:
            which = "" if version is None else f" of version {version}"
            raise PencilError(
                f"{folder}: no catalogue{which}; run `{command('pipelines.index_shards')}` first"
            )
        return cls(folder, manifest)

    @property
    def digest(self) -> str:
        """A hash of the manifest, which differs for every version."""
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()[:32]

    # -- rows ---------------------------------------------------------------------------------------

    def read(self, first: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read rows [first, stop), in order."""
        schema = ROW if columns is None else pa.schema([ROW.field(name) for name in columns])
        tables = [schema.empty_table()]
        for segment in self.segments:
            low = max(first, segment.first_row) - segment.first_row
            high = min(stop, segment.stop) - segment.first_row
            if low < high:
                groups = range(low // CHUNK_ROWS, -(-high // CHUNK_ROWS))
                with self._file_errors(segment.file):
                    table = self._file(segment.file).read_row_groups([*groups], columns=schema.names)
                tables.append(table.slice(low - groups.start * CHUNK_ROWS, high - low))
        return pa.concat_tables(tables)

    def batches(self, columns: Sequence[str] | None = None, num_rows: int = 1 << 18) -> Iterator[pa.Table]:
        """Read all rows in order, `num_rows` at a time."""
        for first in range(0, self.num_rows, num_rows):
            yield self.read(first, min(first + num_rows, self.num_rows), columns)

    def ok_rows(self) -> npt.NDArray[np.int64]:
        """Read the numbers of all ok rows, in order."""
        tables = self.batches(["row", "status"])
        found = [table.filter(pc.equal(table["status"], "ok"))["row"].to_numpy() for table in tables]
        return np.concatenate([np.empty(0, np.int64), *found])

    def rewritten_rows(self, since: "Catalogue") -> list[range]:
        """The rows of an older version that may have changed since: all rows of rewritten segments."""
        known = {segment.file for segment in since.segments}
        newer = [segment for segment in self.segments if segment.file not in known]
        return [range(one.first_row, one.stop) for one in newer if one.first_row < since.num_rows]

    # -- the other tables ---------------------------------------------------------------------------

    def chunks(self) -> Chunks:
        """Read the size of every chunk: all that planning an epoch needs."""
        table = self._open_file(self.manifest["chunks"]).read()
        return Chunks(table["num_ok"].to_numpy(), table["ok_bytes"].to_numpy())

    def damage(self) -> pa.Table:
        """Read the damage table: what could not become a row, with its shard and bytes."""
        return pa.concat_tables([*self.small_tables("damage_tables"), DAMAGE.empty_table()])

    def aliases(self) -> pa.Table:
        """Read the duplicates: samples with the id of an earlier sample, under that sample's row."""
        return pa.concat_tables([*self.small_tables("alias_tables"), ROW.empty_table()])

    def small_tables(self, key: str) -> Iterator[pa.Table]:
        """Read the files of the damage or alias table one by one."""
        for name in self.manifest[key]:
            with self._file_errors(name):
                table = self._file(name).read()
            yield table

    def _open_file(self, name: str) -> pq.ParquetFile:
        with self._file_errors(name):
            return pq.ParquetFile(f"{self._root}/{name}", filesystem=self._filesystem)

    @contextmanager
    def _file_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise PencilError(
                f"{self.folder}/{name}: named by the manifest but unreadable ({reason}); restore it, or "
                "index into another run.storage"
            ) from error


def manifest_name(version: int | None = None) -> str:
    """The file name of a version's manifest, or of the newest one."""
    return "manifest.json" if version is None else f"manifests/{version:06d}.json"


def read_manifest(folder: str, version: int | None = None) -> dict[str, Any] | None:
    """Read the manifest of a version, or the newest one; None if there is none."""
    name = manifest_name(version)
    try:
        with store_errors(f"{folder}: the manifest cannot be read"):
            manifest: dict[str, Any] | None = Folder(folder).read_json(name)
    except DamagedError as error:
        raise PencilError(f"{error}, or index again") from error
    if manifest is not None and manifest.get("format") != FORMAT:
        raise PencilError(
            f"{folder}/{name}: format {manifest.get('format')!r}, but this program reads format {FORMAT}; "
            "index into another run.storage"
        )
    return manifest


def publish(store: Folder, manifest: dict[str, Any], old_version: int) -> None:
    """Write the manifest: first under its version number, permanently, then as the newest.

    A version number is created once, so of two jobs one publishes.
    """
    newest = read_manifest(store.url)
    found, version = int(newest["version"]) if newest else 0, int(manifest["version"])
    data = json.dumps(manifest, indent=1).encode()
    if found != old_version or not store.create(manifest_name(version), data):
        raise PencilError(
            f"{store.url}: another job published version {max(found, version)} while this one worked on "
            f"{old_version}; run this one again"
        )
    finish_publish(store)


def finish_publish(store: Folder) -> None:
    """Make the last version the newest, also if its job died right after creating its manifest."""
    while True:
        etag = store.etag(manifest_name())
        newest = read_manifest(store.url)
        following = store.read(manifest_name(int(newest["version"]) + 1 if newest else 1))
        if following is None:
            return
        store.replace(manifest_name(), following[0], etag)
