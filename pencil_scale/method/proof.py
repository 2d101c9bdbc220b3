"""Proof: what a clean set says about the labels that a network contradicts, whatever pattern errors follow.

    clean, watched = (count_by_sureness(predicted, classes) for predicted, classes in (...))
    proof = prove(clean, watched)               # None if nothing is proven
    shift(clean, watched) > 0                   # whether the clean set seems to come from another source

The clean set shows how often the network is wrong when it is so sure of its best class. If it contradicts the
labels of watched samples, which it was not trained on either, clearly more often than that, the rest of what
it contradicts is wrong. Of equally sure predictions equally many must be right in both, as they are if both
come from the same source. A network that is clearly more often sure of clean samples than of watched ones, or
less often, shows that they do not; then nothing is proven.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int64]

Z95 = NormalDist().inv_cdf(0.95)
SURENESS = np.arange(-1.5, 10.5, 0.5)  # log-odds; predictions between two of them are counted together
LEAST_SURE = -60_000.0  # below all log-odds
MOST_SHIFT = 0.1  # between the shares of clean and of watched samples of which a network is so sure


def sureness(log_p: Floats) -> Floats:
    """The log-odds of classes against all others."""
    return log_p - np.log(np.maximum(-np.expm1(log_p), 1e-12))


def count_by_sureness(predicted: Floats, classes: Classes) -> Classes:
    """Count, by how sure the network is, the samples whose best class is this one, and all.   [2, M]

    `predicted` has the most likely classes of each sample, and then their log-probabilities.   [N, 2 K]
    """
    best = predicted[:, predicted.shape[1] // 2].astype(np.float64)
    group = np.searchsorted(SURENESS, sureness(best), side="right")
    right = predicted[:, 0] == classes
    return np.stack([np.bincount(some, minlength=len(SURENESS) + 1) for some in (group[right], group)])


@dataclass(frozen=True)
class Proof:
    """What a clean set shows about the labels that a network contradicts; shares of all labels."""

    min_sureness: float  # of the network, where the labels that it contradicts should change
    changed: float  # these labels
    wrong_low: float  # lower bound of those that are wrong, with 95 %
    right: (
        float  # share of the changes that are right, if every error of the network contradicts a right label
    )
    gain: float  # what is gained then
    low: float  # its lower bound, with 95 %


def prove(clean: Classes, watched: Classes) -> Proof | None:
    """Find the contradicted labels whose change is a gain, if any, from two counts by sureness.

    `clean` counts correct predictions, and `watched` those that agree with the given label. At worst, every
    error of the network contradicts a label that is right: then it costs one, and is not a wrong label found.
    """
    (right, seen), (agree, num) = clean, watched
    total = max(int(num.sum()), 1)
    if shift(clean, watched) > 0:
        return None
    errs = 1 - (right + 0.5) / (seen + 1)
    # Of the predictions that are so sure, or surer:
    changed, errors, variance = (
        values[::-1].cumsum()[::-1]
        for values in (
            (num - agree) / total,
            errs * num / total,
            errs * (1 - errs) / (seen + 1) * (num / total) ** 2,
        )
    )
    gain, chance = changed - 2 * errors, changed * (1 - changed) / total
    low = gain - Z95 * np.sqrt(chance + 4 * variance)
    wrong_low = changed - errors - Z95 * np.sqrt(chance + variance)
    best = int(low.argmax())
    if low[best] <= 0:
        return None
    least = LEAST_SURE if best == 0 else SURENESS[best - 1]
    of_changes = 1 - errors[best] / changed[best]
    found = (least, changed[best], wrong_low[best], of_changes, gain[best], low[best])
    return Proof(*map(float, found))


def shift(clean: Classes, watched: Classes) -> float:
    """How much the shares of samples of which the network is so sure differ, beyond chance and what is usual.

    The largest difference of the cumulative shares (Kolmogorov and Smirnov), less what chance exceeds in one
    of a hundred cases, and less `MOST_SHIFT`.
    """
    seen, num = clean[1], watched[1]
    if not seen.sum() or not num.sum():
        return 0.0
    largest = np.abs(seen.cumsum() / seen.sum() - num.cumsum() / num.sum()).max()
    return float(largest - 1.63 * np.sqrt(1 / seen.sum() + 1 / num.sum()) - MOST_SHIFT)
