"""A class-balanced choice of samples that barely changes when samples are added.

Every sample has a place in a seeded order that depends on its key alone (the first 64 bits of its
`sample_key`), and a class takes its first samples. A new sample can replace at most one member, the last one
of its class.

A range of rows is processed alone, in any process: counts add up, and picks are merged by picking again.

    for rows in row_ranges(rule):
        counts += count(rule, rows)
    quotas = allocate(counts, total=260_000)
    limits = place_limits(quotas, counts)
    picked = merge_picks([candidates(rule, rows, quotas, limits) for rows in row_ranges(rule)], quotas, seed)

A class is the given one or, with published labels, the decided one. Limits on the places in the seeded order
let through slightly more samples than a class needs, so 100 million rows return little more than the subset.
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
from pencil_scale.method.decisions import UNLABELLED, decide
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import GOLDEN, splitmix64
from pencil_scale.subset.files import MEMBERS

RANGE_ROWS = 1 << 18
SLACK = 8.0  # standard deviations: too few candidates about once in 10**15 draws
LAST_PLACE = 2**64 - 1
Classes = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Places = npt.NDArray[np.uint64]
OnShortage = Literal["error", "take_all"]


@dataclass(frozen=True)
class Rule:
    """Which samples may be members, and of which class."""

    catalogue: Catalogue
    seed: int
    labels: Manifest | None = None  # over the catalogue's classes, in any order
    corrected: bool = False
    min_confidence: float = 0.0
    excluded: Keys = field(default_factory=lambda: np.empty(0, "S16"))

    @property
    def is_plain(self) -> bool:
        """Whether every ok sample may be taken, by its given class: the catalogue has counted those."""
        return self.labels is None and len(self.excluded) == 0


def allocate(
    class_counts: npt.ArrayLike,
    *,
    per_class: int | None = None,
    total: int | None = None,
    on_shortage: OnShortage = "error",
    names: Sequence[str] = (),
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
    asked = per_class if per_class is not None else total
    if asked is None or asked < 0 or len(counts) == 0:
        raise PencilError(f"{asked} samples of {len(counts)} classes: expected at least 0 samples, 1 class")
    quotas = np.full(len(counts), asked, dtype=np.int64)
    if total is not None:
        quotas = total // len(counts) + (np.arange(len(counts)) < total % len(counts)).astype(np.int64)
    short = np.flatnonzero(counts < quotas).tolist()
    if short and on_shortage == "error":
        called = {c: f"class {c} ({names[c]})" if c < len(names) else f"class {c}" for c in short[:10]}
        listed = ", ".join(f"{name} has {counts[c]:,} of {quotas[c]:,}" for c, name in called.items())
        more = f" and {len(short) - 10} more" if len(short) > 10 else ""
        raise PencilError(
            f"too few samples: {listed}{more}; ask for fewer, or set subset.on_shortage: take_all"
        )
    return np.minimum(quotas, counts)


def seeded_order(sample_keys: npt.NDArray[np.uint64], seed: int) -> Places:
    """Give every key its place in the order of a seed."""
    return splitmix64(sample_keys.astype(np.uint64) + np.uint64((seed + 1) * GOLDEN % 2**64))


def pick(
    sample_keys: npt.NDArray[np.uint64], classes: npt.NDArray[np.integer], quotas: Counts, seed: int
) -> npt.NDArray[np.int64]:
    """Take each class's first samples in the seeded order; returns their positions, rising.

    Rows with a class below 0 (unlabelled) are never taken.
    """
    places = seeded_order(sample_keys, seed)
    order = np.lexsort((sample_keys, places, classes))
    sorted_classes = np.asarray(classes)[order]
    starts = np.searchsorted(sorted_classes, np.arange(len(quotas)))
    known = (sorted_classes >= 0) & (sorted_classes < len(quotas))
    order, sorted_classes = order[known], sorted_classes[known]
    rank = np.flatnonzero(known) - starts[sorted_classes]
    return np.sort(order[rank < quotas[sorted_classes]])


def row_ranges(rule: Rule) -> list[range]:
    """Cut the rows into ranges of complete label parts; rows after the last part have no label yet."""
    if rule.labels is None:
        num_rows, step = rule.catalogue.num_rows, RANGE_ROWS
    else:
        layout = rule.labels.layout
        num_rows = min(layout.num_rows, rule.catalogue.num_rows)
        step = max(1, RANGE_ROWS // layout.part_rows) * layout.part_rows
    return [range(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


def count(rule: Rule, rows: range) -> Counts:
    """Count the samples of each class that may be taken."""
    columns = ["status", "noisy_class", *(["sample_key"] if len(rule.excluded) else [])]
    classes = _classes(rule, rows, rule.catalogue.read(rows.start, rows.stop, columns))
    return np.bincount(classes[classes >= 0], minlength=rule.catalogue.num_classes)


def place_limits(quotas: Counts, counts: Counts) -> Places:
    """How far into the seeded order a class must be searched to find its quota, almost surely.

    Places are practically uniform, so a share p of the order has about p * count samples, plus or minus the
    square root. The caller counts what was found, and searches without limits if a class has too few.
    """
    asked = quotas + SLACK * np.sqrt(quotas) + SLACK**2
    shares = np.minimum(asked / np.maximum(counts, 1), 1.0)
    return np.array([min(int(share * 2.0**64), LAST_PLACE) for share in shares], np.uint64)


def no_limits(num_classes: int) -> Places:
    """Limits that let every sample through."""
    return np.full(num_classes, LAST_PLACE, np.uint64)


def candidates(rule: Rule, rows: range, quotas: Counts, limits: Places) -> pa.Table:
    """Pick each class's first samples in a range, among those whose place is within their class's limit."""
    table = rule.catalogue.read(rows.start, rows.stop, ["row", "status", "noisy_class", "sample_key"])
    classes = _classes(rule, rows, table)
    places = seeded_order(_first_bits(table["sample_key"]), rule.seed)
    near = np.flatnonzero((classes >= 0) & (places <= limits[np.maximum(classes, 0)]))
    table = table.take(pa.array(near))
    columns = [table["row"], table["sample_key"], pa.array(classes[near].astype(np.int32))]
    return merge_picks([pa.table(columns, schema=MEMBERS)], quotas, rule.seed)


def merge_picks(picks: Sequence[pa.Table], quotas: Counts, seed: int) -> pa.Table:
    """Pick again from the picks of several ranges; rows come out rising."""
    table = pa.concat_tables([*picks, MEMBERS.empty_table()]).combine_chunks()
    chosen = pick(_first_bits(table["sample_key"]), table["class"].to_numpy(), quotas, seed)
    return table.take(pa.array(chosen)).sort_by("row")


def _first_bits(keys: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """The first 64 bits of 128-bit keys."""
    return np.ascontiguousarray(hashes_of(keys).view("<u8")[::2])


def _classes(rule: Rule, rows: range, table: pa.Table) -> Classes:
    """The class for which each row may be taken; -1 if it may not."""
    classes: Classes = table["noisy_class"].fill_null(UNLABELLED).to_numpy().astype(np.int64)
    allowed = pc.equal(table["status"], "ok").to_numpy()
    if len(rule.excluded):
        allowed &= ~contains(rule.excluded, hashes_of(table["sample_key"]))
    if rule.labels is not None:
        classes, confidence = _decided(rule, rule.labels, rows, classes)
        allowed &= confidence >= rule.min_confidence
    return np.where(allowed, classes, UNLABELLED)


def _decided(
    rule: Rule, labels: Manifest, rows: range, given: Classes
) -> tuple[Classes, npt.NDArray[np.float32]]:
    """The class to use, and the share of the label on it."""
    order = ClassOrder.between(labels.class_names, rule.catalogue.class_names, "subset.labels")
    classes, shares = [], []
    for batch in PublishedLabels(labels).batches(rows):
        own = given[batch.rows.start - rows.start : batch.rows.stop - rows.start]
        found = decide(order.logits(batch.logits), own)
        classes.append(found.corrected_class if rule.corrected else own)
        shares.append(found.confidence if rule.corrected else found.score)
    return np.concatenate(classes), np.concatenate(shares)
