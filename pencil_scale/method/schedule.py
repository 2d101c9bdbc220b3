"""Which stage an epoch belongs to, and what follows from it: loss, rates, whether labels move.

    schedule = Schedule(config.stages, config.optimizer, num_classes=14, batch=2048)
    stage = schedule.stage_at(7)
    loss = stage.loss(class_logits, label_logits, noisy_class)             # [B]
    moved = stage.move_labels(class_logits, label_logits, noisy_class)     # [B, C]; unchanged if labels stay

Rates, alpha and lambda are tuned for one batch and one class count. The learning rate scales with the batch;
the 1/c of the losses and the pull use `tuned_classes`, so a config carries over to another class list.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor
from torch.nn.functional import cross_entropy

from pencil_scale.config.settings import Optimizer
from pencil_scale.config.stages import Stages
from pencil_scale.config.values import Curve
from pencil_scale.method.pencil import (
    Form,
    classification_loss,
    initial_logits,
    mixed_loss,
    move_labels,
    pencil_loss,
)

StageName = Literal["backbone", "pencil", "finetune"]


@dataclass(frozen=True)
class Stage:
    """What the method does in one epoch."""

    name: StageName
    learning_rate: float
    class_factor: float = 1.0
    alpha: float = 0.0
    beta: float = 0.0
    label_rate: float = 0.0
    pull: float = 0.0
    form: Form = "released"
    decay: float | None = None  # of an average of the network
    strong: bool = False  # augmentation
    mixup: float = 0.0
    sharpen: float = 1.0  # the labels that are learned
    restarts: bool = False  # from new weights
    from_average: bool = False  # of the round before

    @property
    def moves_labels(self) -> bool:
        return self.label_rate > 0

    def loss(
        self, class_logits: Tensor, label_logits: Tensor, noisy_class: Tensor, own: Tensor | None = None
    ) -> Tensor:
        """Compare the prediction with the given class at first, and with the label in later stages.   [B]

        `own` is the share of each sample's own image, and label, in a mixture with the sample before it.
        """
        if self.name == "backbone" and own is not None:
            label_logits = initial_logits(noisy_class, class_logits.shape[-1])
        if self.sharpen != 1:
            label_logits = label_logits.float() * self.sharpen
        if own is not None:
            return mixed_loss(class_logits, label_logits, own)
        if self.name == "backbone":
            return cross_entropy(class_logits.float(), noisy_class.long(), reduction="none")
        if self.name == "finetune":
            return self.class_factor * classification_loss(class_logits, label_logits)
        return self.class_factor * pencil_loss(
            class_logits, label_logits, noisy_class, self.alpha, self.beta, self.form
        )

    def move_labels(self, class_logits: Tensor, label_logits: Tensor, noisy_class: Tensor) -> Tensor:
        """Move the labels one step; return them unchanged in a stage that does not move labels."""
        if not self.moves_labels:
            return label_logits
        return move_labels(class_logits, label_logits, noisy_class, self.label_rate, self.pull, self.form)


@dataclass(frozen=True)
class Schedule:
    """The three stages, one after the other."""

    stages: Stages
    optimizer: Optimizer
    num_classes: int
    batch: int  # of an optimizer step: all workers, all accumulated batches

    @property
    def epochs(self) -> int:
        return self.stages.num_epochs

    def extended(self, epochs: int) -> "Schedule":
        """The same with a longer first stage."""
        backbone = self.stages.backbone
        backbone = backbone.model_copy(update={"epochs": backbone.epochs + epochs})
        return replace(self, stages=self.stages.model_copy(update={"backbone": backbone}))

    def labels_move_from(self, epoch: int) -> bool:
        """Whether this is the first epoch in which labels move."""
        return epoch == self.stages.backbone.epochs and self.stages.pencil.epochs > 0

    @property
    def rate_factor(self) -> float:
        return self.batch / self.optimizer.tuned_batch

    @property
    def class_factor(self) -> float:
        """What replaces the 1/c of the losses by the tuned one."""
        return self.num_classes / self.stages.pencil.tuned_classes

    def stage_at(self, epoch: int) -> Stage:
        """Find the stage of an epoch, counted from the start of the run."""
        if not 0 <= epoch < self.epochs:
            raise IndexError(f"epoch {epoch}: this schedule has epochs 0 to {self.epochs - 1}")
        backbone, pencil = self.stages.backbone, self.stages.pencil
        if epoch < backbone.epochs:
            rate = backbone.rate * self.rate_factor
            return Stage("backbone", rate, strong=backbone.augment == "strong", mixup=backbone.mixup)
        done, epoch = divmod(epoch - backbone.epochs, pencil.epochs + self.stages.finetune.epochs)
        if epoch < pencil.epochs:
            ended_with = self.stages.finetune.average if self.stages.finetune.epochs else pencil.teacher
            return replace(self._pencil(epoch), from_average=done > 0 and ended_with is not None)
        return self._finetune(epoch - pencil.epochs)

    def starts_at(self, epoch: int) -> bool:
        """Whether this is the first epoch of a stage."""
        pencil, since = self.stages.pencil, epoch - self.stages.backbone.epochs
        if since < 0:
            return epoch == 0
        return since % (pencil.epochs + self.stages.finetune.epochs) in (0, pencil.epochs)

    def label_rates(self) -> list[float]:
        """The label rate of every epoch in which labels move."""
        pencil, finetune = self.stages.pencil, self.stages.finetune
        rates = [self._pencil(epoch).label_rate for epoch in range(pencil.epochs)]
        if finetune.move_labels:
            rates += rates[-1:] * finetune.epochs
        return rates * pencil.rounds

    def _finetune(self, epoch: int) -> Stage:
        stage = self.stages.finetune
        if stage.schedule == "cosine":
            factor = (1 + math.cos(math.pi * epoch / stage.epochs)) / 2
        else:
            factor = 1 / stage.drop_by ** sum(after <= epoch for after in stage.drop_after or ())
        found = Stage(
            name="finetune",
            learning_rate=stage.rate * self.rate_factor * factor,
            class_factor=self.class_factor,
            decay=stage.average,
            strong=stage.augment == "strong",
            mixup=stage.mixup,
            sharpen=stage.sharpen,
            restarts=stage.restart,
        )
        if not (stage.move_labels and self.stages.pencil.epochs):
            return found
        last = self._pencil(self.stages.pencil.epochs - 1)
        return replace(found, label_rate=last.label_rate, pull=last.pull, form=last.form)

    def _pencil(self, epoch: int) -> Stage:
        stage = self.stages.pencil
        lambda_: Curve = stage.lambda_
        return Stage(
            name="pencil",
            learning_rate=stage.rate * self.rate_factor,
            class_factor=self.class_factor,
            alpha=stage.alpha / self.class_factor,
            beta=stage.beta,
            label_rate=lambda_.at(epoch, stage.epochs) / (self.optimizer.tuned_batch * stage.tuned_classes),
            pull=stage.alpha * stage.tuned_classes,
            form=stage.compatibility,
            decay=stage.teacher,
            strong=stage.augment == "strong",
            mixup=stage.mixup,
        )
