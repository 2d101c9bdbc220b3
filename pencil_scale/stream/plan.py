"""Epoch plan: the order of an epoch's rows, and which rank reads which of them.

The order depends only on (seed, epoch, catalogue version, subset). Chunks of the catalogue are cut into
stretches of at most a ninth of a window, the stretches are permuted, and as many as fit into the bytes of a
window are shuffled together. Both permutations sort by a hash of (seed, epoch, place), so leaving out rows
that were already visited does not change the order of the others.

Ranks take windows in turn; where there are fewer than eight per rank, windows are dealt out in slices.
Planning uses the counts of the chunks and reads no rows: the read task of a piece looks up its rows and
shuffles them.

    order = EpochOrder.of(counts, seed=1, epoch=7, window_bytes=64 << 20)
    left = order.left(visited, members)                    # rows still to be read, by window
    for cut in deal(left, world)[rank]:
        piece = order.piece(cut, visited)                  # what a read task needs to know
        rows = piece.rows(members)                         # int64, in the order of the epoch
    sizes = batch_sizes(share, batch, num_steps(left.sum(), batch, world))
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pencil_scale.storage.hashing import hashes

Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Members = Callable[[int], Int64s]  # the rows of a chunk that an epoch visits, in ascending order

CHUNK_ROWS = 4096
STRETCHES_PER_WINDOW = 8
PIECES_PER_RANK = 8  # small pieces: the first block comes soon, and few cores idle during the last one


@dataclass(frozen=True)
class RowCounts:
    """How many rows of each chunk an epoch visits, and the bytes of their images."""

    num_rows: Int64s
    num_bytes: Int64s

    @property
    def total(self) -> int:
        return int(self.num_rows.sum())


class Cut(NamedTuple):
    """Rows [start, stop) of the `total` that are left of a window."""

    window: int
    start: int
    stop: int
    total: int


class Stretch(NamedTuple):
    """Part `part` of the `parts` into which the rows of a chunk are cut."""

    chunk: int
    part: int
    parts: int

    def of(self, rows: Int64s) -> Int64s:
        return rows[len(rows) * self.part // self.parts : len(rows) * (self.part + 1) // self.parts]


@dataclass(frozen=True)
class Piece:
    """What one read task reads: some rows of one window, in a form that is small to send."""

    stretches: tuple[Stretch, ...]
    start: int
    stop: int
    total: int
    key: int | None  # of the shuffle; None: rows stay in catalogue order
    visited: dict[int, bytes] = field(default_factory=dict)  # chunk -> one bit per row
    chosen: dict[int, bytes] | None = None  # the subset, in the same form; None: all rows

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def chunks(self) -> list[int]:
        return sorted({place.chunk for place in self.stretches})

    def rows(self, ok_rows: Members) -> Int64s:
        """Look up the rows and return them in the order of the epoch.

        If the window has another number of rows left than planned, this is a ValueError: rows would be lost.
        """
        members = {chunk: ok_rows(chunk) for chunk in self.chunks}
        if self.chosen is not None:
            members = {chunk: rows[_marked(self.chosen, chunk, rows)] for chunk, rows in members.items()}
        found = [(place.chunk, place.of(members[place.chunk])) for place in self.stretches]
        unvisited = [rows[~_marked(self.visited, chunk, rows)] for chunk, rows in found]
        rows = np.concatenate([np.empty(0, np.int64), *unvisited])
        if len(rows) != self.total:
            raise ValueError(f"a window was planned with {self.total:,} rows, {len(rows):,} are there")
        return (rows if self.key is None else shuffled(rows, self.key))[self.start : self.stop]


@dataclass(frozen=True)
class EpochOrder:
    """The windows of an epoch, as stretches of chunks in their order."""

    counts: RowCounts
    chunk: Int64s  # [stretches], in the order of the epoch
    part: Int64s
    parts: Int64s
    first: Int64s  # [windows + 1]: a window's stretches are first[w] to first[w + 1]
    key: int | None

    @classmethod
    def of(
        cls, counts: RowCounts, seed: int, epoch: int, window_bytes: int, shuffle: bool = True
    ) -> "EpochOrder":
        """Order an epoch; a window holds at most about `window_bytes`, or one image if that is larger."""
        # A window ends with the stretch that crosses its bound, so the bound leaves room for one stretch.
        stretch_bytes = max(1, window_bytes // (STRETCHES_PER_WINDOW + 1))
        parts = np.minimum(-(-counts.num_bytes // stretch_bytes), counts.num_rows)
        parts = np.where(counts.num_rows > 0, np.maximum(parts, 1), 0)
        chunk = np.repeat(np.arange(len(parts)), parts)
        part = np.arange(len(chunk)) - np.repeat(np.cumsum(parts) - parts, parts)
        key = mixed_key(seed, epoch) if shuffle else None
        if key is not None:
            order = np.argsort(hashes(chunk * (2 * CHUNK_ROWS) + part, ~key), kind="stable")
            chunk, part = chunk[order], part[order]
        # Windows of about equal bytes; a stretch belongs to the window in which it begins.
        sizes = counts.num_bytes[chunk] / parts[chunk]
        total = float(sizes.sum())
        windows = max(1, int(np.ceil(total / max(1, window_bytes - stretch_bytes))))
        window = np.floor((np.cumsum(sizes) - sizes) * windows / max(total, 1.0)).astype(np.int64)
        first = np.append(np.flatnonzero(np.diff(window, prepend=-1)), len(sizes))
        return cls(counts, chunk, part, parts[chunk], first, key)

    def left(self, visited: Mask | None = None, members: Members | None = None) -> Int64s:
        """Count the rows of each window that are not visited yet.

        `visited` marks rows of this epoch only. `members` is needed only where a chunk is cut into stretches
        and some, but not all, of its rows are visited.
        """
        rows = self.counts.num_rows[self.chunk]
        left = rows * (self.part + 1) // self.parts - rows * self.part // self.parts
        if visited is not None:
            starts = np.arange(0, len(visited), CHUNK_ROWS)
            num_visited = np.zeros(len(self.counts.num_rows), np.int64)
            num_visited[: len(starts)] = np.add.reduceat(visited, starts, dtype=np.int64)
            done = num_visited[self.chunk]
            left = np.where(done == 0, left, np.where(self.parts == 1, rows - done, 0))
            mixed = np.flatnonzero((done > 0) & (done < rows) & (self.parts > 1))
            mixed = mixed[np.argsort(self.chunk[mixed], kind="stable")]
            for chunk, places in groupby(mixed.tolist(), key=lambda place: int(self.chunk[place])):
                assert members is not None
                inside = members(chunk)
                for place in places:
                    left[place] = np.count_nonzero(~visited[self._stretch(place).of(inside)])
        return np.add.reduceat(np.append(left, 0), self.first)[:-1] if len(left) else left

    def piece(self, cut: Cut, visited: Mask | None = None, subset: Mask | None = None) -> Piece:
        """Describe a cut for its read task; with a `subset`, the counts must be those of the subset."""
        places = range(self.first[cut.window], self.first[cut.window + 1])
        stretches = tuple(self._stretch(place) for place in places)
        chunks = {place.chunk for place in stretches}
        done = {} if visited is None else _bits_of(visited, chunks)
        chosen = None if subset is None else _bits_of(subset, chunks)
        return Piece(stretches, *cut[1:], self.key, done, chosen)

    def _stretch(self, place: int) -> Stretch:
        return Stretch(int(self.chunk[place]), int(self.part[place]), int(self.parts[place]))


def deal(left: Int64s, world: int) -> list[list[Cut]]:
    """Give every rank its cuts, so that shares differ by at most one row.

    Complete windows go to the ranks in turn until a rank's share is full; the last windows are cut. Where
    there are few windows, equal slices of them are dealt out. Rows are shuffled within their window, not
    within a slice, so that the order does not depend on the number of ranks.
    """
    full = np.flatnonzero(left).tolist()
    slices = -(-(PIECES_PER_RANK + 1) * world // max(1, len(full)))
    dealt = [
        Cut(window, total * k // slices, total * (k + 1) // slices, total)
        for window, total in zip(full, left[full].tolist(), strict=True)
        for k in range(slices)
    ]
    num_rows = int(left.sum())
    room = [num_rows // world + (rank < num_rows % world) for rank in range(world)]
    shares: list[list[Cut]] = [[] for _ in range(world)]
    rank = 0
    for window, start, stop, total in dealt:
        while start < stop:
            while room[rank] == 0:
                rank = (rank + 1) % world
            end = min(stop, start + room[rank])
            shares[rank].append(Cut(window, start, end, total))
            room[rank] -= end - start
            start, rank = end, (rank + 1) % world
    return shares


def num_steps(total: int, batch: int, world: int) -> int:
    """Count the steps of an epoch, the same on every rank: as many as the largest share needs."""
    return -(-total // (world * batch))


def batch_sizes(num_rows: int, batch: int, num_steps: int) -> list[int]:
    """Cut a rank's rows into full batches, and share the rest equally between the last two.

    This avoids batches of a single row, for which batch norm could not compute a variance. A rank with fewer
    rows than steps has empty batches at the end.
    """
    if num_rows > batch * num_steps:
        raise ValueError(f"{num_rows} rows do not fit {num_steps} batches of {batch}")
    full = min(max(num_steps - 2, 0), num_rows // batch)
    rest, places = num_rows - full * batch, num_steps - full
    return [batch] * full + [rest // places + (place < rest % places) for place in range(places)]


def shuffled(rows: Int64s, key: int) -> Int64s:
    """Shuffle rows into the order that belongs to a key."""
    return rows[np.argsort(hashes(rows, key), kind="stable")]


def mixed_key(seed: int, epoch: int) -> int:
    """Make one key of seed and epoch; the keys of neighbouring epochs are unrelated."""
    digest = hashlib.blake2b(f"epoch {epoch} of seed {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _bits_of(mask: Mask, chunks: set[int]) -> dict[int, bytes]:
    """Pack a mask of these chunks into 512 bytes per chunk; chunks without a marked row are left out."""
    inside = {chunk: mask[chunk * CHUNK_ROWS : (chunk + 1) * CHUNK_ROWS] for chunk in chunks}
    return {chunk: np.packbits(marked).tobytes() for chunk, marked in inside.items() if marked.any()}


def _marked(bits: dict[int, bytes], chunk: int, rows: Int64s) -> Mask:
    """Look up which rows of a chunk are marked."""
    if chunk not in bits:
        return np.zeros(len(rows), np.bool_)
    unpacked = np.unpackbits(np.frombuffer(bits[chunk], np.uint8)).view(np.bool_)
    return np.asarray(unpacked[rows - chunk * CHUNK_ROWS])
