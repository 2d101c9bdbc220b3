"""PENCIL's mathematics: three losses, and the step that moves a label. Tensors only, no I/O.

    f   = softmax(class_logits)      what the network predicts          [B, C]
    y_d = softmax(label_logits)      the label as learned so far        [B, C]

    L = KL(f || y_d) / c  +  alpha * L_o(y_d, noisy_class)  +  beta * H(f) / c

The compatibility loss L_o keeps a label near the class it was given. Its `printed` form is
-log y_d[noisy_class]. The `released` form, from the authors' code, is -log softmax(y_d)[noisy_class]: its
pull fades as the label moves away, which is what allows labels to be corrected (`label_outlook` computes
when).

Every loss is one float32 value per sample, computed with log-softmax: finite for logits of +-1e4 and beyond.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Form = Literal["released", "printed"]
MANY_CLASSES = 16  # as many numbers as a processor computes at once
LONGEST_OUTLOOK = 20_000  # visits; no training run is longer
SURE = 0.99


def initial_logits(noisy_class: Tensor, num_classes: int, scale: float = 10.0) -> Tensor:
    """Start every label near one-hot on its given class: logits of `scale` there, 0 elsewhere."""
    return functional.one_hot(noisy_class.long(), num_classes).float() * scale


def log_softmax(logits: Tensor) -> Tensor:
    """The logarithms of the probabilities of all classes.   [B, C]

    PyTorch's own is slow on a CPU if the classes are fewer than the numbers that are computed at once.
    """
    if logits.is_cuda or logits.shape[-1] >= MANY_CLASSES:
        return logits.log_softmax(-1)
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def classification_loss(class_logits: Tensor, label_logits: Tensor) -> Tensor:
    """KL(f || y_d) / c, in this order: KL(y_d || f) corrects labels badly.   [B]"""
    log_f = log_softmax(_full(class_logits))
    log_y = log_softmax(_full(label_logits))
    return (log_f.exp() * (log_f - log_y)).mean(-1)


def compatibility_loss(label_logits: Tensor, noisy_class: Tensor, form: Form = "released") -> Tensor:
    """How far the label has moved from its given class.   [B]"""
    return _compatibility(log_softmax(_full(label_logits)), noisy_class, form)


def _compatibility(log_y: Tensor, noisy_class: Tensor, form: Form) -> Tensor:
    _require_known(form)
    if form == "released":
        log_y = log_softmax(log_y.exp())
    return -log_y.gather(-1, noisy_class.long().unsqueeze(-1)).squeeze(-1)


def entropy_loss(class_logits: Tensor) -> Tensor:
    """H(f) / c: pushes the network towards confident predictions.   [B]"""
    log_f = log_softmax(_full(class_logits))
    return -(log_f.exp() * log_f).mean(-1)


def pencil_loss(
    class_logits: Tensor,
    label_logits: Tensor,
    noisy_class: Tensor,
    alpha: float,
    beta: float,
    form: Form = "released",
) -> Tensor:
    """The weighted sum of the three that the pencil stage minimises.   [B]"""
    log_f = log_softmax(_full(class_logits))
    log_y = log_softmax(_full(label_logits))
    # Classification and entropy in one pass: on a head's small outputs these passes are what a step costs.
    both = (log_f.exp() * ((1 - beta) * log_f - log_y)).mean(-1)
    return both + alpha * _compatibility(log_y, noisy_class, form)


def mixed_loss(class_logits: Tensor, label_logits: Tensor, own: Tensor) -> Tensor:
    """Cross entropy of mixtures: each sample's own share of it, the rest of the sample before it.   [B]"""
    y = log_softmax(_full(label_logits)).exp()
    y = own * y + (1 - own) * y.roll(1, 0)
    return -(y * log_softmax(_full(class_logits))).sum(-1)


def move_labels(
    class_logits: Tensor,
    label_logits: Tensor,
    noisy_class: Tensor,
    label_rate: float,
    pull: float,
    form: Form = "released",
) -> Tensor:
    """Move each label by its own sample's gradient, in closed form.   [B, C]

    Autograd on the batch mean would give lambda/B * ((y_d - f)/c + alpha * h), with h the gradient of the
    compatibility loss. With label_rate = lambda/(B*c) and pull = alpha*c the batch and the class count drop
    out: a sample's step does not depend on the rest of its batch.
    """
    f = log_softmax(_full(class_logits.detach())).exp()
    y = log_softmax(_full(label_logits)).exp()
    given = functional.one_hot(noisy_class.long(), y.shape[-1]).to(y.dtype)
    return _full(label_logits) - label_rate * (y - f + pull * _compatibility_gradient(y, given, form))


def _compatibility_gradient(y: Tensor, given: Tensor, form: Form) -> Tensor:
    """dL_o / d(label_logits), given y_d and the one-hot of the given class."""
    _require_known(form)
    if form == "printed":
        return y - given
    # Two softmaxes in a row: dL_o/dy_d = softmax(y_d) - onehot, then back through y_d = softmax(logits).
    upstream = log_softmax(y).exp() - given
    return y * (upstream - (upstream * y).sum(-1, keepdim=True))


def _require_known(form: str) -> None:
    if form not in ("released", "printed"):
        raise ValueError(f"form '{form}': 'released' or 'printed' was expected")


def _full(logits: Tensor) -> Tensor:
    """Half precision becomes float32; float64 stays, for checks against exact formulas."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class LabelOutlook:
    """What happens to a label when the network is confident of another class."""

    changes: bool  # it ends on the network's class and stays there
    visits: int | None  # visits until it has changed permanently; None if it never does
    swings: bool  # it oscillates and never settles
    share: float  # of the network's class in the label at the end


def label_outlook(
    num_classes: int, pull: float, label_rates: Sequence[float], form: Form = "released", scale: float = 10.0
) -> LabelOutlook:
    """Find out whether a label can change with these numbers, by moving one until it settles.

    The network is 99 % sure of one rival class and spreads the rest evenly. `label_rates` has one number per
    visit, and the last one is repeated. A label may cross over and come back, so a crossing alone proves
    nothing: what counts is where it settles.
    """
    given = torch.tensor([0])
    belief = torch.full((1, num_classes), (1 - SURE) / (num_classes - 1))
    belief[0, 1] = SURE
    class_logits, label_logits = belief.log(), initial_logits(given, num_classes, scale)
    crossings: list[int] = []
    settled, visit = False, 0
    # A label settles once rate times visits reaches some hundreds (1000 is ample), or never.
    settling = 0 if label_rates[-1] == 0 else int(1000 / label_rates[-1]) + 100
    most_visits = min(len(label_rates) + settling, LONGEST_OUTLOOK)
    repeated = itertools.chain(label_rates, itertools.repeat(label_rates[-1]))
    for visit, rate in enumerate(itertools.islice(repeated, most_visits), 1):
        moved = move_labels(class_logits, label_logits, given, rate, pull, form)
        crossings += [visit] if _crossed(moved) != _crossed(label_logits) else []
        # All logits must settle: the gap between the two rivals alone also pauses where it turns around.
        settled = visit >= len(label_rates) and float((moved - label_logits).abs().max()) <= 1e-4 * rate
        label_logits = moved
        if settled:
            break
    swings = not settled and bool(crossings) and crossings[-1] > visit // 2
    changes = _crossed(label_logits) and not swings
    share = float(label_logits.softmax(-1)[0, 1])
    return LabelOutlook(changes, crossings[-1] if changes else None, swings, share)


def _crossed(label_logits: Tensor) -> bool:
    """Whether the rival class is ahead of the given one."""
    return bool(label_logits[0, 1] > label_logits[0, 0])
