"""Epoch plan: the order of an epoch's rows, and which rank reads which of them.

The order depends only on (seed, epoch, catalogue version, subset, window size). Chunks of the catalogue are
cut into stretches of at most a ninth of a window, the stretches are permuted, and as many as fit into the
bytes of a window are shuffled together. Both permutations sort by a hash of (seed, epoch, position), so
leaving out rows that were already visited does not change the order of the others.

Ranks take windows in turn; where there are fewer than nine per rank, slices of windows are dealt out.
Planning uses the counts of the chunks and reads no rows: the read task of a piece looks up its rows and
shuffles them.

    order = EpochOrder(catalogue.chunks(), mixed_key(seed, epoch), window_bytes=64 << 20)
    num_unread = order.num_unread(visited, ok_rows)        # by window
    for cut in deal(num_unread, world)[rank]:
        piece = order.piece(cut, visited)                  # what a read task needs to know
        rows = piece.rows(ok_rows)                         # int64, in the order of the epoch
    sizes = batch_sizes(share, batch, num_steps(num_unread.sum(), batch, world))
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pencil_scale.catalogue.catalogue import Chunks
from pencil_scale.catalogue.schema import CHUNK_ROWS
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import hashes

Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
OkRows = Callable[[int], Int64s]  # the ok rows of a chunk, in ascending order

STRETCHES_PER_WINDOW = 8
# On average, or more: with small pieces the first block comes soon, and few cores idle during the last one.
SLICES_PER_RANK = 9


class Cut(NamedTuple):
    """Rows [start, stop) of the `total` unread rows of a window."""

    window: int
    start: int
    stop: int
    total: int


class Stretch(NamedTuple):
    """Stretch `number` of the `num_stretches` into which the rows of a chunk are cut."""

    chunk: int
    number: int
    num_stretches: int
    subset: bytes | None  # one bit per row of the chunk; None: all rows
    visited: bytes | None  # in the same format; None: no row

    def unread(self, ok_rows: Int64s) -> Int64s:
        """Choose the rows of this stretch among the ok rows of the chunk."""
        rows = ok_rows if self.subset is None else ok_rows[_lookup(self.subset, ok_rows)]
        start, stop = (len(rows) * number // self.num_stretches for number in (self.number, self.number + 1))
        rows = rows[start:stop]
        return rows if self.visited is None else rows[~_lookup(self.visited, rows)]


class Piece(NamedTuple):
    """What one read task reads: some rows of one window, described in few bytes."""

    stretches: list[Stretch]
    cut: Cut
    key: int | None  # of the shuffle

    @property
    def num_rows(self) -> int:
        return self.cut.stop - self.cut.start

    def rows(self, ok_rows: OkRows) -> Int64s:
        """Look up the rows and return them in the order of the epoch; refuse to lose any."""
        unread = [stretch.unread(ok_rows(stretch.chunk)) for stretch in self.stretches]
        rows = np.concatenate([np.empty(0, np.int64), *unread])
        if len(rows) != self.cut.total:
            raise PencilError(
                f"a window was planned with {self.cut.total:,} rows, {len(rows):,} are there; the visited "
                "rows or the subset belong to another version of the catalogue: start a new run"
            )
        return (rows if self.key is None else shuffled(rows, self.key))[self.cut.start : self.cut.stop]


class EpochOrder:
    """The windows of an epoch, as stretches of chunks in their order."""

    def __init__(
        self, chunks: Chunks, key: int | None, window_bytes: int, subset: Mask | None = None
    ) -> None:
        """Order an epoch; a window holds at most about `window_bytes`, or one image if that is larger.

        Without a `key` rows stay in catalogue order. With a `subset`, `chunks` counts its rows only.
        """
        self._num_rows, self._key, self._subset = chunks.num_ok.astype(np.int64), key, subset
        # A window ends with the stretch that crosses its bound, so the bound leaves room for one stretch.
        stretch_bytes = max(1, window_bytes // (STRETCHES_PER_WINDOW + 1))
        count = np.minimum(-(-chunks.ok_bytes // stretch_bytes), self._num_rows)
        count = np.where(self._num_rows > 0, np.maximum(count, 1), 0)
        chunk = np.repeat(np.arange(len(count)), count)
        number = np.arange(len(chunk)) - np.repeat(np.cumsum(count) - count, count)
        if key is not None:
            order = np.argsort(hashes(chunk * (2 * CHUNK_ROWS) + number, ~key), kind="stable")
            chunk, number = chunk[order], number[order]
        self._chunk, self._number, self._count = chunk, number, count[chunk]  # by stretch
        # Windows of about equal bytes; a stretch belongs to the window in which it starts.
        sizes = chunks.ok_bytes[chunk] / self._count
        total = float(sizes.sum())
        windows = max(1, int(np.ceil(total / max(1, window_bytes - stretch_bytes))))
        window = np.floor((np.cumsum(sizes) - sizes) * windows / max(total, 1.0)).astype(np.int64)
        self._first = np.append(np.flatnonzero(np.diff(window, prepend=-1)), len(sizes))  # by window

    def num_unread(self, visited: Mask | None = None, ok_rows: OkRows | None = None) -> Int64s:
        """Count the rows of each window that are not visited yet.

        `visited` contains rows of this epoch only. `ok_rows` is needed only where a chunk is cut into
        stretches and some, but not all, of its rows are visited.
        """
        rows = self._num_rows[self._chunk]
        unread = rows * (self._number + 1) // self._count - rows * self._number // self._count
        if visited is not None:
            starts = np.arange(0, len(visited), CHUNK_ROWS)
            done = np.add.reduceat(visited, starts, dtype=np.int64)[self._chunk]
            unread = np.where(self._count == 1, rows - done, np.where(done == rows, 0, unread))
            mixed = self._chunk[(self._count > 1) & (done > 0) & (done < rows)]
            for chunk in np.unique(mixed).tolist():
                assert ok_rows is not None
                known = ok_rows(chunk)
                for position in np.flatnonzero(self._chunk == chunk).tolist():
                    unread[position] = len(self._stretch(position, visited).unread(known))
        return np.add.reduceat(np.append(unread, 0), self._first)[:-1] if len(unread) else unread

    def piece(self, cut: Cut, visited: Mask | None = None) -> Piece:
        """Describe a cut for its read task."""
        positions = range(self._first[cut.window], self._first[cut.window + 1])
        return Piece([self._stretch(position, visited) for position in positions], cut, self._key)

    def _stretch(self, position: int, visited: Mask | None) -> Stretch:
        chunk, number, count = (int(a[position]) for a in (self._chunk, self._number, self._count))
        return Stretch(chunk, number, count, _packed(self._subset, chunk), _packed(visited, chunk))


def deal(num_unread: Int64s, world: int) -> list[list[Cut]]:
    """Give every rank its cuts, so that shares differ by at most one row.

    Complete windows go to the ranks in turn until a rank's share is full; the last windows are cut. Where
    there are few windows, equal slices of them are dealt out. Rows are shuffled within their window, not
    within a slice, so that the order does not depend on the number of ranks.
    """
    windows = np.flatnonzero(num_unread).tolist()
    num_slices = -(-SLICES_PER_RANK * world // max(1, len(windows)))
    num_rows = int(num_unread.sum())
    room = [num_rows // world + (rank < num_rows % world) for rank in range(world)]
    shares: list[list[Cut]] = [[] for _ in range(world)]
    rank = 0
    for window, total in zip(windows, num_unread[windows].tolist(), strict=True):
        for number in range(num_slices):
            start, stop = total * number // num_slices, total * (number + 1) // num_slices
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
    full = min(max(num_steps - 2, 0), num_rows // batch)
    rest, others = num_rows - full * batch, num_steps - full
    return [batch] * full + [rest // others + (number < rest % others) for number in range(others)]


def shuffled(rows: Int64s, key: int) -> Int64s:
    """Shuffle rows into the order that belongs to a key."""
    return rows[np.argsort(hashes(rows, key), kind="stable")]


def mixed_key(seed: int, epoch: int) -> int:
    """Make one key of seed and epoch; the keys of neighbouring epochs are unrelated."""
    digest = hashlib.blake2b(f"epoch {epoch} of seed {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _packed(mask: Mask | None, chunk: int) -> bytes | None:
    """Pack the mask of a chunk into 512 bytes; None if it contains no row."""
    chosen = None if mask is None else mask[chunk * CHUNK_ROWS : (chunk + 1) * CHUNK_ROWS]
    return None if chosen is None or not chosen.any() else np.packbits(chosen).tobytes()


def _lookup(packed: bytes, rows: Int64s) -> Mask:
    """Look up which rows of a chunk its mask contains."""
    return np.asarray(np.unpackbits(np.frombuffer(packed, np.uint8)).view(np.bool_)[rows % CHUNK_ROWS])
