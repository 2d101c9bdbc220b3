"""Table files: the CSV or Parquet files of one table, found by name and streamed by batches.

paths = table_files("cifar10/train-*.parquet")            # in natural order: 2 before 10
for batch in stream_columns(url, paths[0], ["label"]): ...    # Arrow record batches
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from pipelines.shard_making.shard_samples import SourceError, open_root


def is_csv(path: str) -> bool:
    """Tell the two kinds apart by name; `table_files` has refused all others."""
    return path.lower().endswith(".csv")


def stream_columns(
    url: str, path: str, columns: Sequence[str | None], present: Sequence[str] = ()
) -> Iterator[Any]:
    """Stream some columns of one file of the table at `url`; `present` must be there too, unread."""
    filesystem, _ = open_root(url)
    names = list(dict.fromkeys(name for name in columns if name))
    batches = _csv_batches if is_csv(path) else _parquet_batches
    try:
        with filesystem.open(path) as file:
            yield from batches(file, path, names, present)
    except (pa.ArrowInvalid, UnicodeDecodeError, OSError) as error:
        kind, why = "CSV" if is_csv(path) else "Parquet", str(error).splitlines()[0]
        raise SourceError(f"{path}: not a readable {kind} table ({why})") from None


def _parquet_batches(file: Any, path: str, names: Sequence[str], present: Sequence[str]) -> Iterator[Any]:
    table = pq.ParquetFile(file)
    _refuse_missing(path, table.schema_arrow.names, [*names, *present])
    yield from table.iter_batches(65_536, columns=list(names))


def _csv_batches(file: Any, path: str, names: Sequence[str], present: Sequence[str]) -> Iterator[Any]:
    """Stream a CSV with every wanted column as text: what looks like a number may be a name."""
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    head = pyarrow.csv.open_csv(file, parse_options=parse).schema.names
    _refuse_missing(path, head, [*names, *present])
    file.seek(0)
    convert = pyarrow.csv.ConvertOptions(
        include_columns=list(names),
        column_types={name: pa.string() for name in names},
        strings_can_be_null=True,
        null_values=[""],
    )
    yield from pyarrow.csv.open_csv(file, parse_options=parse, convert_options=convert)


def _refuse_missing(path: str, found: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in found:
            raise SourceError(f"{path}: no column {name!r}; it has {', '.join(found[:30])}")


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
        raise SourceError(f"{url}: no such table; a .parquet or .csv file, a glob or a folder was expected")
    kinds = {name.rsplit(".", 1)[-1].lower() for name in found}
    if len(kinds) > 1 or not kinds <= {"parquet", "csv"}:
        raise SourceError(
            f"{url}: found files of the kinds {', '.join(sorted(kinds))}; all .parquet or all .csv expected"
        )
    return sorted(found, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def folder_of(url: str) -> str:
    """Name the folder of a table, also inside an archive: of `tar://a/b.csv::x.tar` it is `tar://a/::x.tar`."""
    first, chain, rest = url.partition("::")
    if not first.lower().endswith((".csv", ".parquet")) and not any(letter in first for letter in "*?["):
        return url
    return (re.sub(r"[^/]*$", "", first) or ".") + chain + rest
