"""Raw labels: the words or numbers a source uses for its classes, turned into class numbers.

Words are kept once and counted by code, so a column of a hundred million labels costs eight bytes each.

    collected = RawLabels.empty()
    collected.add(batch.column("label"), first_row=0)
    classes, (given,) = number_classes([collected], label_names=None, where="photos.csv")
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.shard_making.shard_samples import Classes, SourceError


@dataclass
class RawLabels:
    """One label column: class numbers, or codes into `words`."""

    words: dict[str, int] = field(default_factory=dict)
    _chunks: list[Classes] = field(default_factory=list)
    _num_rows: int = 0

    @classmethod
    def of_words(cls, words: Sequence[str]) -> "RawLabels":
        """Take labels that are already in memory as words."""
        labels = cls()
        labels.add(pa.array(words, pa.string()))
        return labels

    @classmethod
    def of_numbers(cls, numbers: Any) -> "RawLabels":
        """Take class numbers that are already in memory."""
        labels = cls()
        labels.add(pa.array(numbers))
        return labels

    def add(self, column: Any) -> None:
        """Take in the next batch of an Arrow column of words or whole numbers."""
        if column.null_count:
            row = self._num_rows + int(pc.index(pc.is_null(column), True).as_py())
            raise SourceError(f"row {row:,} has no label; fill it in or drop the row")
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
            self._chunks.append(column.cast(pa.int64()).to_numpy(zero_copy_only=False))
        elif pa.types.is_floating(column.type):
            self._chunks.append(_whole(column, self._num_rows))
        elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            self._add_words(column)
        else:
            raise SourceError(
                f"labels of type {column.type} were found; words or whole numbers were expected"
            )
        self._num_rows += len(column)

    def numbers(self) -> Classes:
        """All codes or class numbers, in order."""
        return np.concatenate(self._chunks) if self._chunks else np.zeros(0, np.int64)

    def as_numbers(self) -> "RawLabels":
        """Read words such as "7" as class numbers, where every word is one; a text file has no other way."""
        if not self.words or not all(word.isdecimal() for word in self.words):
            return self
        values = np.array([int(word) for word in self.words], np.int64)
        return RawLabels(_chunks=[values[self.numbers()]], _num_rows=self._num_rows)

    def _add_words(self, column: Any) -> None:
        encoded = column.dictionary_encode()
        codes = [self.words.setdefault(word, len(self.words)) for word in encoded.dictionary.to_pylist()]
        self._chunks.append(np.array(codes, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)])


def number_classes(
    columns: Sequence[RawLabels], label_names: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], list[Classes]]:
    """Agree on one list of classes for all label columns of a source, and number each column by it.

    Without names from the user the classes are the words found, in alphabetical order, or the numbers
    up to the largest. A label outside the names is an error, never a new class.
    """
    known = set(label_names or ())
    columns = [column if known & set(column.words) else column.as_numbers() for column in columns]
    classes = tuple(label_names) if label_names else _classes_found(columns)
    if len(set(classes)) != len(classes):
        raise SourceError(f"{where}: a class is named twice among {', '.join(classes[:20])}")
    places = {name: number for number, name in enumerate(classes)}
    return classes, [_numbered(column, places, where) for column in columns]


def read_names(given: str) -> list[str]:
    """Read class names from a file (one a line, or a JSON list), or from a comma-separated list."""
    path = Path(given)
    if not path.is_file():
        if "," not in given:
            raise SourceError(f"--label-names {given}: no such file, and no list such as cat,dog either")
        return [name.strip() for name in given.split(",")]
    text = path.read_text("utf-8")
    if text.lstrip().startswith("["):
        return [str(name) for name in json.loads(text)]
    return [line.strip() for line in text.splitlines() if line.strip()]


def names_in_metadata(metadata: Mapping[bytes, bytes] | None, label_column: str) -> list[str] | None:
    """Find class names in a Parquet schema: a list `class_names`, or what Hugging Face datasets writes."""
    try:
        if metadata and b"class_names" in metadata:
            return [str(name) for name in json.loads(metadata[b"class_names"])]
        if metadata and b"huggingface" in metadata:
            feature = json.loads(metadata[b"huggingface"])["info"]["features"][label_column]
            return [str(name) for name in feature["names"]]
    except (ValueError, KeyError, TypeError):
        return None
    return None


def _classes_found(columns: Iterable[RawLabels]) -> tuple[str, ...]:
    words = {word for column in columns for word in column.words}
    if words:
        return tuple(sorted(words))
    largest = max((int(column.numbers().max(initial=-1)) for column in columns), default=-1)
    return tuple(str(number) for number in range(largest + 1))


def _numbered(column: RawLabels, places: Mapping[str, int], where: str) -> Classes:
    numbers = column.numbers()
    if column.words:
        unknown = [word for word in column.words if word not in places]
        if unknown:
            raise SourceError(
                f"{where}: unknown class {_some(unknown)}; the classes are {_some(list(places))}"
            )
        return np.array([places[word] for word in column.words], np.int64)[numbers]
    bad = np.flatnonzero((numbers < 0) | (numbers >= len(places)))
    if bad.size:
        raise SourceError(
            f"{where}: row {bad[0]:,} has the unknown class {numbers[bad[0]]}; "
            f"classes 0 to {len(places) - 1} were expected ({_some(list(places))})"
        )
    return numbers


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:12])
    return shown if len(names) <= 12 else f"{shown} and {len(names) - 12:,} more"


def _whole(column: Any, first_row: int) -> Classes:
    values = column.to_numpy(zero_copy_only=False)
    bad = np.flatnonzero(values != np.floor(values))
    if bad.size:
        raise SourceError(
            f"row {first_row + bad[0]:,} has the label {values[bad[0]]}; a whole number was expected"
        )
    whole: Classes = values.astype(np.int64)
    return whole
