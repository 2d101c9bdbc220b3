"""Guard rails: what a night did to the labels, and whether it must be held for a person to review.

    findings = check_night(config.nightly, prepared, labels, accuracy=0.93, clean=night.clean)
    findings.reasons                                             # none: CURRENT may move

Changes are counted only in the parts of the label table that the night wrote. Old rows that were trained on
again are a fair sample of the archive, so new samples are compared with them.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pencil_scale.config.settings import NightlyJob
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import LabelRows, PublishedLabels
from pencil_scale.labels.report import Share
from pencil_scale.method.decisions import decide
from pencil_scale.nights.crawl import archive_counts
from pencil_scale.nights.prepare import Prepared

SURELY = 3.0  # standard deviations that chance is allowed
SHOWN = 3  # classes in a reason, and changes from class to class in the summary
NONE = Share(0, 0)
Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Moves:
    """The label changes of the rows that a night trained on, without pinned ones."""

    old_changed: Share = NONE  # old rows whose label differs from that of the night before
    old_repaired: Share = NONE  # old rows whose label differed from the given one the night before
    new_repaired: Share = NONE  # new rows whose label differs from the given one
    between: Mapping[tuple[int, int], int] = field(default_factory=dict)  # old rows, from class to class


@dataclass(frozen=True)
class Balance:
    """Samples per given class, before and tonight; the last count is of those without a usable label."""

    class_names: Sequence[str]
    before: Int64s  # [C + 1]
    tonight: Int64s  # [C + 1]
    added: frozenset[int] = frozenset()  # classes that are new in the list, with nothing to compare


def count_moves(carried: Manifest, labels: Manifest, rows: Int64s, is_new: Mask) -> Moves:
    """Compare the labels that a night started and ended with, over the rows it trained on."""
    counts: Counter[str] = Counter()
    between: Counter[tuple[int, int]] = Counter()
    parts = (PublishedLabels(manifest).parts_with(rows) for manifest in (carried, labels))
    for before, after in zip(*parts, strict=True):
        some = slice(*np.searchsorted(rows, [after.rows.start, after.rows.stop]).tolist())
        places, new = rows[some] - after.rows.start, is_new[some]
        given, was, free = _decided(before, places)
        _, now, _ = _decided(after, places)
        moved = free & ~new & (was != now)
        counts["old"] += int((free & ~new).sum())
        counts["old changed"] += int(moved.sum())
        counts["old repaired"] += int((free & ~new & (was != given)).sum())
        counts["new"] += int((free & new).sum())
        counts["new repaired"] += int((free & new & (now != given)).sum())
        between.update(zip(was[moved].tolist(), now[moved].tolist(), strict=True))
    return Moves(
        Share(counts["old changed"], counts["old"]),
        Share(counts["old repaired"], counts["old"]),
        Share(counts["new repaired"], counts["new"]),
        dict(between.most_common()),
    )


def _decided(labels: LabelRows, places: Int64s) -> tuple[Int64s, Int64s, Mask]:
    """Of some rows of a part: the given class, the class now, and which are not pinned."""
    given = labels.noisy_class[places].astype(np.int64)
    return given, decide(labels.logits[places], given).corrected_class, ~labels.pinned[places]


def judge(
    limits: NightlyJob, moves: Moves, balance: Balance, before: float | None, tonight: float | None
) -> tuple[str, ...]:
    """The reasons to hold a night; none if it may be used. The last two are accuracies on the clean set."""
    found = []
    limit = limits.max_accuracy_fall
    if before is not None and tonight is not None and before - tonight > limit:
        found.append(
            f"accuracy on the clean set fell from {before:.4f} to {tonight:.4f} "
            f"(nightly.max_accuracy_fall {limit:g})"
        )
    changed, limit = moves.old_changed, limits.max_changed_share
    if changed.num > limit * changed.of + SURELY * math.sqrt(limit * changed.of):
        found.append(
            f"{changed.num:,} of {changed.of:,} old labels changed since the night before, "
            f"{changed.share:.1%} (nightly.max_changed_share {limit:g})"
        )
    new, old, limit = moves.new_repaired, moves.old_repaired, limits.max_repair_jump
    allowed = min(old.share + limit, 1.0) if old.of else 1.0  # without old ones there is nothing to compare
    if new.num > allowed * new.of + SURELY * math.sqrt(allowed * (1 - allowed) * new.of):
        found.append(
            f"{new.share:.1%} of {new.of:,} new labels were repaired, of old ones {old.share:.1%} "
            f"(nightly.max_repair_jump {limit:g})"
        )
    unbalanced = _unbalanced(limits.max_class_ratio, balance)
    return (*found, unbalanced) if unbalanced else tuple(found)


def _unbalanced(limit: float, balance: Balance) -> str:
    """Compare the share of each class with its share before, times or divided by the limit, and chance."""
    num_before, num = int(balance.before.sum()), int(balance.tonight.sum())
    if not num_before or not num:
        return ""
    names = [*balance.class_names, "no usable label"]
    # One more than was seen: a class without samples so far may get one or two.
    expected = (balance.before + 1) / (num_before + len(names)) * num
    odd: list[str] = []
    for number, (mean, found) in enumerate(zip(expected.tolist(), balance.tonight.tolist(), strict=True)):
        most = limit * mean + SURELY * math.sqrt(limit * mean) + 1
        fewest = mean / limit - SURELY * math.sqrt(mean / limit)
        if number not in balance.added and not fewest <= found <= most:
            odd.append(f"{names[number]} {found:,} where about {mean:,.0f} were expected")
    if not odd:
        return ""
    more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
    return f"the class balance jumped: {', '.join(odd[:SHOWN])}{more} (nightly.max_class_ratio {limit:g})"


@dataclass(frozen=True)
class Findings:
    """The figures of a night, why it must be held, and what changed, as text for its summary."""

    figures: Mapping[str, float]
    reasons: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def check_night(
    limits: NightlyJob, prepared: Prepared, labels: Manifest, accuracy: float | None, clean: str
) -> Findings:
    """Compare a night with its parent; `clean` names the set on which accuracy was measured."""
    parent, crawl, mapping = prepared.parent, prepared.crawl, prepared.mapping
    moves = count_moves(prepared.labels, labels, prepared.rows, crawl.is_fresh(prepared.rows))
    comparable = prepared.same_classes and parent.clean == clean
    before = parent.figures.get("clean_accuracy") if comparable else None
    names = tuple(prepared.catalogue.manifest["classes"])
    added = frozenset(number for number, olds in enumerate(mapping) if not olds)
    balance = Balance(names, archive_counts(prepared.before, mapping), crawl.given_counts, added)
    figures: dict[str, float] = {
        **_shard_counts(prepared),
        "new_samples": crawl.num_new,
        "regiven_samples": len(crawl.regiven),
        "vanished_samples": crawl.num_vanished,
        "returned_samples": crawl.num_returned,
        "old_trained": moves.old_changed.of,
        "old_changed": moves.old_changed.num,
        "new_trained": moves.new_repaired.of,
        "new_repaired": moves.new_repaired.num,
    }
    facts = _summary(figures, moves, names)
    if accuracy is None:
        facts["clean accuracy"] = "not known: no validation or test shards"
    else:
        figures["clean_accuracy"] = accuracy
        than = "" if comparable else ", not compared: classes or clean set have changed"
        than = than if before is None else f", {before:.4f} the night before"
        facts["clean accuracy"] = f"{accuracy:.4f}{than}"
    return Findings(figures, judge(limits, moves, balance, before, accuracy), facts)


def _shard_counts(prepared: Prepared) -> dict[str, int]:
    """Count the shards that are new, changed and gone between two versions of the catalogue."""
    before, after = (
        {entry.url: entry.version for entry in catalogue.shards if entry.state == "indexed"}
        for catalogue in (prepared.before, prepared.catalogue)
    )
    return {
        "new_shards": len(after.keys() - before.keys()),
        "changed_shards": sum(before[url] != after[url] for url in before.keys() & after.keys()),
        "vanished_shards": len(before.keys() - after.keys()),
    }


def _summary(figures: Mapping[str, float], moves: Moves, names: Sequence[str]) -> dict[str, str]:
    new, old = moves.new_repaired, moves.old_changed
    shards = [f"{figures[f'{what}_shards']:,} {what}" for what in ("new", "changed", "vanished")]
    samples = [f"{figures[f'{what}_samples']:,} {what}" for what in ("new", "regiven", "vanished")]
    return {
        "shards": ", ".join(shards),
        "samples": ", ".join(samples),
        "new labels repaired": f"{new.num:,} of {new.of:,} trained on",
        "old labels changed": f"{old.num:,} of {old.of:,} trained on again",
        **{f"  {names[a]} -> {names[b]}": f"{num:,}" for (a, b), num in [*moves.between.items()][:SHOWN]},
    }
