"""Label classes: from what a label source says to a class number, or to the reason there is none.

A raw label is looked up as written: first in the alias file, then among the class names, then as a
number. What matches nothing is `unknown_class` and is counted by its text, so that the alias file can
be written from the list, most frequent first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec

from pencil_scale.class_names import read_class_names
from pencil_scale.indexing.raw_text import from_json
from pencil_scale.schema import PencilError


class LabelError(PencilError):
    """An alias file or label table that cannot be used."""


@dataclass(frozen=True)
class LabelClasses:
    """The classes in order, and every text that stands for one of them."""

    names: tuple[str, ...]
    numbers: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.names)

    def classify(self, raw: Any) -> tuple[int | None, str | None]:
        """Give the class of one raw label, or None and the status that says why there is none."""
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
        """Give the class that all of several labels agree on; a list inside a list is no label."""
        if not raws:
            return None, "unlabelled"
        nested = any(isinstance(raw, list | tuple) for raw in raws)
        found = {(None, "unknown_class")} if nested else {self.classify(raw) for raw in raws}
        return found.pop() if len(found) == 1 else (None, "several_labels")


def read_label_classes(classes_url: str, aliases_url: str | None = None) -> LabelClasses:
    """Read the class list, and the alias file with `raw<TAB>class` on each line."""
    names = read_class_names(classes_url)
    numbers = {name: number for number, name in enumerate(names)}
    classes = LabelClasses(names, numbers)
    if aliases_url is None:
        return classes
    aliases = dict(_alias(line, place, aliases_url, classes) for place, line in _lines(aliases_url))
    return LabelClasses(names, numbers | aliases)


def raw_text(raw: Any) -> str:
    """Spell a raw label for the list of those that matched nothing, at a length a table can show."""
    text = raw if isinstance(raw, str) else repr(raw)
    try:
        text.encode("utf-8", "surrogateescape")  # bytes of a member that are no UTF-8 stand as they are
    except UnicodeEncodeError:
        text = from_json(text)
    return text[:80]


def _alias(line: str, place: int, url: str, classes: LabelClasses) -> tuple[str, int]:
    raw, tab, wanted = line.rpartition("\t")
    number, _ = classes.classify(wanted)
    if not tab or number is None:
        raise LabelError(
            f"data.aliases: {url} line {place} is {line!r}; a raw string, a tab and one of the "
            f"{len(classes)} classes was expected"
        )
    return raw.strip(), number


def _lines(url: str) -> list[tuple[int, str]]:
    try:
        with fsspec.open(url, "rt", encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, ImportError, ValueError) as error:
        raise LabelError(f"data.aliases: {url} cannot be read: {error}") from error
    return [(place, line) for place, line in enumerate(lines, start=1) if line.strip()]
