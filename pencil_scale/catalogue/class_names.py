"""The class list of a dataset: a text file of names, one per line; its line number from 0 is the class.

A class number has no meaning without its list, so everything that stores class numbers also stores the names,
and every reader compares them.

    order = ClassOrder.between(labels.class_names, catalogue_names, "labels of run demo")
    order.logits(logits)         # the same logits, in the order of the catalogue's list
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt

from pencil_scale.storage.errors import PencilError

SHOWN = 5


def read_lines(url: str, key: str) -> list[str]:
    """Read the lines of a text file that a key of the config names."""
    try:
        with fsspec.open(url, "rt", encoding="utf-8-sig") as file:
            lines: list[str] = file.read().splitlines()
    except (OSError, ImportError, ValueError) as error:
        raise PencilError(f"{key}: {url} cannot be read: {error}") from error
    return lines


def read_class_names(url: str) -> tuple[str, ...]:
    """Read and check the list: at least two names, none blank, no duplicates."""
    names = tuple(line.strip() for line in read_lines(url, "data.classes"))
    blank = [number for number, name in enumerate(names, 1) if not name]
    if blank:
        raise PencilError(f"data.classes: {url}: line {blank[0]} is blank; every line names a class")
    first: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if first.setdefault(name, number) != number:
            raise PencilError(f"data.classes: {url}: '{name}' is on lines {first[name]} and {number}")
    if len(names) < 2:
        raise PencilError(f"data.classes: {url} has {len(names)} classes; expected at least 2")
    return names


def difference(found: Sequence[str], expected: Sequence[str]) -> str:
    """Describe how one class list differs from another; empty if they are the same."""
    in_found, in_expected = set(found), set(expected)
    parts = [
        _listed("lacks", [name for name in expected if name not in in_found]),
        _listed("has in addition", [name for name in found if name not in in_expected]),
    ]
    if not any(parts) and list(found) != list(expected):
        number = next(n for n, name in enumerate(found) if name != expected[n])
        here = f"class {number} is {found[number]!r}, not {expected[number]!r}"
        return f"has the same names in another order: {here}"
    return " and ".join(part for part in parts if part)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what} {', '.join(map(repr, names[:SHOWN]))}{more}"


@dataclass(frozen=True)
class ClassOrder:
    """Translates class numbers between two lists of the same names in different order."""

    columns: npt.NDArray[np.int64]  # [C]: for each class of the wanted list, its number in the found list
    numbers: npt.NDArray[np.int64]  # [C + 1]: the inverse; the last entry maps -1, no usable label, to -1

    @classmethod
    def between(cls, found: Sequence[str], wanted: Sequence[str], what: str) -> "ClassOrder":
        """Map by name, or refuse with the difference between the two lists."""
        if set(found) != set(wanted) or len(found) != len(wanted):
            raise PencilError(
                f"{what}: its class list {difference(found, wanted)}, compared with the list it is used with "
                f"({len(found)} and {len(wanted)} classes); use the class list it was written with"
            )
        places = {name: number for number, name in enumerate(found)}
        columns = np.array([places[name] for name in wanted], np.int64)
        return cls(columns, np.append(np.argsort(columns), -1))

    @property
    def is_same(self) -> bool:
        """Whether both lists have the same order."""
        return bool((self.columns == np.arange(len(self.columns))).all())

    def logits(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Reorder the columns of [B, C]."""
        return logits if self.is_same else np.ascontiguousarray(logits[:, self.columns])

    def classes(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Translate class numbers from the found list into the wanted one; -1 stays."""
        return self.numbers[numbers.astype(np.int64)]

    def back(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Translate class numbers from the wanted list into the found one; -1 stays."""
        return np.append(self.columns, -1)[numbers.astype(np.int64)]
