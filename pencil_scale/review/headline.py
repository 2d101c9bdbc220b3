"""Headline: the few large figures at the top of the review page, and what has to be said beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pencil_scale.export.table import Words
from pencil_scale.review.page import Fact
from pencil_scale.review.scan import Tally
from pencil_scale.review.thumbnails import Thumbnails


def headline(words: Words, tally: Tally, figures: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    """The figures a person wants first; what is not known is left out."""
    counts = tally.counts
    labels, changed = counts["labels"], counts["changed"]
    studied = f"of {counts['rows']:,} samples in the catalogue"
    facts = [
        Fact("labels studied", f"{labels:,}", studied),
        Fact("changed", _percent(changed, labels), f"{changed:,} labels have another class now"),
        *_accuracy(figures[-1] if figures else {}),
        *_largest_flow(words, tally),
    ]
    if counts["pinned"]:
        facts.append(Fact("decided by people", f"{counts['pinned']:,}", "labels are pinned and never move"))
    return tuple(facts)


def notes(tally: Tally, thumbnails: Thumbnails) -> tuple[str, ...]:
    """What a person should know before believing the page."""
    found = []
    if tally.counts["untouched"]:
        found.append(
            f"{tally.counts['untouched']:,} usable samples were not trained on: their labels are as given, "
            "and are not counted here."
        )
    if thumbnails.problems:
        reason = next(iter(thumbnails.problems.values()))
        found.append(f"{len(thumbnails.problems):,} pictures cannot be shown, the first because: {reason}")
    return tuple(found)


def _accuracy(last: Mapping[str, Any]) -> list[Fact]:
    given, corrected = last.get("given_label_accuracy"), last.get("corrected_label_accuracy")
    if given is None or corrected is None:
        return []
    known = f"{int(last['label_accuracy_n']):,}"
    detail = f"{100 * given:.1f} % as given; the truth is known of {known} labels"
    return [Fact("right as repaired", f"{100 * corrected:.1f} %", detail)]


def _largest_flow(words: Words, tally: Tally) -> list[Fact]:
    first, second, num = tally.transitions
    moved = np.flatnonzero(first != second)
    if len(moved) == 0:
        return []
    top = moved[num[moved].argmax()]
    names = f"{words.class_names[first[top]]} → {words.class_names[second[top]]}"
    of_class = num[first == first[top]].sum()
    detail = f"the largest flow: {num[top]:,} labels, {_percent(num[top], of_class)} of their class"
    return [Fact("most often", names, detail)]


def _percent(num: int, of: int) -> str:
    return f"{100 * num / of:.1f} %" if of else "none"
