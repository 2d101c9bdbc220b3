"""Tables as a source: Parquet with image bytes or paths, CSV with paths.

Labels are streamed by batches on the driver. Rows of a Parquet table are read by whoever writes the
shard, straight from the row groups that hold them; a CSV has no such places to jump to, so the driver
streams its paths and hands them out. Several files of one table are read in natural order of name.

    source = TableSource("cifar10/train-*.parquet", TableColumns(image="image", label="label"))
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pencil_scale.storage.errors import sample_key
from pipelines.shard_making.raw_labels import RawLabels, names_in_metadata, number_classes
from pipelines.shard_making.shard_samples import (
    FilePiece,
    Item,
    Labels,
    Piece,
    RawSample,
    SourceError,
    clean_key,
    fingerprint_of,
    open_root,
    read_image,
)
from pipelines.shard_making.table_files import folder_of, is_csv, stream_columns, table_files

BATCH_ROWS = 256  # of images in memory at a time, while a shard is written


@dataclass(frozen=True)
class TableColumns:
    """The names of the columns a table is read by; `true` and `key` may be absent."""

    image: str = "image"
    label: str = "label"
    true: str | None = None
    key: str | None = None


class Span(NamedTuple):
    """Rows [start, stop) of one Parquet file, whose row 0 is row `first` of the whole table."""

    path: str
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class ParquetPiece:
    """One shard's rows of a Parquet table."""

    table: str
    spans: list[Span]
    columns: TableColumns
    image_root: str

    def samples(self) -> Iterator[RawSample]:
        filesystem, _ = open_root(self.table)
        images, base = open_root(self.image_root)
        wanted = [name for name in (self.columns.image, self.columns.key) if name]
        for span in self.spans:
            with filesystem.open(span.path) as file:
                for row, record in _rows_of(pq.ParquetFile(file), span, wanted):
                    key = clean_key(str(record[self.columns.key])) if self.columns.key else row_key(row)
                    image, path = _image_or_path(record[self.columns.image])
                    if image is None and path is None:
                        raise SourceError(f"{span.path}: row {row:,} of the table has no image")
                    if image is None:
                        image = read_image(images, base, str(path))
                    yield RawSample(key, image, path or span.path.rsplit("/", 1)[-1], row)


def _image_or_path(value: Any) -> tuple[bytes | None, str | None]:
    """Read an image cell: bytes, a path, or the pair that Hugging Face datasets writes."""
    if isinstance(value, dict):
        return value.get("bytes"), value.get("path")
    return (None, value) if isinstance(value, str) else (value, None)


def row_key(row: int) -> str:
    """Name a sample by its row in the table: unique whatever the table holds."""
    return f"{row:09d}"


def _rows_of(table: Any, span: Span, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row of the whole table, record), reading only the row groups that the span touches."""
    at, groups = 0, []
    for group in range(table.num_row_groups):
        num_rows = table.metadata.row_group(group).num_rows
        if at < span.stop and at + num_rows > span.start:
            groups.append((group, at))
        at += num_rows
    for group, row in groups:
        for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=list(wanted)):
            start, stop = max(span.start - row, 0), min(span.stop - row, batch.num_rows)
            if start < stop:
                for place, record in enumerate(batch.slice(start, stop - start).to_pylist()):
                    yield span.first + row + start + place, record
            row += batch.num_rows
            if row >= span.stop:
                break


@dataclass
class TableSource:
    """A CSV or Parquet table, one file or several; `given` replaces its labels, which become the truth."""

    url: str
    columns: TableColumns
    label_names: Sequence[str] | None = None
    image_root: str | None = None
    given: npt.NDArray[np.int64] | None = None
    _num_rows: list[int] = field(default_factory=list)

    def labels(self) -> Labels:
        names = self.columns
        raw = {name: RawLabels() for name in (names.label, names.true) if name}
        keys = _KeyHashes()
        self._num_rows = [self._collect(path, raw, keys) for path in self._paths]
        if not sum(self._num_rows):
            raise SourceError(f"{self.url}: the table has no rows")
        self._refuse_repeats(keys.repeated())
        columns = [raw[name] for name in (names.label, names.true) if name]
        if self.given is not None:
            columns = [self._given(), raw[names.label]]
        classes, numbered = number_classes(columns, self.label_names or self._names(), self.url)
        files = (path.rsplit("/", 1)[-1] for path in self._paths)
        fingerprint = fingerprint_of([*files, *map(str, self._num_rows), keys.digest()])
        return Labels(classes, numbered[0], numbered[1] if len(numbered) > 1 else None, fingerprint)

    def pieces(self, per_shard: int) -> Iterator[Piece]:
        return self._csv_pieces(per_shard) if self._is_csv else self._parquet_pieces(per_shard)

    def _collect(self, path: str, raw: Mapping[str, RawLabels], keys: "_KeyHashes") -> int:
        """Take in the labels and keys of one file; give its number of rows."""
        num_rows = 0
        for batch in stream_columns(self.url, path, [*raw, self.columns.key], [self.columns.image]):
            for name, column in raw.items():
                try:
                    column.add(batch.column(name))
                except SourceError as error:
                    raise SourceError(f"{path}, column {name}: {error}") from None
            if self.columns.key:
                keys.add(batch.column(self.columns.key).to_pylist())
            num_rows += batch.num_rows
        return num_rows

    @cached_property
    def _paths(self) -> list[str]:
        return table_files(self.url)

    @property
    def _is_csv(self) -> bool:
        return is_csv(self._paths[0])

    @property
    def _root(self) -> str:
        return self.image_root or folder_of(self.url)

    def _given(self) -> RawLabels:
        assert self.given is not None
        if len(self.given) != sum(self._num_rows):
            raise SourceError(
                f"--given-labels has {len(self.given):,} labels and {self.url} {sum(self._num_rows):,} rows; "
                "one label a row, in the order of the rows, was expected"
            )
        return RawLabels.of_numbers(self.given)

    def _names(self) -> list[str] | None:
        if self._is_csv:
            return None
        filesystem, _ = open_root(self.url)
        with filesystem.open(self._paths[0]) as file:
            return names_in_metadata(pq.read_schema(file).metadata, self.columns.label)

    def _parquet_pieces(self, per_shard: int) -> Iterator[Piece]:
        firsts = np.cumsum([0, *self._num_rows])
        for start in range(0, int(firsts[-1]), per_shard):
            spans = []
            for path, first, num in zip(self._paths, firsts.tolist(), self._num_rows, strict=False):
                low, high = max(start - first, 0), min(start + per_shard - first, num)
                if low < high:
                    spans.append(Span(path, first, low, high))
            yield ParquetPiece(self.url, spans, self.columns, self._root)

    def _csv_pieces(self, per_shard: int) -> Iterator[Piece]:
        items: list[Item] = []
        row = 0
        for path in self._paths:
            for batch in stream_columns(self.url, path, [self.columns.image, self.columns.key]):
                keys = batch.column(self.columns.key).to_pylist() if self.columns.key else None
                for place, image in enumerate(batch.column(self.columns.image).to_pylist()):
                    if image is None:
                        raise SourceError(f"{path}: row {row:,} of the table has no image")
                    items.append(Item(clean_key(keys[place]) if keys else row_key(row), image, row))
                    row += 1
                    if len(items) == per_shard:
                        yield FilePiece(self._root, items)
                        items = []
        if items:
            yield FilePiece(self._root, items)

    def _refuse_repeats(self, suspects: set[int]) -> None:
        """Look at the keys whose hashes met; a hash may meet by chance, a key may not repeat."""
        if not suspects or not self.columns.key:
            return
        seen: Counter[str] = Counter()
        for path in self._paths:
            for batch in stream_columns(self.url, path, [self.columns.key]):
                named = (clean_key(str(key)) for key in batch.column(self.columns.key).to_pylist())
                seen.update(key for key in named if _hash_of(key) in suspects)
        for key, times in seen.most_common(1):
            if times > 1:
                raise SourceError(
                    f"{self.url}: key {key!r} of column {self.columns.key} repeats {times} times"
                )


class _KeyHashes:
    """Eight bytes a key, so that a repeat is noticed without holding the keys."""

    def __init__(self) -> None:
        self._chunks = [np.zeros(0, np.uint64)]

    def add(self, keys: Sequence[object]) -> None:
        hashes = [_hash_of(clean_key(str(key))) for key in keys]
        self._chunks.append(np.array(hashes, np.uint64))

    def repeated(self) -> set[int]:
        values, times = np.unique(np.concatenate(self._chunks), return_counts=True)
        return set(values[times > 1].tolist())

    def digest(self) -> str:
        return hashlib.blake2b(np.concatenate(self._chunks).tobytes(), digest_size=16).hexdigest()


def _hash_of(key: str) -> int:
    return int.from_bytes(sample_key(key)[:8], "little")
