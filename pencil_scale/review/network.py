"""How good the network is, and what it says about the labels: the figures at the top of the review page.

facts = network_facts(known, num_classes=10)            # `known`: figures of the last epoch, and summary.json
notes = network_notes(known, "demo", held_because=())   # what a person must know before using the labels
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from pencil_scale.labels.report import worse
from pencil_scale.labels.run_record import ways_on

GAIN = "gain of the repair"


class Fact(NamedTuple):
    """A figure with its name and what it means."""

    name: str
    value: str
    detail: str


def network_facts(known: Mapping[str, Any], num_classes: int) -> list[Fact]:
    """Say how good the network is, next to chance, and what the run estimated, as far as it is known."""
    facts = [
        Fact(f"accuracy on the {name} set", _percent(known[key]), "of the network, on clean labels")
        for name in ("test", "validation")
        if _is_number(known, key := f"{name}_accuracy")
    ]
    if not facts:
        detail = "no clean labels: give some with data.validation or data.test"
        facts = [Fact("accuracy", "unknown", detail)]
    if _is_number(known, "watch_agreement"):
        detail = "with the given labels of watched samples, which the network was not trained on"
        facts.append(Fact("agreement on watched samples", _percent(known["watch_agreement"]), detail))
    if _is_number(known, "balanced_agreement"):
        detail = (
            "with the labels it was trained on, planted errors included, mean over the classes; it may have "
            "memorised wrong ones"
        )
        facts.append(Fact("training agreement", _percent(known["balanced_agreement"]), detail))
    facts.append(
        Fact("chance level", _percent(1 / num_classes), f"of guessing among {num_classes:,} classes")
    )
    if _is_number(known, "wrong_labels"):
        detail = _interval(known, "wrong_labels", "{:,.0f}", 1)
        detail = f"estimated{detail}; errors that follow a pattern are not counted"
        facts.append(Fact("labels wrong at random", f"≈ {known['wrong_labels']:,.0f}", detail))
    if _is_number(known, "proven_wrong"):
        detail = "the clean set shows it (evidence.clean), whatever pattern the errors follow"
        facts.append(Fact("labels proven wrong", f"≥ {known['proven_wrong']:,.0f}", detail))
    if _is_number(known, "gain"):
        detail = _interval(known, "gain", "{:+.1f} %", 100)
        detail = f"of all labels, put right minus spoiled; estimated{detail}"
        if _is_number(known, "gain_true"):
            detail += f"; by the true classes {100 * known['gain_true']:+.1f} %"
        facts.append(Fact(GAIN, f"{100 * known['gain']:+.1f} %", detail))
    return facts


def network_notes(known: Mapping[str, Any], name: str, held_because: Sequence[str]) -> list[str]:
    """Warn of labels that are held, and say what to do; and of labels that were promoted or got worse."""
    what = "These labels are held" if held_because else "The run found reasons to hold these labels"
    reasons = held_because or known.get("held_because") or ()
    found = [f"{what}: {'; '.join(reasons)}."] if reasons else []
    found += ways_on(name, known.get("corrected")) if held_because else []
    warnings = known.get("warnings") or {}
    if missing := warnings.get("evidence"):
        found.append(f"{missing[:1].upper()}{missing[1:].partition('; ')[0]}.")
    if gate := warnings.get("gate"):  # of a run with gate.hold=false
        found.append(f"These labels would have been held (gate.hold=false): {gate}.")
    return [*found, *(f"{text}." for text in [worse(known)] if text)]


def _is_number(known: Mapping[str, Any], key: str) -> bool:
    value = known.get(key)
    return isinstance(value, int | float) and isfinite(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(known: Mapping[str, Any], key: str, form: str, factor: int) -> str:
    ends = [f"{key}_low", f"{key}_high"]
    if not all(_is_number(known, end) for end in ends):
        return ""
    low, high = (form.format(factor * known[end]) for end in ends)
    return f", 90 % interval {low} to {high}"
