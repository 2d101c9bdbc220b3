"""Tables as a source: Parquet with image bytes or paths, CSV with paths.

The main process streams the labels in batches. The task that writes a shard reads its rows of a Parquet
table directly from their row groups. A CSV cannot be read from the middle, so the main process streams its
paths and sends them to the tasks. Files are read in natural order of their names: 2, then 10.

    source = TableSource("cifar10/train-*.parquet", TableColumns(image="image", label="label"))
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pencil_scale.storage.errors import PencilError, sample_key
from pipelines.shard_making.samples import (
    FilePiece,
    Item,
    Labels,
    Piece,
    RawSample,
    clean_key,
    fingerprint_of,
    label_array,
    number_classes,
    open_root,
    read_image,
)

BATCH_ROWS = 256  # rows with images that are in memory at a time while a shard is written


@dataclass(frozen=True)
class TableColumns:
    """The names of the columns to read; `true` and `key` may be absent."""

    image: str = "image"
    label: str = "label"
    true: str | None = None
    key: str | None = None


class Span(NamedTuple):
    """Rows [start, stop) of one Parquet file, whose row 0 is row `first` of the complete table."""

    path: str
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class ParquetPiece:
    """The rows of a Parquet table that go into one shard."""

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
                        raise PencilError(f"{span.path}: row {row:,} of the table has no image")
                    if image is None:
                        image = read_image(images, base, str(path))
                    yield RawSample(key, image, path or span.path.rsplit("/", 1)[-1], row)


def _image_or_path(value: Any) -> tuple[bytes | None, str | None]:
    """Read an image cell: bytes, a path, or the pair that Hugging Face datasets writes."""
    if isinstance(value, dict):
        return value.get("bytes"), value.get("path")
    return (None, value) if isinstance(value, str) else (value, None)


def row_key(row: int) -> str:
    """Name a sample by its row in the table, which is always unique."""
    return f"{row:09d}"


def _rows_of(table: Any, span: Span, wanted: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row of the complete table, record), reading only the row groups that the span touches."""
    sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    firsts = np.cumsum([0, *sizes]).tolist()
    groups = [n for n in range(len(sizes)) if firsts[n] < span.stop and firsts[n + 1] > span.start]
    row = firsts[groups[0]]
    for batch in table.iter_batches(BATCH_ROWS, row_groups=groups, columns=wanted):
        start, stop = max(span.start - row, 0), min(span.stop - row, batch.num_rows)
        if start < stop:
            yield from enumerate(batch.slice(start, stop - start).to_pylist(), span.first + row + start)
        row += batch.num_rows
        if row >= span.stop:
            return


@dataclass
class TableSource:
    """A CSV or Parquet table in one file or several; `given` replaces its labels, which become the truth."""

    url: str
    columns: TableColumns
    label_names: Sequence[str] | None = None
    image_root: str | None = None
    given: npt.NDArray[np.int64] | None = None
    _num_rows: list[int] = field(default_factory=list)

    def labels(self) -> Labels:
        names = [name for name in (self.columns.label, self.columns.true) if name]
        raw: dict[str, list[pa.Array]] = {name: [] for name in names}
        hashes = [np.zeros(0, np.uint64)]
        self._num_rows = [self._collect(path, raw, hashes) for path in self._paths]
        num_rows = sum(self._num_rows)
        if not num_rows:
            raise PencilError(f"{self.url}: the table has no rows")
        all_hashes = np.concatenate(hashes)
        self._refuse_repeats(all_hashes)
        batches = [raw[name] for name in names]
        if self.given is not None:
            if len(self.given) != num_rows:
                raise PencilError(
                    f"--given-labels has {len(self.given):,} labels and {self.url} {num_rows:,} rows; "
                    "one label per row, in the order of the rows, was expected"
                )
            batches = [[label_array(pa.array(self.given))], raw[self.columns.label]]
        classes, numbered = number_classes(batches, self.label_names or self._names_in_schema(), self.url)
        files = (path.rsplit("/", 1)[-1] for path in self._paths)
        digest = hashlib.blake2b(all_hashes.tobytes(), digest_size=16).hexdigest()
        fingerprint = fingerprint_of([*files, *map(str, self._num_rows), digest])
        return Labels(classes, numbered[0], numbered[1] if len(numbered) > 1 else None, fingerprint)

    def pieces(self, per_shard: int) -> Iterator[Piece]:
        root = self.image_root or folder_of(self.url)
        if is_csv(self._paths[0]):
            return self._csv_pieces(per_shard, root)
        return self._parquet_pieces(per_shard, root)

    @cached_property
    def _paths(self) -> list[str]:
        return table_files(self.url)

    def _collect(self, path: str, raw: Mapping[str, list[pa.Array]], hashes: list[Any]) -> int:
        """Take in the labels and the key hashes of one file; return its number of rows."""
        num_rows = 0
        for batch in stream_columns(self.url, path, [*raw, self.columns.key], [self.columns.image]):
            for name, found in raw.items():
                try:
                    found.append(label_array(batch.column(name), num_rows))
                except PencilError as error:
                    raise PencilError(f"{path}, column {name}: {error}") from None
            if self.columns.key:
                hashes.append(np.array([_hash_of(key) for key in self._keys(batch)], np.uint64))
            num_rows += batch.num_rows
        return num_rows

    def _keys(self, batch: Any) -> list[str]:
        return [clean_key(str(key)) for key in batch.column(self.columns.key).to_pylist()]

    def _refuse_repeats(self, hashes: npt.NDArray[np.uint64]) -> None:
        """Refuse keys that repeat. Eight bytes per key are held; keys with equal hashes are read again."""
        values, times = np.unique(hashes, return_counts=True)
        suspects = set(values[times > 1].tolist())
        seen: Counter[str] = Counter()
        for path in self._paths if suspects else ():
            for batch in stream_columns(self.url, path, [self.columns.key]):
                seen.update(key for key in self._keys(batch) if _hash_of(key) in suspects)
        for key, num in seen.most_common(1):
            if num > 1:
                raise PencilError(
                    f"{self.url}: duplicate key {key!r} in column {self.columns.key}, found {num} times"
                )

    def _names_in_schema(self) -> list[str] | None:
        """Class names in a Parquet schema: a list `class_names`, or what Hugging Face datasets writes."""
        if is_csv(self._paths[0]):
            return None
        filesystem, _ = open_root(self.url)
        with filesystem.open(self._paths[0]) as file:
            metadata = pq.read_schema(file).metadata or {}
        try:
            if b"class_names" in metadata:
                return [str(name) for name in json.loads(metadata[b"class_names"])]
            features = json.loads(metadata[b"huggingface"])["info"]["features"]
            return [str(name) for name in features[self.columns.label]["names"]]
        except (ValueError, KeyError, TypeError):
            return None

    def _parquet_pieces(self, per_shard: int, root: str) -> Iterator[Piece]:
        firsts = np.cumsum([0, *self._num_rows])
        for start in range(0, int(firsts[-1]), per_shard):
            spans = []
            for path, first, num in zip(self._paths, firsts.tolist(), self._num_rows, strict=False):
                low, high = max(start - first, 0), min(start + per_shard - first, num)
                if low < high:
                    spans.append(Span(path, first, low, high))
            yield ParquetPiece(self.url, spans, self.columns, root)

    def _csv_pieces(self, per_shard: int, root: str) -> Iterator[Piece]:
        items: list[Item] = []
        row = 0
        for path in self._paths:
            for batch in stream_columns(self.url, path, [self.columns.image, self.columns.key]):
                keys = self._keys(batch) if self.columns.key else None
                for place, image in enumerate(batch.column(self.columns.image).to_pylist()):
                    if image is None:
                        raise PencilError(f"{path}: row {row:,} of the table has no image")
                    items.append(Item(keys[place] if keys else row_key(row), image, row))
                    row += 1
                    if len(items) == per_shard:
                        yield FilePiece(root, items)
                        items = []
        if items:
            yield FilePiece(root, items)


def _hash_of(key: str) -> int:
    return int.from_bytes(sample_key(key)[:8], "little")


def table_files(url: str) -> list[str]:
    """List a table's files: one file, a glob, or all .parquet or .csv files of a folder."""
    filesystem, path = open_root(url)
    if any(letter in path for letter in "*?["):
        found = filesystem.glob(path)
    elif filesystem.isdir(path):
        found = filesystem.glob(f"{path}/*.parquet") or filesystem.glob(f"{path}/*.csv")
    else:
        found = [path] if filesystem.exists(path) else []
    if not found:
        raise PencilError(f"{url}: no such table; a .parquet or .csv file, a glob or a folder was expected")
    kinds = {name.rsplit(".", 1)[-1].lower() for name in found}
    if len(kinds) > 1 or not kinds <= {"parquet", "csv"}:
        raise PencilError(
            f"{url}: found {', '.join(sorted(kinds))} files; all .parquet or all .csv was expected"
        )
    return sorted(found, key=_natural)


def _natural(name: str) -> list[str]:
    return [part.zfill(20) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def folder_of(url: str) -> str:
    """Name the folder of a table, also in an archive: `tar://a/b.csv::x.tar` is in `tar://a/::x.tar`."""
    first, chain, rest = url.partition("::")
    if not first.lower().endswith((".csv", ".parquet")) and not any(letter in first for letter in "*?["):
        return url
    return (re.sub(r"[^/]*$", "", first) or ".") + chain + rest


def is_csv(path: str) -> bool:
    """Whether a file of `table_files` is a CSV; all others are Parquet."""
    return path.lower().endswith(".csv")


def stream_columns(
    url: str, path: str, columns: Sequence[str | None], present: Sequence[str] = ()
) -> Iterator[Any]:
    """Stream some columns of one file of the table at `url`; `present` must exist too, but is not read."""
    filesystem, _ = open_root(url)
    names = list(dict.fromkeys(name for name in columns if name))
    try:
        with filesystem.open(path) as file:
            if is_csv(path):
                _refuse_missing(path, _open_csv(file).schema.names, [*names, *present])
                file.seek(0)
                yield from _open_csv(file, names)
            else:
                table = pq.ParquetFile(file)
                _refuse_missing(path, table.schema_arrow.names, [*names, *present])
                yield from table.iter_batches(columns=names)
    except (pa.ArrowInvalid, UnicodeDecodeError, OSError) as error:
        kind, why = "CSV" if is_csv(path) else "Parquet", str(error).splitlines()[0]
        raise PencilError(f"{path}: not a readable {kind} table ({why})") from None


def _open_csv(file: Any, names: Sequence[str] = ()) -> Any:
    """Open a CSV. Every wanted column is text, because what looks like a number may be a name."""
    text = {name: pa.string() for name in names}
    return pyarrow.csv.open_csv(
        file,
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=names, column_types=text, strings_can_be_null=True, null_values=[""]
        ),
    )


def _refuse_missing(path: str, found: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in found:
            raise PencilError(f"{path}: no column {name!r}; found {', '.join(found[:30])}")
