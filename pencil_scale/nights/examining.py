"""Examining: a night's figures, what it changed since the night before, and whether it must be held.

findings = examine(config.nightly, prepared, labels, accuracy=0.93, clean=night.clean)
findings.reasons                  # none: CURRENT may move
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pencil_scale.job_settings import NightlyJob
from pencil_scale.labels.manifest import Manifest
from pencil_scale.nights.crawl import archive_counts
from pencil_scale.nights.guard_rails import Accuracy, Balance, Moves, count_moves, judge
from pencil_scale.nights.preparing import Prepared

MOVES_TOLD = 3


@dataclass(frozen=True)
class Findings:
    """What a night came to."""

    figures: Mapping[str, float]
    reasons: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # what changed, in words


def examine(
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
    counts = shard_counts(prepared) | {
        "new_samples": crawl.num_new,
        "regiven_samples": crawl.num_regiven,
        "vanished_samples": crawl.num_vanished,
        "returned_samples": crawl.num_returned,
    }
    known = {} if accuracy is None else {"clean_accuracy": accuracy}
    return Findings(
        {**counts, **moves.figures(), **known},
        judge(limits, moves, balance, Accuracy(before, accuracy)),
        _told(counts, moves, names) | _accuracy_told(accuracy, before, comparable),
    )


def shard_counts(prepared: Prepared) -> dict[str, int]:
    """How many shards came, changed and went between two versions of the catalogue."""
    before = {entry.url: entry for entry in prepared.before.shards if entry.state == "indexed"}
    after = {entry.url: entry for entry in prepared.catalogue.shards if entry.state == "indexed"}
    both = before.keys() & after.keys()
    return {
        "new_shards": len(after.keys() - before.keys()),
        "changed_shards": sum(before[url].version != after[url].version for url in both),
        "vanished_shards": len(before.keys() - after.keys()),
    }


def _told(counts: Mapping[str, int], moves: Moves, names: Sequence[str]) -> dict[str, str]:
    shards = [f"{counts[f'{what}_shards']:,} {what}" for what in ("new", "changed", "vanished")]
    samples = [f"{counts[f'{what}_samples']:,} {what}" for what in ("new", "regiven", "vanished")]
    told = {"shards": ", ".join(shards), "samples": ", ".join(samples)}
    told["new labels repaired"] = f"{moves.new_repaired.num:,} of {moves.new_repaired.of:,} trained on"
    told["old labels changed"] = f"{moves.old_changed.num:,} of {moves.old_changed.of:,} trained on again"
    for (was, now), num in list(moves.between.items())[:MOVES_TOLD]:
        told[f"  {names[was]} -> {names[now]}"] = f"{num:,}"
    return told


def _accuracy_told(accuracy: float | None, before: float | None, comparable: bool) -> dict[str, str]:
    if accuracy is None:
        return {"clean accuracy": "not known: no validation or test shards"}
    if before is not None:
        return {"clean accuracy": f"{accuracy:.4f}, {before:.4f} the night before"}
    why = "" if comparable else ", not compared: the classes or the clean set are others now"
    return {"clean accuracy": f"{accuracy:.4f}{why}"}
