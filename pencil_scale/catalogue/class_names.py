"""Class names: the class list of a dataset, and the class that each raw label means.

The list is a text file of names, one per line; the line number, from 0, is the class. A class number has no
meaning without its list, so everything that stores class numbers also stores the names, and every reader
compares them.

A raw label is looked up as written: first in the alias file, then among the class names, then as a number. A
label that matches nothing has status `unknown_class`; these labels are counted by their text, so that the
alias file can be written from the list, most frequent first.

Labels outside the shards are found by the hash of a sample's id or key. A key-to-label file of 100 million
lines takes 20 bytes per line, in two arrays that all tasks on a machine share.

    order = ClassOrder.between(labels.class_names, catalogue_names, "labels of run demo")
    order.logits(logits)                         # the same logits, in the order of the catalogue's list
    lookup = read_lookup("file:s3://crawl/noisy_label_kv.txt")
    lookup.find(sample_key("images/0/1"))        # raw label, None, or [raw, raw] if lines disagree
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset

from pencil_scale.catalogue.duplicates import Keys
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.catalogue.shards import IMAGE_SUFFIXES, split_name
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.urls import filesystem_of, open_url

SHOWN = 5


def read_lines(url: str, key: str, errors: str = "strict", advice: str = "") -> list[str]:
    """Read the lines of a text file that a key of the config names; `advice` is for one that is missing."""
    try:
        with open_url(url, "rt", encoding="utf-8-sig", errors=errors, newline="") as file:
            # Not `splitlines`: an id may contain characters that Unicode also counts as line ends.
            lines: list[str] = file.read().replace("\r\n", "\n").split("\n")
    except FileNotFoundError as error:
        where = "a relative path starts at the current folder"
        raise PencilError(f"{key}: {url} cannot be read: no such file ({where}){advice}") from error
    except (OSError, ImportError, ValueError) as error:
        raise PencilError(f"{key}: {url} cannot be read: {error}") from error
    return lines if lines[-1] else lines[:-1]


def read_class_names(url: str) -> tuple[str, ...]:
    """Read and check the list: at least two names, none blank, no duplicates."""
    advice = "; write one class name per line, or use the classes.txt that make_shards and init write"
    names = tuple(line.strip() for line in read_lines(url, "data.classes", advice=advice))
    first: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not name:
            raise PencilError(f"data.classes: {url}: line {number} is blank; every line names a class")
        if first.setdefault(name, number) != number:
            raise PencilError(f"data.classes: {url}: '{name}' is on lines {first[name]} and {number}")
    if len(names) < 2:
        raise PencilError(
            f"data.classes: {url} has {'one class' if names else 'no classes'}; expected at least 2"
        )
    return names


def difference(found: Sequence[str], expected: Sequence[str]) -> str:
    """Describe how one class list differs from another; empty if they are the same."""
    parts = []
    for what, names, others in (("lacks", expected, set(found)), ("has in addition", found, set(expected))):
        names = [name for name in names if name not in others]
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            parts.append(f"{what} {', '.join(map(repr, names[:SHOWN]))}{more}")
    if not parts and list(found) != list(expected):
        number = next(n for n, name in enumerate(found) if name != expected[n])
        here = f"class {number} is {found[number]!r}, not {expected[number]!r}"
        return f"has the same names in another order: {here}"
    return " and ".join(parts)


@dataclass(frozen=True)
class ClassOrder:
    """Translates class numbers between two lists of the same names in different order."""

    columns: npt.NDArray[np.int64]  # [C]: for each class of the wanted list, its number in the found list

    @classmethod
    def between(cls, found: Sequence[str], wanted: Sequence[str], what: str) -> "ClassOrder":
        """Map by name, or refuse with the difference between the two lists."""
        if set(found) != set(wanted) or len(found) != len(wanted):
            raise PencilError(
                f"{what}: its class list {difference(found, wanted)}, compared with the list it is used with "
                f"({len(found)} and {len(wanted)} classes); use the class list it was written with"
            )
        numbers = {name: number for number, name in enumerate(found)}
        return cls(np.array([numbers[name] for name in wanted], np.int64))

    def logits(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Reorder the columns of [B, C]."""
        is_same = np.array_equal(self.columns, np.arange(len(self.columns)))
        return logits if is_same else np.ascontiguousarray(logits[:, self.columns])

    def classes(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Translate class numbers from the found list into the wanted one; -1 stays."""
        return np.append(np.argsort(self.columns), -1)[numbers.astype(np.int64)]

    def back(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Translate class numbers from the wanted list into the found one; -1 stays."""
        return np.append(self.columns, -1)[numbers.astype(np.int64)]


# -- raw labels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelClasses:
    """The classes in order, and every text that means one of them."""

    names: tuple[str, ...]
    numbers: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.names)

    def classify(self, raw: Any) -> tuple[int | None, str | None]:
        """Find the class of a raw label, or None and the status that says why there is none.

        Several labels, in a list or on lines, must agree; a nested list is not a label.
        """
        if isinstance(raw, str):
            raw = raw.strip()
            if raw in self.numbers:
                return self.numbers[raw], None
            digits = raw.removeprefix("-")
            if digits.isascii() and digits.isdigit():
                raw = int(raw) if len(digits) < 20 else -1
            elif "\n" in raw:
                raw = [line for line in raw.splitlines() if line.strip()]
            else:
                return None, "unknown_class" if raw else "unlabelled"
        if isinstance(raw, list | tuple):
            nested = any(isinstance(one, list | tuple) for one in raw)
            found = {(None, "unknown_class")} if nested else {self.classify(one) for one in raw}
            return found.pop() if len(found) == 1 else (None, "several_labels" if raw else "unlabelled")
        if isinstance(raw, float) and raw.is_integer():
            raw = int(raw)
        if isinstance(raw, int) and not isinstance(raw, bool):
            return (raw, None) if 0 <= raw < len(self.names) else (None, "label_out_of_range")
        return None, "unlabelled" if raw is None else "unknown_class"


def read_label_classes(classes_url: str, aliases_url: str | None = None) -> LabelClasses:
    """Read the class list, and the alias file with `raw<TAB>class` on each line."""
    names = read_class_names(classes_url)
    classes = LabelClasses(names, {name: number for number, name in enumerate(names)})
    if aliases_url is None:
        return classes
    numbers = dict(classes.numbers)
    for line_number, line in enumerate(read_lines(aliases_url, "data.aliases"), start=1):
        raw, tab, wanted = line.rpartition("\t")
        number, _ = classes.classify(wanted)
        if tab and number is not None:
            numbers[raw.strip()] = number
        elif line.strip():
            expected = f"a raw string, a tab and one of the {len(names)} classes"
            found = f"line {line_number} is {line!r}"
            raise PencilError(f"data.aliases: {aliases_url} {found}; expected {expected}")
    return LabelClasses(names, numbers)


@dataclass(frozen=True)
class LabelLookup:
    """Sorted hashes, and for each the number of its raw label in `values`."""

    keys: Keys
    codes: npt.NDArray[np.int32]
    values: tuple[Any, ...]

    def find(self, key: bytes) -> Any:
        """Find the raw label of a hashed id: None if there is none, a list if there are several."""
        wanted = np.array(key, "S16")
        same = slice(np.searchsorted(self.keys, wanted), np.searchsorted(self.keys, wanted, "right"))
        found = [self.values[code] for code in dict.fromkeys(self.codes[same].tolist())]
        return found[0] if len(found) == 1 else found or None


def read_lookup(source: str) -> LabelLookup:
    """Read `file:URL` (lines `key label`) or `table:URL#id,label` (Parquet or CSV)."""
    kind, _, rest = source.partition(":")
    if kind == "file":
        pairs: Iterator[tuple[str, Any]] = _pairs_of_lines(rest)
    else:
        url, _, columns = rest.rpartition("#")
        id_column, _, label_column = columns.partition(",")
        pairs = _pairs_of_table(url, id_column, label_column)
    keys = bytearray()
    numbers: list[int] = []
    codes: dict[Any, int] = {}
    for name, label in pairs:
        keys += sample_key(name)
        numbers.append(codes.setdefault(label, len(codes)))
    hashes = np.frombuffer(bytes(keys), "S16")
    order = np.argsort(hashes, kind="stable")
    return LabelLookup(hashes[order], np.array(numbers, np.int32)[order], tuple(codes))


def lookup_key(name: str) -> str:
    """The form of a key that key-to-label files and shards share: no `./`, no image suffix."""
    name = name.removeprefix("./")
    split = split_name(name)
    return split[0] if split is not None and split[1] in IMAGE_SUFFIXES else name


def _pairs_of_lines(url: str) -> Iterator[tuple[str, str]]:
    try:
        with open_url(url, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                line = line.strip()
                name, gap, label = line.rpartition("\t") if "\t" in line else line.rpartition(" ")
                if gap:
                    yield lookup_key(name.strip()), label.strip()
                elif line:
                    raise PencilError(
                        f"data.label: {url} line {number} is {line!r}; expected a key and a label"
                    )
    except (OSError, ValueError) as error:
        raise PencilError(f"data.label: {url} cannot be read ({error})") from error


def _pairs_of_table(url: str, id_column: str, label_column: str) -> Iterator[tuple[str, Any]]:
    filesystem, path = filesystem_of(url)
    kind = "csv" if path.endswith((".csv", ".csv.gz")) else "parquet"
    # An id such as 000123 must not become the number 123.
    convert = pyarrow.csv.ConvertOptions(column_types={id_column: pa.string()})
    csv = pyarrow.dataset.CsvFileFormat(convert_options=convert)
    try:
        table = pyarrow.dataset.dataset(path, filesystem=filesystem, format=csv if kind == "csv" else kind)
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
        raise PencilError(f"{url}: cannot be read as {kind} ({error})") from error
