"""Exchange: one round of label traffic between all ranks, in two collectives.

First every rank sends every other a note of fixed size: the rows it asks for and the rows it has moved. Now
both sides of every pair know the sizes, and the second collective carries the rows: answers to the questions
in the notes, and the moved logits that the notes announced. A row occurs once per epoch, so no round asks for
a row that it also moves, and their order inside a round does not matter.

    answers = Exchange(table, world, group).round(Outgoing(asked=rows, moved=moved, epoch=7), logits)

When a rank hangs, gloo reports how long it waited but not for which rank; when one dies, gloo reports an
address with the bytes of the port in the wrong order. So the ranks tell each other at the start where they
run, and every error names all of them:

    peers = introduce(rank, world, group)
    str(peers[1])                             # rank 1 on node-7 at 10.0.3.7 (pid 4711)
"""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
NO_ROWS: Int64s = np.zeros(0, np.int64)
FIRST_CAPACITY = 64
NOTE_HEAD = 6
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface
LOOPBACK = "127.0.0.1"


class OwnersError(PencilError):
    """Labels could not be exchanged with their owners."""


class PeerFailedError(OwnersError):
    """Another rank reported that it failed."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} failed; its log says why")


class Flag(IntFlag):
    """The state of a rank, sent to every other."""

    NONE = 0
    IDLE = 1  # it asks for no more rows until every rank has drained
    DRAINED = 2  # it waits in `drain`, and has sent everything
    MORE = 4  # it needs another round at once
    FAILED = 8  # it has failed and exchanges nothing more


@dataclass(frozen=True)
class Outgoing:
    """What one rank sends in a round: to all ranks together, or, once grouped by owner, to one of them."""

    asked: Int64s = field(default_factory=lambda: NO_ROWS)
    moved: Int64s = field(default_factory=lambda: NO_ROWS)
    marked: Int64s = field(default_factory=lambda: NO_ROWS)
    epoch: int = 0  # of the moved and marked rows
    capacity: int = 0  # how many rows it wants the next round to carry
    flags: Flag = Flag.NONE

    def encode(self, capacity: int) -> Int64s:
        """As a note of fixed size: six numbers, then row numbers, then zeros."""
        note = np.zeros(NOTE_HEAD + 2 * capacity, np.int64)
        sizes = len(self.asked), len(self.moved), len(self.marked)
        note[:NOTE_HEAD] = *sizes, self.epoch, self.capacity, self.flags
        note[NOTE_HEAD : NOTE_HEAD + sum(sizes)] = np.concatenate([self.asked, self.moved, self.marked])
        return note

    @classmethod
    def decode(cls, note: Int64s) -> "Outgoing":
        """Read a note back."""
        num_asked, num_moved, num_marked, epoch, capacity, flags = note[:NOTE_HEAD].tolist()
        ends = np.cumsum([num_asked, num_moved, num_marked])
        asked, moved, marked, _ = np.split(note[NOTE_HEAD:], ends)
        return cls(asked, moved, marked, epoch, capacity, Flag(flags))


@dataclass(frozen=True)
class Answers:
    """What a round brought: the labels asked for, and the state of every rank."""

    logits: Float32s  # [asked, C]
    noisy_class: npt.NDArray[np.int32]  # [asked]
    flags: list[Flag]  # one per rank


class _ByOwner:
    """Rows grouped by the rank that owns them: part p belongs to rank p mod world."""

    def __init__(self, rows: Int64s, shift: int, world: int):
        owner = (rows >> shift) % world
        self.order = np.argsort(owner, kind="stable")
        self.ends = np.cumsum(np.bincount(owner, minlength=world))
        self.groups: list[Int64s] = np.split(rows[self.order], self.ends[:-1])


class Exchange:
    """One rank's side of all rounds. Only one thread may use it: two on one group abort, or deadlock."""

    def __init__(self, table: LabelTable, world: int, group: dist.ProcessGroup | None):
        self._table, self._world, self._group = table, world, group
        # Rows a round may ask for, and as many it may write; it grows on all ranks to what any rank wants.
        self.capacity = FIRST_CAPACITY

    def round(self, out: Outgoing, logits: Float32s) -> Answers:
        """Send questions and moved rows (with their `logits`) to the owners; answer and write as an owner."""
        if self._world == 1:
            # One rank needs no notes: they would slow down a small network of hundreds of steps per second.
            self.capacity = max(self.capacity, out.capacity)
            answers = Answers(
                self._table.read(out.asked), self._table.read(out.asked, "noisy_class"), [out.flags]
            )
            self._write([out], [logits])
            return answers
        shift = self._table.layout.shift
        asked, moved, marked = (
            _ByOwner(rows, shift, self._world) for rows in (out.asked, out.moved, out.marked)
        )
        groups = zip(asked.groups, moved.groups, marked.groups, strict=True)
        heard = self._swap_notes([replace(out, asked=a, moved=b, marked=c) for a, b, c in groups])
        leaving = np.split(logits[moved.order], moved.ends[:-1])
        arrived = self._swap_rows(leaving, asked, heard)
        self._write(heard, [rows for _, rows in arrived])
        packed = np.empty((len(asked.order), self._table.layout.num_classes + 1), np.float32)
        packed[asked.order] = np.concatenate([rows for rows, _ in arrived])
        return Answers(packed[:, :-1], packed.view(np.int32)[:, -1], [note.flags for note in heard])

    def farewell(self) -> None:
        """Tell the others, in their next round, that this rank has failed."""
        if self._world > 1:
            self._swap_notes([Outgoing(flags=Flag.FAILED)] * self._world)

    def _swap_notes(self, notes: list[Outgoing]) -> list[Outgoing]:
        sent = np.concatenate([note.encode(self.capacity) for note in notes])
        sizes = [len(sent) // self._world] * self._world
        heard = [Outgoing.decode(note) for note in self._swap(sent, sizes, sizes)]
        failed = [rank for rank, note in enumerate(heard) if note.flags & Flag.FAILED]
        if failed:
            raise PeerFailedError(failed[0])
        self.capacity = max(self.capacity, *(note.capacity for note in heard))
        return heard

    def _swap_rows(
        self, leaving: list[Float32s], asked: _ByOwner, heard: list[Outgoing]
    ) -> list[tuple[Float32s, Float32s]]:
        """Answer every rank; from every rank: its answers to this one, and the logits that it moved."""
        num_classes = self._table.layout.num_classes
        rows = np.concatenate([note.asked for note in heard])
        packed = np.empty((len(rows), num_classes + 1), np.float32)  # the logits, and the bits of the class
        packed[:, :-1] = self._table.read(rows)
        packed.view(np.int32)[:, -1] = self._table.read(rows, "noisy_class")
        answers = np.split(packed, np.cumsum([len(note.asked) for note in heard])[:-1])
        parcels = list(zip(answers, leaving, strict=True))
        sent = np.concatenate([rows.reshape(-1) for parcel in parcels for rows in parcel])
        owed = [len(rows) * (num_classes + 1) for rows in asked.groups]
        arriving = [size + len(note.moved) * num_classes for size, note in zip(owed, heard, strict=True)]
        received = self._swap(sent, [a.size + b.size for a, b in parcels], arriving)
        return [
            (parcel[:size].reshape(-1, num_classes + 1), parcel[size:].reshape(-1, num_classes))
            for parcel, size in zip(received, owed, strict=True)
        ]

    def _write(self, heard: list[Outgoing], logits: list[Float32s]) -> None:
        for epoch in sorted({note.epoch for note in heard if len(note.moved) or len(note.marked)}):
            at_once = [rank for rank, note in enumerate(heard) if note.epoch == epoch]
            moved = np.concatenate([heard[rank].moved for rank in at_once])
            marked = np.concatenate([heard[rank].marked for rank in at_once])
            if len(moved):
                self._table.write(moved, np.concatenate([logits[rank] for rank in at_once]), epoch)
            if len(marked):
                self._table.mark(marked, epoch)

    def _swap(
        self, sent: npt.NDArray[Any], leaving: list[int], arriving: list[int]
    ) -> list[npt.NDArray[Any]]:
        """Send each rank its `leaving` numbers, in the order of ranks, and take `arriving` from each."""
        received = np.empty(sum(arriving), sent.dtype)
        tensors = torch.from_numpy(received), torch.from_numpy(sent)
        dist.all_to_all_single(*tensors, arriving, leaving, group=self._group)
        return np.split(received, np.cumsum(arriving)[:-1])


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
        return LOOPBACK  # the host's name does not resolve: torch uses the loopback too
    return str(found[0][4][0])
