"""Exchange: one round of label traffic between all ranks.

In a round every rank asks the owners of some rows for their labels, and sends the owners of other rows their
predictions and moved labels. That takes three collectives: sizes, row numbers, and labels. A row occurs once
per epoch, so no round asks for a row that it also writes, and their order inside a round does not matter.

    logits, noisy_class = Exchange(table, world, group).round(Outgoing(asked, written, values, epoch=7))

Every rank takes part in every round, and all drain in the same round; ranks that are not in step are refused.

When a rank hangs, gloo reports how long it waited but not for which rank; when one dies, gloo reports an
address with the bytes of the port in the wrong order. So the ranks share their addresses at the start, and
every error names all of them:

    peers = introduce(rank, world, group)
    str(peers[1])                             # rank 1 on node-7 at 10.0.3.7 (pid 4711)
"""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pencil_scale.labels.columns import Int64s, prediction_width
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError

Float32s = npt.NDArray[np.float32]
FAILED = -1  # instead of a size: this rank exchanges nothing more
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface


class OwnersError(PencilError):
    """Labels could not be exchanged with their owners."""


@dataclass(frozen=True)
class Outgoing:
    """What one rank sends in a round."""

    asked: Int64s
    written: Int64s
    values: Float32s  # of the rows written: moved logits [B, C], if they move, and predictions [B, 2 K]
    moves: bool
    epoch: int  # of the rows written
    drains: bool = False  # nothing more is sent until every rank has drained


class Exchange:
    """One rank's side of all rounds. Only one thread may use it: two on one group abort, or deadlock."""

    def __init__(self, table: LabelTable, world: int, group: dist.ProcessGroup | None):
        self._table, self._world, self._group = table, world, group
        self._one_each = np.ones(world, np.int64)
        self._num_classes = table.layout.num_classes

    def round(self, out: Outgoing) -> tuple[Float32s, npt.NDArray[np.int32]]:
        """Ask and write as a rank, answer and apply writes as an owner; return the labels asked for."""
        if self._world == 1:
            # One rank needs no notes: they would slow down a small network of hundreds of steps per second.
            answers = self._table.read(out.asked), self._table.read(out.asked, "noisy_class")
            self._write(out.written, out.values, out.moves, out.epoch)
            return answers
        # Group by owner. The sort is stable: each owner gets what is asked first, then what is written.
        rows, num_asked = np.concatenate([out.asked, out.written]), len(out.asked)
        owners = (rows >> self._table.layout.shift) % self._world
        order = np.argsort(owners, kind="stable")
        asked = np.bincount(owners[:num_asked], minlength=self._world)
        written = np.bincount(owners[num_asked:], minlength=self._world)
        their_asked, their_written, epoch, moves = self._swap_sizes(out, asked, written)
        their_rows = self._swap(rows[order], asked + written, their_asked + their_written)
        rows_asked, rows_written = _unbraid(their_rows, their_asked, their_written)

        # Now the labels: to each rank the answers to its questions, then what it shall write.
        answer, write = self._num_classes + 1, prediction_width(self._num_classes) + self._num_classes * moves
        values = out.values[order[order >= num_asked] - num_asked]
        sent = _braid(self._answers(rows_asked), their_asked, values, written)
        sizes = their_asked * answer + written * write, asked * answer + their_written * write
        labels, their_values = _unbraid(self._swap(sent, *sizes), asked * answer, their_written * write)
        self._write(rows_written, their_values.reshape(-1, write), moves, epoch)
        found = np.empty((num_asked, answer), np.float32)
        found[order[order < num_asked]] = labels.reshape(-1, answer)
        return found[:, :-1], found.view(np.int32)[:, -1]

    def farewell(self) -> None:
        """Tell the other ranks, in their next round, that this one has failed."""
        if self._world > 1:
            self._swap(np.full((self._world, 5), FAILED), self._one_each, self._one_each)

    def _swap_sizes(self, out: Outgoing, asked: Int64s, written: Int64s) -> tuple[Int64s, Int64s, int, bool]:
        """How many rows each rank asks this one for, and writes here; the epoch, and whether labels move."""
        state = [out.epoch if len(out.written) else -1, out.moves, out.drains]
        sizes = np.array([[*pair, *state] for pair in zip(asked, written, strict=True)])
        heard = self._swap(sizes, self._one_each, self._one_each)
        for rank in np.flatnonzero(heard[:, 0] == FAILED):
            raise OwnersError(f"rank {rank} failed; its log says why")
        drains, writes = heard[:, 4], heard[heard[:, 2] >= 0][:, 2:4]
        if len(np.unique(drains)) > 1 or len(np.unique(writes, axis=0)) > 1:
            raise OwnersError(
                f"the ranks are not in step: ranks {np.flatnonzero(drains).tolist()} of {self._world} drain, "
                f"and they write epochs {(heard[:, 2] + 1).tolist()} (0: none); give every rank the same "
                "number of batches, empty ones where rows run out, and call drain() on all at the same step"
            )
        epoch, moves = writes[0].tolist() if len(writes) else (0, False)
        return heard[:, 0], heard[:, 1], epoch, bool(moves)

    def _answers(self, rows: Int64s) -> Float32s:
        """The logits of these rows, and in the last column the bits of the class: [B, C + 1]."""
        packed = np.empty((len(rows), self._table.layout.num_classes + 1), np.float32)
        packed[:, :-1] = self._table.read(rows)
        packed.view(np.int32)[:, -1] = self._table.read(rows, "noisy_class")
        return packed

    def _write(self, rows: Int64s, values: Float32s, moves: bool, epoch: int) -> None:
        if len(rows) and moves:
            self._table.write(rows, values[:, : self._num_classes], values[:, self._num_classes :], epoch)
        elif len(rows):
            self._table.mark(rows, values, epoch)

    def _swap(self, sent: npt.NDArray[Any], leaving: Int64s, arriving: Int64s) -> npt.NDArray[Any]:
        """Send each rank its `leaving` rows, in the order of ranks, and take `arriving` rows from each."""
        received = np.empty((arriving.sum(), *sent.shape[1:]), sent.dtype)
        tensors = torch.from_numpy(received), torch.from_numpy(sent)
        dist.all_to_all_single(*tensors, arriving.tolist(), leaving.tolist(), group=self._group)
        return received


def _braid(first: Float32s, num_first: Int64s, second: Float32s, num_second: Int64s) -> Float32s:
    """For each rank its rows of `first`, then its rows of `second`, as one run of numbers."""
    firsts, seconds = np.split(first, num_first.cumsum()[:-1]), np.split(second, num_second.cumsum()[:-1])
    return np.concatenate([rows.ravel() for pair in zip(firsts, seconds, strict=True) for rows in pair])


def _unbraid(both: npt.NDArray[Any], num_first: Int64s, num_second: Int64s) -> list[npt.NDArray[Any]]:
    """Separate what each rank sent first from what it sent second."""
    pieces = np.split(both, np.stack([num_first, num_second], axis=1).cumsum()[:-1])
    return [np.concatenate(pieces[which::2]) for which in (0, 1)]


@dataclass(frozen=True)
class Peer:
    """The place where a rank runs."""

    rank: int
    host: str
    address: str  # where gloo listens
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} at {self.address} (pid {self.pid})"


def introduce(rank: int, world: int, group: dist.ProcessGroup | None) -> list[Peer]:
    """Tell every rank where this one runs, and learn where they run."""
    me = Peer(rank, socket.gethostname(), gloo_address(), os.getpid())
    if world == 1:
        return [me]
    peers: list[Peer] = [me] * world
    try:
        dist.all_gather_object(peers, me, group=group)
    except RuntimeError as error:
        raise OwnersError(
            f"{me} could not reach the other {world - 1} ranks: {' '.join(str(error).split())}; "
            "check which of them did not start, and start again"
        ) from error
    return peers


def gloo_address() -> str:
    """The address on which gloo listens, found as torch finds it: by interface, else by the host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        asked = struct.pack("256s", interface.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            try:
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, asked)
            except OSError:
                return f"interface {interface}"  # it has no IPv4 address
        return socket.inet_ntoa(answer[20:24])
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"  # the host's name does not resolve: torch uses the loopback too
    return str(found[0][4][0])
