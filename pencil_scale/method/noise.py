"""Label noise as in the paper, seeded, with the rate that it really produced.

    noisy = symmetric_noise(true_class, rate=0.5, num_classes=10, seed=1)
    noisy.noisy_class, noisy.rate_made        # a rate of 0.5 over 10 classes changes about 0.45

A symmetric flip draws from all classes and may draw the true one, so a rate of `r` changes about
`r * (c - 1) / c` of the labels. An asymmetric flip turns a class into the one it is confused with.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pencil_scale.storage.errors import PencilError

Classes = npt.NDArray[np.int64]

# truck -> automobile, bird -> airplane, deer -> horse, cat <-> dog
CIFAR10_FLIPS: Mapping[int, int] = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}


@dataclass(frozen=True)
class NoisyLabels:
    """The noisy labels, and the share of labels that differ from the true ones."""

    noisy_class: Classes
    rate_asked: float
    rate_made: float


def symmetric_noise(true_class: npt.ArrayLike, rate: float, num_classes: int, seed: int) -> NoisyLabels:
    """Redraw each label from all classes with probability `rate`."""
    known = _checked(true_class, rate, num_classes)
    random = np.random.default_rng(seed)
    drawn = random.integers(num_classes, size=known.shape)
    hit = random.random(known.shape) < rate
    return _noisy(known, np.where(hit, drawn, known), rate)


def asymmetric_noise(
    true_class: npt.ArrayLike, rate: float, flips: Mapping[int, int], seed: int
) -> NoisyLabels:
    """Turn each label into the class it is confused with, with probability `rate`."""
    known = _checked(true_class, rate)
    confused_with = np.arange(max([known.max(initial=-1), *flips]) + 1)
    confused_with[list(flips.keys())] = list(flips.values())
    hit = np.random.default_rng(seed).random(known.shape) < rate
    return _noisy(known, np.where(hit, confused_with[known], known), rate)


def next_class_flips(num_classes: int) -> Mapping[int, int]:
    """Map every class to the next, and the last to the first, as the paper does on CIFAR-100."""
    return {number: (number + 1) % num_classes for number in range(num_classes)}


def _noisy(known: Classes, noisy: Classes, rate: float) -> NoisyLabels:
    made = float(np.mean(known != noisy)) if known.size else 0.0
    return NoisyLabels(noisy_class=noisy, rate_asked=rate, rate_made=made)


def _checked(true_class: npt.ArrayLike, rate: float, num_classes: float = math.inf) -> Classes:
    if not 0 <= rate <= 1:
        raise PencilError(f"noise rate {rate}: a share of the labels, from 0 to 1, was expected")
    known = np.asarray(true_class)
    if known.ndim != 1 or (known.size and not np.issubdtype(known.dtype, np.integer)):
        raise PencilError(
            f"true_class has shape {known.shape} and type {known.dtype}; one integer per sample was expected"
        )
    if known.size and not 0 <= known.min() <= known.max() < num_classes:
        raise PencilError(
            f"true_class ranges from {known.min()} to {known.max()}; 0 to {num_classes - 1} was expected"
        )
    return known.astype(np.int64)
