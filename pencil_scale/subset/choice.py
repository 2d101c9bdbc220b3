"""A class-balanced choice of samples that barely changes when samples are added.

Every sample has a place in a seeded order that depends on its key alone (the first 64 bits of its
`sample_key`); a class takes the first so many. A new sample can push out at most one member, the last of its
own class: the rest of the subset stands.

    quotas = allocate(class_counts, total=260_000)
    members = pick(sample_keys, classes, quotas, seed=1)          # positions, rising
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import GOLDEN, splitmix64

Counts = npt.NDArray[np.int64]
OnShortage = Literal["error", "take_all"]


def allocate(
    class_counts: npt.ArrayLike,
    *,
    per_class: int | None = None,
    total: int | None = None,
    on_shortage: OnShortage = "error",
    names: Sequence[str] = (),
) -> Counts:
    """Say how many samples each class gives; a total that does not divide leaves one more to the first.

    With `take_all` a short class gives what it has, and the others are not asked for more: classes alike is
    the point of the subset.
    """
    counts = np.asarray(class_counts, dtype=np.int64)
    if (per_class is None) == (total is None):
        raise PencilError(f"per_class {per_class} and total {total}: exactly one of the two was expected")
    asked = per_class if per_class is not None else total
    if asked is None or asked < 0 or len(counts) == 0:
        raise PencilError(f"{asked} samples of {len(counts)} classes: nothing below 0, and a class, expected")
    quotas = np.full(len(counts), asked, dtype=np.int64)
    if total is not None:
        quotas = total // len(counts) + (np.arange(len(counts)) < total % len(counts)).astype(np.int64)
    short = np.flatnonzero(counts < quotas)
    if len(short) and on_shortage == "error":
        raise _too_few(short, counts, quotas, names)
    return np.minimum(quotas, counts)


def _too_few(
    short: npt.NDArray[np.intp], counts: Counts, quotas: Counts, names: Sequence[str]
) -> PencilError:
    called = [f"class {c} ({names[c]})" if c < len(names) else f"class {c}" for c in short[:10]]
    pairs = zip(called, short.tolist(), strict=False)
    listed = ", ".join(f"{name} has {counts[c]:,} of {quotas[c]:,}" for name, c in pairs)
    more = f" and {len(short) - 10} more" if len(short) > 10 else ""
    return PencilError(f"too few samples: {listed}{more}; ask for fewer, or set subset.on_shortage: take_all")


def seeded_order(sample_keys: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Give every key its place in the seed's order: a mix of all 64 bits, alike on every machine."""
    return splitmix64(sample_keys.astype(np.uint64) + np.uint64((seed + 1) * GOLDEN % 2**64))


def pick(
    sample_keys: npt.NDArray[np.uint64], classes: npt.NDArray[np.integer], quotas: Counts, seed: int
) -> npt.NDArray[np.int64]:
    """Take each class's first samples in the seeded order; gives their positions, rising.

    Picks of parts can be merged by picking again from their union, so 100 million rows need no more memory
    than one part and the subset. Rows of a class below 0 (unlabelled) are never taken.
    """
    places = seeded_order(sample_keys, seed)
    order = np.lexsort((sample_keys, places, classes))
    sorted_classes = np.asarray(classes)[order]
    starts = np.searchsorted(sorted_classes, np.arange(len(quotas)))
    known = (sorted_classes >= 0) & (sorted_classes < len(quotas))
    order, sorted_classes = order[known], sorted_classes[known]
    rank = np.flatnonzero(known) - starts[sorted_classes]
    return np.sort(order[rank < quotas[sorted_classes]])
