"""Batches: Arrow blocks of any size in, batches of exactly the planned sizes out, made ahead of their use.

    cutter = BatchCutter(size=(256, 256))
    for batch in prefetched(cutter.cut(blocks, sizes), depth=3):
        ...

Pixels are copied once, from the block into the batch, which is pinned where there is a GPU to copy it to.
"""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Full, Queue
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pencil_scale.labels.owners import Batch
from pencil_scale.storage.errors import PencilError

Item = TypeVar("Item")
POLL_S = 0.1


@dataclass(frozen=True)
class StreamBatch(Batch):
    """A batch as it comes off the stream.

    `images` is uint8 [B, 3, H, W] in `channels_last` layout, or a list of bytes that are still to be
    decoded. `noisy_class` is the catalogue's: evaluation uses it, in training the owners replace it.
    """

    problems: tuple[str, ...] = ()  # a line for each image that could not be decoded; it weighs 0


class BatchCutter:
    """Cuts blocks into batches."""

    def __init__(self, size: tuple[int, int] | None, pin_memory: bool = False) -> None:
        self._size = size
        self._pin_memory = pin_memory

    def cut(
        self, blocks: Iterator[pa.Table], sizes: list[int], is_last: bool = True
    ) -> Iterator[StreamBatch]:
        """Yield a batch of each size; too few rows, or too many, are an error and never a shorter epoch.

        Where this epoch `is_last`, no block may be left; else those of the next one follow.
        """
        ready: deque[pa.Table] = deque()
        num_ready = 0
        for number, size in enumerate(sizes):
            while num_ready < size:
                block = next(blocks, None)
                if block is None:
                    raise PencilError(
                        f"the stream ended in batch {number} of {len(sizes)} with {num_ready} of {size} rows"
                    )
                ready.append(block)
                num_ready += len(block)
            yield self._batch(_take(ready, size), size)
            num_ready -= size
        if num_ready or (is_last and any(len(block) for block in blocks)):
            raise PencilError("the stream has more rows than were planned")

    def _batch(self, tables: list[pa.Table], size: int) -> StreamBatch:
        weight, problems = _judged(tables, size)
        return StreamBatch(
            rows=_numbers(tables, "row"),
            images=self._images(tables, size),
            weight=weight,
            noisy_class=_numbers(tables, "noisy_class"),
            problems=problems,
        )

    def _images(self, tables: list[pa.Table], size: int) -> Any:
        if self._size is None:
            return [data for table in tables for data in table["image"].to_pylist()]
        pixels = torch.empty((size, *self._size, 3), dtype=torch.uint8, pin_memory=self._pin_memory)
        target = pixels.numpy().reshape(size, 3 * self._size[0] * self._size[1])
        done = 0
        for table in tables:
            for array in table["image"].chunks:
                target[done : done + len(array)] = _as_bytes(array)
                done += len(array)
        return pixels.permute(0, 3, 1, 2)


def _judged(tables: list[pa.Table], size: int) -> tuple[Tensor, tuple[str, ...]]:
    """Weigh 1 what was decoded and 0 what was not, with its problem."""
    if all(table["problem"].null_count == len(table) for table in tables):
        return torch.ones(size), ()
    reasons = [reason for table in tables for reason in table["problem"].to_pylist()]
    weight = torch.tensor([float(reason is None) for reason in reasons])
    return weight, tuple(reason for reason in reasons if reason is not None)


def _numbers(tables: list[pa.Table], name: str) -> Tensor:
    columns = [table[name].to_numpy() for table in tables]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *columns]))


def _take(ready: "deque[pa.Table]", size: int) -> list[pa.Table]:
    """Take so many rows off the front, without copying any."""
    taken: list[pa.Table] = []
    while size:
        block = ready.popleft()
        taken.append(block.slice(0, size))
        if len(block) > size:
            ready.appendleft(block.slice(size))
        size -= len(taken[-1])
    return taken


def _as_bytes(array: pa.FixedSizeBinaryArray) -> np.ndarray[Any, np.dtype[np.uint8]]:
    width = array.type.byte_width
    flat = np.frombuffer(array.buffers()[1], np.uint8)
    return flat[array.offset * width : (array.offset + len(array)) * width].reshape(len(array), width)


class Prefetch(Generic[Item]):
    """Runs an iterator in a thread, a few items ahead; its errors are raised where the items are taken."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._items = items
        self._queue: Queue[Any] = Queue(depth)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        try:
            while True:
                item = self._queue.get()
                if item is self:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._left.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has let go of its iterator; it ends at its next item, if not before."""
        self._left.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        last: Any = self
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as error:
            last = error
        finally:
            # In this thread, where the generator ran: whatever it holds open is closed now, not some day.
            close = getattr(self._items, "close", None)
            if close is not None:
                close()
            self._put(last)

    def _put(self, item: Any) -> bool:
        while not self._left.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
                return True
            except Full:
                continue
        return False
