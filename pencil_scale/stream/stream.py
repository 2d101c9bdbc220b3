"""Stream: the images of an epoch, in the plan's order, as batches of exactly the plan's sizes.

Each rank streams its own share. The rank plans, Ray Data's tasks read and decode in other processes, and a
thread of this process cuts batches ahead of their use.

    stream = Stream(StreamSpec.from_config(config, catalogue.version), rank, world)
    for epoch in range(first_epoch, num_epochs):
        stream.num_steps(visited)                          # the same on every rank
        for batch in stream.batches(epoch, visited):       # rows, images, weight, noisy_class, problems
            ...
    stream.close()

With `in_process=True` threads of this process read the same pieces, without Ray: for tests, short trials and
small evaluation sets. With `shuffle=False` the rows come in catalogue order, for evaluation.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from pencil_scale.config.settings import Config
from pencil_scale.labels.owners import Batch
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.batches import Prefetch, cut_batches
from pencil_scale.stream.plan import EpochOrder, Int64s, Mask, Piece, batch_sizes, deal, num_steps
from pencil_scale.stream.ray_blocks import RayBlocks
from pencil_scale.stream.window_reader import ReadSpec, Selection, common_size, name_problem, read_pieces

CleanSetName = Literal["", "validation", "test"]

# Finished batches kept ready, for the second or more that Ray Data takes between two epochs.
AHEAD_BYTES = 256 << 20
FEWEST_AHEAD, MOST_AHEAD = 3, 512
BLOCK_BYTES = 32 << 20
PIECES_AT_ONCE = 1024  # short epochs are read together, without a pause between them
PATIENCE_S = 10.0
CLEAN_PIXELS = 2**22  # per evaluation batch: without gradients there is room for more small images


@dataclass(frozen=True)
class StreamSpec:
    """What to stream; small enough to be sent to a worker."""

    storage: str
    version: int
    batch: int
    clean_set: CleanSetName = ""
    seed: int = 1
    window_mb: int = 64
    resize: int | None = None
    decode: Literal["cpu", "gpu"] = "cpu"
    shuffle: bool = True
    subset: Int64s | None = field(default=None, repr=False, compare=False)  # row numbers
    num_epochs: int = 0  # of the run: while one epoch ends, the next is already being read
    worker_cpus: float = 0.0  # reserved by every rank; the other CPUs are for reading

    @classmethod
    def from_config(
        cls, config: Config, version: int, clean_set: CleanSetName = "", subset: Int64s | None = None
    ) -> "StreamSpec":
        """Take from the config what concerns reading; clean sets come in order, decoded on the CPU."""
        batch = config.optimizer.batch_per_worker
        spec = cls(
            storage=config.run.storage,
            version=version,
            batch=batch,
            clean_set=clean_set,
            seed=config.run.seed,
            window_mb=config.data.window_mb,
            resize=config.images.resize,
            subset=subset,
            worker_cpus=config.workers.cpus,
        )
        if clean_set:
            most = min(4 * batch, CLEAN_PIXELS // config.images.crop**2)
            return replace(spec, batch=max(batch, most), shuffle=False)
        num_epochs = sum(stage.epochs for _, stage in config.stages)
        return replace(spec, decode=config.images.decode, num_epochs=num_epochs)


class Share(NamedTuple):
    """What one rank reads in one epoch."""

    pieces: list[Piece]
    sizes: list[int]  # of its batches


class Stream:
    """The images of one rank, epoch after epoch."""

    def __init__(self, spec: StreamSpec, rank: int = 0, world: int = 1, in_process: bool = False) -> None:
        self.spec, self.rank, self.world = spec, rank, world
        block_bytes = min(BLOCK_BYTES, max(1 << 20, (spec.window_mb << 20) // 2))
        read = ReadSpec(spec.storage, spec.version, block_bytes, spec.clean_set, spec.resize)
        self._selection = Selection(read.catalogue(), spec.subset)
        self.num_rows = self._selection.num_rows  # of a complete epoch, over all ranks
        if self.num_rows == 0:
            raise PencilError(f"{spec.storage}: no row to read; see the report of pipelines.index_shards")
        resized = None if spec.resize is None else (spec.resize, spec.resize)
        self.image_size = resized or common_size(read, self._selection)  # height, width
        self._read = replace(read, size=self.image_size if spec.decode == "cpu" else None)
        self._bytes_per_image = 3 * self.image_size[0] * self.image_size[1]  # once read
        if spec.decode == "gpu":
            self._bytes_per_image = int(self._selection.chunks.ok_bytes.sum()) // self.num_rows
        self._blocks: Callable[[Sequence[Piece]], Iterator[pa.Table]] = partial(read_pieces, self._read)
        if not in_process:
            ahead_bytes = 2 * self.num_rows * self._bytes_per_image // world
            evaluates = not spec.shuffle
            self._blocks = RayBlocks(self._read, world, spec.worker_cpus, evaluates, ahead_bytes).blocks
        self._running: Prefetch[Batch] | None = None
        self._coming: Iterator[Batch] = iter(())
        self._next_epoch: int | None = None  # the epoch whose batches come next, if one is being read

    def num_steps(self, visited: Mask | None = None) -> int:
        """Count the remaining steps of an epoch: the same number on every rank."""
        done = 0 if visited is None else np.count_nonzero(self._selection.among(visited))
        return num_steps(self.num_rows - int(done), self.spec.batch, self.world)

    def batches(self, epoch: int, visited: Mask | None = None) -> Iterator[Batch]:
        """Read the unvisited rows of an epoch; the caller may leave early and ask for another epoch.

        Ranks that train get as many batches as `num_steps` says, with empty ones at the end where rows ran
        out. In evaluation the ranks do not wait for each other, and empty batches are left out.
        """
        if visited is not None or self._next_epoch != epoch:
            self._start(epoch, visited)
        self._next_epoch = None
        if epoch + 1 < self.spec.num_epochs:
            yield from islice(self._coming, self.num_steps(visited))
            self._next_epoch = epoch + 1  # its batches arrive while this one is evaluated and saved
        else:
            yield from self._coming

    def plan(self, epoch: int, visited: Mask | None = None) -> Share:
        """Plan this rank's share of the unvisited rows of an epoch."""
        spec, selection = self.spec, self._selection
        visited = None if visited is None else selection.among(visited)
        window_bytes = spec.window_mb << 20
        order = EpochOrder(
            selection.chunks, spec.seed, epoch, window_bytes, spec.shuffle, subset=selection.mask
        )
        num_unread = order.num_unread(visited, selection.ok_rows)
        cuts = deal(num_unread, self.world)[self.rank]
        steps = num_steps(int(num_unread.sum()), spec.batch, self.world)
        sizes = batch_sizes(sum(cut.stop - cut.start for cut in cuts), spec.batch, steps)
        sizes = sizes if spec.shuffle else [size for size in sizes if size]
        return Share([order.piece(cut, visited) for cut in cuts], sizes)

    def name_problem(self, row: int, reason: str) -> str:
        """Name a sample that could not be decoded here, as the read tasks do."""
        return name_problem(self._read.catalogue(), row, reason)

    def close(self) -> None:
        """Stop reading and release the readers; a storage that does not answer is not waited for."""
        self._stop(PATIENCE_S)
        self._blocks = partial(read_pieces, self._read)  # Ray's actors end with the last reference to them

    def _start(self, epoch: int, visited: Mask | None = None) -> None:
        """Start to read an epoch and all epochs after it."""
        self._stop()
        batch_bytes = max(1, self.spec.batch * self._bytes_per_image)
        ahead = min(MOST_AHEAD, max(FEWEST_AHEAD, AHEAD_BYTES // batch_bytes))
        self._running = Prefetch(self._cut(epoch, self._shares(epoch, visited)), ahead)
        self._coming = iter(self._running)

    def _stop(self, timeout_s: float | None = None) -> None:
        """End what is being read: two epochs must never be read from the same blocks at once."""
        if self._running is not None:
            self._running.stop(timeout_s)
            self._running = None

    def _cut(self, epoch: int, shares: list[Share]) -> Generator[Batch, None, None]:
        while shares:
            blocks = self._blocks([piece for share in shares for piece in share.pieces])
            for share in shares:
                yield from cut_batches(blocks, share.sizes, self._read, is_last=share is shares[-1])
            epoch += len(shares)
            shares = self._shares(epoch) if epoch < self.spec.num_epochs else []

    def _shares(self, epoch: int, visited: Mask | None = None) -> list[Share]:
        """Plan an epoch, and those after it where they are short: they are handed to the readers together.

        A read error in a later epoch may then end the run in an earlier one, because Ray raises it at once.
        """
        shares = [self.plan(epoch, visited)]
        for later in range(epoch + 1, self.spec.num_epochs):
            if sum(len(share.pieces) for share in shares) >= PIECES_AT_ONCE:
                break
            shares.append(self.plan(later))
        return shares
