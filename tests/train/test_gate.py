"""The gate: runs that learned something pass at any noise and class count, all others are held."""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from pencil_scale.config.settings import Evidence
from pencil_scale.labels.assessment import Assessment
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.report import LabelReport, Share
from pencil_scale.method.evidence import Gain, NoiseModel
from pencil_scale.train.gate import chance_of, judge, needed, still_rises, unmeasured, unready

NONE = Share(0, 0)


def report(counts: Sequence[int], after: Sequence[int] | None = None, **right: Share) -> LabelReport:
    """Labels with this many samples of each class as given, and this many at the end."""
    transitions = np.diag(counts)
    for number, remaining in enumerate(after or counts):
        moved = counts[number] - remaining
        transitions[number, number] -= moved
        transitions[number, (number + 1) % len(counts)] += moved
    return LabelReport(transitions, 0.0, right.get("given", NONE), right.get("corrected", NONE))


def epoch(stage: str, **figures: float) -> dict[str, Any]:
    return {"stage": stage, **figures}


def judged(figures: list[dict[str, Any]], labels: LabelReport, **options: Any) -> tuple[str, ...]:
    names = [f"class {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"[: len(labels.transitions)]]
    options = {"max_class_loss": 0.5, "num_clean": {"validation": 1000, "test": 1000}, **options}
    return judge(figures, labels, options.pop("names", names), **options)


def agreeing(agreement: float, num_classes: int, per_class: int = 1000) -> tuple[str, ...]:
    names = [str(number) for number in range(num_classes)]
    figures = [epoch("backbone", balanced_agreement=agreement), epoch("finetune")]
    return judged(figures, report([per_class] * num_classes), names=names)


@pytest.mark.parametrize(("num_classes", "least"), [(2, 0.525), (10, 0.145), (14, 1.5 / 14), (100, 0.015)])
def test_the_figure_needed_on_many_samples(num_classes: int, least: float) -> None:
    assert needed(num_classes, deviation=0.0) == pytest.approx(least)


@pytest.mark.parametrize(
    ("num_classes", "agreement"),
    [
        (2, 0.60),  # 40 % swapped
        (2, 0.55),
        (10, 0.28),  # 80 % symmetric
        (10, 0.19),  # 90 % symmetric
        (14, 0.38),  # six in ten wrong
        (100, 0.10),
        (1000, 0.05),
    ],
)
def test_no_run_is_held_because_of_noise_alone(num_classes: int, agreement: float) -> None:
    assert agreeing(agreement, num_classes) == ()


@pytest.mark.parametrize(("num_classes", "agreement"), [(2, 0.51), (4, 0.25), (10, 0.12), (100, 0.012)])
def test_a_network_at_chance_is_held_whatever_the_number_of_classes(
    num_classes: int, agreement: float
) -> None:
    (reason,) = agreeing(agreement, num_classes)
    assert "not clearly better than chance" in reason
    assert f"among {num_classes} classes" in reason


@pytest.mark.parametrize("num_classes", [2, 3, 10, 100])
@pytest.mark.parametrize("per_class", [5, 20, 100])
def test_a_network_that_guesses_is_held_however_few_samples_it_guesses(
    num_classes: int, per_class: int
) -> None:
    chance = np.random.default_rng(num_classes * per_class)
    guesses = chance.integers(num_classes, size=(200, num_classes, per_class))
    agreements = (guesses == np.arange(num_classes)[:, None]).mean((1, 2))
    held = [bool(agreeing(float(agreement), num_classes, per_class)) for agreement in agreements]
    assert np.mean(held) >= 0.99


def test_rare_classes_widen_what_chance_is_allowed() -> None:
    figures = [epoch("backbone", balanced_agreement=0.4)]
    assert judged(figures, report([500, 500, 500])) == ()
    assert judged(figures, report([1490, 5, 5])) != ()


def test_classes_without_samples_do_not_lower_chance() -> None:
    figures = [epoch("backbone", balanced_agreement=0.51)]
    assert judged(figures, report([500, 500, 0, 0])) != ()  # one of two classes, always


def test_agreement_is_judged_before_labels_move_or_at_the_end_if_they_always_moved() -> None:
    learned, guessed = {"balanced_agreement": 0.6}, {"balanced_agreement": 0.25}
    labels = report([100] * 4)
    before = [epoch("backbone", **guessed), epoch("backbone", **learned), epoch("pencil", **guessed)]
    assert judged(before, labels) == ()
    assert judged([epoch("pencil", **learned), epoch("finetune", **guessed)], labels) != ()


def test_missing_figures_are_not_a_reason() -> None:
    assert judged([epoch("backbone"), epoch("finetune")], report([100] * 4)) == ()


def test_clean_accuracy_is_judged_at_the_end_on_validation_before_test() -> None:
    labels = report([100] * 4)
    (reason,) = judged([epoch("finetune", test_accuracy=0.26)], labels)
    assert "accuracy on the test set is 0.260" in reason
    assert judged([epoch("finetune", test_accuracy=0.26, validation_accuracy=0.9)], labels) == ()
    assert judged([epoch("backbone", test_accuracy=0.26), epoch("finetune", test_accuracy=0.9)], labels) == ()
    few = {"num_clean": {"test": 20}}
    assert judged([epoch("finetune", test_accuracy=0.5)], labels, **few) != ()
    assert judged([epoch("finetune", test_accuracy=0.5)], labels) == ()


def test_a_figure_that_is_not_a_number_is_held() -> None:
    assert judged([epoch("finetune", test_accuracy=float("nan"))], report([100] * 4)) != ()


def test_classes_that_lost_most_of_their_samples_are_named() -> None:
    (reason,) = judged([epoch("finetune")], report([1000, 1000, 1000], after=[100, 1000, 900]))
    assert reason == (
        "classes lost most of their samples: class a 1,000 -> 200 (stages.pencil.max_class_loss 0.5)"
    )


def test_the_limit_comes_from_the_config() -> None:
    labels = report([1000, 1000, 1000], after=[100, 1000, 1000])
    assert judged([epoch("finetune")], labels, max_class_loss=0.95) == ()
    assert judged([epoch("finetune")], labels, max_class_loss=1.0) == ()
    assert judged([epoch("finetune")], report([100, 100], after=[99, 100]), max_class_loss=0.0) != ()


def test_a_class_of_three_may_lose_two_but_a_class_of_thirty_may_not_lose_all() -> None:
    assert judged([epoch("finetune")], report([3, 500, 500], after=[1, 500, 500])) == ()
    assert judged([epoch("finetune")], report([30, 500, 500], after=[0, 500, 500])) != ()


def test_labels_that_got_worse_are_held_and_those_that_stayed_as_good_are_not() -> None:
    for right, is_held in ((69, True), (70, False), (90, False)):
        labels = report([100] * 4, given=Share(70, 100), corrected=Share(right, 100))
        assert bool(judged([epoch("finetune")], labels)) is is_held
    (reason,) = judged([epoch("finetune")], report([100] * 4, given=Share(70, 100), corrected=Share(69, 100)))
    assert "of 100 whose truth is known, 70 were right as given and 69 are right now" in reason


def assessed(gain: float, error: float, changed: float, power: float) -> Assessment:
    found = Gain(gain, gain - error, gain + error, 0.8, 0.7, changed, 300)
    return Assessment(Manifest.empty("store", ("a", "b"), 10.0), gain=found, power=power)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (assessed(0.05, 0.01, changed=0.1, power=0.9), ""),
        (assessed(0.00, 0.01, changed=0.1, power=0.9), "not clearly a gain: it changed 10.0% of the labels"),
        (
            assessed(-0.20, 0.01, changed=0.4, power=0.9),
            r"estimated to change by -20.0% \(-21.0% to -19.0%\)",
        ),
        (assessed(0.00, 0.00, changed=0.0, power=0.9), ""),  # there was nothing to repair
        (assessed(0.00, 0.00, changed=0.0, power=0.1), "too weak to find wrong ones: it would find 10%"),
    ],
)
def test_a_repair_that_is_not_clearly_a_gain_is_held(found: Assessment, reason: str) -> None:
    figures = [epoch("backbone", balanced_agreement=0.9), epoch("finetune")]
    reasons = judged(figures, report([1000, 1000]), found=found)
    assert len(reasons) == bool(reason)
    assert re.search(reason, " ".join(reasons))


def test_a_repair_is_held_if_it_is_unsure_or_errors_follow_a_pattern() -> None:
    noise = NoiseModel(1.0, 0.2, wrong=0.15, wrong_low=0.02, wrong_high=0.25)
    sure = replace(assessed(0.05, 0.01, changed=0.1, power=0.9), noise=noise, contradicted=(100, 200))
    figures = [epoch("backbone", balanced_agreement=0.9), epoch("finetune")]

    def reasons(**what: Any) -> tuple[str, ...]:
        return judged(figures, report([1000, 1000]), found=replace(sure, **what))

    assert reasons() == ()
    assert "probably 15%, but it may be 2% to 25%" in reasons(unsure=True)[0]
    (reason,) = reasons(patterned=True, gain=None)
    assert "contradicts 50% of the watched labels where it is surest" in reason
    assert "random errors explain at most 25%" in reason


def test_a_network_that_got_worse_while_labels_moved_is_held() -> None:
    def ended(lost: int, won: int) -> tuple[str, ...]:
        last = epoch("finetune", balanced_agreement=0.9, watch_lost=lost, watch_won=won)
        return judged([epoch("backbone", balanced_agreement=0.9), last], report([1000, 1000]))

    assert ended(40, 30) == ()
    assert ended(30, 40) == ()
    (reason,) = ended(40, 15)
    assert "40 agreed with their given label only before, 15 only after" in reason


@pytest.mark.parametrize(
    ("num", "of", "chance"), [(0, 0, 1.0), (3, 3, 0.125), (2, 3, 0.5), (5000, 10000, 0.504)]
)
def test_the_chance_of_this_many_heads_is_exact(num: int, of: int, chance: float) -> None:
    assert chance_of(num, of) == pytest.approx(chance, abs=1e-3)


def test_labels_start_to_move_only_if_the_network_is_better_than_chance_and_has_stopped_learning() -> None:
    assert "not clearly better than chance" in unready([0.11, 0.12], 500, 10)
    still_learning = [0.2, 0.3, 0.4, 0.5, 0.6]
    assert "rose from 0.500 to 0.600" in unready(still_learning, 500, 10, may_rise=False)
    assert unready(still_learning, 500, 10) == ""
    assert unready([0.2, 0.4, 0.55, 0.6, 0.58, 0.61], 500, 10, may_rise=False) == ""
    assert not still_rises([0.5], 500, 10)
    assert not still_rises([0.50, 0.55], 100, 10)  # too few samples to tell
    assert still_rises([0.50, 0.55], 10_000, 10)


def test_every_reason_is_given() -> None:
    labels = report([500] * 4, after=[0, 500, 500, 500], given=Share(7, 10), corrected=Share(6, 10))
    figures = [epoch("backbone", balanced_agreement=0.25), epoch("finetune", test_accuracy=0.25)]
    assert len(judged(figures, labels)) == 4


def test_what_could_not_be_measured_is_said_in_one_line() -> None:
    labels, noise = Manifest.empty("memory://store", ("a", "b")), NoiseModel(1.0, 0.1, 0.1, 0.05, 0.2)
    gain = Gain(0.1, 0.05, 0.15, found=0.8, restored=0.7, changed=0.1, num_planted=100)
    assert unmeasured(Assessment(labels, noise, gain, 0.9)) == ""
    assert unmeasured(Assessment(labels)).startswith("nothing could be measured: too few samples are watched")
    assert unmeasured(Assessment(labels, noise)).startswith("what the repair gains could not be measured")


@pytest.mark.parametrize(
    ("evidence", "known", "why"),
    [
        (Evidence(), "nothing", "the dataset has too few samples to watch some"),
        (Evidence(planted=0), "nothing", "the dataset has too few samples to watch some"),
        (Evidence(), "noise", "the dataset has too few samples to plant errors in"),
        (Evidence(planted=0), "noise", "no errors are planted (evidence.planted is 0; leave it out)"),
        (Evidence(watched=0), "nothing", ""),  # as the paper's configs ask for
        (Evidence(), "gain", ""),
    ],
)
def test_changes_are_held_if_they_were_to_be_measured_and_could_not(
    evidence: Evidence, known: str, why: str
) -> None:
    noise = NoiseModel(1.0, 0.1, 0.1, 0.05, 0.2)
    gain = Gain(0.1, 0.05, 0.15, found=0.8, restored=0.7, changed=0.1, num_planted=100)
    labels = Manifest.empty("memory://store", ("a", "b"))
    if known != "nothing":
        labels = replace(labels, noise=asdict(noise))
    found = Assessment(labels, noise if known != "nothing" else None, gain if known == "gain" else None, 0.9)
    figures = [epoch("backbone", balanced_agreement=0.9), epoch("finetune")]
    changed, same = report([100, 100], [80, 100]), report([100, 100])
    reasons = judged(figures, changed, found=found, evidence=evidence)
    assert len(reasons) == bool(why)
    assert all(
        f"20 labels changed, and nothing shows that this is a gain: {why}" in reason for reason in reasons
    )
    assert judged(figures, same, found=found, evidence=evidence) == ()
    right = {"given": Share(150, 200), "corrected": Share(160, 200)}
    assert judged(figures, report([100, 100], [80, 100], **right), found=found, evidence=evidence) == ()
    few = {"given": Share(5, 10), "corrected": Share(6, 10)}
    assert judged(figures, report([100, 100], [80, 100], **few), found=found, evidence=evidence) == reasons
    night = replace(found, labels=replace(labels, first_epoch=9, noise=asdict(noise)))
    assert judged(figures, changed, found=night, evidence=evidence) == ()
