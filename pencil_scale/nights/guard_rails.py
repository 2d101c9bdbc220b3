"""Guard rails: what a night did to the labels, and whether it must be held for a person to review.

    findings = check_night(config.nightly, prepared, labels, accuracy=0.93, clean=night.clean)
    findings.reasons                                             # none: CURRENT may move

Rows are decided again if they were trained on or watched. Old ones among them are a fair sample of the
archive, so new samples are compared with them. An old label that changes counts, whichever row it is. Parts
of the label table that the night did not write are read only if it has a new noise model. Each check takes
the limits and the evidence, and returns a reason to hold the night, or an empty text; `judge` lists the
checks.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pencil_scale.config.settings import NightlyJob
from pencil_scale.labels.columns import WATCHED
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.nights.crawl import Crawl, archive_counts
from pencil_scale.nights.start import Prepared

SURELY = 3.0  # standard deviations that chance is allowed
SHOWN = 3  # classes in a reason, and changes from class to class in the summary
FACTS = {  # of figures, in the summary
    "shards": "{new_shards:,} new, {changed_shards:,} changed, {vanished_shards:,} vanished",
    "samples": "{new_samples:,} new, {regiven_samples:,} given another class, {vanished_samples:,} vanished",
    "new labels repaired": "{new_repaired:,} of {new_decided:,} trained on or watched",
    "undecided": "{undecided:,}, as given until a later night decides them",
    "old labels changed": "{old_changed:,} of {old_decided:,} trained on or watched again",
}
Int64s = npt.NDArray[np.int64]
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Evidence:
    """What a night is judged by. The last count per class is of samples without a usable label."""

    figures: Figures
    class_names: Sequence[str]
    archive: npt.NDArray[np.float64]  # [C + 1]: samples per given class before; nan: a class that is new
    tonight: Int64s  # [C + 1]: of the samples that are new or start again
    parent_accuracy: float | None = None  # on the clean set; None if it cannot be compared


@dataclass(frozen=True)
class Findings:
    """The figures of a night, why it must be held, and what changed, as text for its summary."""

    figures: Figures
    reasons: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def count_moves(
    carried: Manifest, labels: Manifest, trained: Int64s, fresh: Int64s
) -> tuple[dict[str, int], Counter[tuple[int, int]]]:
    """Compare the labels that a night started and ended with; `fresh` rows are new, start again, or wait.

    Return the figures, and how many old labels went from one class to another. Pinned rows do not count.
    """
    found = [np.empty((6, 0), np.int64)]
    written = [part for part in labels.parts if labels.parts[part] != carried.parts[part]]
    some = labels.parts if labels.noise != carried.noise else written
    firsts = np.array([labels.layout.rows_of(part).start for part in some], np.int64)
    read = np.concatenate([firsts, trained])
    parts = (PublishedLabels(manifest).parts_with(read) for manifest in (carried, labels))
    for before, after in zip(*parts, strict=True):
        rows = np.arange(after.rows.start, after.rows.stop)
        was, now = (one.decide().corrected_class for one in (before, after))
        again = np.isin(rows, trained) | (after.role == WATCHED)
        columns = [before.noisy_class, was, now, np.isin(rows, fresh), again, after.is_undecided]
        found.append(np.stack(columns)[:, ~before.pinned & (again | (was != now))])
    given, was, now, new, again, undecided = np.concatenate(found, axis=1)
    changed = (new == 0) & (was != now)
    figures = {
        "old_decided": int(((new == 0) & (again == 1)).sum()),
        "old_changed": int(changed.sum()),
        "old_repaired": int(((new == 0) & (again == 1) & (was != given)).sum()),  # before the night
        "new_decided": int(((new == 1) & (again == 1)).sum()),
        "new_repaired": int(((new == 1) & (now != given)).sum()),
        "undecided": int(((new == 1) & (undecided == 1)).sum()),
    }
    return figures, Counter(zip(was[changed].tolist(), now[changed].tolist(), strict=True))


def judge(limits: NightlyJob, evidence: Evidence) -> tuple[str, ...]:
    """The reasons to hold a night; none if it may be used."""
    checks = (_accuracy, _old_labels, _repairs, _class_balance)
    return tuple(reason for check in checks if (reason := check(limits, evidence)))


def _accuracy(limits: NightlyJob, evidence: Evidence) -> str:
    before, tonight = evidence.parent_accuracy, evidence.figures.get("clean_accuracy")
    if before is None or tonight is None or before - tonight <= limits.max_accuracy_fall:
        return ""
    limit = f"nightly.max_accuracy_fall {limits.max_accuracy_fall:g}"
    return f"accuracy on the clean set fell from {before:.4f} to {tonight:.4f} ({limit})"


def _old_labels(limits: NightlyJob, evidence: Evidence) -> str:
    num, of = evidence.figures["old_changed"], max(evidence.figures["old_decided"], 1)
    limit = limits.max_changed_share
    if num <= limit * of + SURELY * math.sqrt(limit * of):
        return ""
    return (
        f"{num:,} of {of:,} old labels changed since the night before, {num / of:.1%} "
        f"(nightly.max_changed_share {limit:g})"
    )


def _repairs(limits: NightlyJob, evidence: Evidence) -> str:
    num, of = evidence.figures["new_repaired"], evidence.figures["new_decided"]
    num_old, limit = evidence.figures["old_decided"], limits.max_repair_jump
    of_old = evidence.figures["old_repaired"] / num_old if num_old else 1.0  # 1: nothing to compare with
    allowed = min(of_old + limit, 1.0)
    if num <= allowed * of + SURELY * math.sqrt(allowed * (1 - allowed) * of):
        return ""
    return (
        f"{num / of:.1%} of {of:,} new labels were repaired, of old ones {of_old:.1%} "
        f"(nightly.max_repair_jump {limit:g})"
    )


def _class_balance(limits: NightlyJob, evidence: Evidence) -> str:
    """Compare the share of each class with its share before, times or divided by the limit, and chance."""
    limit, archive, tonight = limits.max_class_ratio, evidence.archive, evidence.tonight
    # One more than was seen: a class without samples so far may get one or two.
    expected = (archive + 1) / (np.nansum(archive) + len(archive)) * tonight.sum()
    most = limit * expected + SURELY * np.sqrt(limit * expected) + 1
    fewest = expected / limit - SURELY * np.sqrt(expected / limit)
    odd = np.flatnonzero((tonight < fewest) | (tonight > most)).tolist()  # never a class that is new
    if not odd or not np.nansum(archive):
        return ""
    names = [*evidence.class_names, "no usable label"]
    shown = [f"{names[c]} {tonight[c]:,} where about {expected[c]:,.0f} were expected" for c in odd[:SHOWN]]
    more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
    return f"the class balance jumped: {', '.join(shown)}{more} (nightly.max_class_ratio {limit:g})"


def check_night(
    limits: NightlyJob, prepared: Prepared, labels: Manifest, accuracy: float | None, clean: str
) -> Findings:
    """Compare a night with its parent; `clean` names the set on which accuracy was measured."""
    parent, crawl = prepared.parent, prepared.crawl
    moved, between = count_moves(prepared.labels, labels, prepared.rows, prepared.to_decide)
    figures: dict[str, float] = {**_shard_counts(crawl), **crawl.figures, **moved}
    if accuracy is not None:
        figures["clean_accuracy"] = accuracy
    comparable = prepared.same_classes and parent.clean == clean
    before, names = parent.figures.get("clean_accuracy") if comparable else None, crawl.after.class_names
    evidence = Evidence(figures, names, archive_counts(crawl), crawl.given_counts, before)
    than = "" if comparable else ", not compared: classes or clean set have changed"
    than = than if before is None else f", {before:.4f} the night before"
    known = "not known: no validation or test shards" if accuracy is None else f"{accuracy:.4f}{than}"
    facts = {name: text.format_map(figures) for name, text in FACTS.items()}
    facts |= {f"  {names[a]} -> {names[b]}": f"{num:,}" for (a, b), num in between.most_common(SHOWN)}
    facts["clean accuracy"] = known
    return Findings(figures, judge(limits, evidence), facts)


def _shard_counts(crawl: Crawl) -> dict[str, int]:
    """Count the shards that are new, changed and gone since the parent."""
    before, after = (
        {entry.url: entry.version for entry in catalogue.shards if entry.state == "indexed"}
        for catalogue in (crawl.before, crawl.after)
    )
    return {
        "new_shards": len(after.keys() - before.keys()),
        "changed_shards": sum(before[url] != after[url] for url in before.keys() & after.keys()),
        "vanished_shards": len(before.keys() - after.keys()),
    }
