"""Duplicates: which samples have the id of an earlier sample, and which images occur more than once.

Both compare 128-bit hashes, one range of hashes at a time, so memory is bounded: the new hashes of a range
are held in memory while the known ones stream past. Of several samples with one id the first is kept.

Equal images prove label noise: of n samples with the same bytes and different labels, at least n minus the
count of the most frequent label are wrong.

    decisions = decide(num_new, new_keys, known_rows, first_row=catalogue.num_rows)
    decisions.kind[number], decisions.target_rows(numbers)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Keys = np.ndarray[Any, np.dtype[np.bytes_]]  # S16; all have the same length, so trailing zeros count
Rows = npt.NDArray[np.int64]
Classes = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

KEYS_PER_RANGE = 16_000_000  # memory peaks at about 1.6 GB
NEW, ALIAS, MOVED = 0, 1, 2


class KnownRows(NamedTuple):
    """Some rows of the catalogue; `valid` if their bytes are still those that were indexed."""

    rows: Rows
    keys: Keys
    valid: Flags


@dataclass(frozen=True)
class Decisions:
    """What each new sample becomes; samples are numbered in the order of reading.

    NEW gets a new row. ALIAS is a duplicate of the row in `targets`; MOVED takes over that row, whose bytes
    are gone. Rows whose bytes are gone and that no sample takes over are `orphans`.
    """

    kind: npt.NDArray[np.uint8]
    numbers: Rows  # of all samples that are not NEW, in order
    targets: Rows  # their rows
    orphans: Rows

    def target_rows(self, numbers: Rows) -> Rows:
        """The rows of some samples that are not NEW."""
        return self.targets[np.searchsorted(self.numbers, numbers)]


def decide(
    num_new: int,
    new_keys: Callable[[], Iterator[tuple[Keys, Rows]]],
    known: Callable[[], Iterator[KnownRows]],
    first_row: int,
    keys_per_range: int = KEYS_PER_RANGE,
) -> Decisions:
    """Decide for every new sample; new rows are numbered from `first_row`.

    `new_keys` gives the keys and numbers of the samples. Both iterators are read once per range of hashes.
    """
    kind = np.zeros(num_new, np.uint8)
    bits = (num_new // keys_per_range).bit_length()
    found_numbers, found_targets, orphans = [], [], []
    for hash_range in range(1 << bits):
        keys, numbers, group = _sorted_range(new_keys(), hash_range, bits)
        is_head = np.diff(group, prepend=-1) > 0
        match, valid, lost = _match(keys[is_head], known(), hash_range, bits)
        is_known = match[group] >= 0
        kind[numbers[~is_head | (is_known & valid[group])]] = ALIAS
        kind[numbers[is_head & is_known & ~valid[group]]] = MOVED
        others = kind[numbers] != NEW
        found_numbers.append(numbers[others])
        # A target that is itself a new sample has no row yet: keep its number as -1 - number.
        found_targets.append(np.where(is_known, match[group], -1 - numbers[is_head][group])[others])
        orphans.append(lost)
    numbers, targets = np.concatenate(found_numbers), np.concatenate(found_targets)
    order = np.argsort(numbers)
    numbers, targets = numbers[order], targets[order]
    inside = targets < 0
    heads = -1 - targets[inside]
    # `numbers` lists the samples that are not NEW, so the number of NEW ones before a sample is a difference.
    targets[inside] = first_row + heads - np.searchsorted(numbers, heads)
    return Decisions(kind, numbers, targets, np.sort(np.concatenate(orphans)))


def contains(sorted_keys: Keys, keys: Keys) -> Flags:
    """Whether each key is among the sorted ones."""
    if len(sorted_keys) == 0:
        return np.zeros(len(keys), np.bool_)
    places = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.asarray(sorted_keys[places] == keys, dtype=np.bool_)


def hashes_of(keys: Any) -> Keys:
    """View a column of 16-byte hashes as an array."""
    array = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
    if len(array) == 0:
        return np.empty(0, "S16")
    start = array.offset * 16
    return np.frombuffer(array.buffers()[1], np.uint8)[start : start + len(array) * 16].view("S16")


def _range_of(keys: Keys, bits: int) -> npt.NDArray[np.uint64]:
    """The range of each key: its first bits."""
    if bits == 0:
        return np.zeros(len(keys), np.uint64)
    return np.frombuffer(keys.tobytes(), ">u8")[::2].astype(np.uint64) >> np.uint64(64 - bits)


def _sorted_range(batches: Iterator[tuple[Keys, Any]], hash_range: int, bits: int) -> tuple[Keys, Rows, Rows]:
    """The sorted keys of one range, their values, and group numbers: equal keys are a group."""
    chosen: list[Keys] = [np.empty(0, "S16")]
    values: list[Any] = [np.empty(0, np.int32)]
    for keys, some in batches:
        inside = _range_of(keys, bits) == hash_range
        chosen.append(keys[inside])
        values.append(some[inside])
    keys = np.concatenate(chosen)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    group = np.cumsum(np.append(False, keys[1:] != keys[:-1])) if len(keys) else np.empty(0, np.int64)
    return keys, np.concatenate(values)[order], group


def _match(unique: Keys, known: Iterator[KnownRows], hash_range: int, bits: int) -> tuple[Rows, Flags, Rows]:
    """Find the known row of each unique key (-1: none), and the rows without bytes that no key matches."""
    match = np.full(len(unique), -1, np.int64)
    valid = np.zeros(len(unique), np.bool_)
    lost: list[Rows] = [np.empty(0, np.int64)]
    for batch in known:
        inside = np.flatnonzero(_range_of(batch.keys, bits) == hash_range)
        # Searching keys in rising order is several times faster: each search touches memory of the last one.
        inside = inside[np.argsort(_range_of(batch.keys[inside], 64))]
        hit = contains(unique, batch.keys[inside])
        found, others = inside[hit], inside[~hit]
        places = np.searchsorted(unique, batch.keys[found])
        match[places] = batch.rows[found]
        valid[places] = batch.valid[found]
        lost.append(batch.rows[others[~batch.valid[others]]])
    return match, valid, np.concatenate(lost)


def find_equal_content(
    num_expected: int, contents: Callable[[], Iterator[tuple[Keys, Classes]]], per_range: int = KEYS_PER_RANGE
) -> dict[str, float]:
    """Count images that occur more than once, and the labels that this proves wrong.

    `contents` is read once for each range of hashes.
    """
    bits = (num_expected // per_range).bit_length()
    totals = np.zeros(5, np.int64)
    for hash_range in range(1 << bits):
        _, classes, group = _sorted_range(contents(), hash_range, bits)
        repeated = np.bincount(group)[group] > 1
        # Within a group, count each label: the most frequent one may be right, the others are not.
        labels = np.stack([group[repeated], classes[repeated]])
        pairs, counts = np.unique(labels, axis=1, return_counts=True)
        heads = np.unique(pairs[0], return_index=True)[1]
        members = np.add.reduceat(counts, heads)
        wrong = members - np.maximum.reduceat(counts, heads)
        totals += [len(group), len(heads), members.sum(), np.count_nonzero(wrong), wrong.sum()]
    return equal_content(*totals.tolist())


def equal_content(labelled: int, images: int, samples: int, conflicting: int, wrong: int) -> dict[str, float]:
    """Name the counts; `proven_noise` is a lower limit of the share of wrong labels."""
    return {
        "num_labelled": labelled,
        "num_repeated_images": images,
        "num_samples": samples,
        "num_conflicting_images": conflicting,
        "num_proven_wrong": wrong,
        "proven_noise": wrong / max(labelled, 1),
    }
