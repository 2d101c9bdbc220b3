"""Owners: each rank owns some parts of the label table; batches get their labels, and moved labels go back.

Part `p` of the table belongs to rank `p mod world`, and only its owner writes it. One thread per rank carries
rows back and forth, so the training thread finds the labels of its next batches already there:

    owners = Owners(table, rank, world)
    for batch in owners.with_labels(batches):                  # label_logits and noisy_class are filled in
        result = train_step(model, optimizer, batch, stage)
        owners.move(batch.rows, result.label_logits, epoch)    # returns at once; applied a few steps behind
    owners.drain()                                             # every rank: now all moves are applied

`drain` is collective: every rank calls it equally often. Before it, a rank may have fewer batches than
others, or none. A rank without further batches keeps answering the others in the background, so its training
thread may wait for them in another collective.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from pencil_scale.labels.courier import Courier, HostCopy, Request, Write, launched_so_far
from pencil_scale.labels.exchange import Exchange, OwnersError, PeerFailedError, introduce
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError

STOP_PATIENCE_S = 5.0
AHEAD = 3  # batches whose labels are fetched before their turn: this many steps may wait in a GPU's queue


@dataclass(frozen=True)
class Batch:
    """Some samples on their way through a step; the labels are empty until the owners fill them in."""

    rows: Tensor  # int64 [B], on the host
    images: Any  # what the model takes; passed through
    weight: Tensor  # float32 [B]; 0 where the image could not be read
    label_logits: Tensor = field(default_factory=lambda: torch.empty(0))  # float32 [B, C]
    noisy_class: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # int64 [B]
    problems: tuple[str, ...] = ()  # one line per image that could not be decoded


AnyBatch = TypeVar("AnyBatch", bound=Batch)


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
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
        device: torch.device | str = "cpu",
    ):
        """Connect to the other ranks; `table` has at least the parts this rank owns, open for writing.

        Without a `group`, one is made over gloo: every rank of the default group must do so at the same time.
        A single rank needs no process group.
        """
        lacking = set(owned_parts(table.layout.num_parts, rank, world)) - set(table.parts)
        if lacking:
            raise OwnersError(
                f"rank {rank} of {world} owns part {min(lacking)}, which is not in {table.folder}"
            )
        self.table, self.rank, self.world = table, rank, world
        self._device = torch.device(device)
        self._own_group = world > 1 and group is None
        self._group = _new_group(timeout_s) if self._own_group else group
        self.peers = introduce(rank, world, self._group)
        self._courier = Courier(Exchange(table, world, self._group), rank, world)
        self._epoch: int | None = None
        self._step = 0
        self._drained = True
        self._pass = 0
        self._under_way: deque[Write] = deque(maxlen=AHEAD + 1)
        self.device_s = 0.0  # time in `with_labels` spent waiting for steps to finish on the device

    def with_labels(self, batches: Iterable[AnyBatch], epoch: int | None = None) -> Iterator[AnyBatch]:
        """Yield every batch with its labels, fetched while those before it are computed.

        A row occurs once in a pass, so no earlier batch can still move what was fetched. The class comes from
        the table too, where pins win. `epoch` is only used in error messages.
        """
        if not self._drained:
            raise OwnersError(
                "labels of an earlier pass are not written yet; call drain() on every rank first"
            )
        self._pass += 1
        self._step, self._epoch, this_pass = 0, epoch, self._pass
        self._courier.begin()
        num_classes, pinned = self.table.layout.num_classes, self._device.type == "cuda"
        coming: deque[tuple[AnyBatch, Request]] = deque()
        try:
            for batch in batches:
                asked = self.table.check_rows(_host_rows(batch.rows))
                label_logits = torch.empty(len(asked), num_classes, dtype=torch.float32, pin_memory=pinned)
                noisy_class = torch.empty(len(asked), dtype=torch.int64, pin_memory=pinned)
                coming.append((batch, Request(asked, label_logits, noisy_class)))
                self._drained = False
                self._courier.ask(coming[-1][1])
                if len(coming) > AHEAD:
                    yield self._hand_over(*coming.popleft())
            self._courier.finish()
            while coming:
                yield self._hand_over(*coming.popleft())
            self._courier.finish()  # again, for a caller that drained while it held the last batch
        finally:
            # A pass left early. One that was drained since is over, and may be garbage collected at any time.
            if not self._drained and self._pass == this_pass:
                self._courier.finish()

    def move(self, rows: Tensor, logits: Tensor, epoch: int) -> None:
        """Send these rows to their owners with new logits, and mark them as visited; returns at once."""
        expected = len(rows), self.table.layout.num_classes
        if logits.shape != expected:
            raise OwnersError(f"label logits of shape {tuple(logits.shape)}; expected {expected}")
        self._write(Write(_host_rows(rows), HostCopy(logits.float()), epoch))

    def mark(self, rows: Tensor, epoch: int) -> None:
        """Mark these rows as visited, where a stage moves no labels; returns at once."""
        self._write(Write(_host_rows(rows), None, epoch, launched_so_far(self._device)))

    def drain(self) -> None:
        """Wait until every rank drains and every row that any of them sent is written."""
        self._wait(self._courier.drain())
        self._drained = True

    def close(self) -> None:
        """Stop the thread; the table stays open."""
        unsent = len(self._courier.unsent)
        ended = self._courier.stop(STOP_PATIENCE_S)
        if self._own_group and ended and dist.is_initialized():
            dist.destroy_process_group(self._group)
        if unsent and self._courier.error is None:
            raise OwnersError(f"{unsent} writes never reached their owners; call drain() before close()")

    def __enter__(self) -> "Owners":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._courier.stop(0.0)  # unsent writes are no news: the error matters

    def _hand_over(self, batch: AnyBatch, request: Request) -> AnyBatch:
        # Limit the steps in the device's queue; the wait for them is counted apart from that for labels.
        if len(self._under_way) == self._under_way.maxlen:
            asked = time.perf_counter()
            self._under_way[0].wait_for_step()
            self.device_s += time.perf_counter() - asked
        self._wait(request.ready)
        self._step += 1
        return replace(
            batch,
            label_logits=request.label_logits.to(self._device, non_blocking=True),
            noisy_class=request.noisy_class.to(self._device, non_blocking=True),
        )

    def _write(self, write: Write) -> None:
        if self._courier.error is not None:
            raise self._named(self._courier.error)
        self.table.check_rows(write.rows)
        self._epoch, self._drained = write.epoch, False
        self._courier.write(write)
        self._under_way.append(write)

    def _wait(self, coming: "Future[None]") -> None:
        try:
            coming.result()
        except Exception as error:
            raise self._named(error) from error

    def _named(self, error: BaseException) -> BaseException:
        """Explain a failed exchange; a failed GPU or a refused row is reported as it is."""
        clear = isinstance(error, torch.AcceleratorError | PencilError)
        if clear and not isinstance(error, PeerFailedError):
            return error
        what = " ".join(str(error).split())
        epoch = "an unnamed epoch" if self._epoch is None else f"epoch {self._epoch}"
        return OwnersError(
            f"labels could not be exchanged in {epoch}, step {self._step}: {what}; the ranks are "
            f"{', '.join(map(str, self.peers))}; check which one ended, and restart from the last checkpoint"
        )


def _host_rows(rows: Tensor) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = rows.detach().to("cpu", torch.int64).numpy()
    return found


def _new_group(timeout_s: float) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise OwnersError(
            "several ranks, but torch.distributed is not initialised; call init_process_group or give a group"
        )
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)  # it has all ranks, so also this one
    return group
