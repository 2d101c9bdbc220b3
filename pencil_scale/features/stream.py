"""Feature stream: the features of an epoch's rows, in the plan's order, as batches of exactly its sizes.

The same plan as for images, so every row is visited exactly once, by one rank, in an order that does not
depend on the number of ranks. Features are a memory-mapped table, so nothing is read by other processes.

    stream = FeatureStream(spec, table, rank, world)
    for batch in stream.batches(epoch, visited):           # images: [B, views, dimension]
        ...
"""

import platform
from collections.abc import Generator

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pencil_scale.catalogue.catalogue import Catalogue, Chunks
from pencil_scale.catalogue.schema import CHUNK_ROWS
from pencil_scale.features.manifest import ABSENT, READY
from pencil_scale.features.table import FeatureTable
from pencil_scale.labels.owners import Batch
from pencil_scale.storage.errors import PencilError, many
from pencil_scale.stream.plan import Int64s, Mask
from pencil_scale.stream.stream import Stream, StreamSpec
from pencil_scale.stream.window_reader import ReadSpec, Selection

ON_ARM = platform.machine() in ("arm64", "aarch64")
UNREADABLE = "it has no features, because its image could not be decoded"


class KnownRows(Selection):
    """The rows that an epoch visits, all in memory: a head is trained faster than a catalogue is read."""

    def __init__(self, catalogue: Catalogue, spec: StreamSpec, row_bytes: int) -> None:
        self._catalogue, self.mask = catalogue, None
        self.usable = np.zeros(-(-catalogue.num_rows // CHUNK_ROWS) * CHUNK_ROWS, np.bool_)
        rows = catalogue.ok_rows()
        self.usable[rows if spec.subset is None else np.intersect1d(rows, spec.subset)] = True
        if spec.left_out is not None:
            self.usable[spec.left_out.rows] = False
        num_ok = self.usable.reshape(-1, CHUNK_ROWS).sum(axis=1)
        self.chunks = Chunks(num_ok.astype(np.int32), num_ok.astype(np.int64) * row_bytes)

    def ok_rows(self, chunk: int) -> Int64s:
        """Look up the rows of a chunk, in ascending order."""
        first = chunk * CHUNK_ROWS
        return first + np.flatnonzero(self.usable[first : first + CHUNK_ROWS])

    def among(self, visited: Mask) -> Mask:
        """Leave out rows that are never visited; a table may be longer than the catalogue."""
        return visited[: len(self.usable)] & self.usable[: len(visited)]


class FeatureStream(Stream):
    """The features of one rank, epoch after epoch."""

    def __init__(
        self, spec: StreamSpec, table: FeatureTable, rank: int = 0, world: int = 1, in_full: bool = False
    ) -> None:
        """With `in_full` batches are float32, for a CPU; a GPU converts them faster than they are copied."""
        self.spec, self.rank, self.world, self._table, self._in_full = spec, rank, world, table, in_full
        self.read = ReadSpec(spec.storage, spec.version, block_bytes=0)
        catalogue = self.read.catalogue()
        self._bytes_per_image = 2 * table.manifest.width
        self._selection = known = KnownRows(catalogue, spec, self._bytes_per_image)
        self.num_rows, usable = known.num_rows, np.flatnonzero(known.usable)
        self._given = None if spec.shuffle else _given_classes(catalogue, usable)
        there = usable[usable < len(table.state)]
        num_absent = len(usable) - int((table.state[there] != ABSENT).sum())
        if num_absent or not self.num_rows:
            raise PencilError(
                f"{spec.storage}: {many(num_absent, 'sample')} of {self.num_rows:,} without features; run "
                "extract_features, or import_features, again"
            )
        self._running, self._coming, self._next_epoch = None, iter(()), None

    def close(self) -> None:
        """Stop reading ahead."""
        if self._running is not None:
            self._running.stop()

    def _read_epochs(self, epoch: int, visited: Mask | None) -> Generator[Batch, None, None]:
        for number in range(epoch, max(epoch + 1, self.spec.num_epochs)):
            pieces, sizes = self.plan(number, visited if number == epoch else None)
            coming, ready = iter(pieces), np.zeros(0, np.int64)
            for size in sizes:
                while len(ready) < size:
                    ready = np.concatenate([ready, next(coming).rows(self._selection.ok_rows)])
                yield self._batch(ready[:size])
                ready = ready[size:]

    def _batch(self, rows: Int64s) -> Batch:
        is_ready = self._table.state[rows] == READY
        given = np.zeros(len(rows), np.int64) if self._given is None else self._given[rows]
        features = torch.from_numpy(self._table.take(rows))
        return Batch(
            rows=torch.from_numpy(rows),
            images=full(features) if self._in_full else features,
            weight=torch.from_numpy(is_ready.astype(np.float32)),
            noisy_class=torch.from_numpy(given),
            problems=tuple(self.read.name_problem(row, UNREADABLE) for row in rows[~is_ready].tolist()),
        )


def full(features: Tensor) -> Tensor:
    """Features as float32; NumPy converts them several times faster than torch on Arm, and slower on x86."""
    if ON_ARM and features.dtype == torch.float16 and not features.is_cuda:
        return torch.from_numpy(features.numpy().astype(np.float32))
    return features.float()


def _given_classes(catalogue: Catalogue, rows: Int64s) -> Int64s:
    """The given class of each of these rows, by row; 0 for all others."""
    found = np.zeros(catalogue.num_rows, np.int64)
    for chunk in np.unique(rows // CHUNK_ROWS).tolist():
        first, stop = chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, catalogue.num_rows)
        classes: pa.Table = catalogue.read(first, stop, ["noisy_class"])
        found[first:stop] = classes["noisy_class"].fill_null(0).to_numpy()
    return found
