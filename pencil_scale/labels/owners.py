"""Owners: each rank owns some parts of the label table; batches get their labels, and moved labels go back.

Part `p` of the table belongs to rank `p mod world`, and only its owner writes it. One thread per rank carries
rows back and forth, so the training thread finds the labels of its next batches already there:

    owners = Owners(table, rank, world)
    for batch in owners.with_labels(batches, epoch):            # label_logits and noisy_class are filled in
        result = stepper.step(batch, stage)
        owners.move(batch.rows, result.label_logits, result.predicted, epoch)   # returns at once
    owners.drain()                                              # every rank: now all moves are applied

The ranks are in step: all have the same number of batches, empty ones where rows ran out, and all drain after
the same batch. Each batch is one round of the exchange. It asks for the labels of that batch, three batches
ahead of its turn, and takes along what was moved since the round before.

Tensors leave the GPU as host copies, and only the thread that reads a copy waits for it:

    loss = HostCopy(losses.sum())       # returns at once
    ...                                 # more steps are launched
    loss.read()                         # waits for this copy, not for what was launched since
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pencil_scale.labels.columns import Int64s, prediction_width
from pencil_scale.labels.exchange import Exchange, Outgoing, OwnersError, introduce
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError

NO_ROWS: Int64s = np.zeros(0, np.int64)
PATIENCE_S = 5.0
AHEAD = 3  # batches whose labels are fetched before their turn: this many steps may wait in a GPU's queue


@dataclass(frozen=True)
class Batch:
    """Some samples on their way through a step; the labels are empty until the owners fill them in."""

    rows: Tensor  # int64 [B], on the host
    images: Any  # what the model takes, without those that are still encoded; passed through
    weight: Tensor  # float32 [B]; 0 where the image could not be read
    label_logits: Tensor = field(default_factory=lambda: torch.empty(0))  # float32 [B, C]
    noisy_class: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # int64 [B]
    problems: tuple[str, ...] = ()  # one line per image that could not be decoded
    encoded: dict[int, bytes] = field(default_factory=dict)  # images for the GPU to decode, by their number
    own: Tensor | None = None  # share of each image in its mixture with the one before it
    weak_images: Any = None  # the same images, weakly augmented, where a teacher needs them


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class HostCopy:
    """A copy of a tensor on the host; only its reader waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._values.copy_(tensor.detach(), non_blocking=True)
        self._arrived = launched_so_far(tensor.device)

    def read(self) -> Tensor:
        """Wait for the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def launched_so_far(device: torch.device) -> torch.cuda.Event | None:
    """An event that is reached once the GPU has done everything launched up to now; None on a CPU.

    A thread that waits for it sleeps. CUDA polls by default, which would take a processor away from the
    threads that read images.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True)
class _Write:
    """Rows to send to their owners once their step is done."""

    rows: Int64s
    values: HostCopy  # float32, there once the step is done: moved logits, if any, and predictions
    moves: bool
    epoch: int


@dataclass(frozen=True)
class _Round:
    """A round to come: what it asks for, where the labels go, and what it writes."""

    asked: Int64s
    label_logits: Tensor  # float32 [B, C]
    noisy_class: Tensor  # int64 [B]
    writes: list[_Write]
    drains: bool
    done: "Future[None]" = field(default_factory=Future)

    def run(self, exchange: Exchange) -> None:
        """Wait for the steps whose labels go out, and exchange."""
        rows = np.concatenate([NO_ROWS, *(write.rows for write in self.writes)])
        copies = [write.values.read().numpy() for write in self.writes]
        moves, epoch = (self.writes[0].moves, self.writes[0].epoch) if self.writes else (False, 0)
        values = np.concatenate(copies) if copies else np.zeros((0, 0), np.float32)
        out = Outgoing(self.asked, rows, values, moves, epoch, self.drains)
        self.label_logits.numpy()[:], self.noisy_class.numpy()[:] = exchange.round(out)


def owned_parts(num_parts: int, rank: int, world: int) -> range:
    """The parts that belong to a rank."""
    return range(rank, num_parts, world)


class Owners:
    """The labels of all ranks, seen from one of them."""

    def __init__(
        self,
        table: LabelTable,
        rank: int = 0,
        world: int = 1,
        timeout_s: float = 600.0,
        device: torch.device | str = "cpu",
    ):
        """Connect to the other ranks; `table` has at least the parts this rank owns.

        Several ranks make a group over gloo: every rank of the default group must do so at the same time. A
        single rank needs no process group.
        """
        lacking = set(owned_parts(table.layout.num_parts, rank, world)) - set(table.parts)
        if lacking:
            raise OwnersError(
                f"rank {rank} of {world} owns part {min(lacking)}, which is not in {table.folder}"
            )
        self.table, self.rank, self.world = table, rank, world
        self._device = torch.device(device)
        self._group = _new_group(timeout_s) if world > 1 else None
        self.peers = introduce(rank, world, self._group)
        self._exchange = Exchange(table, world, self._group)
        self._epoch: int | None = None
        self._step = 0
        self._drained = True
        self._unsent: list[_Write] = []
        self._under_way: deque[_Write] = deque(maxlen=AHEAD + 1)
        self.device_s = 0.0  # time in `with_labels` spent waiting for steps to finish on the device
        self._error: BaseException | None = None
        self._rounds: SimpleQueue[_Round | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="label exchange", daemon=True)
        self._thread.start()

    def with_labels(self, batches: Iterable[AnyBatch], epoch: int | None = None) -> Iterator[AnyBatch]:
        """Yield every batch with its labels, fetched while those before it are computed.

        A row occurs once in a pass, so no earlier batch can still move what was fetched. The class comes from
        the table too, where pins win. `epoch` is only used in error messages.
        """
        if not self._drained:
            raise OwnersError(
                "labels of an earlier pass are not written yet; call drain() on every rank first"
            )
        self._step, self._epoch = 0, epoch
        coming: deque[tuple[AnyBatch, _Round]] = deque()
        for batch in batches:
            coming.append((batch, self._start_round(self.table.check_rows(_host_rows(batch.rows)))))
            if len(coming) > AHEAD:
                yield self._hand_over(*coming.popleft())
        while coming:
            yield self._hand_over(*coming.popleft())

    def move(self, rows: Tensor, logits: Tensor, predicted: Tensor, epoch: int) -> None:
        """Send these rows to their owners with new logits, and mark them as visited; returns at once."""
        num_classes = self.table.layout.num_classes
        _require_shape("label logits", logits, len(rows), num_classes)
        _require_shape("predictions", predicted, len(rows), prediction_width(num_classes))
        both = torch.cat([logits.float(), predicted], dim=1)
        self._write(_Write(_host_rows(rows), HostCopy(both), True, epoch))

    def mark(self, rows: Tensor, predicted: Tensor, epoch: int) -> None:
        """Mark these rows as visited, where a stage moves no labels; returns at once."""
        _require_shape("predictions", predicted, len(rows), prediction_width(self.table.layout.num_classes))
        self._write(_Write(_host_rows(rows), HostCopy(predicted), False, epoch))

    def drain(self) -> None:
        """Wait until every rank drains and every row that any of them sent is written."""
        self._wait(self._start_round(NO_ROWS, drains=True))
        self._drained = True

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Stop the thread, if it ends in time, without sending what was not drained; the table stays open."""
        self._rounds.put(None)
        self._thread.join(patience_s)
        if self._group is not None and not self._thread.is_alive() and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None

    def __enter__(self) -> "Owners":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(PATIENCE_S if error is None else 0.0)
        if error is None and self._unsent and self._error is None:
            raise OwnersError(f"{len(self._unsent)} writes never reached their owners; call drain() first")

    def _start_round(self, asked: Int64s, drains: bool = False) -> _Round:
        pinned, num_classes = self._device.type == "cuda", self.table.layout.num_classes
        label_logits = torch.empty(len(asked), num_classes, dtype=torch.float32, pin_memory=pinned)
        noisy_class = torch.empty(len(asked), dtype=torch.int64, pin_memory=pinned)
        started = _Round(asked, label_logits, noisy_class, self._unsent, drains)
        self._unsent, self._drained = [], False
        self._rounds.put(started)
        return started

    def _hand_over(self, batch: AnyBatch, fetched: _Round) -> AnyBatch:
        # Limit the steps in the device's queue; the wait for them is counted apart from that for labels.
        if len(self._under_way) == self._under_way.maxlen:
            asked = time.perf_counter()
            self._under_way[0].values.read()
            self.device_s += time.perf_counter() - asked
        self._wait(fetched)
        self._step += 1
        return replace(
            batch,
            label_logits=fetched.label_logits.to(self._device, non_blocking=True),
            noisy_class=fetched.noisy_class.to(self._device, non_blocking=True),
        )

    def _write(self, write: _Write) -> None:
        if self._error is not None:
            raise self._named(self._error)
        self.table.check_rows(write.rows)
        for other in self._unsent[:1]:
            if (other.epoch, other.moves) != (write.epoch, write.moves):
                raise OwnersError("writes of another epoch or stage are not sent yet; call drain() first")
        self._epoch, self._drained = write.epoch, False
        self._unsent.append(write)
        self._under_way.append(write)

    def _serve(self) -> None:
        """The thread: the only one that uses the exchange. Once a round has failed, all later ones fail."""
        while (next_round := self._rounds.get()) is not None:
            try:
                if self._error is not None:
                    raise self._error
                next_round.run(self._exchange)
            except BaseException as error:
                first, self._error = self._error is None, error
                next_round.done.set_exception(error)
                # The table refused a row: without a note the other ranks would wait until their timeout.
                if first and isinstance(error, PencilError) and not isinstance(error, OwnersError):
                    with contextlib.suppress(RuntimeError):
                        self._exchange.farewell()
            else:
                next_round.done.set_result(None)

    def _wait(self, coming: _Round) -> None:
        try:
            coming.done.result()
        except Exception as error:
            raise self._named(error) from error

    def _named(self, error: BaseException) -> BaseException:
        """Explain a failed exchange; a failed GPU or a refused row is reported as it is."""
        if isinstance(error, torch.AcceleratorError | PencilError) and not isinstance(error, OwnersError):
            return error
        what = " ".join(str(error).split())
        epoch = "an unnamed epoch" if self._epoch is None else f"epoch {self._epoch + 1}"
        return OwnersError(
            f"labels could not be exchanged in {epoch}, step {self._step}: {what}; the ranks are "
            f"{', '.join(map(str, self.peers))}; check which one ended, and restart from the last checkpoint"
        )


def _require_shape(what: str, values: Tensor, *expected: int) -> None:
    if values.shape != expected:
        raise OwnersError(f"{what} of shape {tuple(values.shape)}; expected {expected}")


def _host_rows(rows: Tensor) -> Int64s:
    found: Int64s = rows.detach().to("cpu", torch.int64).numpy()
    return found


def _new_group(timeout_s: float) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise OwnersError("several ranks, but torch.distributed is not initialised; call init_process_group")
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)  # it has all ranks, so also this one
    return group
