"""Seeded orders: 64-bit hashes that are the same on every machine and in every version of NumPy.

An order sorted by such a hash is a function of its inputs alone: adding or removing an item leaves the order
of all others as it was.

    order = np.argsort(hashes(rows, key), kind="stable")
"""

from typing import Any

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: the increment of splitmix64

UInt64s = npt.NDArray[np.uint64]


def splitmix64(states: UInt64s) -> UInt64s:
    """Mix all 64 bits of each state (the finalizer of splitmix64); products wrap at 2**64 by design."""
    mixed = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def hashes(numbers: npt.NDArray[Any], key: int) -> UInt64s:
    """Hash integers with a key."""
    return splitmix64(numbers.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(key % 2**64))
