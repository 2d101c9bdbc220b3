"""Which stage an epoch belongs to, and what follows from it: loss, rates, whether labels move.

    schedule = Schedule.from_config(config.stages, config.optimizer, num_classes=14, batch=2048)
    stage = schedule.stage_at(7)
    loss = stage.loss(class_logits, label_logits, noisy_class)             # [B]
    moved = stage.move_labels(class_logits, label_logits, noisy_class)     # [B, C]; unchanged in 1 and 3

Rates, alpha and lambda are tuned for one batch and one class count. The learning rate scales with the batch;
the 1/c of the losses and the pull use `tuned_classes`, so a config carries over to another class list.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, Self

from torch import Tensor
from torch.nn.functional import cross_entropy

from pencil_scale.config.settings import Optimizer, Stages
from pencil_scale.config.values import Curve
from pencil_scale.method.pencil import Form, classification_loss, move_labels, pencil_loss

StageName = Literal["backbone", "pencil", "finetune"]


class Loss(Protocol):
    """One value per sample, from the prediction, the learned label and the given class."""

    def __call__(self, class_logits: Tensor, label_logits: Tensor, noisy_class: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Stage:
    """What the method does in one epoch."""

    name: StageName
    epoch: int  # from the start of the stage
    learning_rate: float
    loss: Loss
    label_rate: float = 0.0
    pull: float = 0.0
    form: Form = "released"

    @property
    def moves_labels(self) -> bool:
        return self.label_rate > 0

    def move_labels(self, class_logits: Tensor, label_logits: Tensor, noisy_class: Tensor) -> Tensor:
        """Move the labels one step; return them unchanged in a stage that does not move labels."""
        if not self.moves_labels:
            return label_logits
        return move_labels(class_logits, label_logits, noisy_class, self.label_rate, self.pull, self.form)


@dataclass(frozen=True)
class Schedule:
    """The three stages, one after the other."""

    stages: Stages
    rate_factor: float  # batch / tuned_batch
    class_factor: float  # num_classes / tuned_classes: replaces the 1/c of the losses by the tuned one
    tuned_batch: int

    @classmethod
    def from_config(cls, stages: Stages, optimizer: Optimizer, num_classes: int, batch: int) -> Self:
        """`batch` is the global batch of an optimizer step: all workers, all accumulated batches."""
        return cls(
            stages=stages,
            rate_factor=batch / optimizer.tuned_batch,
            class_factor=num_classes / stages.pencil.tuned_classes,
            tuned_batch=optimizer.tuned_batch,
        )

    @property
    def epochs(self) -> int:
        return self.stages.backbone.epochs + self.stages.pencil.epochs + self.stages.finetune.epochs

    def stage_at(self, epoch: int) -> Stage:
        """Find the stage of an epoch, counted from the start of the run."""
        if not 0 <= epoch < self.epochs:
            raise IndexError(f"epoch {epoch}: this schedule has epochs 0 to {self.epochs - 1}")
        first_pencil = self.stages.backbone.epochs
        first_finetune = first_pencil + self.stages.pencil.epochs
        if epoch < first_pencil:
            return self._backbone(epoch)
        if epoch < first_finetune:
            return self._pencil(epoch - first_pencil)
        return self._finetune(epoch - first_finetune)

    def label_rates(self) -> list[float]:
        """The label rate of every epoch of the pencil stage."""
        return [self._pencil(epoch).label_rate for epoch in range(self.stages.pencil.epochs)]

    def _backbone(self, epoch: int) -> Stage:
        rate = self.stages.backbone.rate * self.rate_factor
        return Stage("backbone", epoch, rate, loss=_cross_entropy)

    def _pencil(self, epoch: int) -> Stage:
        stage = self.stages.pencil
        pull = stage.alpha * stage.tuned_classes
        lambda_: Curve = stage.lambda_
        return Stage(
            name="pencil",
            epoch=epoch,
            learning_rate=stage.rate * self.rate_factor,
            loss=partial(
                _scaled_pencil_loss,
                factor=self.class_factor,
                alpha=stage.alpha / self.class_factor,
                beta=stage.beta,
                form=stage.compatibility,
            ),
            label_rate=lambda_.at(epoch, stage.epochs) / (self.tuned_batch * stage.tuned_classes),
            pull=pull,
            form=stage.compatibility,
        )

    def _finetune(self, epoch: int) -> Stage:
        stage = self.stages.finetune
        drops = sum(after <= epoch for after in stage.drop_after)
        rate = stage.rate * self.rate_factor / stage.drop_by**drops
        return Stage(
            "finetune", epoch, rate, loss=partial(_scaled_classification_loss, factor=self.class_factor)
        )


def _cross_entropy(class_logits: Tensor, label_logits: Tensor, noisy_class: Tensor) -> Tensor:
    return cross_entropy(class_logits.float(), noisy_class.long(), reduction="none")


def _scaled_pencil_loss(
    class_logits: Tensor,
    label_logits: Tensor,
    noisy_class: Tensor,
    *,
    factor: float,
    alpha: float,
    beta: float,
    form: Form,
) -> Tensor:
    return factor * pencil_loss(class_logits, label_logits, noisy_class, alpha, beta, form)


def _scaled_classification_loss(
    class_logits: Tensor, label_logits: Tensor, noisy_class: Tensor, *, factor: float
) -> Tensor:
    return factor * classification_loss(class_logits, label_logits)
