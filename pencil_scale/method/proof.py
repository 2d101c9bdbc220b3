"""Proof: what a clean set says about the labels that a network contradicts, whatever pattern errors follow.

    clean, watched = (count(predicted, classes, num_classes) for predicted, classes in (...))
    proof = prove(clean, watched)               # None if nothing is proven
    shift(clean, watched) > 0                   # whether the clean set seems to come from another source

A network contradicts a class by a margin: by how much it finds its best class likelier, in log-probabilities.
The clean set shows how often it contradicts a true class by so much. If it contradicts the labels of watched
samples, which it was not trained on either, clearly more often, at least the difference is wrong.

This needs clean samples from the same source. A network that is clearly more often sure of clean samples than
of watched ones, or less often, shows that they are not; then nothing is proven.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]  # [2, M]: by margin, and by sureness

Z95, Z99 = (NormalDist().inv_cdf(share) for share in (0.95, 0.99))
MARGINS = np.arange(0, 12, 0.5)  # those between two of them are counted together
SURENESS = np.arange(-1.5, 10.5, 0.5)  # log-odds of the best class, counted likewise


def margins(classes: Classes, log_p: Floats, given: Classes, num_classes: int) -> Floats:
    """By how much the best class is likelier than the given one; the first two arguments are [N, K].

    Classes that were not kept count as equally likely.
    """
    is_it, num_others = classes == given[:, None], max(num_classes - classes.shape[1], 1)
    others = np.log(np.maximum(1 - np.exp(log_p).sum(-1), 1e-12) / num_others)
    on_given = np.where(is_it.any(-1), np.where(is_it, log_p, 0.0).sum(-1), np.minimum(others, log_p[:, -1]))
    found: Floats = log_p[:, 0] - on_given
    return found


def count(predicted: Floats, classes: Classes, num_classes: int) -> Counts:
    """Count samples by the margin against their class, and by how sure the network is of its best class.

    The first of the margins are those of samples whose class is the best one. `predicted` has the most likely
    classes of each sample, and then their log-probabilities.   [N, 2 K]
    """
    num_kept = predicted.shape[1] // 2
    kept, log_p = predicted[:, :num_kept].astype(np.int64), predicted[:, num_kept:].astype(np.float64)
    best = log_p[:, 0]
    log_odds = best - np.log(np.maximum(-np.expm1(best), 1e-12))
    contradicted = np.searchsorted(MARGINS, margins(kept, log_p, classes, num_classes)).clip(min=1)
    by_margin = np.where(kept[:, 0] == classes, 0, contradicted)  # also if another class is as likely
    groups = by_margin, np.searchsorted(SURENESS, log_odds, side="right")
    return np.stack([np.bincount(group, minlength=len(MARGINS) + 1) for group in groups])


def no_counts() -> Counts:
    """Counts of no samples."""
    return np.zeros((2, len(MARGINS) + 1), np.int64)


@dataclass(frozen=True)
class Proof:
    """What a clean set shows about the labels that a network contradicts; shares of all labels."""

    min_margin: float  # labels that the network contradicts by more than this should change
    changed: float  # these labels
    wrong_low: float  # lower bound of those that are wrong, with 99 %
    right: float  # share of the changes that are right
    gain: float
    low: float  # its lower bound, with 99 %


def prove(clean: Counts, watched: Counts) -> Proof | None:
    """Find the contradicted labels whose change is a gain, if any, from two counts.

    At most as many right labels are contradicted as true classes are in the clean set. The other contradicted
    labels are wrong, and a change loses nothing. Its new class is taken to be wrong as often as the network
    is, and for the lower bound twice as often. Where this bound is positive, the margin with the highest gain
    is chosen. Two dozen are tried, hence 99 %.
    """
    if not watched[0].any() or shift(clean, watched) > 0:
        return None
    num_clean, num_watched = clean[0].sum(), watched[0].sum()
    beyond_clean, beyond = (counts[0, :0:-1].cumsum()[::-1] for counts in (clean, watched))
    changed, spoiled = beyond / num_watched, (beyond_clean + 0.5) / (num_clean + 1)
    errs = spoiled[0]
    wrong = changed - spoiled
    gain = wrong * (1 - errs) - spoiled
    chances = changed * (1 - changed) / num_watched, spoiled * (1 - spoiled) / (num_clean + 1)
    least = max(0.0, 1 - 2 * errs)
    low = wrong * least - spoiled
    low -= Z99 * np.sqrt(chances[0] * least**2 + chances[1] * (1 + least) ** 2)
    if (low <= 0).all():
        return None
    best = int(np.where(low > 0, gain, -np.inf).argmax())
    wrong_low = wrong[best] - Z99 * np.sqrt(chances[0][best] + chances[1][best])
    of_changes = wrong[best] * (1 - errs) / changed[best]
    found = (MARGINS[best], changed[best], wrong_low, of_changes, gain[best], low[best])
    return Proof(*map(float, found))


def shift(clean: Counts, watched: Counts) -> float:
    """How much the shares of samples of which the network is so sure differ, beyond chance.

    The largest difference of the cumulative shares (Kolmogorov and Smirnov), less what chance exceeds in one
    of a hundred cases. Nothing more is tolerated: a tenth of hard images that the clean set lacks would make
    the right labels of these images look wrong.
    """
    seen, num = clean[1], watched[1]
    if not seen.sum() or not num.sum():
        return 0.0
    largest = np.abs(seen.cumsum() / seen.sum() - num.cumsum() / num.sum()).max()
    return float(largest - 1.63 * np.sqrt(1 / seen.sum() + 1 / num.sum()))
