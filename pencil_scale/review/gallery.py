"""Gallery: which samples are the most worth a person's look, and in which order.

Every transition (given class -> suggested class) is shown, large ones more: its share of the list grows with
the square root of its size. Within a transition the doubtful and the sure take turns, least margin, largest
margin, next to least, and so on: the doubtful are where a person's word changes most, the sure are where
one sees whether the method can be trusted. Labels that did not change are listed where they are in doubt.

    size = ...                                                     # of each sample's transition
    chosen = pick(given, suggested, margin, size, listed=2000)     # positions, the most worth a look first
"""

import numpy as np
import numpy.typing as npt

DOUBT = 0.5  # an unchanged label is in doubt below this margin over the next class
Int64s = npt.NDArray[np.int64]


def candidates(given: Int64s, suggested: Int64s, margin: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Whether each label is one to list: changed, or in doubt."""
    found: npt.NDArray[np.bool_] = (given != suggested) | (margin < DOUBT)
    return found


def pick(
    given: Int64s, suggested: Int64s, margin: npt.NDArray[np.float32], size: Int64s, listed: int
) -> Int64s:
    """Rank candidates and take the first; `size` is how many candidates each one's transition has.

    Picks of parts can be merged by picking again from their union, with the sizes of the whole.
    """
    turn = _turns(given << 32 | suggested, margin, given != suggested)
    worth = (turn + 1) / np.sqrt(size)
    return np.lexsort((-size, worth))[:listed]


def _turns(cell: Int64s, margin: npt.NDArray[np.float32], changed: npt.NDArray[np.bool_]) -> Int64s:
    """When each sample has its turn within its transition, from 0."""
    order = np.lexsort((margin, cell))
    starts = np.flatnonzero(np.r_[True, np.diff(cell[order]) != 0])[: len(cell)]
    sizes = np.diff(np.r_[starts, len(cell)])
    from_low = np.arange(len(cell)) - np.repeat(starts, sizes)
    from_high = np.repeat(sizes, sizes) - 1 - from_low
    turn = np.empty(len(cell), np.int64)
    turn[order] = np.where(changed[order], np.minimum(2 * from_low, 2 * from_high + 1), from_low)
    return turn
