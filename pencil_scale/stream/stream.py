"""Stream: the images of an epoch, in the plan's order, as batches of exactly the plan's sizes.

Each rank streams its own share. The rank plans, Ray Data's tasks read and decode elsewhere, and a thread here
cuts batches ahead of their use.

    stream = Stream(StreamSpec.from_config(config, catalogue.version), rank, world)
    for epoch in range(first_epoch, num_epochs):
        stream.num_steps(epoch, visited)                   # equal on every rank
        for batch in stream.batches(epoch, visited):       # rows, images, weight, problems
            ...
    stream.close()

With `in_process=True` the same pieces are read by threads of this process, without Ray: for tests, short
trials and small evaluation sets. With `shuffle=False` the rows come in the catalogue's order, for evaluation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from pencil_scale.config.settings import Config
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.batches import BatchCutter, Prefetch, StreamBatch
from pencil_scale.stream.plan import EpochOrder, Mask, Piece, batch_sizes, deal, num_steps
from pencil_scale.stream.ray_blocks import RayBlocks
from pencil_scale.stream.window_reader import (
    BLOCK_BYTES,
    ReadSpec,
    Selection,
    common_size,
    name_problem,
    read_pieces,
)

# Batches that lie ready, for the second or more in which Ray Data ends one epoch and begins the next.
AHEAD_BYTES = 256 << 20
FEWEST_AHEAD, MOST_AHEAD = 3, 512
PIECES_AT_ONCE = 1024  # short epochs are handed to the readers together, and read without a pause between
PATIENCE_S = 10.0
CLEAN_PIXELS = 2**22  # of a batch to evaluate: without gradients there is room for more small images


@dataclass(frozen=True)
class StreamSpec:
    """What a stream must know; small, and fit to be sent to a worker."""

    storage: str
    version: int
    batch: int
    part: Literal["", "validation", "test"] = ""
    seed: int = 1
    window_mb: int = 64
    resize: int | None = None
    decode: Literal["cpu", "gpu"] = "cpu"
    shuffle: bool = True
    subset: npt.NDArray[Any] | None = field(default=None, repr=False, compare=False)
    num_epochs: int = 0  # of the run: while one ends, the next is already being read
    worker_cpus: float = 0.0  # what every rank reserves for itself; the others are for reading

    @classmethod
    def from_config(
        cls,
        config: Config,
        version: int,
        part: Literal["", "validation", "test"] = "",
        subset: npt.NDArray[Any] | None = None,
    ) -> "StreamSpec":
        """Take from the config what concerns reading; validation and test come in order, decoded here."""
        return cls(
            storage=config.run.storage,
            version=version,
            batch=config.optimizer.batch_per_worker if part == "" else _clean_batch(config),
            part=part,
            seed=config.run.seed,
            window_mb=config.data.window_mb,
            resize=config.images.resize,
            decode=config.images.decode if part == "" else "cpu",
            shuffle=part == "",
            subset=subset,
            num_epochs=sum(stage.epochs for _, stage in config.stages) if part == "" else 0,
            worker_cpus=config.workers.cpus,
        )

    @property
    def window_bytes(self) -> int:
        return self.window_mb << 20


@dataclass(frozen=True)
class Share:
    """What one rank reads in one epoch."""

    pieces: list[Piece]
    sizes: list[int]  # of its batches


class Stream:
    """The images of one rank, epoch after epoch."""

    def __init__(self, spec: StreamSpec, rank: int = 0, world: int = 1, in_process: bool = False) -> None:
        self.spec, self.rank, self.world = spec, rank, world
        block_bytes = min(BLOCK_BYTES, max(1 << 20, spec.window_bytes // 2))
        read = ReadSpec(spec.storage, spec.version, spec.part, spec.resize, block_bytes=block_bytes)
        self._selection = Selection(read.catalogue(), spec.subset)
        self.image_size = self._image_size(read)  # height, width
        self._read = replace(read, size=self.image_size if spec.decode == "cpu" else None)
        evaluates = not spec.shuffle  # while the next epoch of the training stream is begun already
        self._blocks = (
            None
            if in_process
            else RayBlocks(self._read, world, spec.worker_cpus, evaluates, 2 * self._epoch_bytes())
        )
        self._cutter = BatchCutter(self._read.size, pin_memory=torch.cuda.is_available())
        self._running: Prefetch[StreamBatch] | None = None
        self._coming: Iterator[StreamBatch] = iter(())
        self._next_epoch: int | None = None  # the one whose batches come next, asked for or not

    @property
    def num_rows(self) -> int:
        """Rows of a whole epoch, over all ranks."""
        return self._selection.counts.total

    def num_steps(self, epoch: int, visited: Mask | None = None) -> int:
        """Count the steps that are left of an epoch: equally many on every rank."""
        done = 0 if visited is None else np.count_nonzero(self._selection.among(visited))
        return num_steps(self.num_rows - int(done), self.spec.batch, self.world)

    def plan(self, epoch: int, visited: Mask | None = None) -> Share:
        """Plan this rank's share of what is left of an epoch."""
        spec, selection = self.spec, self._selection
        visited = None if visited is None else selection.among(visited)
        order = EpochOrder.of(selection.counts, spec.seed, epoch, spec.window_bytes, spec.shuffle)
        left = order.left(visited, selection.members)
        cuts = deal(left, self.world)[self.rank]
        steps = num_steps(int(left.sum()), spec.batch, self.world)
        sizes = batch_sizes(sum(cut.stop - cut.start for cut in cuts), spec.batch, steps)
        sizes = sizes if spec.shuffle else [size for size in sizes if size]
        return Share([order.piece(cut, visited, selection.mask) for cut in cuts], sizes)

    def batches(self, epoch: int, visited: Mask | None = None) -> Iterator[StreamBatch]:
        """Read what is left of an epoch; leaving early is fine, and the next epoch starts afresh.

        Ranks that train get as many batches as `num_steps` says, empty ones at the end where rows ran out.
        In evaluation nobody waits for anybody, and empty batches are left out.
        """
        if visited is not None or self._next_epoch != epoch:
            self._begin(epoch, visited)
        self._next_epoch = None
        if epoch + 1 < self.spec.num_epochs:
            yield from islice(self._coming, self.num_steps(epoch, visited))
            self._next_epoch = epoch + 1  # its batches arrive while this one is evaluated and saved
        else:
            yield from self._coming

    def _begin(self, epoch: int, visited: Mask | None = None) -> None:
        """Start to read an epoch, and all that come after it."""
        self._finish()
        bytes_a_batch = self.spec.batch * self._epoch_bytes() * self.world // self.num_rows
        ahead = min(MOST_AHEAD, max(FEWEST_AHEAD, AHEAD_BYTES // max(bytes_a_batch, 1)))
        self._running = Prefetch(self._cut(epoch, self._shares(epoch, visited)), ahead)
        self._coming = iter(self._running)

    def _cut(self, epoch: int, shares: list[Share]) -> Iterator[StreamBatch]:
        while shares:
            blocks = self._tables([piece for share in shares for piece in share.pieces])
            for share in shares:
                yield from self._cutter.cut(blocks, share.sizes, is_last=share is shares[-1])
            epoch += len(shares)
            shares = self._shares(epoch) if epoch < self.spec.num_epochs else []

    def _shares(self, epoch: int, visited: Mask | None = None) -> list[Share]:
        """Plan an epoch, and those after it where they are short: they are handed to the readers together.

        What cannot be read of a later one may end the run in an earlier one: Ray tells of it at once.
        """
        shares = [self.plan(epoch, visited)]
        while sum(len(share.pieces) for share in shares) < PIECES_AT_ONCE:
            if epoch + len(shares) >= self.spec.num_epochs:
                break
            shares.append(self.plan(epoch + len(shares)))
        return shares

    def name_problem(self, row: int, reason: str) -> str:
        """Name a sample that could not be decoded here, as the read tasks name theirs."""
        return name_problem(self._read.catalogue(), row, reason)

    def close(self) -> None:
        """End reading, and let go of what it held; a store that does not answer is not waited for."""
        self._finish(PATIENCE_S)
        if self._blocks is not None:
            self._blocks.close()

    def _tables(self, pieces: list[Piece]) -> Iterator[Any]:
        return read_pieces(self._read, pieces) if self._blocks is None else self._blocks.blocks(pieces)

    def _finish(self, timeout_s: float | None = None) -> None:
        """An epoch that was left early may still be waiting for its next block: two must never overlap."""
        if self._running is not None:
            self._running.join(timeout_s)
            self._running = None

    def _epoch_bytes(self) -> int:
        """What this rank's part of an epoch is when it has been read."""
        if self._read.size is None:
            return int(self._selection.counts.num_bytes.sum()) // self.world
        return self.num_rows * 3 * self._read.size[0] * self._read.size[1] // self.world

    def _image_size(self, read: ReadSpec) -> tuple[int, int]:
        if self.num_rows == 0:
            raise PencilError(
                f"{self.spec.storage}: no row to read; see what index_shards says of the shards"
            )
        resize = self.spec.resize
        return (resize, resize) if resize is not None else common_size(read, self._selection)


def _clean_batch(config: Config) -> int:
    batch = config.optimizer.batch_per_worker
    return max(batch, min(4 * batch, CLEAN_PIXELS // config.images.crop**2))
