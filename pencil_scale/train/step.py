"""One step: move the weights by a batch, then its labels by what the network said of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pencil_scale.labels.owners import Batch
from pencil_scale.method.schedule import Stage


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, still on the device: to read it is to wait for the step."""

    label_logits: Tensor  # [B, C], moved
    sums: Tensor  # float64 [3]: weighted loss, weight, and labels whose move was not finite
    class_counts: Tensor  # int64 [2, C]: samples by given class, and those the network agrees with

    @property
    def loss(self) -> Tensor:
        """The weighted mean over this rank's batch."""
        return self.sums[0] / self.sums[1].clamp(min=1e-12)


@dataclass
class Stepper:
    """How a step is taken: in which precision, and over how many batches at once."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    bf16: bool = False
    accumulation: int = 1
    _group_weight: Tensor = field(default_factory=lambda: torch.zeros(()), init=False, repr=False)

    def step(self, batch: Batch, stage: Stage, nth: int, of: int) -> StepResult:
        """Take the `nth` of `of` batches; the weights move after every `accumulation` of them.

        Both count from the batch at which this attempt started, which is the first of its group.
        """
        first, last = nth % self.accumulation == 0, (nth + 1) % self.accumulation == 0 or nth + 1 == of
        weight_sum = batch.weight.sum()
        self._group_weight = weight_sum if first else self._group_weight + weight_sum
        if first:
            self.optimizer.zero_grad(set_to_none=True)
        mean_weight = self._mean_over_ranks(self._group_weight) if last else lambda: self._group_weight
        with self._gradients_stay_local(last):
            with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=self.bf16):
                class_logits = self.model(batch.images)  # [B, C]
            loss = stage.loss(class_logits, batch.label_logits, batch.noisy_class)  # [B]
            loss_sum = (loss * batch.weight).sum()
            # The weights move by the gradient of the weighted mean over all samples of the group, of all
            # ranks. DDP averages the ranks' gradients, so each rank divides its sum by the mean of the ranks'
            # weights; divided by its own, a single readable image would count as much as a full batch.
            (loss_sum / mean_weight() if self.accumulation == 1 else loss_sum).backward()
        if last and self.accumulation > 1:  # only now is the weight of the group known
            self._divide_gradients(mean_weight())
        if last:
            self.optimizer.step()
        return _result(batch, stage, class_logits.detach(), loss_sum.detach(), weight_sum)

    def _mean_over_ranks(self, weight: Tensor) -> Callable[[], Tensor]:
        """Start to add up the ranks' weights; the mean is asked for after the forward pass, which hides it.

        On a GPU the host does not wait: the sum is one small kernel, queued with DDP's own.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return lambda: weight.clamp(min=1e-12)
        group, total = self.model.process_group, weight.clone()
        adding = dist.all_reduce(total, group=group, async_op=True)

        def mean() -> Tensor:
            adding.wait()
            return (total / group.size()).clamp(min=1e-12)

        return mean

    def _divide_gradients(self, divisor: Tensor) -> None:
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        torch._foreach_div_([weight.grad for weight in weights if weight.grad is not None], divisor)

    def _gradients_stay_local(self, last: bool) -> AbstractContextManager[None]:
        """Only the last batch of a group exchanges gradients between the workers."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[None] = self.model.no_sync()
        return context


@torch.no_grad()
def _result(
    batch: Batch, stage: Stage, class_logits: Tensor, loss_sum: Tensor, weight_sum: Tensor
) -> StepResult:
    # A label moves by its own sample's gradient, so it goes equally far whether one worker holds the whole
    # batch or eight workers share it. It stays if its image could not be read, or if its move is not finite;
    # the latter is counted, and ends the run before anything is saved.
    readable = batch.weight > 0
    moved = stage.move_labels(class_logits, batch.label_logits, batch.noisy_class)
    finite = moved.isfinite().all(-1)
    moved = torch.where((readable & finite)[:, None], moved, batch.label_logits)

    classes = torch.arange(class_logits.shape[-1], device=class_logits.device)
    given = (batch.noisy_class[:, None] == classes) & readable[:, None]  # [B, C]
    agrees = class_logits.argmax(-1) == batch.noisy_class
    counts = torch.stack([given.sum(0), (given & agrees[:, None]).sum(0)])
    sums = torch.stack([loss_sum.double(), weight_sum.double(), (~finite).sum().double()])
    return StepResult(moved, sums, counts)
