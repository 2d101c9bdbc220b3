"""A whole step as one CUDA graph: recorded once, then replayed for every full batch.

A small network keeps the GPU waiting for Python, which launches hundreds of kernels a step; a replay launches
them all at once. The numbers are those of a plain step: a stage begins with plain ones, a recording computes
nothing, and it is then replayed for the batch it was made with.

    stepper = StepGraph(stepper, odd=stepper, full_batch=128)
    result = stepper.step(batch, stage, nth, of)             # batches of other sizes take plain steps

For one worker, and weights that move at every step: gradients that others wait for are not recorded. A lambda
that changes with every epoch is recorded anew as often.
"""

from dataclasses import replace

import torch

from pencil_scale.labels.owners import Batch
from pencil_scale.method.schedule import Stage
from pencil_scale.train.step import Stepper, StepResult

PLAIN_STEPS = 3  # libraries choose their kernels, and momentum gets its memory


class StepGraph:
    """Takes the steps of a `Stepper`, mostly by replaying one."""

    accumulation = 1

    def __init__(self, stepper: Stepper, odd: Stepper, full_batch: int) -> None:
        """`odd` takes the batches that are not full: a compiled network would be compiled again for them."""
        self.model, self.optimizer = stepper.model, stepper.optimizer
        self._stepper, self._odd, self._full_batch = stepper, odd, full_batch
        self._rate = torch.zeros((), device=next(stepper.model.parameters()).device)
        self._kind: tuple[str, float] | None = None  # what differs between recordings; the rate does not
        self._num_taken = 0

    def step(self, batch: Batch, stage: Stage, nth: int, of: int) -> StepResult:
        """Replay the step on this batch; what it leaves is overwritten by the next one."""
        if len(batch.weight) != self._full_batch:
            return self._odd.step(batch, stage, nth, of)
        if self._kind != (stage.name, stage.label_rate):
            self._kind, self._num_taken = (stage.name, stage.label_rate), 0
        self._num_taken += 1
        if self._num_taken <= PLAIN_STEPS:
            return self._stepper.step(batch, stage, nth, of)
        if self._num_taken == PLAIN_STEPS + 1:
            self._record(batch, stage)
        for still, coming in zip(_tensors(self._batch), _tensors(batch), strict=True):
            still.copy_(coming, non_blocking=True)
        self._rate.fill_(self.optimizer.param_groups[0]["lr"])
        self._graph.replay()
        return self._result

    def _record(self, batch: Batch, stage: Stage) -> None:
        images, label_logits, noisy_class, weight = (tensor.clone() for tensor in _tensors(batch))
        self._batch = replace(
            batch, images=images, label_logits=label_logits, noisy_class=noisy_class, weight=weight
        )
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate  # read at every replay, where a number would be recorded
        self._graph = torch.cuda.CUDAGraph()
        # Other threads pin memory and wait for copies meanwhile: only this one must not.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = self._stepper.step(self._batch, stage, nth=0, of=1)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.images, batch.label_logits, batch.noisy_class, batch.weight
