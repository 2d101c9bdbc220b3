"""The class list of a dataset: a text file of names, one a line; the line's number from 0 is the class."""

import fsspec

from pencil_scale.schema import PencilError


class ClassListError(PencilError):
    """A class list that cannot be used."""


def read_class_names(url: str) -> tuple[str, ...]:
    """Read and check the list: at least two names, none blank, none twice."""
    try:
        with fsspec.open(url, "rt", encoding="utf-8-sig") as file:
            names = tuple(line.strip() for line in file.read().splitlines())
    except (OSError, ImportError, ValueError) as error:
        raise ClassListError(f"data.classes: {url} cannot be read: {error}") from error
    blank = [number for number, name in enumerate(names, 1) if not name]
    if blank:
        raise ClassListError(f"data.classes: {url}: line {blank[0]} is blank; every line names a class")
    first: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if first.setdefault(name, number) != number:
            raise ClassListError(f"data.classes: {url}: '{name}' stands on lines {first[name]} and {number}")
    if len(names) < 2:
        raise ClassListError(f"data.classes: {url} names {len(names)} classes; at least 2 were expected")
    return names
