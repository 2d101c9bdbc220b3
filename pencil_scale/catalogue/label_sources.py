"""Label sources: from what a member, file or table says about a sample to its class.

A raw label is looked up as written: first in the alias file, then among the class names, then as a number. A
label that matches nothing has status `unknown_class`; these labels are counted by their text, so that the
alias file can be written from the list, most frequent first.

Labels outside the shards are found by the hash of a sample's id or key. A key-to-label file of 100 million
lines takes 20 bytes per line, in three arrays that all tasks on a machine share.

    lookup = read_lookup("file:s3://crawl/noisy_label_kv.txt")
    lookup.find(sample_key("images/0/1"))        # raw label, None, or [raw, raw] if lines disagree
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset

from pencil_scale.catalogue.class_names import read_class_names, read_lines
from pencil_scale.catalogue.schema import from_json, from_stored
from pencil_scale.catalogue.shards import IMAGE_SUFFIXES, split_name
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.urls import filesystem_of


@dataclass(frozen=True)
class LabelClasses:
    """The classes in order, and every text that means one of them."""

    names: tuple[str, ...]
    numbers: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.names)

    def classify(self, raw: Any) -> tuple[int | None, str | None]:
        """Find the class of a raw label, or None and the status that says why there is none."""
        if isinstance(raw, str):
            return self._of_text(raw.strip())
        if isinstance(raw, list | tuple):
            return self._of_many(raw)
        if isinstance(raw, float) and raw.is_integer():
            raw = int(raw)
        if isinstance(raw, int) and not isinstance(raw, bool):
            return self._of_number(raw)
        return None, "unlabelled" if raw is None else "unknown_class"

    def _of_text(self, text: str) -> tuple[int | None, str | None]:
        number = self.numbers.get(text)
        if number is not None:
            return number, None
        if not text:
            return None, "unlabelled"
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit():
            return self._of_number(int(text) if len(digits) < 20 else -1)
        if "\n" in text:
            return self._of_many([line for line in text.splitlines() if line.strip()])
        return None, "unknown_class"

    def _of_number(self, number: int) -> tuple[int | None, str | None]:
        return (number, None) if 0 <= number < len(self.names) else (None, "label_out_of_range")

    def _of_many(self, raws: Sequence[Any]) -> tuple[int | None, str | None]:
        """Find the class that several labels agree on; a nested list is not a label."""
        if not raws:
            return None, "unlabelled"
        nested = any(isinstance(raw, list | tuple) for raw in raws)
        found = {(None, "unknown_class")} if nested else {self.classify(raw) for raw in raws}
        return found.pop() if len(found) == 1 else (None, "several_labels")


def read_label_classes(classes_url: str, aliases_url: str | None = None) -> LabelClasses:
    """Read the class list, and the alias file with `raw<TAB>class` on each line."""
    names = read_class_names(classes_url)
    classes = LabelClasses(names, {name: number for number, name in enumerate(names)})
    if aliases_url is None:
        return classes
    aliases = {}
    for place, line in enumerate(read_lines(aliases_url, "data.aliases"), start=1):
        raw, tab, wanted = line.rpartition("\t")
        number, _ = classes.classify(wanted)
        if tab and number is not None:
            aliases[raw.strip()] = number
        elif line.strip():
            raise PencilError(
                f"data.aliases: {aliases_url} line {place} is {line!r}; expected a raw string, a tab and one "
                f"of the {len(classes)} classes"
            )
    return LabelClasses(names, {**classes.numbers, **aliases})


def raw_text(raw: Any) -> str:
    """The text of a raw label for the list of those that match no class, short enough for a table."""
    text = raw if isinstance(raw, str) else repr(raw)
    try:
        text.encode("utf-8", "surrogateescape")  # bytes that are not UTF-8 are kept as they are
    except UnicodeEncodeError:
        text = from_json(text)
    return text[:80]


@dataclass(frozen=True)
class LabelLookup:
    """Sorted 128-bit hashes in two halves, and for each the number of its raw label in `values`."""

    high: np.ndarray[Any, np.dtype[np.uint64]]
    low: np.ndarray[Any, np.dtype[np.uint64]]
    codes: np.ndarray[Any, np.dtype[np.int32]]
    values: tuple[Any, ...]

    def find(self, key: bytes) -> Any:
        """Find the raw label of a hashed id: None if there is none, a list if there are several."""
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
    """The form of a key that key-to-label files and shards share: no `./`, no image suffix."""
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
                    raise PencilError(
                        f"data.label: {url} line {place} is {line!r}; expected a key and a label"
                    )
    except (OSError, ValueError) as error:
        raise PencilError(f"data.label: {url} cannot be read ({error})") from error


def _pairs_of_table(url: str, id_column: str, label_column: str) -> Iterator[tuple[str, Any]]:
    filesystem, path = filesystem_of(url)
    form = "csv" if path.endswith((".csv", ".csv.gz")) else "parquet"
    # An id such as 000123 must not become the number 123.
    convert = pyarrow.csv.ConvertOptions(column_types={id_column: pa.string()})
    csv = pyarrow.dataset.CsvFileFormat(convert_options=convert)
    try:
        table = pyarrow.dataset.dataset(path, filesystem=filesystem, format=csv if form == "csv" else form)
        absent = [name for name in (id_column, label_column) if name not in table.schema.names]
        if absent:
            raise PencilError(f"{url}: no column {absent[0]!r}; it has {', '.join(table.schema.names)}")
        for batch in table.to_batches(columns=[id_column, label_column]):
            names, labels = batch.column(0).to_pylist(), batch.column(1).to_pylist()
            for name, label in zip(names, labels, strict=True):
                # An id may be written as it is, or as our own tables escape it.
                for spelled in {} if name is None else {str(name), from_stored(str(name))}:
                    yield spelled, tuple(label) if isinstance(label, list) else label
    except (OSError, pa.ArrowInvalid) as error:
        raise PencilError(f"{url}: cannot be read as {form} ({error})") from error
