"""Label lookup: labels that stand outside the shards, found by the hash of a sample's id or key.

A key-to-label file of 100 million lines takes 20 bytes a line here, in three arrays that every task of
a machine shares, instead of a dictionary in each.

    lookup = read_lookup("file:s3://crawl/noisy_label_kv.txt")
    lookup.find(sample_key("images/0/1"))        # raw label, None, or [raw, raw] where lines disagree
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset

from pencil_scale.indexing.label_classes import LabelError
from pencil_scale.indexing.raw_text import from_stored
from pencil_scale.reading.byte_source import filesystem_of
from pencil_scale.schema import sample_key
from pencil_scale.shards import IMAGE_SUFFIXES, split_name


@dataclass(frozen=True)
class LabelLookup:
    """Sorted 128-bit hashes in two halves, and for each the number of its raw label in `values`."""

    high: np.ndarray[Any, np.dtype[np.uint64]]
    low: np.ndarray[Any, np.dtype[np.uint64]]
    codes: np.ndarray[Any, np.dtype[np.int32]]
    values: tuple[Any, ...]

    def find(self, key: bytes) -> Any:
        """Give the raw label of a hashed id: None when there is none, a list when there are several."""
        high, low = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
        place = int(np.searchsorted(self.high, np.uint64(high)))
        found: dict[int, Any] = {}
        while place < len(self.high) and int(self.high[place]) == high:
            if int(self.low[place]) == low:
                code = int(self.codes[place])
                found[code] = self.values[code]
            place += 1
        return next(iter(found.values())) if len(found) == 1 else list(found.values()) or None


def read_lookup(source: str) -> LabelLookup:
    """Read `file:URL` (lines `key label`) or `table:URL#id,label` (Parquet or CSV)."""
    kind, _, rest = source.partition(":")
    if kind == "file":
        return build_lookup(_pairs_of_lines(rest))
    url, _, columns = rest.rpartition("#")
    id_column, _, label_column = columns.partition(",")
    return build_lookup(_pairs_of_table(url, id_column, label_column))


def build_lookup(pairs: Iterable[tuple[str, Any]]) -> LabelLookup:
    """Hash the ids, number the labels, and sort."""
    keys = bytearray()
    numbers: list[int] = []
    codes: dict[Any, int] = {}
    for name, label in pairs:
        keys += sample_key(name)
        numbers.append(codes.setdefault(label, len(codes)))
    halves = np.frombuffer(bytes(keys), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    chosen = np.asarray(numbers, dtype=np.int32)[order]
    return LabelLookup(halves[order, 0], halves[order, 1], chosen, tuple(codes))


def lookup_key(name: str) -> str:
    """Spell a key as a key-to-label file and a shard both know it: no `./`, no image suffix."""
    name = name.removeprefix("./")
    split = split_name(name)
    return split[0] if split is not None and split[1] in IMAGE_SUFFIXES else name


def _pairs_of_lines(url: str) -> Iterator[tuple[str, str]]:
    try:
        with fsspec.open(url, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
            for place, line in enumerate(file, start=1):
                line = line.strip()
                name, gap, label = line.rpartition("\t") if "\t" in line else line.rpartition(" ")
                if gap:
                    yield lookup_key(name.strip()), label.strip()
                elif line:
                    raise LabelError(
                        f"data.label: {url} line {place} is {line!r}; a key and a label was expected"
                    )
    except (OSError, ValueError) as error:
        raise LabelError(f"data.label: {url} cannot be read ({error})") from error


def _pairs_of_table(url: str, id_column: str, label_column: str) -> Iterator[tuple[str, Any]]:
    filesystem, path = filesystem_of(url)
    form = "csv" if path.endswith((".csv", ".csv.gz")) else "parquet"
    options = {"format": _csv_of_text(id_column)} if form == "csv" else {"format": "parquet"}
    try:
        table = pyarrow.dataset.dataset(path, filesystem=filesystem, **options)
        absent = [name for name in (id_column, label_column) if name not in table.schema.names]
        if absent:
            raise LabelError(f"{url}: no column {absent[0]!r}; it has {', '.join(table.schema.names)}")
        for batch in table.to_batches(columns=[id_column, label_column]):
            names, labels = batch.column(0).to_pylist(), batch.column(1).to_pylist()
            for name, label in zip(names, labels, strict=True):
                # An id may stand there as it is, or as our own tables spell it.
                for spelled in {} if name is None else {str(name), from_stored(str(name))}:
                    yield spelled, tuple(label) if isinstance(label, list) else label
    except (OSError, pa.ArrowInvalid) as error:
        raise LabelError(f"{url}: cannot be read as {form} ({error})") from error


def _csv_of_text(id_column: str) -> Any:
    """An id such as 000123 must not become the number 123."""
    convert = pyarrow.csv.ConvertOptions(column_types={id_column: pa.string()})
    return pyarrow.dataset.CsvFileFormat(convert_options=convert)
