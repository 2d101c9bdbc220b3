"""Tables as a source: Parquet with image bytes or paths, CSV with paths.

The main process reads the labels. The task that writes a shard reads its rows of a Parquet table directly
from their row groups. A CSV cannot be read from the middle, so the main process reads its paths and sends
them to the tasks. Files are read in natural order of their names: 2, then 10.

    source = read_table("cifar10/train-*.parquet", Columns(), per_shard=1000)
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pencil_scale.storage.errors import PencilError
from pipelines.shard_making.samples import (
    Classes,
    Item,
    Piece,
    RawSample,
    Source,
    clean_key,
    file_pieces,
    fingerprint_of,
    number_classes,
    open_root,
    read_image,
    refuse_repeats,
)

BATCH_ROWS = 256  # rows with images that are in memory at a time while a shard is written


class Columns(NamedTuple):
    """The names of the columns to read; `true` and `key` may be absent."""

    image: str = "image"
    label: str = "label"
    true: str | None = None
    key: str | None = None


class Rows(NamedTuple):
    """Rows [start, stop) of a Parquet table, and its files that hold them, each with its first row."""

    table: str
    files: list[tuple[str, int]]
    start: int
    stop: int


def read_table(
    url: str,
    columns: Columns,
    label_names: Sequence[str] | None = None,
    image_root: str | None = None,
    given: Classes | None = None,
    *,
    per_shard: int,
) -> Source:
    """Read a CSV or Parquet table in one file or several; `given` replaces its labels, which become true."""
    paths = table_files(url)
    wanted = [columns.label, columns.true, columns.key, columns.image if is_csv(paths[0]) else None]
    tables = [_read_columns(url, path, wanted, columns.image) for path in paths]
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowTypeError as error:
        raise PencilError(f"{url}: its files have different types of columns ({error})") from error
    if not len(table):
        raise PencilError(f"{url}: the table has no rows")
    labels = {f"column {name}": table[name] for name in (columns.label, columns.true) if name}
    if given is not None:
        if len(given) != len(table):
            raise PencilError(
                f"--given-labels has {len(given):,} labels and {url} {len(table):,} rows; "
                "one label per row, in the order of the rows, was expected"
            )
        labels = {"--given-labels": pa.chunked_array([given]), **labels}
    classes, numbered = number_classes(labels, label_names or _names_in_schema(tables[0], columns.label), url)
    keys = [clean_key(str(key)) for key in table[columns.key].to_pylist()] if columns.key else []
    refuse_repeats(keys, range(len(keys)), f"{url}, row ")
    sizes = [(path, len(some)) for path, some in zip(paths, tables, strict=True)]
    files = [f"{path.rsplit('/', 1)[-1]} {num_rows}" for path, num_rows in sizes]
    fingerprint, root = fingerprint_of([*files, *keys]), image_root or folder_of(url)
    if is_csv(paths[0]):
        pieces = file_pieces(root, _items(url, table[columns.image].to_pylist(), keys), per_shard)
    else:
        pieces = _parquet_pieces(url, sizes, per_shard, columns, root)
    return Source(classes, numbered[0], pieces, fingerprint, numbered[1] if len(numbered) > 1 else None)


def _items(url: str, images: list[str | None], keys: list[str]) -> list[Item]:
    """The images that a CSV names, with their keys or, if it has none, their row numbers."""
    items = []
    for row, image in enumerate(images):
        if image is None:
            raise PencilError(f"{url}: row {row:,} of the table has no image")
        items.append(Item(keys[row] if keys else row_key(row), image, row))
    return items


def _parquet_pieces(
    url: str, sizes: list[tuple[str, int]], per_shard: int, columns: Columns, root: str
) -> list[Piece]:
    pieces: list[Piece] = []
    firsts = list(accumulate((num for _, num in sizes), initial=0))
    for start in range(0, firsts[-1], per_shard):
        stop = min(start + per_shard, firsts[-1])
        files = [
            (path, first)
            for (path, num), first in zip(sizes, firsts, strict=False)
            if first < stop and first + num > start
        ]
        pieces.append(partial(_read_rows, Rows(url, files, start, stop), columns, root))
    return pieces


def _read_rows(rows: Rows, columns: Columns, image_root: str) -> Iterator[RawSample]:
    """Read the samples of some rows of a Parquet table."""
    filesystem, _ = open_root(rows.table)
    images, base = open_root(image_root)
    wanted = [name for name in (columns.image, columns.key) if name]
    for path, first in rows.files:
        with filesystem.open(path) as file:
            for row, values in _values(pq.ParquetFile(file), first, rows, wanted):
                key = clean_key(str(values[columns.key])) if columns.key else row_key(row)
                image, image_path = _image_or_path(values[columns.image])
                if image is None and image_path is None:
                    raise PencilError(f"{path}: row {row:,} of the table has no image")
                if image is None:
                    image = read_image(images, base, str(image_path))
                yield RawSample(key, image, image_path or path.rsplit("/", 1)[-1], row)


def _values(table: Any, row: int, rows: Rows, wanted: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows of a file that starts with `row`, reading only the row groups that are needed."""
    for group in range(table.num_row_groups):
        num_rows = table.metadata.row_group(group).num_rows
        if row < rows.stop and row + num_rows > rows.start:
            first = row
            for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=wanted):
                low, high = max(rows.start - first, 0), min(rows.stop - first, batch.num_rows)
                if low < high:
                    yield from enumerate(batch.slice(low, high - low).to_pylist(), first + low)
                first += batch.num_rows
                if first >= rows.stop:
                    return
        row += num_rows


def _image_or_path(value: Any) -> tuple[bytes | None, str | None]:
    """Read an image cell: bytes, a path, or the pair that Hugging Face datasets writes."""
    if isinstance(value, dict):
        return value.get("bytes"), value.get("path")
    return (None, value) if isinstance(value, str) else (value, None)


def row_key(row: int) -> str:
    """Name a sample by its row in the table, which is always unique."""
    return f"{row:09d}"


def _names_in_schema(table: pa.Table, label: str) -> list[str] | None:
    """Class names in a Parquet schema: a list `class_names`, or what Hugging Face datasets writes."""
    metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
    try:
        if b"class_names" in metadata:
            return [str(name) for name in json.loads(metadata[b"class_names"])]
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[label]["names"]]
    except (ValueError, KeyError, TypeError):
        return None


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
    return sorted(found, key=lambda name: re.sub(r"\d+", lambda digits: digits[0].zfill(20), name))


def folder_of(url: str) -> str:
    """Name the folder of a table, also in an archive: `tar://a/b.csv::x.tar` is in `tar://a/::x.tar`."""
    first, chain, rest = url.partition("::")
    if not first.lower().endswith((".csv", ".parquet")) and not any(letter in first for letter in "*?["):
        return url
    return (re.sub(r"[^/]*$", "", first) or ".") + chain + rest


def is_csv(path: str) -> bool:
    """Whether a file of `table_files` is a CSV; all others are Parquet."""
    return path.lower().endswith(".csv")


def _read_columns(url: str, path: str, columns: Sequence[str | None], image: str) -> pa.Table:
    """Read some columns of one file of a table; the column of images must exist too."""
    filesystem, _ = open_root(url)
    names = list(dict.fromkeys(name for name in columns if name))
    try:
        with filesystem.open(path) as file:
            table = None if is_csv(path) else pq.ParquetFile(file)
            found = table.schema_arrow.names if table else _open_csv(file).schema.names
            for name in [*names, image]:
                if name not in found:
                    raise PencilError(f"{path}: no column {name!r}; found {', '.join(found[:30])}")
            if table:
                return table.read(columns=names)
            file.seek(0)
            return _open_csv(file, names).read_all()
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
