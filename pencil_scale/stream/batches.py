"""Batches: cut Arrow blocks of any size into batches of exactly the planned sizes, ahead of their use.

    batches = Prefetch(cut_batches(blocks, sizes, image_size=(256, 256)), depth=3)
    for batch in batches:
        ...

Pixels are copied once, from the block into the batch, which is pinned if there is a GPU to copy it to.
"""

import threading
from collections import deque
from collections.abc import Iterator
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


def cut_batches(
    blocks: Iterator[pa.Table], sizes: list[int], image_size: tuple[int, int] | None, is_last: bool = True
) -> Iterator[Batch]:
    """Yield a batch of each size; too few rows, or too many, are an error and never a shorter epoch.

    If this epoch `is_last`, no block may be left; otherwise the blocks of the next epoch follow. `images` is
    uint8 [B, 3, H, W] in `channels_last` layout, or, without an `image_size`, a list of encoded images.
    `noisy_class` is the catalogue's: evaluation uses it, and in training the owners replace it.
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
        yield _batch(_take(ready, size), size, image_size)
        num_ready -= size
    if num_ready or (is_last and any(len(block) for block in blocks)):
        raise PencilError("the stream has more rows than were planned")


def _take(ready: "deque[pa.Table]", size: int) -> list[pa.Table]:
    """Take this many rows off the front, without copying any."""
    taken: list[pa.Table] = []
    while size:
        block = ready.popleft()
        taken.append(block.slice(0, size))
        if len(block) > size:
            ready.appendleft(block.slice(size))
        size -= len(taken[-1])
    return taken


def _batch(tables: list[pa.Table], size: int, image_size: tuple[int, int] | None) -> Batch:
    weight, problems = torch.ones(size), list[str]()
    if any(table["problem"].null_count < len(table) for table in tables):
        reasons = [reason for table in tables for reason in table["problem"].to_pylist()]
        weight = torch.tensor([float(reason is None) for reason in reasons])
        problems = [reason for reason in reasons if reason is not None]
    encoded = [] if image_size else [data for table in tables for data in table["image"].to_pylist()]
    return Batch(
        rows=_numbers(tables, "row"),
        images=_pixels(tables, size, image_size) if image_size else encoded,
        weight=weight,
        noisy_class=_numbers(tables, "noisy_class"),
        problems=tuple(problems),
    )


def _numbers(tables: list[pa.Table], name: str) -> Tensor:
    columns = [table[name].to_numpy() for table in tables]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *columns]))


def _pixels(tables: list[pa.Table], size: int, image_size: tuple[int, int]) -> Tensor:
    pixels = torch.empty((size, *image_size, 3), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    width = 3 * image_size[0] * image_size[1]
    target = pixels.numpy().reshape(size, width)
    done = 0
    for array in (array for table in tables for array in table["image"].chunks):
        source = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * width :]
        target[done : done + len(array)] = source[: len(array) * width].reshape(len(array), width)
        done += len(array)
    return pixels.permute(0, 3, 1, 2)


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
        """Wait until the thread has released its iterator, which it does at the next item at the latest."""
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
            # Closed in the thread that ran the generator, so that what it holds open is released now.
            getattr(self._items, "close", lambda: None)()
            self._put(last)

    def _put(self, item: Any) -> bool:
        while not self._left.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
                return True
            except Full:
                continue
        return False
