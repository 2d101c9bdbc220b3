"""The training loop: epochs, steps, and the moments at which progress becomes permanent.

The loop does not know Ray, MLflow or files: it calls a `Host`, so a unit test can run all of it on a list of
batches. The ranks run it in step with each other: all have the same number of batches, and all call `save`,
`close_epoch`, `stop` and the methods of `ranks` together.

    loop = Loop(stepper, schedule, owners, host, ranks, seed=1, save_every=100)
    progress = loop.run(progress)              # all epochs are done, unless a stop was requested
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, Protocol

import torch

from pencil_scale.labels.owners import AHEAD, Batch, HostCopy, Owners
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.storage.errors import PencilError
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.ranks import (
    Ranks,
    Tally,
    average_buffers,
    mean_loss,
    not_finite,
    problems_of,
    require_finite,
)
from pencil_scale.train.step import StepGraph, Stepper

LOG_EVERY_STEPS = 50
ARRIVED_AFTER = 2 * (AHEAD + 1)  # steps: the owners allow only AHEAD + 1 in the queue of the device
NAMED_PROBLEMS = 20


Readiness = Literal["ready", "not yet", "never"]


class Host(Protocol):
    """What the loop calls: a worker of a run, or a test. `close_epoch` evaluates, reports and saves."""

    def epoch(self, epoch: int) -> tuple[int, Iterable[Batch]]: ...  # steps and batches that remain of it
    def prepare(self, batch: Batch, epoch: int, stage: Stage) -> Batch: ...  # on the device, never empty
    def save(self, progress: Progress) -> None: ...  # labels and weights as a pair
    def close_epoch(self, stage: Stage, progress: Progress, figures: dict[str, Any]) -> None: ...
    def report(self, kind: str, **what: Any) -> None: ...  # an event; "live" are figures of this rank
    def stop(self) -> bool: ...  # whether any rank was asked to stop
    def readiness(self, schedule: Schedule) -> Readiness: ...  # whether labels may start to move


class Clock:
    """Where the seconds of an epoch went."""

    def __init__(self, owners: Owners) -> None:
        self._owners, self._device_s = owners, owners.device_s
        self._started = time.perf_counter()
        self._waited_s = {"data": 0.0, "labels": 0.0}
        self._half_s = self._start_s = 0.0
        self.num_images = 0

    def wait_for(self, what: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on, and add up the time spent waiting for "data" or for "labels"."""
        coming = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(coming, None)
            self._waited_s[what] += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def count_step(self, num_done: int, num_steps: int, num_images: int) -> None:
        """Count a step that was done."""
        self.num_images += num_images
        now, half = time.perf_counter() - self._started, num_steps // 2
        if num_done == half:
            self._half_s = now
        elif num_done == num_steps and half:
            self._start_s = max(self._half_s - (now - self._half_s) * half / (num_steps - half), 0.0)

    def figures(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        # The owners wait for the stream and for the device while the loop waits for them.
        data_s, device_s = self._waited_s["data"], self._owners.device_s - self._device_s
        return {
            "epoch_s": seconds,
            "start_s": self._start_s,  # what its first half took longer than its second
            "images_per_s": self.num_images / seconds,
            "data_wait_share": data_s / seconds,
            "label_wait_share": (self._waited_s["labels"] - data_s - device_s) / seconds,
            "gpu_wait_share": device_s / seconds,  # high if the GPU is busy, which is good
        }


@dataclass(eq=False)
class Loop:
    """Trains from some progress to the end of the schedule, or until a stop is requested."""

    stepper: Stepper | StepGraph
    schedule: Schedule
    owners: Owners
    host: Host
    ranks: Ranks
    seed: int
    save_every: int | None = None  # steps
    stop_every: int = 1  # steps between two checks for a stop request
    warmup_steps: int = 0
    max_unreadable_share: float = 0.01

    def __post_init__(self) -> None:
        self._tally = Tally(self.ranks)
        self._sent: tuple[Stage, Progress, HostCopy] | None = None  # a loss on its way from the device
        self._num_unreadable, self._unreadable = 0, list[str]()  # in this epoch

    def run(self, progress: Progress) -> Progress:
        """Train; return progress with all epochs done, unless a stop was requested or labels may not move.

        The first stage lasts longer than planned while the host is not ready for the second.
        """
        if self.ranks.rank == 0:  # what all ranks had found, however many there were
            self._num_unreadable, self._unreadable = progress.num_unreadable, list(progress.unreadable)
        schedule = self.schedule.extended(progress.extended)
        while progress.epoch < schedule.epochs:
            if progress.step == 0 and schedule.labels_move_from(progress.epoch):
                readiness = self.host.readiness(schedule)
                if readiness == "never":
                    return progress
                if readiness == "not yet":
                    progress = replace(progress, extended=progress.extended + 1)
                    schedule = self.schedule.extended(progress.extended)
            stage = schedule.stage_at(progress.epoch)
            if progress.step == 0 and schedule.starts_at(progress.epoch):
                self.stepper.start(stage)
            clock = Clock(self.owners)
            progress, finished = self._train_epoch(stage, progress, clock)
            progress = self._ready_to_save(stage, progress)
            if not finished:
                self.host.save(progress)
                return progress
            figures = self._figures(stage, progress, clock)
            progress = Progress(progress.epoch + 1, 0, progress.all_steps, progress.extended)
            self.host.close_epoch(stage, progress, figures)
            # An epoch may be shorter than the steps between two checks, or end exactly where one is due.
            if progress.epoch < schedule.epochs and self.host.stop():
                return progress
        return progress

    def _train_epoch(self, stage: Stage, progress: Progress, clock: Clock) -> tuple[Progress, bool]:
        """Train what remains of an epoch; also return whether its end was reached."""
        accumulation = self.stepper.accumulation
        num_steps, coming = self.host.epoch(progress.epoch)  # as many on every rank, some without rows
        batches = self.owners.with_labels(clock.wait_for("data", coming), progress.epoch)
        # Counted from here, not from the start of the epoch: progress is saved only between groups of
        # batches, so a group starts here, whatever the size of earlier groups.
        for num_done, batch in enumerate(clock.wait_for("labels", batches), 1):
            self._step(batch, stage, progress, num_done - 1, num_steps)
            clock.count_step(num_done, num_steps, len(batch.rows))
            progress = replace(progress, step=progress.step + 1, all_steps=progress.all_steps + 1)
            self._report(stage, progress, clock)
            if num_done == num_steps or num_done % accumulation:
                continue  # the epoch is over, or gradients are still being added up
            # Due at any batch of this group; all ranks are at the same step, and check together.
            if _falls_due(self.stop_every, progress.all_steps, accumulation) and self.host.stop():
                return progress, False
            if self.save_every and _falls_due(self.save_every, progress.step, accumulation):
                self.host.save(self._ready_to_save(stage, progress))
        return progress, True

    def _step(self, batch: Batch, stage: Stage, progress: Progress, nth: int, num_steps: int) -> None:
        # Randomness in the network (dropout) depends only on the position, so a restart repeats it.
        _set_seed(self.seed, progress.epoch, progress.step, self.owners.rank)
        warmed_up = min(1.0, (progress.all_steps + 1) / max(self.warmup_steps, 1))
        for group in self.stepper.optimizer.param_groups:
            group["lr"] = stage.learning_rate * warmed_up
        prepared = self.host.prepare(batch, progress.epoch, stage)
        if prepared.problems:
            self._num_unreadable += len(prepared.problems)
            self._unreadable = [*self._unreadable, *prepared.problems][:NAMED_PROBLEMS]
            # More than a complete epoch may have end the run at once.
            num_rows = self.owners.table.layout.num_rows
            self._limit_unreadable(self._num_unreadable, num_rows, self._unreadable, progress.epoch)
        result = self.stepper.step(prepared, stage, nth, num_steps)
        self._tally.add(result)
        label_logits, predicted = result.label_logits[: len(batch.rows)], result.predicted[: len(batch.rows)]
        if stage.moves_labels:
            self.owners.move(batch.rows, label_logits, predicted, progress.epoch)
        else:
            self.owners.mark(batch.rows, predicted, progress.epoch)

    def _report(self, stage: Stage, progress: Progress, clock: Clock) -> None:
        """Start to copy the loss, and report it a few steps later, at the same steps on all ranks."""
        if self._tally.num_recent == ARRIVED_AFTER:
            self._report_loss()
        if self._tally.num_recent == LOG_EVERY_STEPS:
            self._sent = stage, progress, self._tally.send()
            self.host.report("live", figures=clock.figures())

    def _report_loss(self) -> None:
        if self._sent is not None:
            (stage, progress, sent), self._sent = self._sent, None
            sums = self._tally.read(sent)
            require_finite(problems_of(sums), stage.name, progress, LOG_EVERY_STEPS)
            figures = {"loss": mean_loss(sums)}
            self.host.report("step", stage=stage.name, progress=progress, figures=figures)

    def _ready_to_save(self, stage: Stage, progress: Progress) -> Progress:
        """Make sure that what is evaluated and saved next is complete, finite, and the same on every rank."""
        self.owners.drain()
        self._report_loss()
        num_recent = self._tally.num_recent
        require_finite(problems_of(self._tally.peek()), stage.name, progress, num_recent)
        # All ranks end together, so none waits for one that has ended.
        broken = self.ranks.gather(not_finite(self.stepper.model, self.stepper.optimizer))
        require_finite(list(chain(*broken)), stage.name, progress, num_recent)
        average_buffers(self.stepper.model, self.ranks)
        if self.stepper.average is not None:
            average_buffers(self.stepper.average.network, self.ranks)
        num = int(self.ranks.total(self._num_unreadable))
        names = list(chain(*self.ranks.gather(self._unreadable)))[:NAMED_PROBLEMS] if num else []
        return replace(progress, num_unreadable=num, unreadable=names)

    def _limit_unreadable(self, num: int, num_rows: float, names: list[str], epoch: int) -> None:
        if num > self.max_unreadable_share * num_rows:
            raise PencilError(
                f"epoch {epoch + 1}: {num:,} of {num_rows:,.0f} images cannot be decoded, more than "
                f"data.max_damaged_share allows: {'; '.join(names)}"
            )

    def _figures(self, stage: Stage, progress: Progress, clock: Clock) -> dict[str, float]:
        """The figures of an epoch, over all ranks; too many unreadable images end the run here."""
        visited = self.ranks.total(self.owners.table.count_visited(progress.epoch))
        num, names = progress.num_unreadable, progress.unreadable
        if num:
            self._limit_unreadable(num, visited, names, progress.epoch)
            self.host.report("unreadable", num=num, names=names)
        figures = clock.figures()
        self.host.report("live", figures=dict(figures))
        figures["images_per_s"] = self.ranks.total(figures["images_per_s"])
        figures |= {"rows_visited": visited, "rows_unreadable": float(num)}
        figures |= {**self._tally.close(), "learning_rate": stage.learning_rate}
        self._num_unreadable, self._unreadable = 0, []
        return figures


def _falls_due(every: int, step: int, num_steps: int) -> bool:
    """Whether a multiple of `every` is among the last `num_steps` steps up to this one."""
    return step // every > (step - num_steps) // every


def _set_seed(*numbers: int) -> None:
    """Mix the numbers into one seed, and seed the generators in use."""
    seed = 0
    for number in numbers:
        seed = ((seed ^ (number + 1)) * 0x9E3779B97F4A7C15) % 2**63
        seed ^= seed >> 29
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would record a stack trace without a GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
