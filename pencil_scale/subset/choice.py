"""A class-balanced choice of samples that barely changes when samples are added.

Every sample has a position in a seeded order that depends on its key alone (the first 64 bits of its
`sample_key`), and a class takes its first samples. A new sample can replace at most one member, the last one
of its class.

A range of rows is processed alone, in any process: counts add up, and picks are merged by picking again.

    for rows in row_ranges(rule):
        counts += count(rule, rows)
    quotas = allocate(counts, class_names, total=260_000)
    limits = position_limits(quotas, counts)
    picked = merge_picks([candidates(rule, rows, quotas, limits) for rows in row_ranges(rule)], quotas, seed)

A class is the given one or, with published labels, the decided one. Limits on the positions let through
slightly more samples than a class needs, so 100 million rows return little more than the subset.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import ClassOrder
from pencil_scale.catalogue.duplicates import Keys, contains, hashes_of
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.method.decisions import UNLABELLED
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import GOLDEN, splitmix64
from pencil_scale.subset.files import MEMBERS

RANGE_ROWS = 1 << 18
SLACK = 8.0  # standard deviations: too few candidates about once in 10**15 draws
COLUMNS = ["row", "status", "noisy_class", "sample_key"]
Classes = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Positions = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Rule:
    """Which samples may be members, and of which class."""

    catalogue: Catalogue
    seed: int
    labels: Manifest | None = None  # over the catalogue's classes, in any order
    corrected: bool = False
    min_confidence: float = 0.0
    excluded: Keys = field(default_factory=lambda: np.empty(0, "S16"))


def allocate(
    class_counts: npt.ArrayLike,
    names: Sequence[str],
    *,
    per_class: int | None = None,
    total: int | None = None,
    on_shortage: Literal["error", "take_all"] = "error",
) -> Counts:
    """Decide how many samples to take from each class; a remainder goes to the first classes.

    With `take_all` a class with too few samples gives all it has, and the others do not give more: the
    subset should stay balanced.
    """
    counts = np.asarray(class_counts, dtype=np.int64)
    if (per_class is None) == (total is None):
        raise PencilError(
            "subset.per_class, subset.total: set exactly one of them, as in subset.total=260000"
        )
    if per_class is not None:
        quotas = np.full(len(counts), per_class, np.int64)
    else:
        each, rest = divmod(total or 0, len(counts))
        quotas = each + (np.arange(len(counts)) < rest).astype(np.int64)
    short = np.flatnonzero(counts < quotas).tolist()
    if short and on_shortage == "error":
        listed = [f"class {c} ({names[c]}) has {counts[c]:,} of {quotas[c]:,}" for c in short[:10]]
        more = f" and {len(short) - 10} more" if len(short) > 10 else ""
        raise PencilError(
            f"too few samples: {', '.join(listed)}{more}; ask for fewer, or set subset.on_shortage: take_all"
        )
    return np.minimum(quotas, counts)


def seeded_order(sample_keys: npt.NDArray[np.uint64], seed: int) -> Positions:
    """Give every key its position in the order of a seed."""
    return splitmix64(sample_keys.astype(np.uint64) + np.uint64((seed + 1) * GOLDEN % 2**64))


def pick(
    sample_keys: npt.NDArray[np.uint64], classes: npt.NDArray[np.integer], quotas: Counts, seed: int
) -> npt.NDArray[np.int64]:
    """Take each class's first samples in the seeded order; returns their indices, in ascending order.

    Rows with a class below 0 (unlabelled) are never taken.
    """
    order = np.lexsort((sample_keys, seeded_order(sample_keys, seed), classes))
    sorted_classes = np.asarray(classes)[order]
    starts = np.searchsorted(sorted_classes, np.arange(len(quotas)))
    known = np.flatnonzero((sorted_classes >= 0) & (sorted_classes < len(quotas)))
    order, sorted_classes = order[known], sorted_classes[known]
    return np.sort(order[known - starts[sorted_classes] < quotas[sorted_classes]])


def row_ranges(rule: Rule) -> list[range]:
    """Cut the rows into ranges of complete label parts; rows after the last part have no label yet."""
    num_rows, step = rule.catalogue.num_rows, RANGE_ROWS
    if rule.labels is not None:
        layout = rule.labels.layout
        num_rows, step = min(layout.num_rows, num_rows), max(1, step // layout.part_rows) * layout.part_rows
    return [range(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


def count(rule: Rule, rows: range) -> Counts:
    """Count the samples of each class that may be taken."""
    _, classes = _read(rule, rows)
    return np.bincount(classes[classes >= 0], minlength=rule.catalogue.num_classes)


def position_limits(quotas: Counts, counts: Counts) -> Positions:
    """How far into the seeded order a class must be searched to find its quota, almost surely.

    Positions are practically uniform, so a share p of the order has about p * count samples, plus or minus
    the square root.
    """
    asked = quotas + SLACK * np.sqrt(quotas) + SLACK**2
    shares = np.minimum(asked / np.maximum(counts, 1), 1.0)
    return np.array([min(int(share * 2.0**64), 2**64 - 1) for share in shares], np.uint64)


def candidates(rule: Rule, rows: range, quotas: Counts, limits: Positions) -> pa.Table:
    """Pick each class's first samples in a range, among those within the limit of their class."""
    table, classes = _read(rule, rows)
    positions = seeded_order(_first_bits(table["sample_key"]), rule.seed)
    near = np.flatnonzero((classes >= 0) & (positions <= limits[np.maximum(classes, 0)]))
    table = table.take(pa.array(near))
    columns = [table["row"], table["sample_key"], pa.array(classes[near].astype(np.int32))]
    return merge_picks([pa.table(columns, schema=MEMBERS)], quotas, rule.seed)


def merge_picks(picks: Sequence[pa.Table], quotas: Counts, seed: int) -> pa.Table:
    """Pick again from the picks of several ranges; rows come out in ascending order."""
    table = pa.concat_tables([*picks, MEMBERS.empty_table()]).combine_chunks()
    chosen = pick(_first_bits(table["sample_key"]), table["class"].to_numpy(), quotas, seed)
    return table.take(pa.array(chosen)).sort_by("row")


def _first_bits(keys: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """The first 64 bits of 128-bit keys."""
    return np.ascontiguousarray(hashes_of(keys).view("<u8")[::2])


def _read(rule: Rule, rows: range) -> tuple[pa.Table, Classes]:
    """Read some rows, and the class for which each may be taken; -1 if it may not."""
    table = rule.catalogue.read(rows.start, rows.stop, COLUMNS)
    classes: Classes = table["noisy_class"].fill_null(UNLABELLED).to_numpy().astype(np.int64)
    allowed = pc.equal(table["status"], "ok").to_numpy()
    allowed &= ~contains(rule.excluded, hashes_of(table["sample_key"]))
    if rule.labels is not None:
        order = ClassOrder.between(rule.labels.class_names, rule.catalogue.class_names, "subset.labels")
        for labels in PublishedLabels(rule.labels).batches(rows):
            here = slice(labels.rows.start - rows.start, labels.rows.stop - rows.start)
            found = labels.under(order, classes[here]).decide()
            share = found.confidence if rule.corrected else found.score
            allowed[here] &= share >= rule.min_confidence
            if rule.corrected:
                classes[here] = found.corrected_class
    return table, np.where(allowed, classes, UNLABELLED)
