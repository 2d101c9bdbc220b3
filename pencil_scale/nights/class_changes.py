"""Class changes: from the class list of one night to that of the next.

    mapping = class_mapping(("ant", "bee", "wasp"), ("bee", "ant"), {"wasp": "bee"})      # [[1, 2], [0]]

For every new class the old ones it is made of. Names decide, so a list may be put into another order. A class
that left the list must be accounted for: a mistyped name must not cost its samples their labels. Of a class
that is still listed `moved` says nothing, so it may stay in the config for the nights to come.
"""

from collections.abc import Mapping, Sequence

from pencil_scale.nights.night_files import NightError

Classes = Sequence[Sequence[int]]


def class_mapping(old: Sequence[str], new: Sequence[str], moved: Mapping[str, str | None]) -> list[list[int]]:
    """Say what each new class is made of, or which class nobody has accounted for."""
    lost = [name for name in old if name not in new and name not in moved]
    if lost:
        raise NightError(
            f"data.classes: {', '.join(map(repr, lost[:5]))} left the class list since the last night; say "
            f"what became of it, as in nightly.remap={{{lost[0]}: {new[0]}}} (null: dropped), or put it back"
        )
    became = {name: name if name in new else moved[name] for name in old}
    odd = [(name, to) for name, to in became.items() if to is not None and to not in new]
    if odd:
        raise NightError(
            f"nightly.remap: {odd[0][0]!r} became {odd[0][1]!r}, which data.classes does not name"
        )
    return [[number for number, name in enumerate(old) if became[name] == to] for to in new]


def is_same(mapping: Classes, num_old: int) -> bool:
    """Whether the classes are what they were."""
    return [list(olds) for olds in mapping] == [[number] for number in range(num_old)]


def new_numbers(mapping: Classes, num_old: int) -> list[int]:
    """The new number of every old class, and of none at the end; -1 where there is no longer one."""
    found = [-1] * (num_old + 1)
    for number, olds in enumerate(mapping):
        for old in olds:
            found[old] = number
    return found
