"""Checks before a run whether its settings can repair a label at all, and refuses if they cannot.

A user who copies alpha = 0.08 from 14 classes to 400 repairs nothing, and would find out days later; so would
one whose labels need 10 visits in a stage of 5 epochs. If a label can change at its first or second visit,
one wrong prediction is enough to ruin it. The trainer therefore moves one label with the step it is about to
use, reports when it changes, and if that is never, too late or too soon, proposes settings that work.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from pencil_scale.config.stages import PencilStage
from pencil_scale.config.values import Steps
from pencil_scale.method.automatic import FEWEST_VISITS
from pencil_scale.method.pencil import LabelOutlook, label_outlook
from pencil_scale.method.schedule import Schedule
from pencil_scale.storage.errors import PencilError, many

PAPER_SCALE = 10.0
SAFE_PULL = 1.0  # as in the paper on CIFAR-10; the bound of the released form is 2
RATES = (0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0)  # tried in turn; the paper has 0.3 to 6.7
ENOUGH_EPOCHS = 8


def label_scale(stage: PencilStage, num_classes: int) -> float:
    """The logit K of the given class in a new label, whose share is then e^K / (e^K + c - 1)."""
    confidence = stage.start_confidence
    if confidence is None:
        return PAPER_SCALE
    if confidence <= 1 / num_classes:
        raise PencilError(
            f"stages.pencil.start_confidence: {confidence} is not above chance for {num_classes} classes; "
            "use a share such as 0.99"
        )
    odds = torch.tensor(confidence / (1 - confidence) * (num_classes - 1), dtype=torch.float64)
    return float(odds.log())


def check_outlook(schedule: Schedule) -> str:
    """Report when a label that the network is 99 % sure is wrong changes; refuse if too late or too soon."""
    stage = schedule.stages.pencil
    if stage.epochs == 0:
        return "labels: the pencil stage has no epochs; no label moves"
    if schedule.stages.finetune.move_labels and not schedule.label_rates()[-1]:
        raise PencilError(
            "stages.finetune.move_labels: labels would move on as at the end of the pencil stage, where "
            "stages.pencil.lambda is 0; let it end above 0, or set stages.finetune.move_labels=false"
        )
    outlook = _outlook(schedule)
    numbers = f"alpha {stage.alpha:g} at {stage.tuned_classes} classes, form '{stage.compatibility}'"
    visits, epochs = (many(len(schedule.label_rates()), what) for what in ("visit", "epoch"))
    if _is_good(outlook, schedule):
        return (
            f"labels: a label the network doubts changes after {outlook.visits} of {visits} and ends with "
            f"{outlook.share:.2f} on the new class ({numbers})"
        )
    if not stage.allow_fast_labels and outlook.visits is not None and outlook.visits < FEWEST_VISITS:
        raise PencilError(
            f"stages.pencil: a label changes after {many(outlook.visits, 'visit')} with "
            f"{_spelled({'lambda_': stage.lambda_})}, so one or two wrong predictions are enough to ruin "
            f"it; {_advice(schedule)}, or set stages.pencil.allow_fast_labels=true"
        )
    why = "it oscillates forever" if outlook.swings else f"the new class stays at {outlook.share:.2f}"
    if outlook.visits is not None:
        why = f"it takes {many(outlook.visits, 'visit')}, and labels move in {epochs}"
    if stage.allow_fixed_labels:
        return f"labels: WARNING: no label changes with {numbers}: {why} (allowed by allow_fixed_labels)"
    raise PencilError(
        f"stages.pencil: no label can change with {numbers}: {why}; "
        f"{_advice(schedule)}, or set stages.pencil.allow_fixed_labels=true"
    )


def _is_good(outlook: LabelOutlook, schedule: Schedule) -> bool:
    """Whether a label changes within the stage, and not too soon."""
    stage = schedule.stages.pencil
    fewest = 1 if stage.allow_fast_labels else FEWEST_VISITS
    return outlook.visits is not None and fewest <= outlook.visits <= len(schedule.label_rates())


def _outlook(schedule: Schedule) -> LabelOutlook:
    stage, num_classes = schedule.stages.pencil, schedule.num_classes
    pull, scale = stage.alpha * stage.tuned_classes, label_scale(stage, num_classes)
    return label_outlook(num_classes, pull, schedule.label_rates(), stage.compatibility, scale)


# --- what to try instead -------------------------------------------------------------------------------


def _advice(schedule: Schedule) -> str:
    """Propose the smallest changes of the config that let a label change within the stage.

    Each proposal has been tried. Where a label settles does not depend on lambda, so a form and an alpha that
    let it change are found first; then a higher lambda, or more epochs, lets it get there in time.
    """
    stage = schedule.stages.pencil
    form = {"compatibility": "released"}
    alpha = {"alpha": float(f"{SAFE_PULL / stage.tuned_classes:.2g}")}
    for change in ({}, form, alpha, form | alpha):
        changed = _with(schedule, change)
        outlook = _outlook(changed)
        if _is_good(outlook, changed):
            return f"try {_spelled(change)}"
        epochs = {"epochs": max(ENOUGH_EPOCHS, stage.epochs)}
        both = epochs | _other_lambda(_with(changed, epochs))
        found = [
            _spelled(change | more) for more in (_other_lambda(changed), _longer(changed, outlook)) if more
        ]
        if found or len(both) > 1:
            return f"try {' or '.join(found or [_spelled(change | both)])}"
    return "no small change of alpha, lambda or form helps"


def _other_lambda(schedule: Schedule) -> dict[str, Any]:
    """Find the lowest lambda that changes a label in time; nothing if no lambda does."""
    for rate in RATES:
        lambda_ = round(rate * schedule.optimizer.tuned_batch * schedule.stages.pencil.tuned_classes)
        change = {"lambda_": Steps(((0, lambda_),))}
        outlook = _outlook(_with(schedule, change))
        if _is_good(outlook, schedule):
            return change
        if not outlook.changes:
            break
    return {}


def _longer(schedule: Schedule, outlook: LabelOutlook) -> dict[str, Any]:
    """Find a number of epochs that is enough; more are tried because lambda may fall over the stage."""
    for factor in (1.0, 1.5, 2.0, 3.0):
        change = {"epochs": math.ceil(factor * (outlook.visits or 0))}
        longer = _with(schedule, change)
        if outlook.visits is not None and _is_good(_outlook(longer), longer):
            return change
    return {}


def _with(schedule: Schedule, change: dict[str, Any]) -> Schedule:
    pencil = schedule.stages.pencil.model_copy(update=change)
    return replace(schedule, stages=schedule.stages.model_copy(update={"pencil": pencil}))


def _spelled(change: dict[str, Any]) -> str:
    values = {
        name: value.steps[0][1] if isinstance(value, Steps) and len(value.steps) == 1 else value
        for name, value in change.items()
    }
    return " ".join(f"stages.pencil.{name.rstrip('_')}={value}" for name, value in values.items())
