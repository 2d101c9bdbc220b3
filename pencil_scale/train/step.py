"""One step: move the weights by a batch, then move its labels by the network's predictions.

    stepper = Stepper(model, optimizer)
    result = stepper.step(batch, stage, nth, of)             # label_logits moved; predictions; loss, counts

`StepGraph` takes the same steps by replaying a CUDA graph.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pencil_scale.labels.owners import Batch
from pencil_scale.method.evidence import TOP
from pencil_scale.method.pencil import log_softmax
from pencil_scale.method.schedule import Stage
from pencil_scale.train.average import Average

PLAIN_STEPS = 3  # before a graph is recorded: libraries choose their kernels, and momentum gets its memory
LEAST_LOG_P = -60_000.0  # a label table stores 16 bits


@dataclass(frozen=True)
class StepResult:
    """The result of a step, still on the device: reading it waits for the step."""

    label_logits: Tensor  # [B, C], moved
    predicted: Tensor  # [B, 2 K], of `top_predictions`; NaN where the image was mixed or could not be read
    # float64 [3 + 2 C]: weighted loss, weight, labels whose move was not finite, and by given class the
    # samples and those whose prediction agrees
    sums: Tensor


@dataclass
class Stepper:
    """Takes steps in a given precision; weights move once per `accumulation` batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    bf16: bool = False
    accumulation: int = 1
    average: Average | None = None
    compiled_average: nn.Module | None = None
    fresh: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # the weights of a restart
    _group_weight: Tensor = field(default_factory=lambda: torch.zeros(()), init=False, repr=False)

    def start(self, stage: Stage) -> None:
        """Prepare the weights for the first step of a stage."""
        if stage.from_average and self.average is not None:
            self.average.become()
        if stage.restarts:
            _unwrapped(self.model).load_state_dict(self.fresh)
        if stage.from_average or stage.restarts:
            forget_momentum(self.optimizer)
        if self.average is not None:
            self.average.restart()

    def step(self, batch: Batch, stage: Stage, nth: int, of: int) -> StepResult:
        """Take the step of batch `nth` of `of`; the weights move after every group of `accumulation` batches.

        Both numbers count from the batch at which this attempt started, which is the first of its group.
        """
        first, last = nth % self.accumulation == 0, (nth + 1) % self.accumulation == 0 or nth + 1 == of
        weight_sum = batch.weight.sum()
        self._group_weight = weight_sum if first else self._group_weight + weight_sum
        if first:
            self.optimizer.zero_grad(set_to_none=True)
        mean_weight = self._mean_over_ranks(self._group_weight) if last else lambda: self._group_weight
        # Only the last batch of a group exchanges gradients between the workers.
        model = self.model
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
            with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=self.bf16):
                class_logits = model(batch.images)  # [B, C]
            loss = stage.loss(class_logits, batch.label_logits, batch.noisy_class, batch.own)  # [B]
            loss_sum = (loss * batch.weight).sum()
            # The weights move by the gradient of the weighted mean over all samples of the group, on all
            # ranks. DDP averages the gradients of the ranks, so each rank divides its sum by the mean of the
            # ranks' weights. Divided by the rank's own weight, a single readable image would count as much
            # as a full batch.
            (loss_sum / mean_weight() if self.accumulation == 1 else loss_sum).backward()
        if last and self.accumulation > 1:  # only now is the weight of the group known
            weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            torch._foreach_div_(gradients, mean_weight())
        predicted = class_logits.detach()
        if self.average is not None and stage.decay and (stage.moves_labels or batch.weak_images is not None):
            predicted = self._taught(self.average, batch)
        if last:
            self.optimizer.step()
            if self.average is not None and stage.decay:
                self.average.follow(stage.decay)
        return _result(batch, stage, predicted, loss_sum.detach(), weight_sum)

    @torch.no_grad()
    def _taught(self, average: Average, batch: Batch) -> Tensor:
        """What the average of the network predicts.   [B, C]"""
        images = batch.images if batch.weak_images is None else batch.weak_images
        network = average.network if self.compiled_average is None else self.compiled_average
        with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=self.bf16):
            class_logits: Tensor = network(images)
        return class_logits

    def _mean_over_ranks(self, weight: Tensor) -> Callable[[], Tensor]:
        """Start to add up the ranks' weights; the mean is needed only after the forward pass."""
        if not isinstance(self.model, DistributedDataParallel):
            return lambda: weight.clamp(min=1e-12)
        group, total = self.model.process_group, weight.clone()
        # On a GPU the host does not wait: the sum is one small kernel, queued with those of DDP.
        adding = dist.all_reduce(total, group=group, async_op=True)

        def mean() -> Tensor:
            adding.wait()
            return (total / group.size()).clamp(min=1e-12)

        return mean


@torch.no_grad()
def _result(
    batch: Batch, stage: Stage, class_logits: Tensor, loss_sum: Tensor, weight_sum: Tensor
) -> StepResult:
    # A label moves by the gradient of its own sample, so it moves equally far whether one worker holds the
    # complete batch or eight workers share it. It does not move if its image could not be read, or if the
    # move is not finite; the latter is counted, and ends the run before anything is saved.
    readable = batch.weight > 0
    label_logits, num_not_finite = batch.label_logits, torch.zeros_like(weight_sum, dtype=torch.float64)
    if stage.moves_labels:
        moved = stage.move_labels(class_logits, label_logits, batch.noisy_class)
        finite = moved.isfinite().all(-1)
        label_logits = torch.where((readable & finite)[:, None], moved, label_logits)
        num_not_finite = (~finite).sum().double()

    classes = torch.arange(class_logits.shape[-1], device=class_logits.device)
    given = (batch.noisy_class[:, None] == classes) & readable[:, None]  # [B, C]
    predicted = top_predictions(class_logits)
    agrees = predicted[:, 0] == batch.noisy_class
    counts = torch.cat([given.sum(0), (given & agrees[:, None]).sum(0)])
    sums = torch.stack([loss_sum.double(), weight_sum.double(), num_not_finite])
    if batch.own is not None and batch.weak_images is None:
        readable = torch.zeros_like(readable)  # what is predicted for a mixture says nothing of a sample
    predicted = torch.where(readable[:, None], predicted, torch.nan)
    return StepResult(label_logits, predicted, torch.cat([sums, counts]))


def top_predictions(class_logits: Tensor) -> Tensor:
    """The most likely classes, and their log-probabilities: float32 [B, 2 K]."""
    log_p = log_softmax(class_logits.float()).clamp(min=LEAST_LOG_P)
    top = log_p.topk(min(TOP, log_p.shape[-1]))
    return torch.cat([top.indices.float(), top.values], dim=-1)


def forget_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Start again, where the weights are not those that the momentum belongs to."""
    for state in optimizer.state.values():
        if (momentum := state.get("momentum_buffer")) is not None:
            momentum.zero_()


class StepGraph:
    """Takes the steps of a `Stepper`, mostly by replaying one CUDA graph.

        stepper = StepGraph(stepper, odd=stepper, full_batch=128)

    A small network keeps the GPU waiting for Python, which launches hundreds of kernels per step; a replay
    launches them all at once. The numbers are those of plain steps: a stage starts with plain steps, a
    recording computes nothing, and it is then replayed for the batch it was made with. The graph is recorded
    again whenever the stage or its label rate changes.

    Only for a single worker, and weights that move at every step: an exchange of gradients is not recorded.
    """

    accumulation = 1

    def __init__(self, stepper: Stepper, odd: Stepper, full_batch: int) -> None:
        """`odd` takes batches that are not full, for which a compiled network would be compiled again."""
        self.model, self.optimizer, self.average = stepper.model, stepper.optimizer, stepper.average
        self._stepper, self._odd, self._full_batch = stepper, odd, full_batch
        self._rate = torch.zeros((), device=next(stepper.model.parameters()).device)
        self._kind: tuple[str, float] | None = None  # what differs between recordings; the rate does not
        self._num_taken = 0

    def start(self, stage: Stage) -> None:
        """Prepare the weights for the first step of a stage."""
        self._stepper.start(stage)

    def step(self, batch: Batch, stage: Stage, nth: int, of: int) -> StepResult:
        """Replay the step on this batch; the next step overwrites its result."""
        if len(batch.weight) != self._full_batch:
            return self._odd.step(batch, stage, nth, of)
        if self._kind != (stage.name, stage.label_rate):
            self._kind, self._num_taken = (stage.name, stage.label_rate), 0
        self._num_taken += 1
        if self._num_taken <= PLAIN_STEPS:
            return self._stepper.step(batch, stage, nth, of)
        if self._num_taken == PLAIN_STEPS + 1:
            self._record(batch, stage)
        coming = _tensors(batch)
        for name, still in _tensors(self._batch).items():
            still.copy_(coming[name], non_blocking=True)
        self._rate.fill_(self.optimizer.param_groups[0]["lr"])
        self._graph.replay()
        return self._result

    def _record(self, batch: Batch, stage: Stage) -> None:
        copies = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
        self._batch = replace(batch, **copies)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate  # read at every replay; a plain number would be recorded
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may pin memory and wait for copies meanwhile; only this one must not.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = self._stepper.step(self._batch, stage, nth=0, of=1)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _tensors(batch: Batch) -> dict[str, Any]:
    """What a step reads of a batch, by name."""
    names = ("images", "label_logits", "noisy_class", "weight", "own", "weak_images")
    return {name: value for name in names if (value := getattr(batch, name)) is not None}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, without what shares its gradients or compiles it."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return getattr(inner, "_orig_mod", inner)
