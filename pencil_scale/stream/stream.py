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

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from queue import Empty, Queue
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from pencil_scale.config.settings import Config
from pencil_scale.labels.owners import Batch
from pencil_scale.storage import retries
from pencil_scale.storage.errors import PencilError, ResumableError
from pencil_scale.stream.plan import EpochOrder, Int64s, Mask, Piece, batch_sizes, deal, mixed_key, num_steps
from pencil_scale.stream.ray_blocks import RayBlocks
from pencil_scale.stream.window_reader import LeftOut, ReadSpec, Selection, common_size, read_pieces

Item = TypeVar("Item")

# Finished batches kept ready, for the second or more that Ray Data takes between two epochs.
AHEAD_BYTES = 256 << 20
FEWEST_AHEAD, MOST_AHEAD = 3, 512
BLOCK_BYTES = 32 << 20
PIECES_AT_ONCE = 1024  # short epochs are read together, without a pause between them
PATIENCE_S = 10.0
SLOW_S = 60.0  # a wait for samples that is worth a line
CLEAN_PIXELS = 2**22  # per evaluation batch: without gradients there is room for more small images


class StarvedError(ResumableError):
    """No samples arrive; a new attempt counts again which processors there are to read with."""


@dataclass(frozen=True)
class StreamSpec:
    """What to stream; small enough to be sent to a worker."""

    storage: str
    version: int
    batch: int
    clean_set: str = ""  # "validation" or "test"
    seed: int = 1
    window_mb: int = 64
    resize: int | None = None
    gpu_share: float = 0.0  # of the images, which stay encoded
    keep_mb: int = 0  # of decoded images, in every process that reads
    shuffle: bool = True
    subset: Int64s | None = field(default=None, repr=False, compare=False)  # row numbers
    left_out: LeftOut | None = field(default=None, repr=False, compare=False)  # watched, not trained on
    num_epochs: int = 0  # of the run: while one epoch ends, the next is already being read
    worker_cpus: float = 0.0  # reserved by every rank; the other CPUs are for reading
    starved_s: float = float("inf")  # without a sample; longer than a reader waits for a store

    @classmethod
    def from_config(
        cls, config: Config, version: int, clean_set: str = "", subset: Int64s | None = None
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
            keep_mb=config.data.keep_mb,
            subset=subset,
            worker_cpus=config.workers.cpus,
            starved_s=config.storage.retry_s + config.workers.timeout_s,
        )
        if clean_set:
            return spec.for_evaluation(config)
        return replace(spec, gpu_share=config.images.gpu_share, num_epochs=config.stages.num_epochs)

    def for_evaluation(self, config: Config, subset: Int64s | None = None) -> "StreamSpec":
        """The same rows, or others of the same catalogue, in order and in larger batches."""
        most = min(4 * self.batch, CLEAN_PIXELS // config.images.crop**2)
        batch, rows = max(self.batch, most), self.subset if subset is None else subset
        return replace(
            self,
            batch=batch,
            subset=rows,
            left_out=None,
            shuffle=False,
            gpu_share=0.0,
            num_epochs=0,
            keep_mb=0,
        )


class Stream:
    """The images of one rank, epoch after epoch."""

    def __init__(
        self,
        spec: StreamSpec,
        rank: int = 0,
        world: int = 1,
        in_process: bool = False,
        control: Any = None,  # an actor that the readers tell of retries
    ) -> None:
        self.spec, self.rank, self.world = spec, rank, world
        block_bytes = min(BLOCK_BYTES, max(1 << 20, (spec.window_mb << 20) // 2))
        read = ReadSpec(spec.storage, spec.version, block_bytes, spec.clean_set, spec.resize)
        self._selection = Selection(read.catalogue(), spec.subset, spec.left_out)
        self.num_rows = self._selection.num_rows  # of a complete epoch, over all ranks
        if self.num_rows == 0:
            raise PencilError(f"{spec.storage}: no row to read; see the report of index_shards")
        resized = None if spec.resize is None else (spec.resize, spec.resize)
        self.image_size = resized or common_size(read, self._selection)  # height, width
        keep_bytes = spec.keep_mb << 20
        self.read = replace(read, size=self.image_size, gpu_share=spec.gpu_share, keep_bytes=keep_bytes)
        encoded_bytes = int(self._selection.chunks.ok_bytes.sum()) / self.num_rows
        share = spec.gpu_share
        self._bytes_per_image = int(share * encoded_bytes + (1 - share) * self.read.pixel_bytes)  # once read
        self._blocks: Callable[[Sequence[Piece]], Iterator[pa.Table]] = partial(read_pieces, self.read)
        if not in_process:
            ahead_bytes = 2 * self.num_rows * self._bytes_per_image // world
            evaluates = not spec.shuffle
            blocks = RayBlocks(self.read, world, spec.worker_cpus, evaluates, ahead_bytes, control)
            self._blocks = blocks.blocks
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

    def plan(self, epoch: int, visited: Mask | None = None) -> tuple[list[Piece], list[int]]:
        """Plan this rank's share of the unvisited rows of an epoch, and the sizes of its batches."""
        spec, selection = self.spec, self._selection
        visited = None if visited is None else selection.among(visited)
        key = mixed_key(spec.seed, epoch) if spec.shuffle else None
        order = EpochOrder(selection.chunks, key, spec.window_mb << 20, selection.mask)
        num_unread = order.num_unread(visited, selection.ok_rows)
        cuts = deal(num_unread, self.world)[self.rank]
        steps = num_steps(int(num_unread.sum()), spec.batch, self.world)
        sizes = batch_sizes(sum(cut.stop - cut.start for cut in cuts), spec.batch, steps)
        sizes = sizes if spec.shuffle else [size for size in sizes if size]
        return [order.piece(cut, visited) for cut in cuts], sizes

    def close(self) -> None:
        """Stop reading and release the readers; a storage that does not answer is not waited for."""
        if self._running is not None:
            self._running.stop(PATIENCE_S)
        self._blocks = partial(read_pieces, self.read)  # Ray's actors end with the last reference to them

    def _start(self, epoch: int, visited: Mask | None) -> None:
        """Start to read an epoch and all epochs after it."""
        if self._running is not None:
            self._running.stop()  # two epochs must never be read from the same blocks at once
        batch_bytes = max(1, self.spec.batch * self._bytes_per_image)
        ahead = min(MOST_AHEAD, max(FEWEST_AHEAD, AHEAD_BYTES // batch_bytes))
        self._running = Prefetch(self._read_epochs(epoch, visited), ahead, self._no_samples)
        self._coming = iter(self._running)

    def _no_samples(self, waited_s: float) -> None:
        """Say that no samples arrive, and give up after `starved_s`."""
        why = "the store does not answer, or no processor is free for reading"
        found = f"worker {self.rank} has had no samples for {waited_s:.0f} s: {why}"
        if waited_s >= self.spec.starved_s:
            raise StarvedError(found)
        if waited_s < 2 * SLOW_S:  # once
            retries.log.warning(found)

    def _read_epochs(self, epoch: int, visited: Mask | None) -> Generator[Batch, None, None]:
        """Hand an epoch to the readers, together with the following ones where they are short.

        A read error in a later epoch may then end the run in an earlier one, because Ray raises it at once.
        """
        stop = max(epoch + 1, self.spec.num_epochs)
        while epoch < stop:
            pieces, sizes = self.plan(epoch, visited)
            epoch, visited = epoch + 1, None
            while epoch < stop and len(pieces) < PIECES_AT_ONCE:
                more_pieces, more_sizes = self.plan(epoch)
                pieces, sizes, epoch = pieces + more_pieces, sizes + more_sizes, epoch + 1
            yield from cut_batches(self._blocks(pieces), sizes, self.read)


def cut_batches(blocks: Iterator[pa.Table], sizes: list[int], spec: ReadSpec) -> Iterator[Batch]:
    """Yield a batch of each size; too few rows, or too many, are an error and never a shorter epoch.

    `images` is uint8 [B, 3, H, W] in `channels_last` layout, without those that are in `encoded`.
    `noisy_class` is the catalogue's: evaluation uses it, and in training the owners replace it.
    """
    ready = spec.schema.empty_table()
    for number, size in enumerate(sizes):
        while len(ready) < size:
            block = next(blocks, None)
            if block is None:
                raise PencilError(
                    f"the stream ended in batch {number} of {len(sizes)} with {len(ready)} of {size} rows"
                )
            ready = pa.concat_tables([ready, block])  # copies nothing
        yield _batch(ready.slice(0, size), spec)
        ready = ready.slice(size)
    if len(ready) or any(len(block) for block in blocks):
        raise PencilError("the stream has more rows than were planned")


def _batch(table: pa.Table, spec: ReadSpec) -> Batch:
    reasons = table["problem"].to_pylist()
    return Batch(
        rows=torch.from_numpy(table["row"].to_numpy().copy()),
        images=_pixels(table["pixels"], spec.size),
        weight=torch.from_numpy(np.array([reason is None for reason in reasons], np.float32)),
        noisy_class=torch.from_numpy(table["noisy_class"].to_numpy().copy()),
        problems=tuple(reason for reason in reasons if reason is not None),
        encoded={n: data for n, data in enumerate(table["encoded"].to_pylist()) if data is not None},
    )


def _pixels(column: pa.ChunkedArray, size: tuple[int, int]) -> Tensor:
    """Copy pixels, once, from the blocks into a batch, which is pinned if there is a GPU to copy it to."""
    found = [np.empty(0, np.uint8), *(_bytes_of(array) for array in column.chunks if len(array))]
    pixels = torch.empty(sum(map(len, found)), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    np.concatenate(found, out=pixels.numpy())
    return pixels.view(-1, *size, 3).permute(0, 3, 1, 2)


def _bytes_of(array: pa.LargeBinaryArray) -> npt.NDArray[np.uint8]:
    """All bytes of an array, without a copy."""
    _, offsets, data = array.buffers()
    first, last = np.frombuffer(offsets, np.int64)[[array.offset, array.offset + len(array)]]
    return np.frombuffer(data, np.uint8)[first:last]


class Prefetch(Generic[Item]):
    """Runs a generator in a thread, a few items ahead; its errors are raised where the items are taken.

    If the next item takes long, `on_wait` is called every minute with the seconds so far; it may raise.
    """

    def __init__(
        self,
        items: Generator[Item, None, None],
        depth: int,
        on_wait: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        self._items, self._on_wait = items, on_wait
        self._queue: Queue[Any] = Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        while (item := self._next()) is not self:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _next(self) -> Any:
        waited_s = 0.0
        while True:
            try:
                return self._queue.get(timeout=SLOW_S)
            except Empty:
                waited_s += SLOW_S
                self._on_wait(waited_s)

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has released its generator, which it does at the next item at the latest."""
        self._stopped.set()
        with suppress(Empty):  # makes room for the item that the thread may be waiting to put
            while True:
                self._queue.get_nowait()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        last: Any = self
        try:
            for item in self._items:
                self._queue.put(item)
                if self._stopped.is_set():
                    break
        except BaseException as error:
            last = error
        # Closed in the thread that ran the generator, so that what it holds open is released now.
        self._items.close()
        if not self._stopped.is_set():
            self._queue.put(last)
