"""Equal content: the same image under different labels, and the noise that proves.

Of n samples with the same bytes and labels that disagree, at least n minus the most frequent label's count
are wrong, whoever is right. That is a lower bound on the noise, for free. One range of content hashes is
held in memory at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pencil_scale.indexing.duplicates import Keys, range_of

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
