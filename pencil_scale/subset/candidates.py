"""Subset candidates: which samples of a stretch of the catalogue a subset may take, and the first of them.

A stretch is looked at alone, in any process: its counts add up, and its picks are merged by picking again.

    for rows in stretches(rule):
        counts += count(rule, rows)
    limits = place_limits(quotas, counts)
    picked = merge_picks([candidates(rule, rows, quotas, limits) for rows in stretches(rule)], quotas, seed)

The classes are those given, or, from published labels, those decided. A limit on the places in the seeded
order lets through just over what a class needs, so that 100 million rows send no more than the subset back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import ClassOrder
from pencil_scale.catalogue.duplicates import Keys, contains
from pencil_scale.catalogue.update import hashes_of
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.method.decisions import UNLABELLED, decide
from pencil_scale.subset.choice import Counts, pick, seeded_order
from pencil_scale.subset.files import MEMBERS

STRETCH_ROWS = 1 << 18
SLACK = 8.0  # standard deviations: fewer candidates than needed about once in 10**15 draws
LAST_PLACE = 2**64 - 1
NO_KEYS: Keys = np.empty(0, "S16")
Classes = npt.NDArray[np.int64]
Places = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Rule:
    """Who may be a member, and of which class."""

    catalogue: Catalogue
    seed: int
    labels: Manifest | None = None  # over the catalogue's classes, in whatever order
    corrected: bool = False
    min_confidence: float = 0.0
    excluded: Keys = field(default_factory=lambda: NO_KEYS)

    @property
    def is_plain(self) -> bool:
        """Whether every ok sample may be taken, by its given class: the catalogue has counted those."""
        return self.labels is None and len(self.excluded) == 0


def stretches(rule: Rule) -> list[range]:
    """Cut the rows into stretches of whole label parts; rows behind the labels' last have no label yet."""
    if rule.labels is None:
        num_rows, step = rule.catalogue.num_rows, STRETCH_ROWS
    else:
        layout = rule.labels.layout
        num_rows = min(layout.num_rows, rule.catalogue.num_rows)
        step = max(1, STRETCH_ROWS // layout.part_rows) * layout.part_rows
    return [range(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


def count(rule: Rule, rows: range) -> Counts:
    """Count the samples of each class that may be taken."""
    columns = ["status", "noisy_class", *(["sample_key"] if len(rule.excluded) else [])]
    classes = _classes(rule, rows, rule.catalogue.read(rows.start, rows.stop, columns))
    return np.bincount(classes[classes >= 0], minlength=rule.catalogue.num_classes)


def candidates(rule: Rule, rows: range, quotas: Counts, limits: Places) -> pa.Table:
    """Pick each class's first samples of a stretch, among those whose place is below their class's limit."""
    table = rule.catalogue.read(rows.start, rows.stop, ["row", "status", "noisy_class", "sample_key"])
    classes = _classes(rule, rows, table)
    places = seeded_order(first_bits(table["sample_key"]), rule.seed)
    near = np.flatnonzero((classes >= 0) & (places <= limits[np.maximum(classes, 0)]))
    members = members_table(table.take(pa.array(near)), classes[near])
    return merge_picks([members], quotas, rule.seed)


def merge_picks(picks: Sequence[pa.Table], quotas: Counts, seed: int) -> pa.Table:
    """Pick again from what several stretches picked; rows come out rising."""
    table = pa.concat_tables([*picks, MEMBERS.empty_table()]).combine_chunks()
    chosen = pick(first_bits(table["sample_key"]), table["class"].to_numpy(), quotas, seed)
    return table.take(pa.array(chosen)).sort_by("row")


def place_limits(quotas: Counts, counts: Counts) -> Places:
    """How far into the seeded order a class must be looked at to find its quota, almost surely.

    Places are as good as uniform, so a share p of the order holds about p * count samples, give or take the
    square root. Whoever uses this counts what came, and looks again without limits if a class fell short.
    """
    asked = quotas + SLACK * np.sqrt(quotas) + SLACK**2
    shares = np.minimum(asked / np.maximum(counts, 1), 1.0)
    return np.array([min(int(share * 2.0**64), LAST_PLACE) for share in shares], np.uint64)


def no_limits(num_classes: int) -> Places:
    """Let everybody through."""
    return np.full(num_classes, LAST_PLACE, np.uint64)


def first_bits(keys: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """The first 64 bits of 128-bit keys."""
    return np.ascontiguousarray(hashes_of(keys).view("<u8")[::2])


def members_table(rows: pa.Table, classes: Classes) -> pa.Table:
    """Rows of the catalogue as members of a subset."""
    return pa.table([rows["row"], rows["sample_key"], pa.array(classes.astype(np.int32))], schema=MEMBERS)


def _classes(rule: Rule, rows: range, table: pa.Table) -> Classes:
    """The class each row may be taken for; -1 where it may not."""
    classes: Classes = table["noisy_class"].fill_null(UNLABELLED).to_numpy().astype(np.int64)
    allowed = pc.equal(table["status"], "ok").to_numpy()
    if len(rule.excluded):
        allowed &= ~contains(rule.excluded, hashes_of(table["sample_key"]))
    if rule.labels is not None:
        decided, confidence = _decided(rule, rows, classes)
        classes = decided
        allowed &= confidence >= rule.min_confidence
    return np.where(allowed, classes, UNLABELLED)


def _decided(rule: Rule, rows: range, given: Classes) -> tuple[Classes, npt.NDArray[np.float32]]:
    """The class to go by and the share of the label on it."""
    assert rule.labels is not None
    order = ClassOrder.between(rule.labels.class_names, rule.catalogue.class_names, "subset.labels")
    classes, shares = [], []
    for labels in PublishedLabels(rule.labels).batches(rows):
        here = given[labels.rows.start - rows.start : labels.rows.stop - rows.start]
        found = decide(order.logits(labels.logits), here)
        classes.append(found.corrected_class if rule.corrected else here)
        shares.append(found.confidence if rule.corrected else found.score)
    return np.concatenate(classes), np.concatenate(shares)
