"""The training loop: epochs, steps, and the moments at which progress becomes permanent.

The loop does not know Ray, MLflow or files: what it needs is passed in as plain callables, so a unit test can
run all of it on a list of batches. The ranks run it in step with each other: all have the same number of
batches, and all call `save`, `close_epoch`, `stop` and the methods of `ranks` together.

    loop = Loop(stepper, schedule, owners, hooks, pace, seed=1)
    progress = loop.run(progress)              # all epochs are done, unless a stop was requested
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from pencil_scale.labels.owners import AHEAD, Batch, HostCopy, Owners
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.storage.errors import PencilError
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.ranks import ALONE, Ranks, Tally, average_buffers, not_finite, require_finite
from pencil_scale.train.step import StepGraph, Stepper

LOG_EVERY_STEPS = 50
ARRIVED_AFTER = 2 * (AHEAD + 1)  # steps: the owners allow only AHEAD + 1 in the queue of the device
NAMED_PROBLEMS = 20


@dataclass(frozen=True)
class Epoch:
    """One epoch's batches for this rank: the same number on every rank, empty ones where rows ran out."""

    num_steps: int
    batches: Iterable[Batch]


@dataclass(frozen=True)
class Hooks:
    """What the loop calls."""

    epoch: Callable[[int], Epoch]
    prepare: Callable[[Batch, int], Batch]  # to the device: decoded, augmented, never empty
    save: Callable[[Progress], None]  # labels and weights as a pair
    close_epoch: Callable[[Stage, Progress, dict[str, float]], None]  # evaluate, report, save
    log_step: Callable[[Stage, Progress, dict[str, float]], None]
    name_unreadable: Callable[[int, list[str]], None] = lambda num, names: None  # how many, and the first
    stop: Callable[[], bool] = lambda: False  # whether any rank was asked to stop
    ranks: Ranks = ALONE


@dataclass(frozen=True)
class Pace:
    """How often, or until when, things happen that do not happen at every step."""

    save_every: int | None = None
    stop_every: int = 1
    warmup_steps: int = 0
    max_unreadable_share: float = 0.01


@dataclass
class Clock:
    """Where the seconds of an epoch went."""

    started: float = field(default_factory=time.perf_counter)
    data_s: float = 0.0  # waiting for the stream
    labels_s: float = 0.0  # waiting for the owners
    num_images: int = 0

    def data(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on, and add up the time spent waiting for the stream."""
        coming = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(coming, None)
            self.data_s += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def labels(self, batches: Iterator[Batch], owners: Owners) -> Iterator[Batch]:
        """The same for the owners, without the time in which they wait for the stream and the device."""
        while True:
            asked, others_s = time.perf_counter(), self.data_s + owners.device_s
            batch = next(batches, None)
            self.labels_s += time.perf_counter() - asked - (self.data_s + owners.device_s - others_s)
            if batch is None:
                return
            self.num_images += len(batch.rows)
            yield batch

    def figures(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return {
            "epoch_s": seconds,
            "images_per_s": self.num_images / seconds,
            "data_wait_share": self.data_s / seconds,
            "label_wait_share": self.labels_s / seconds,
        }


@dataclass(eq=False)
class Loop:
    """Trains from some progress to the end of the schedule, or until a stop is requested."""

    stepper: Stepper | StepGraph
    schedule: Schedule
    owners: Owners
    hooks: Hooks
    pace: Pace
    seed: int

    def __post_init__(self) -> None:
        self.ranks = self.hooks.ranks
        self._tally = Tally(self.ranks.add_up)
        self._sent: tuple[Stage, Progress, HostCopy] | None = None  # a loss on its way from the device
        self._num_unreadable, self._unreadable = 0, list[str]()

    def run(self, progress: Progress) -> Progress:
        """Train; return progress with all epochs done, unless a stop was requested."""
        while progress.epoch < self.schedule.epochs:
            stage = self.schedule.stage_at(progress.epoch)
            clock = Clock()
            progress, finished = self._train_epoch(stage, progress, clock)
            self.owners.drain()
            self._settle(stage, progress)
            if not finished:
                self.hooks.save(progress)
                return progress
            figures = self._figures(stage, progress, clock)
            progress = replace(progress, epoch=progress.epoch + 1, step=0)
            self.hooks.close_epoch(stage, progress, figures)
            # An epoch may be shorter than the steps between two checks, or end exactly where one is due.
            if progress.epoch < self.schedule.epochs and self.hooks.stop():
                return progress
        return progress

    def _train_epoch(self, stage: Stage, progress: Progress, clock: Clock) -> tuple[Progress, bool]:
        """Train what is left of an epoch; also return whether it came to its end."""
        epoch, accumulation = self.hooks.epoch(progress.epoch), self.stepper.accumulation
        batches = self.owners.with_labels(clock.data(epoch.batches), progress.epoch)
        # Counted from here, not from the start of the epoch: progress is saved only between groups of
        # batches, so a group starts here, whatever the size of earlier groups.
        for num_done, batch in enumerate(clock.labels(batches, self.owners), 1):
            self._step(batch, stage, progress, num_done - 1, epoch.num_steps)
            progress = replace(progress, step=progress.step + 1, all_steps=progress.all_steps + 1)
            self._report(stage, progress)
            if num_done == epoch.num_steps or num_done % accumulation:
                continue  # the epoch is over, or gradients are still being added up
            # Due at any batch of this group; all ranks are at the same step, and check together.
            if _falls_due(self.pace.stop_every, progress.all_steps, accumulation) and self.hooks.stop():
                return progress, False
            if self.pace.save_every and _falls_due(self.pace.save_every, progress.step, accumulation):
                self.owners.drain()
                self._settle(stage, progress)
                self.hooks.save(progress)
        return progress, True

    def _step(self, batch: Batch, stage: Stage, progress: Progress, nth: int, num_steps: int) -> None:
        # Randomness in the network (dropout) depends only on the position, so a restart repeats it.
        _set_seed(self.seed, progress.epoch, progress.step, self.owners.rank)
        warmth = min(1.0, (progress.all_steps + 1) / max(self.pace.warmup_steps, 1))
        for group in self.stepper.optimizer.param_groups:
            group["lr"] = stage.learning_rate * warmth
        prepared = self.hooks.prepare(batch, progress.epoch)
        if prepared.problems:
            self._num_unreadable += len(prepared.problems)
            self._unreadable = [*self._unreadable, *prepared.problems][:NAMED_PROBLEMS]
            # More than a complete epoch may have end the run at once.
            num_rows = self.owners.table.layout.num_rows
            self._require_few(self._num_unreadable, num_rows, self._unreadable, progress.epoch)
        result = self.stepper.step(prepared, stage, nth, num_steps)
        self._tally.add(result)
        if stage.moves_labels:
            self.owners.move(batch.rows, result.label_logits[: len(batch.rows)], progress.epoch)
        else:
            self.owners.mark(batch.rows, progress.epoch)

    def _report(self, stage: Stage, progress: Progress) -> None:
        """Start to copy the loss, and log it a few steps later, at the same steps on all ranks."""
        if self._tally.num_recent == ARRIVED_AFTER:
            self._log_loss()
        if self._tally.num_recent == LOG_EVERY_STEPS:
            self._sent = stage, progress, self._tally.send()

    def _log_loss(self) -> None:
        if self._sent is not None:
            (stage, progress, sent), self._sent = self._sent, None
            sums = self._tally.read(sent)
            require_finite(sums.problems(), stage.name, progress, LOG_EVERY_STEPS)
            self.hooks.log_step(stage, progress, {"loss": sums.mean_loss})

    def _settle(self, stage: Stage, progress: Progress) -> None:
        """Make sure that what is about to be evaluated and saved is finite, and the same on every rank."""
        self._log_loss()
        num_recent = self._tally.num_recent
        require_finite(self._tally.peek().problems(), stage.name, progress, num_recent)
        broken = not_finite(self.stepper.model, self.stepper.optimizer)
        if self.ranks.total(len(broken)):  # all ranks end together, so none waits for one that has ended
            require_finite(self.ranks.join(broken), stage.name, progress, num_recent)
        average_buffers(self.stepper.model, self.ranks.add_up, self.owners.world)

    def _require_few(self, num: float, num_rows: float, names: list[str], epoch: int) -> None:
        if num > self.pace.max_unreadable_share * num_rows:
            raise PencilError(
                f"epoch {epoch + 1}: {num:,.0f} of {num_rows:,.0f} images cannot be decoded, more than "
                f"data.max_damaged_share allows: {'; '.join(names)}"
            )

    def _figures(self, stage: Stage, progress: Progress, clock: Clock) -> dict[str, float]:
        """The figures of an epoch, over all ranks; too many unreadable images end the run here."""
        total = self.ranks.total
        visited = total(self.owners.table.count_visited(progress.epoch))
        num_unreadable = total(self._num_unreadable)
        if num_unreadable:
            names = self.ranks.join(self._unreadable)[:NAMED_PROBLEMS]
            self._require_few(num_unreadable, visited, names, progress.epoch)
            self.hooks.name_unreadable(int(num_unreadable), names)
        figures = clock.figures()
        figures["images_per_s"] = total(figures["images_per_s"])
        figures |= {"rows_visited": visited, "rows_unreadable": num_unreadable}
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
