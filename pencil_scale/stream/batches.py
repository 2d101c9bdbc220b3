"""Batches: cut Arrow blocks of any size into batches of exactly the planned sizes, ahead of their use.

    batches = Prefetch(cut_batches(blocks, sizes, spec), depth=3)
    for batch in batches:
        ...

Pixels are copied once, from the block into the batch, which is pinned if there is a GPU to copy it to.
"""

import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from queue import Empty, Queue
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pencil_scale.labels.owners import Batch
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.window_reader import ReadSpec

Item = TypeVar("Item")


def cut_batches(
    blocks: Iterator[pa.Table], sizes: list[int], spec: ReadSpec, is_last: bool = True
) -> Iterator[Batch]:
    """Yield a batch of each size; too few rows, or too many, are an error and never a shorter epoch.

    If this epoch `is_last`, no block may remain; otherwise the blocks of the next epoch follow. `images` is
    uint8 [B, 3, H, W] in `channels_last` layout, or a list of encoded images if the spec has no size.
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
    if len(ready) or (is_last and any(len(block) for block in blocks)):
        raise PencilError("the stream has more rows than were planned")


def _batch(table: pa.Table, spec: ReadSpec) -> Batch:
    reasons = table["problem"].to_pylist()
    return Batch(
        rows=torch.tensor(table["row"].to_numpy()),
        images=_pixels(table["image"], spec.size) if spec.size else table["image"].to_pylist(),
        weight=torch.tensor([float(reason is None) for reason in reasons]),
        noisy_class=torch.tensor(table["noisy_class"].to_numpy()),
        problems=tuple(reason for reason in reasons if reason is not None),
    )


def _pixels(column: pa.ChunkedArray, size: tuple[int, int]) -> Tensor:
    shape = (len(column), *size, 3)
    pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    target, width, done = pixels.numpy().reshape(-1), 3 * size[0] * size[1], 0
    for array in column.chunks:
        start, num_bytes = array.offset * width, len(array) * width
        source = np.frombuffer(array.buffers()[1], np.uint8)
        target[done : done + num_bytes] = source[start : start + num_bytes]
        done += num_bytes
    return pixels.permute(0, 3, 1, 2)


class Prefetch(Generic[Item]):
    """Runs a generator in a thread, a few items ahead; its errors are raised where the items are taken."""

    def __init__(self, items: Generator[Item, None, None], depth: int) -> None:
        self._items = items
        self._queue: Queue[Any] = Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        try:
            while (item := self._queue.get()) is not self:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.stop(0)

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
