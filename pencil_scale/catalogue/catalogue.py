"""Catalogue entries: what a manifest says of each shard and of each segment.

Catalogue: every sample the shards hold, one row each; a row number is a sample's identity for life.

Parquet segments hold new rows, or newer words on old rows; the newest word on a row wins. The manifest is
written last and names every file, so a reader sees a whole catalogue or the one before it.

    catalogue = Catalogue.open("s3://lake/clothing1m")
    catalogue.num_rows, catalogue.num_ok, catalogue.num_classes, catalogue.version
    chunks = catalogue.chunks()                     # ok rows and their bytes in every 4,096 rows
    rows = catalogue.ok_rows(range(10))             # row, shard, image_offset, image_bytes, noisy_class
    table = catalogue.read(0, 5000, ["row", "sample_id", "status"])
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pencil_scale.catalogue.schema import CHUNK_ROWS, DAMAGE, ROW
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import ShardVersion, filesystem_of, store_errors, version_of


@dataclass(frozen=True)
class ShardEntry:
    """A shard the catalogue knows: `state` is `indexed` or `vanished`."""

    url: str
    num_bytes: int
    tag: str
    state: str
    num_samples: int
    rules: str
    oddities: dict[str, int]
    skipped: dict[str, int]
    unknown_labels: dict[str, int]
    suffixes: dict[str, int] = field(default_factory=dict)  # the commonest of its members

    @property
    def version(self) -> ShardVersion:
        return ShardVersion(self.num_bytes, self.tag)


@dataclass(frozen=True)
class Segment:
    """One Parquet file: all rows first_row..last_row (`rows`), or newer words on some (`changes`)."""

    file: str
    kind: str
    first_row: int
    last_row: int
    num_rows: int


FORMAT = 2
OPEN_FILES = 16
PLAN_COLUMNS = ["row", "shard", "image_offset", "image_bytes", "noisy_class", "status"]


@dataclass(frozen=True)
class OkRows:
    """What reading and training need of some ok rows, as arrays in row order: 22 bytes a row.

    Offsets are any bytes: in a shard that lost some, members no longer begin at whole blocks of 512.
    """

    row: np.ndarray[Any, np.dtype[np.uint32]]
    shard: np.ndarray[Any, np.dtype[np.int32]]
    image_offset: np.ndarray[Any, np.dtype[np.int64]]
    image_bytes: np.ndarray[Any, np.dtype[np.uint32]]
    noisy_class: np.ndarray[Any, np.dtype[np.uint16]]  # wider where there are more than 65,536 classes

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class Chunks:
    """For each 4,096 rows of the catalogue: how many are ok, and how many bytes their images have."""

    num_ok: np.ndarray[Any, np.dtype[np.int32]]
    ok_bytes: np.ndarray[Any, np.dtype[np.int64]]


class Catalogue:
    """A published catalogue, opened for reading; files are opened when their rows are asked for."""

    def __init__(self, folder: str, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.version = int(manifest["version"])
        self.id = str(manifest["id"])  # of all its versions; a catalogue made again has another
        self.num_rows = int(manifest["num_rows"])
        self.num_ok = int(manifest["num_ok"])
        self.class_names: tuple[str, ...] = tuple(manifest["classes"])
        self.num_classes = len(self.class_names)
        self.shards = tuple(ShardEntry(**entry) for entry in manifest["shards"])
        segments = [Segment(**entry) for entry in manifest["segments"]]
        self._rows = [segment for segment in segments if segment.kind == "rows"]
        self._changes = [segment for segment in segments if segment.kind == "changes"]
        self._chunks: Chunks | None = None
        self._filesystem, self._root = filesystem_of(folder)
        self._file = lru_cache(maxsize=OPEN_FILES)(self._open_file)

    def __reduce__(self) -> tuple[Any, ...]:
        return Catalogue, (self.folder, self.manifest)  # files are opened anew where it arrives

    @classmethod
    def open(cls, storage: str, version: int | None = None, part: str = "") -> "Catalogue":
        """Open the newest catalogue of a storage, or an older version; `part` is `validation` or `test`."""
        folder = catalogue_folder(storage, part)
        manifest = read_manifest(folder, version)
        if manifest is None:
            named = "" if version is None else f" of version {version}"
            raise PencilError(f"{folder}: no catalogue{named}; run pipelines.index_shards first")
        return cls(folder, manifest)

    # -- rows ---------------------------------------------------------------------------------------

    def read(self, first: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read rows [first, stop) as they stand now, in order."""
        names = list(columns) if columns is not None else list(ROW.names)
        wanted = names if "row" in names else ["row", *names]
        parts = [self._read_segment(segment, first, stop, wanted) for segment in self._rows]
        table = pa.concat_tables([part for part in parts if part is not None] or [_empty(wanted)])
        return self._with_changes(table, first, stop, wanted).select(names)

    def batches(self, columns: Sequence[str] | None = None, num_rows: int = 1 << 18) -> Iterator[pa.Table]:
        """Read all rows in order, some at a time."""
        for first in range(0, self.num_rows, num_rows):
            yield self.read(first, min(first + num_rows, self.num_rows), columns)

    def ok_rows(self, chunks: Sequence[int] | None = None) -> OkRows:
        """Read what an epoch needs of the ok rows, of some chunks or all."""
        spans = self._spans(chunks)
        total = self.num_ok if chunks is None else int(self.chunks().num_ok[list(chunks)].sum())
        arrays = OkRows(
            np.empty(total, np.uint32),
            np.empty(total, np.int32),
            np.empty(total, np.int64),
            np.empty(total, np.uint32),
            np.empty(total, np.min_scalar_type(max(self.num_classes, 256))),
        )
        done = 0
        for first, stop in spans:
            table = self.read(first, stop, PLAN_COLUMNS)
            table = table.filter(pa.compute.equal(table["status"], "ok"))
            here = slice(done, done + len(table))
            arrays.row[here] = _fitting(table["row"].to_numpy())
            arrays.shard[here] = table["shard"].to_numpy()
            arrays.image_offset[here] = table["image_offset"].to_numpy()
            arrays.image_bytes[here] = _fitting(table["image_bytes"].to_numpy())
            arrays.noisy_class[here] = table["noisy_class"].to_numpy()
            done += len(table)
        if done != total:
            raise PencilError(
                f"{self.folder}: {done:,} ok rows, but the manifest counts {total:,}; index again"
            )
        return arrays

    def changed_rows(self, since: "Catalogue") -> np.ndarray[Any, np.dtype[np.int64]]:
        """Say which rows of an older version have newer words in this one, rising."""
        known = {segment.file for segment in since._changes}
        newer = [segment.file for segment in self._changes if segment.file not in known]
        found = [self._groups(name, list(range(self._file(name).num_row_groups)), ["row"]) for name in newer]
        rows = np.unique(pa.concat_tables([_empty(["row"]), *found])["row"].to_numpy())
        return rows[rows < since.num_rows]

    def _spans(self, chunks: Sequence[int] | None) -> list[tuple[int, int]]:
        """Join neighbouring chunks to spans that are read at once."""
        step = CHUNK_ROWS * 64
        if chunks is None:
            return [(first, min(first + step, self.num_rows)) for first in range(0, self.num_rows, step)]
        return [(chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, self.num_rows)) for chunk in chunks]

    # -- the other tables ---------------------------------------------------------------------------

    def chunks(self) -> Chunks:
        """Read how much there is to train on in every chunk: all that planning an epoch needs."""
        if self._chunks is None:
            table = self._open_file(self.manifest["chunks"]).read()
            self._chunks = Chunks(table["num_ok"].to_numpy(), table["ok_bytes"].to_numpy())
        return self._chunks

    def damage(self) -> pa.Table:
        """Read the damage table: what could not become a row, with its shard and bytes."""
        return pa.concat_tables([*self.small_tables("damage_tables"), DAMAGE.empty_table()])

    def verify_shard(self, number: int) -> None:
        """Refuse a shard whose bytes are no longer those that were indexed: its offsets mean nothing now."""
        entry = self.shards[number]
        found = version_of(entry.url)
        if found != entry.version:
            what = "is gone" if found is None else f"has {found.num_bytes:,} bytes, {found.tag}"
            raise PencilError(
                f"shard {entry.url}: {what}; {entry.num_bytes:,} bytes, {entry.tag} were indexed: run "
                "pipelines.index_shards again"
            )

    def aliases(self) -> pa.Table:
        """Read the duplicates: records whose id another sample had first, under that sample's row."""
        return pa.concat_tables([*self.small_tables("alias_tables"), ROW.empty_table()])

    def small_tables(self, key: str) -> Iterator[pa.Table]:
        """Read the files of the damage or alias table one after the other."""
        for name in self.manifest[key]:
            with self._file_errors(name):
                table = self._file(name).read()
            yield table

    # -- segments -----------------------------------------------------------------------------------

    def _open_file(self, name: str) -> pq.ParquetFile:
        with self._file_errors(name):
            return pq.ParquetFile(f"{self._root}/{name}", filesystem=self._filesystem)

    def _groups(self, name: str, groups: list[int], columns: list[str]) -> pa.Table:
        with self._file_errors(name):
            return self._file(name).read_row_groups(groups, columns=columns)

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

    def _read_segment(self, segment: Segment, first: int, stop: int, columns: list[str]) -> pa.Table | None:
        low, high = max(first, segment.first_row), min(stop, segment.last_row + 1)
        if low >= high:
            return None
        begin = (low - segment.first_row) // CHUNK_ROWS
        end = (high - segment.first_row - 1) // CHUNK_ROWS + 1
        table = self._groups(segment.file, list(range(begin, end)), columns)
        return table.slice(low - segment.first_row - begin * CHUNK_ROWS, high - low)

    def _with_changes(self, table: pa.Table, first: int, stop: int, columns: list[str]) -> pa.Table:
        for segment in self._changes:
            if segment.last_row < first or segment.first_row >= stop:
                continue
            file = self._file(segment.file)
            groups = [group for group in range(file.num_row_groups) if _overlaps(file, group, first, stop)]
            newer = self._groups(segment.file, groups, columns)
            rows = newer["row"].to_numpy()
            inside = np.flatnonzero((rows >= first) & (rows < stop))
            source = np.arange(len(table))
            source[rows[inside] - first] = len(table) + inside
            table = pa.concat_tables([table, newer]).take(pa.array(source))
        return table


def catalogue_folder(storage: str, part: str = "") -> str:
    """Say where a storage keeps its catalogue, or that of its validation or test shards."""
    return "/".join([storage.rstrip("/"), "catalogue", *([part] if part else [])])


def manifest_name(version: int | None = None) -> str:
    """Where a catalogue keeps the manifest of a version, or the newest one."""
    return "manifest.json" if version is None else f"manifests/{version:06d}.json"


def read_manifest(folder: str, version: int | None = None) -> dict[str, Any] | None:
    """Read the newest manifest of a catalogue, or a certain version's; None when there is none."""
    filesystem, root = filesystem_of(folder)
    name = manifest_name(version)
    filesystem.invalidate_cache()
    try:
        with store_errors(f"{folder}: no manifest can be read"):
            data = filesystem.cat_file(f"{root}/{name}")
    except FileNotFoundError:
        return None
    try:
        manifest: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise PencilError(f"{folder}/{name}: no whole manifest ({error}); index again") from error
    if manifest.get("format") != FORMAT:
        raise PencilError(
            f"{folder}/{name}: format {manifest.get('format')!r}; this program reads format {FORMAT}"
        )
    return manifest


def _fitting(numbers: Any) -> Any:
    """Refuse what 32 bits cannot hold, instead of letting it wrap around to another sample's bytes."""
    if len(numbers) and numbers.max() >= 1 << 32:
        raise PencilError(f"{numbers.max():,}: images over 4 GB, or over 4 billion rows, are not supported")
    return numbers


def _overlaps(file: pq.ParquetFile, group: int, first: int, stop: int) -> bool:
    statistics = file.metadata.row_group(group).column(0).statistics
    return bool(statistics.max >= first and statistics.min < stop)


def _empty(columns: list[str]) -> pa.Table:
    return pa.schema([ROW.field(name) for name in columns]).empty_table()
