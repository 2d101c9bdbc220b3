"""Gate: whether the labels of a run may be published, or have to wait for a person.

A run is held if its network is not clearly better than chance, or got worse while labels moved; if its repair
does not clearly gain more than it loses, or leaves what the surest predictions contradict, or if too few
samples could be set aside to measure it; if a class lost most of its samples; or if the labels got worse
where the truth is known.

    reasons = judge(figures, report, class_names, 0.5, {"test": 10_000}, assessment)
    reasons                            # none: publish

Chance among C classes is 1/C. To be clearly better, a figure has to exceed it by three standard deviations
of guessing on that many samples, and by a margin: half of chance if there are many classes, a twentieth of
the distance from chance to 1 if there are few, whichever is smaller. On many samples 2 classes need more than
0.525, 10 classes 0.145, 100 classes 0.015. Noise limits how often a perfect network agrees with the given
labels: to 0.60 if 40 % of two classes are swapped, to 0.28 if 80 % of ten classes are redrawn. Both pass.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pencil_scale.config.command import program
from pencil_scale.config.settings import Evidence
from pencil_scale.labels.assessment import Assessment
from pencil_scale.labels.report import LabelReport
from pencil_scale.storage.errors import many

SURELY = 3.0  # standard deviations of chance to exceed
SHOWN = 3  # classes named in a reason
LEAST_POWER = 0.2
UNLIKELY = 0.01

Epoch = Mapping[str, Any]  # its figures


def judge(
    figures: Sequence[Epoch],
    report: LabelReport,
    class_names: Sequence[str],
    max_class_loss: float,
    num_clean: Mapping[str, int],
    found: Assessment | None = None,
    evidence: Evidence | None = None,
) -> tuple[str, ...]:
    """Give the reasons why labels must wait for a person; none if they can be published.

    `figures` are those of every epoch up to the published one, `report` describes its labels, `num_clean`
    is the number of samples of the clean sets ("validation", "test"). `found` is what the watched samples
    and the planted errors say. A missing figure is a reason only if `evidence`, the settings, asks
    for it.
    """
    reasons = [
        _guesses(figures, report),
        _guesses_clean(figures[-1], len(class_names), num_clean),
        _shrunken(report, class_names, max_class_loss),
        _declined(figures[-1]),
        _patterned(found),
        _no_gain(found),
        _unsure(found, evidence),
        _unproven(found, report, evidence),
    ]
    given, corrected = report.given_right, report.corrected_right
    if corrected.num < given.num:
        reasons.append(
            f"the labels got worse: of {given.of:,} whose truth is known, {given.num:,} were right as given "
            f"and {corrected.num:,} are right now (data.truth)"
        )
    return tuple(reason for reason in reasons if reason)


def unmeasured(found: Assessment) -> str:
    """Say in one line what could not be measured; nothing if everything was."""
    if found.unmoved:
        num = "the" if found.num_new is None else f"{found.num_new:,}"
        return (
            f"{num} undecided labels are too few to measure what a repair gains: they stay as given until a "
            "later night has more, and decided labels stay as they were"
        )
    if found.noise is None:
        what = "nothing could be measured: too few samples are watched"
    elif found.gain is None and not found.patterned:
        what = "what the repair gains could not be measured: too few errors are planted, or none"
    else:
        return ""
    return f"{what}; review the labels ({program('pipelines.review_report')})"


def needed(num_classes: int, deviation: float) -> float:
    """The figure above which a network is clearly better than chance; see the top of this module."""
    chance = 1 / num_classes
    return chance + max(SURELY * deviation, min(chance / 2, (1 - chance) / 20))


def _guesses(figures: Sequence[Epoch], report: LabelReport) -> str:
    """Judge agreement with the given labels before labels moved, or at the end if no stage came before that.

    Classes without samples are not in the mean, so they do not count for chance either.
    """
    last = ([epoch for epoch in figures if epoch["stage"] == "backbone"] or figures)[-1]
    found = last.get("balanced_agreement")
    counts = report.transitions.sum(1)
    counts = counts[counts > 0]
    if found is None or len(counts) < 2:
        return ""
    chance = 1 / len(counts)
    deviation = math.sqrt(chance * (1 - chance) * float((1 / counts).sum())) / len(counts)
    what = f"after the last {last['stage']} epoch its mean agreement with the given classes is"
    return _at_chance(what, found, len(counts), deviation)


def _guesses_clean(last: Epoch, num_classes: int, num_clean: Mapping[str, int]) -> str:
    known = [name for name in ("validation", "test") if f"{name}_accuracy" in last]
    if not known:
        return ""
    name, chance = known[0], 1 / num_classes
    deviation = math.sqrt(chance * (1 - chance) / max(num_clean[name], 1))
    what = f"its accuracy on the {name} set is"
    return _at_chance(what, last[f"{name}_accuracy"], num_classes, deviation)


def _at_chance(what: str, found: float, num_classes: int, deviation: float) -> str:
    least = needed(num_classes, deviation)
    if found > least:  # not true of NaN
        return ""
    return (
        f"the network is not clearly better than chance: {what} {found:.3f}; more than {least:.3f} was "
        f"expected among {num_classes} classes"
    )


def _no_gain(found: Assessment | None) -> str:
    """Doubt a repair that is not clearly a gain, and one by a network that could not have found errors.

    Errors that follow a pattern make a network look weak, so they are the reason then.
    """
    if found is None or found.gain is None or found.power is None or found.patterned:
        return ""
    gain, power = found.gain, found.power
    measured = f"{gain.found:.0%} of {gain.num_planted:,} deliberate errors were found"
    if gain.changed == 0:
        if power >= LEAST_POWER:
            return ""  # there was nothing to repair, as far as random errors go
        return (
            f"no label changed, and the network is too weak to find wrong ones: it would find {power:.0%} of "
            f"deliberate errors if 10 % of the labels were wrong"
        )
    if gain.low > 0:
        return ""
    return (
        f"the repair is not clearly a gain: it changed {gain.changed:.1%} of the labels, and the share of "
        f"right labels is estimated to change by {gain.gain:+.1%} ({gain.low:+.1%} to {gain.high:+.1%}); "
        f"{measured}"
    )


def _unsure(found: Assessment | None, evidence: Evidence | None) -> str:
    """Doubt a repair of labels of which hardly any are surely wrong."""
    if found is None or found.noise is None or not found.unsure:
        return ""
    noise = found.noise
    ways = "a better network or more samples"
    if not noise.crossed_until:
        ways += " or a higher evidence.watched"
    if evidence is not None and evidence.clean is None:
        ways += " or a clean set (evidence.clean)"
    return (
        f"it is too uncertain how many labels are wrong at random: probably {noise.wrong:.0%}, but it may be "
        f"{noise.wrong_low:.0%} to {noise.wrong_high:.0%}, as a weak network and wrong labels look alike; "
        f"{ways} would tell"
    )


def _unproven(found: Assessment | None, report: LabelReport, evidence: Evidence | None) -> str:
    """Doubt changes that nothing was measured of, unless that is switched off or most of the truth is known.

    A night that is too small to measure anything changes nothing.
    """
    if found is None or found.unmoved or found.patterned or evidence is None or not report.num_corrected:
        return ""
    if 2 * report.given_right.of > report.num_rows:
        return ""
    changed = f"{many(report.num_corrected, 'label')} changed, and nothing shows that this is a gain"
    if found.labels.noise is None and evidence.watched != 0:
        return f"{changed}: the dataset has too few samples to watch some"
    is_first = found.labels.first_epoch == 1  # and not a night
    if found.gain is not None or not is_first or evidence.watched == 0:
        return ""
    if evidence.planted == 0:
        return f"{changed}: no errors are planted (evidence.planted is 0; leave it out)"
    return f"{changed}: the dataset has too few samples to plant errors in"


def _patterned(found: Assessment | None) -> str:
    """Doubt a network whose surest predictions contradict more labels than random errors explain."""
    if found is None or found.noise is None or not found.patterned:
        return ""
    num, of = found.contradicted
    return (
        f"the network contradicts {num / of:.0%} of the watched labels where it is surest, and random errors "
        f"explain at most {found.noise.wrong_high:.0%}: either classes are mixed up systematically, or the "
        "network is sure of its own mistakes; these cannot be told apart without looking"
    )


def _declined(last: Epoch) -> str:
    """Doubt a network that agrees less with the labels of watched samples than before labels moved."""
    lost, won = int(last.get("watch_lost", 0)), int(last.get("watch_won", 0))
    if chance_of(lost, lost + won) > UNLIKELY:
        return ""
    return (
        f"the network got worse while labels moved: of the watched samples that judge, {lost:,} agreed with "
        f"their given label only before, {won:,} only after; use a lower stages.pencil.lambda"
    )


def chance_of(num: int, of: int) -> float:
    """The chance that a fair coin shows at least this many heads (McNemar's exact test, one-sided)."""
    ways, total = math.comb(of, num), 0
    for heads in range(num, of + 1):
        total += ways
        ways = ways * (of - heads) // (heads + 1)
    return total / (1 << of)


def unready(agreements: Sequence[float], num: int, num_classes: int, may_rise: bool = True) -> str:
    """Say why labels must not start to move after these epochs; nothing if they may.

    `agreements` are with the given labels of `num` watched samples. A network that still learns is not ready,
    unless it has taken as long as it may.
    """
    chance, found = 1 / num_classes, max(agreements)
    if found <= (least := needed(num_classes, math.sqrt(chance * (1 - chance) / max(num, 1)))):
        return (
            f"the network is not clearly better than chance: it agrees with {found:.3f} of the watched "
            f"labels, and with {num_classes} classes more than {least:.3f} is needed; the pencil stage was "
            "left out, and any change rests on the network's predictions alone"
        )
    if may_rise or not still_rises(agreements, num, num_classes):
        return ""
    was = max(agreements[: -_late(agreements)])
    return (
        "the network was still learning when labels were about to move: agreement with the watched labels "
        f"rose from {was:.3f} to {found:.3f} in the last epochs; the pencil stage was left out, and any "
        "change rests on the network's predictions alone; set a higher stages.backbone.epochs or rate, or "
        "leave stages.backbone.epochs out: an automatic stage continues until the network stops improving"
    )


def still_rises(agreements: Sequence[float], num: int, num_classes: int) -> bool:
    """Whether the last third of the epochs is clearly better than those before."""
    late = _late(agreements)
    if late == len(agreements):
        return False
    was, now = max(agreements[:-late]), max(agreements[-late:])
    error = math.sqrt((was * (1 - was) + now * (1 - now)) / max(num, 1))
    return now - was > max(2 * error, (now - 1 / num_classes) / 10)


def _late(agreements: Sequence[float]) -> int:
    return max(1, len(agreements) // 3)


def _shrunken(report: LabelReport, class_names: Sequence[str], limit: float) -> str:
    """Name the classes that lost more than the limit, allowing for chance in small classes."""
    before, after = report.transitions.sum(1), report.transitions.sum(0)
    allowed = limit * before + SURELY * np.sqrt(limit * (1 - limit) * before)
    lost = np.flatnonzero(before - after > allowed).tolist()
    if not lost:
        return ""
    named = [f"{class_names[number]} {before[number]:,} -> {after[number]:,}" for number in lost[:SHOWN]]
    more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    what = f"classes lost most of their samples: {', '.join(named)}{more}"
    return f"{what} (stages.pencil.max_class_loss {limit:g})"
