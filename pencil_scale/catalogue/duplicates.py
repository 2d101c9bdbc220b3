"""Duplicates: which new record is a new sample, which is one we know, in bounded memory.

Ids are compared by their 128-bit hashes, one range of hashes at a time: a range's new hashes are sorted in
memory, and the rows that exist stream past them. Of several records with one id the first is kept.

Equal content: the same image under different labels, and the noise that proves.

Of n samples with the same bytes and labels that disagree, at least n minus the most frequent label's count
are wrong, whoever is right. That is a lower bound on the noise, for free. One range of content hashes is
held in memory at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Keys = np.ndarray[Any, np.dtype[np.bytes_]]  # S16: equal lengths, so trailing zeros are compared rightly
Rows = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

KEYS_PER_RANGE = 4_000_000
NEW, ALIAS, MOVED = 0, 1, 2
_BLOCK = 1 << 20


class KnownRows(NamedTuple):
    """Some rows of the catalogue; `stands` where their bytes are still what was indexed."""

    rows: Rows
    keys: Keys
    stands: Flags


@dataclass
class Decisions:
    """What becomes of each new record, by its number in the order of reading.

    NEW gets a row. ALIAS is a sample we know, MOVED takes over the row of one whose bytes are gone;
    `targets` holds their row, or -1 - number where the target is itself a new record.
    """

    kind: np.ndarray[Any, np.dtype[np.uint8]]
    numbers: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    targets: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    orphans: Rows = field(default_factory=lambda: np.empty(0, np.int64))  # rows whose bytes nobody replaced

    def target_rows(self, numbers: Rows, first_row: int) -> Rows:
        """Give the rows of records that are not NEW; new rows are numbered from `first_row`."""
        targets = self.targets[np.searchsorted(self.numbers, numbers)]
        inside = targets < 0
        targets[inside] = first_row + self.num_new_before(-1 - targets[inside])
        return targets

    def num_new_before(self, numbers: Rows) -> Rows:
        """Count the NEW records before each of these."""
        counts = np.zeros(len(numbers), np.int64)
        order = np.argsort(numbers)
        asked = numbers[order]
        before = 0
        for start in range(0, len(self.kind), _BLOCK):
            here = slice(*np.searchsorted(asked, [start, start + _BLOCK]))
            new = np.concatenate([[0], np.cumsum(self.kind[start : start + _BLOCK] == NEW)])
            counts[order[here]] = before + new[asked[here] - start]
            before += int(new[-1])
        return counts


def decide(
    num_new: int,
    new_keys: Callable[[], Iterator[Keys]],
    known: Callable[[], Iterator[KnownRows]],
    keys_per_range: int = KEYS_PER_RANGE,
) -> Decisions:
    """Decide for every new record, reading new and known keys once for each range of hashes."""
    decisions = Decisions(np.zeros(num_new, np.uint8))
    bits = max(0, int(num_new / keys_per_range)).bit_length()
    found: list[tuple[Rows, Rows]] = []
    orphans: list[Rows] = []
    for part in range(1 << bits):
        keys, numbers = _in_range(new_keys(), part, bits)
        order = np.argsort(keys, kind="stable")
        keys, numbers = keys[order], numbers[order]
        heads = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else order
        match, stands, lost = _match(keys[heads], known(), part, bits)
        orphans.append(lost)
        found.append(_mark(decisions.kind, numbers, heads, match, stands))
    decisions.orphans = np.sort(np.concatenate(orphans))
    decisions.numbers = np.concatenate([numbers for numbers, _ in found])
    order = np.argsort(decisions.numbers)
    decisions.numbers = decisions.numbers[order]
    decisions.targets = np.concatenate([targets for _, targets in found])[order]
    return decisions


def range_of(keys: Keys, bits: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Give the hash range each key falls in: its first bits."""
    if bits == 0:
        return np.zeros(len(keys), np.uint64)
    return np.frombuffer(keys.tobytes(), ">u8")[::2].astype(np.uint64) >> np.uint64(64 - bits)


def contains(sorted_keys: Keys, keys: Keys) -> Flags:
    """Tell which keys are among the sorted ones."""
    if len(sorted_keys) == 0:
        return np.zeros(len(keys), np.bool_)
    places = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.asarray(sorted_keys[places] == keys, dtype=np.bool_)


def _in_range(batches: Iterator[Keys], part: int, bits: int) -> tuple[Keys, Rows]:
    chosen: list[Keys] = [np.empty(0, "S16")]
    numbers: list[Rows] = [np.empty(0, np.int64)]
    first = 0
    for keys in batches:
        inside = np.flatnonzero(range_of(keys, bits) == part)
        chosen.append(keys[inside])
        numbers.append(first + inside)
        first += len(keys)
    return np.concatenate(chosen), np.concatenate(numbers)


def _match(unique: Keys, known: Iterator[KnownRows], part: int, bits: int) -> tuple[Rows, Flags, Rows]:
    """Find the known row of each unique key (-1: none), and the rows that do not stand and found nobody."""
    match = np.full(len(unique), -1, np.int64)
    stands = np.zeros(len(unique), np.bool_)
    lost: list[Rows] = [np.empty(0, np.int64)]
    for batch in known:
        inside = range_of(batch.keys, bits) == part
        hit = inside & contains(unique, batch.keys)
        places = np.searchsorted(unique, batch.keys[hit])
        match[places] = batch.rows[hit]
        stands[places] = batch.stands[hit]
        lost.append(batch.rows[inside & ~hit & ~batch.stands])
    return match, stands, np.concatenate(lost)


def _mark(
    kind: np.ndarray[Any, np.dtype[np.uint8]], numbers: Rows, heads: Rows, match: Rows, stands: Flags
) -> tuple[Rows, Rows]:
    group = np.repeat(np.arange(len(heads)), np.diff(np.append(heads, len(numbers))))
    is_head = np.zeros(len(numbers), np.bool_)
    is_head[heads] = True
    known = match[group] >= 0
    kind[numbers[~is_head | (known & stands[group])]] = ALIAS
    kind[numbers[is_head & known & ~stands[group]]] = MOVED
    others = kind[numbers] != NEW
    targets = np.where(known, match[group], -1 - numbers[heads][group] if len(heads) else 0)
    return numbers[others], targets[others]


CONTENTS_PER_RANGE = 16_000_000
Classes = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class EqualContent:
    """How many images are there more than once, and what their labels prove."""

    num_labelled: int = 0
    num_repeated_images: int = 0
    num_samples: int = 0
    num_conflicting_images: int = 0
    num_proven_wrong: int = 0

    @property
    def proven_noise(self) -> float:
        """A share of all labels that is wrong for certain; the true share is higher."""
        return self.num_proven_wrong / self.num_labelled if self.num_labelled else 0.0


def find_equal_content(
    num_expected: int,
    contents: Callable[[], Iterator[tuple[Keys, Classes]]],
    per_range: int = CONTENTS_PER_RANGE,
) -> EqualContent:
    """Count images that come more than once; `contents` is read once for each range of hashes."""
    bits = (num_expected // per_range).bit_length()
    totals = np.zeros(5, np.int64)
    for part in range(1 << bits):
        keys: list[Keys] = [np.empty(0, "S16")]
        classes: list[Classes] = [np.empty(0, np.int32)]
        for some_keys, some_classes in contents():
            inside = range_of(some_keys, bits) == part
            keys.append(some_keys[inside])
            classes.append(some_classes[inside])
        totals += _count(np.concatenate(keys), np.concatenate(classes))
    return EqualContent(*(int(total) for total in totals))


def _count(keys: Keys, classes: Classes) -> np.ndarray[Any, np.dtype[np.int64]]:
    num_labelled = len(keys)
    order = np.argsort(keys, kind="stable")
    keys, classes = keys[order], classes[order]
    group = np.cumsum(np.append(False, keys[1:] != keys[:-1])) if num_labelled else np.zeros(0, np.int64)
    repeated = np.bincount(group)[group] > 1
    group, classes = group[repeated], classes[repeated]
    if len(group) == 0:
        return np.array([num_labelled, 0, 0, 0, 0], np.int64)
    # Within a group, count each label; the most frequent one may be right, the others are not.
    pairs, counts = np.unique(np.stack([group, classes.astype(np.int64)]), axis=1, return_counts=True)
    heads = np.unique(pairs[0], return_index=True)[1]
    members = np.add.reduceat(counts, heads)
    wrong = members - np.maximum.reduceat(counts, heads)
    return np.array([num_labelled, len(heads), members.sum(), np.count_nonzero(wrong), wrong.sum()], np.int64)
