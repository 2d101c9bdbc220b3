"""Review scan: one pass over the labels that counts all of them, and keeps the few samples worth a look.

Any stretch of rows can be scanned alone, by any process, and the results of two scans can be added up.

    tally = merged([scan(source, rules, rows) for rows in stretches(source)], rules)
    tally.counts["changed"], tally.transitions, tally.listed, tally.drawn

Two rankings alternate. The first is by doubt: the lowest label score, whether the label was changed or kept.
The second shows every transition (given class -> suggested class), kept labels included, with a share that
grows with the square root of its size. Within a change, doubtful and certain labels alternate: smallest
margin, largest margin, second smallest, and so on. A person's decision matters most for the doubtful ones;
the certain ones show whether the method can be trusted. Kept labels are in the order of their scores.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.class_names import ClassOrder
from pencil_scale.export.rows import Source, export_tables
from pencil_scale.export.table import JUDGED, PERSON, SCHEMA
from pencil_scale.labels.published import Published, PublishedLabels
from pencil_scale.method.decisions import UNLABELLED
from pencil_scale.review.audit import draw

SCORE_BINS, TRUTH_BINS = 20, 10
SAMPLES = SCHEMA.append(pa.field("before", pa.int64()))  # as exported, and the class to compare with
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


def pick(
    given: Int64s, suggested: Int64s, score: Float32s, margin: Float32s, size: Int64s, listed: int
) -> Int64s:
    """Take the first labels of both rankings in turn; at least half of them are the most doubtful of all.

    Picks of stretches can be merged by picking again from their union, with the sizes in all rows.
    """
    rankings = np.argsort(score, kind="stable"), by_transition(given, suggested, score, margin, size)
    by_doubt, by_size = (np.argsort(ranking, kind="stable") for ranking in rankings)
    return np.argsort(np.minimum(2 * by_doubt, 2 * by_size + 1), kind="stable")[:listed]


def by_transition(
    given: Int64s, suggested: Int64s, score: Float32s, margin: Float32s, size: Int64s
) -> Int64s:
    """Rank labels by their turn in their transition; `size` is the number of labels in each one's."""
    cell, changed = given << 32 | suggested, given != suggested
    order = np.lexsort((np.where(changed, margin, score), cell))
    starts = np.flatnonzero(np.r_[True, np.diff(cell[order]) != 0])[: len(cell)]
    sizes = np.diff(np.r_[starts, len(cell)])
    from_low = np.arange(len(cell)) - np.repeat(starts, sizes)
    from_high = np.repeat(sizes, sizes) - 1 - from_low
    turn = np.empty(len(cell), np.int64)  # the rank of each sample within its transition, from 0
    turn[order] = np.where(changed[order], np.minimum(2 * from_low, 2 * from_high + 1), from_low)
    worth = (turn + 1) / np.sqrt(size)
    return np.lexsort((-size, worth))


class Rules(NamedTuple):
    """What to keep of a scan."""

    listed: int
    audit: int
    seed: int
    since: Published | None = None


class Cells(NamedTuple):
    """How many labels went from one class to another, for the pairs that occur."""

    first: Int64s
    second: Int64s
    num: Int64s

    @staticmethod
    def of(first: Int64s, second: Int64s, num: Int64s | None = None) -> "Cells":
        """Count pairs, or add up counts of pairs."""
        pairs, where = np.unique(first << 32 | second, return_inverse=True)
        total = np.bincount(where, num, len(pairs)).astype(np.int64)
        return Cells(pairs >> 32, pairs & 0xFFFFFFFF, total)


@dataclass(frozen=True)
class Tally:
    """The results of a scan."""

    counts: Counter[str]
    transitions: Cells  # given -> corrected, including unchanged labels
    moves: Cells  # corrected class before -> now, where it differs
    scores: Int64s  # [2, SCORE_BINS], label scores of unchanged and changed labels
    learned: Cells  # given -> corrected, without pinned labels
    listed: pa.Table
    drawn: pa.Table  # for the audit: the changed labels, then the unchanged ones
    reliability: npt.NDArray[np.float64]  # [3, TRUTH_BINS], by confidence: labels of known truth, sum, right
    added: pa.Table = field(
        default_factory=SAMPLES.empty_table
    )  # shown besides the listed: see review.similar


def scan(source: Source, rules: Rules, rows: range) -> Tally:
    """Scan some rows of an export."""
    return merged([_of_table(table, rules, true) for table, true in _tables(source, rules, rows)], rules)


def gather(source: Source, rules: Rules, rows: range, wanted: Int64s) -> pa.Table:
    """Read the wanted ones among some rows, as a scan would list them; pinned ones are left out."""
    found = [SAMPLES.empty_table()]
    for table, true in _tables(source, rules, rows):
        here = np.isin(table["row"].to_numpy(), wanted)
        found.append(_of_table(table.filter(pa.array(here)), rules, true[here]).listed)
    return pa.concat_tables(found)


def _tables(source: Source, rules: Rules, rows: range) -> Iterator[tuple[pa.Table, Int64s]]:
    """Some rows of an export, with labels to compare with in the column `before`, and the true classes."""
    before = np.full(len(rows), UNLABELLED, np.int64)
    if rules.since is not None:
        manifest, name = rules.since.manifest, f"labels {rules.since.name}"
        for labels in PublishedLabels(manifest).batches(rows):
            found = labels.decide().corrected_class
            before[labels.rows.start - rows.start : labels.rows.stop - rows.start] = found
        before = ClassOrder.between(manifest.class_names, source.words.class_names, name).classes(before)
    true = _numbers(source.catalogue.read(rows.start, rows.stop, ["true_class"])["true_class"])
    for table in export_tables(source, rows):
        places = table["row"].to_numpy() - rows.start
        column = pa.array(before[places], pa.int64(), mask=before[places] == UNLABELLED)
        yield table.append_column("before", column), true[places]


def merged(tallies: Sequence[Tally], rules: Rules) -> Tally:
    """Add up the counts, and choose again among the samples that were chosen."""
    counts: Counter[str] = sum((tally.counts for tally in tallies), Counter())
    listed = pa.concat_tables([SAMPLES.empty_table(), *(tally.listed for tally in tallies)]).combine_chunks()
    drawn = pa.concat_tables([SAMPLES.empty_table(), *(tally.drawn for tally in tallies)]).combine_chunks()
    sizes = _added([tally.learned for tally in tallies])
    given, now = (_numbers(listed[name]) for name in ("given_label", "predicted_label"))
    size = sizes.num[np.searchsorted(sizes.first << 32 | sizes.second, given << 32 | now)]
    score, margin = (listed[name].to_numpy() for name in ("label_score", "margin"))
    picked = pick(given, now, score, margin, size, rules.listed)
    is_changed = pc.not_equal(drawn["given_label"], drawn["predicted_label"])
    strata = [drawn.filter(is_changed), drawn.filter(pc.invert(is_changed))]
    chosen = [some.take(pa.array(draw(some["row"].to_numpy(), rules.seed, rules.audit))) for some in strata]
    return Tally(
        counts,
        _added([tally.transitions for tally in tallies]),
        _added([tally.moves for tally in tallies]),
        sum((tally.scores for tally in tallies), np.zeros((2, SCORE_BINS), np.int64)),
        sizes,
        listed.take(pa.array(picked)),
        pa.concat_tables(chosen),
        sum((tally.reliability for tally in tallies), np.zeros((3, TRUTH_BINS))),
    )


def _of_table(table: pa.Table, rules: Rules, true: Int64s) -> Tally:
    speaker = table["predicted_by"].fill_null("").to_numpy(zero_copy_only=False)
    given, now, before = (_numbers(table[name]) for name in ("given_label", "predicted_label", "before"))
    judged = np.isin(speaker, JUDGED) & (given != UNLABELLED)
    changed, learned = judged & (given != now), judged & (speaker != PERSON)
    moved = judged & (before != UNLABELLED) & (before != now)
    counts = Counter(
        rows=len(table),
        labels=int(judged.sum()),
        changed=int(changed.sum()),
        pinned=int(pc.sum(table["pinned"]).as_py() or 0),
        untouched=int((speaker == "given").sum()),
        moved=int(moved.sum()),
        new=int((judged & (before == UNLABELLED)).sum()) if rules.since is not None else 0,
        flagged=int((moved & changed & (before == given)).sum()),
        cleared=int((moved & ~changed).sum()),
        learned_changed=int((learned & changed).sum()),
        learned_unchanged=int((learned & ~changed).sum()),
    )
    score, shown = table["label_score"].fill_null(0.0).to_numpy(), table.filter(pa.array(learned))
    scores = [np.histogram(score[some], SCORE_BINS, (0.0, 1.0))[0] for some in (judged & ~changed, changed)]
    known = learned & (true != UNLABELLED)
    confidence = table["confidence"].fill_null(0.0).to_numpy()[known]
    weights = (np.ones(len(confidence)), confidence, (now == true)[known])
    return Tally(
        counts,
        Cells.of(given[judged], now[judged]),
        Cells.of(before[moved], now[moved]),
        np.array(scores, np.int64),
        Cells.of(given[learned], now[learned]),
        shown,
        shown,
        np.array([np.histogram(confidence, TRUTH_BINS, (0.0, 1.0), weights=some)[0] for some in weights]),
    )


def _added(cells: Sequence[Cells]) -> Cells:
    return Cells.of(*np.hstack([np.zeros((3, 0), np.int64), *cells]))


def _numbers(column: Any) -> Int64s:
    numbers: Int64s = column.fill_null(UNLABELLED).to_numpy().astype(np.int64)
    return numbers
