"""One step: move the weights by a batch, then its labels by what the network said of them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pencil_scale.owners import Batch
from pencil_scale.schedule import Stage


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind."""

    loss: Tensor  # weighted mean over the batch, still on the device
    label_logits: Tensor  # [B, C], moved


@dataclass(frozen=True)
class Stepper:
    """How a step is taken: in which precision, and over how many batches at once."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    bf16: bool = False
    accumulation: int = 1

    def step(self, batch: Batch, stage: Stage, nth: int, of: int) -> StepResult:
        """Take the `nth` of an epoch's `of` batches; the weights move after every `accumulation` of them."""
        last = (nth + 1) % self.accumulation == 0 or nth + 1 == of
        first_of_group = nth - nth % self.accumulation
        num_in_group = min(self.accumulation, of - first_of_group)
        if nth == first_of_group:
            self.optimizer.zero_grad(set_to_none=True)
        with self._gradients_stay_local(last):
            with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=self.bf16):
                class_logits = self.model(batch.images)  # [B, C]
            loss = weighted_mean(
                stage.loss(class_logits, batch.label_logits, batch.noisy_class), batch.weight
            )
            (loss / num_in_group).backward()
        if last:
            self.optimizer.step()
        # A label moves by its own sample's gradient, so it goes equally far whether one worker holds the
        # whole batch or eight workers share it. A label whose image could not be read stays.
        moved = stage.move_labels(class_logits.detach(), batch.label_logits, batch.noisy_class)
        moved = torch.where(batch.weight[:, None] > 0, moved, batch.label_logits)
        return StepResult(loss=loss.detach(), label_logits=moved)

    def _gradients_stay_local(self, last: bool) -> AbstractContextManager[None]:
        """Only the last batch of a group exchanges gradients between the workers."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[None] = self.model.no_sync()
        return context


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """The mean of what counts; 0, with a gradient, where nothing does."""
    return (values * weight).sum() / weight.sum().clamp(min=1e-12)
