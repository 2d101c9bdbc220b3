"""Courier: the thread that carries labels between the training thread of a rank and their owners.

Only this thread uses the exchange. A round starts when this rank asks for rows or drains, when any rank needs
another round at once, and, once this rank has nothing more to ask, as long as others may ask. Every rank gets
the same flags in a round, so all agree on whether the next one follows at once.

Tensors leave the GPU as host copies, and only the thread that reads a copy waits for it:

    loss = HostCopy(losses.sum())       # returns at once
    ...                                 # more steps are launched
    loss.read()                         # waits for this copy, not for what was launched since

The waiting thread sleeps. CUDA polls by default, which would take a processor away from the threads that read
images. On a CPU everything is computed already, and there is nothing to wait for.
"""

import contextlib
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pencil_scale.labels.exchange import NO_ROWS, Answers, Exchange, Flag, Outgoing, PeerFailedError
from pencil_scale.storage.errors import PencilError


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
    """An event that is reached once the GPU has done everything launched up to now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass
class Request:
    """Rows asked for, where their labels go, and how many have arrived."""

    rows: npt.NDArray[np.int64]
    label_logits: Tensor  # float32 [B, C]
    noisy_class: Tensor  # int64 [B]
    num_done: int = 0
    ready: "Future[None]" = field(default_factory=Future)


@dataclass
class Write:
    """Rows to send to their owners once their step is done, and how many were sent."""

    rows: npt.NDArray[np.int64]
    logits: HostCopy | None  # float32 [B, C]; None where rows are only marked
    epoch: int
    stepped: torch.cuda.Event | None = None  # instead of logits: reached once the step is done
    num_done: int = 0

    def wait_for_step(self) -> None:
        """Sleep until the device has finished the step."""
        if self.stepped is not None:
            self.stepped.synchronize()
        if self.logits is not None:
            self.logits.read()


class Courier:
    """One thread, one exchange, two queues."""

    def __init__(self, exchange: Exchange, rank: int, world: int):
        self._exchange, self._rank, self._world = exchange, rank, world
        self._changed = threading.Condition()
        self._requests: deque[Request] = deque()
        self.unsent: deque[Write] = deque()
        self._draining: Future[None] | None = None
        self._idle = self._stopped = self._more = False
        self._others_ask = world > 1
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="label courier", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Start a pass: rows will be asked for."""
        with self._changed:
            self._idle = False

    def ask(self, request: Request) -> None:
        """Fetch labels; `request.ready` resolves once they have arrived."""
        with self._changed:
            self._requests.append(request)
            if self.error:
                request.ready.set_exception(self.error)
            self._changed.notify()

    def write(self, write: Write) -> None:
        """Send rows to their owners, in the next round that takes place for another reason."""
        with self._changed:
            self.unsent.append(write)

    def finish(self) -> None:
        """Say that no more rows will be asked for until the next drain."""
        with self._changed:
            self._idle = True
            self._changed.notify()

    def drain(self) -> "Future[None]":
        """Resolve once every rank drains and every write of every rank has been applied."""
        with self._changed:
            self._draining = drained = Future[None]()
            if self.error:
                drained.set_exception(self.error)
            self._changed.notify()
            return drained

    def stop(self, patience_s: float) -> bool:
        """End the thread; whether it ended in time."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_turn)
                    if self._stopped:
                        return
                self._round()
        except BaseException as error:
            with self._changed:
                self.error = error
                for waiting in [request.ready for request in self._requests] + [self._draining]:
                    if waiting is not None and not waiting.done():
                        waiting.set_exception(error)
            # The table refused a row: without a note the other ranks would wait until their timeout.
            if isinstance(error, PencilError) and not isinstance(error, PeerFailedError):
                with contextlib.suppress(RuntimeError, PeerFailedError):  # it receives its own note too
                    self._exchange.farewell()

    def _has_turn(self) -> bool:
        waited_for = bool(self._requests) or self._draining is not None
        return self._stopped or self._more or waited_for or (self._idle and self._others_ask)

    def _round(self) -> None:
        with self._changed:
            request = self._requests[0] if self._requests else None
            write = self.unsent[0] if self.unsent else None
            outgoing = self._outgoing(request, write)
        logits = np.zeros((0, 0), np.float32)
        if write:
            write.wait_for_step()
            if write.logits is not None:
                logits = write.logits.read().numpy()[write.num_done :][: len(outgoing.moved)]
        answers = self._exchange.round(outgoing, logits)
        with self._changed:
            if request:
                self._deliver(request, answers)
            if write:
                write.num_done += len(outgoing.moved) + len(outgoing.marked)
                if write.num_done == len(write.rows):
                    self.unsent.popleft()
            # Every rank has the same flags, so all decide alike what follows this round.
            self._more = any(flag & Flag.MORE for flag in answers.flags)
            others = [flag for rank, flag in enumerate(answers.flags) if rank != self._rank]
            self._others_ask = not all(flag & Flag.IDLE for flag in others)
            if all(flag & Flag.DRAINED for flag in answers.flags) and self._draining is not None:
                self._draining.set_result(None)
                self._draining, self._idle, self._others_ask = None, False, self._world > 1

    def _outgoing(self, request: Request | None, write: Write | None) -> Outgoing:
        capacity = self._exchange.capacity
        asked = request.rows[request.num_done :][:capacity] if request else NO_ROWS
        rows = write.rows[write.num_done :][:capacity] if write else NO_ROWS
        partly_asked = request is not None and request.num_done + len(asked) < len(request.rows)
        partly_written = write is not None and write.num_done + len(rows) < len(write.rows)
        more = partly_asked or partly_written or len(self.unsent) > 1
        last_asked = len(self._requests) <= 1
        drained = self._draining is not None and not more and last_asked
        idle = (self._idle or self._draining is not None) and last_asked
        return Outgoing(
            asked=asked,
            moved=rows if write and write.logits is not None else NO_ROWS,
            marked=rows if write and write.logits is None else NO_ROWS,
            epoch=write.epoch if write else 0,
            capacity=max(len(request.rows) if request else 0, len(write.rows) if write else 0),
            flags=Flag(more * Flag.MORE | drained * Flag.DRAINED | idle * Flag.IDLE),
        )

    def _deliver(self, request: Request, answers: Answers) -> None:
        here = slice(request.num_done, request.num_done + len(answers.logits))
        request.label_logits.numpy()[here] = answers.logits
        request.noisy_class.numpy()[here] = answers.noisy_class
        request.num_done = here.stop
        if request.num_done == len(request.rows):
            self._requests.popleft()
            request.ready.set_result(None)
