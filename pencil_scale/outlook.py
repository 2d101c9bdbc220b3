"""Says before a run whether its numbers can repair a label at all, and refuses when they cannot.

A user who copies alpha = 0.08 from 14 classes to 400 repairs nothing, and would learn it days later. So the
trainer moves one label by the very step it is about to use, prints what becomes of it, and where nothing
can, names numbers that would.
"""

from dataclasses import replace

from pencil_scale.curves import Steps
from pencil_scale.pencil import LabelOutlook, label_outlook, scale_for_confidence
from pencil_scale.schedule import Schedule
from pencil_scale.schema import PencilError
from pencil_scale.settings import PencilStage

PAPER_SCALE = 10.0
SAFE_PULL = 1.0  # the paper's own on CIFAR-10; the bound of the released form is 2
SAFE_RATE = 0.3


class OutlookError(PencilError):
    """With these numbers no label can change."""


def label_scale(stage: PencilStage, num_classes: int) -> float:
    """The logit a fresh label gives its class."""
    if stage.start_confidence is None:
        return PAPER_SCALE
    if stage.start_confidence <= 1 / num_classes:
        raise OutlookError(
            f"stages.pencil.start_confidence: {stage.start_confidence} is no more than chance among "
            f"{num_classes} classes; give a share such as 0.99"
        )
    return scale_for_confidence(stage.start_confidence, num_classes)


def check_outlook(schedule: Schedule, num_classes: int) -> str:
    """Tell what becomes of a label that the network is 99 % sure is wrong; refuse if none can change."""
    stage = schedule.stages.pencil
    if stage.epochs == 0:
        return "labels: the pencil stage has no epochs; no label moves"
    outlook = _outlook(schedule, num_classes)
    numbers = f"alpha {stage.alpha:g} at {stage.tuned_classes} classes, form '{stage.compatibility}'"
    if outlook.visits is not None:
        warning = "" if outlook.visits <= stage.epochs else "; WARNING: that is more than the stage has"
        return (
            f"labels: a label the network doubts changes after {outlook.visits} of {stage.epochs} visits and "
            f"ends with {outlook.share:.2f} on the new class ({numbers}){warning}"
        )
    why = "it swings to and fro for ever" if outlook.swings else f"the new class stays at {outlook.share:.2f}"
    if stage.allow_fixed_labels:
        return f"labels: WARNING: no label changes with {numbers}: {why} (allowed by allow_fixed_labels)"
    raise OutlookError(
        f"stages.pencil: no label can change with {numbers}: {why}; "
        f"{_advice(schedule, num_classes)}, or set stages.pencil.allow_fixed_labels=true"
    )


def _outlook(schedule: Schedule, num_classes: int) -> LabelOutlook:
    stage = schedule.stages.pencil
    pull = stage.alpha * stage.tuned_classes
    scale = label_scale(stage, num_classes)
    return label_outlook(num_classes, pull, schedule.label_rates(), stage.compatibility, scale=scale)


def _advice(schedule: Schedule, num_classes: int) -> str:
    """Name the smallest change of the config that lets labels change, tried before it is given."""
    stage = schedule.stages.pencil
    form = {"compatibility": "released"}
    alpha = {"alpha": float(f"{SAFE_PULL / stage.tuned_classes:.2g}")}
    lambda_ = {"lambda_": Steps(((0, round(SAFE_RATE * schedule.tuned_batch * stage.tuned_classes)),))}
    for change in (form, alpha, lambda_, form | alpha, alpha | lambda_, form | alpha | lambda_):
        changed = schedule.stages.model_copy(update={"pencil": stage.model_copy(update=change)})
        if _outlook(replace(schedule, stages=changed), num_classes).changes:
            return "try " + " ".join(f"stages.pencil.{_setting(*item)}" for item in change.items())
    return "no small change of alpha, lambda or form helps"


def _setting(name: str, value: object) -> str:
    return f"lambda={value.steps[0][1]}" if isinstance(value, Steps) else f"{name}={value}"
