"""Range reader: the bytes of many images out of many shards, in few requests.

Images that lie close together in a shard are fetched with one request, several requests at a time by
threads, and each image is cut out as its range arrives: memory holds the images asked for and the ranges on
their way. Before the first byte of a shard is used, its size and ETag (or modification time) are compared
with what was indexed, because an offset into a rewritten shard would give another product's picture.

    images = RangeReader(catalogue.shards).read(shard, image_offset, image_bytes)     # list of bytes

A request that fails is tried again a few times, after a growing, random pause, and every time is logged.
What cannot be mended by waiting (no such shard, no access, a changed shard) stops at once, by name.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pencil_scale.reading.byte_source import (
    ByteSource,
    FileSource,
    RemoteSource,
    ShardError,
    ShardVersion,
    filesystem_of,
    is_local,
    version_of,
)
from pencil_scale.schema import PencilError

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Result = TypeVar("Result")

NUM_THREADS = 8
MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
HOPELESS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class IndexedShard(Protocol):
    """A shard as the catalogue knows it."""

    @property
    def url(self) -> str: ...

    @property
    def version(self) -> ShardVersion: ...


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of a shard, and which of the wanted images they hold, in order of offset."""

    start: int
    stop: int
    images: Int64s


class RangeReader:
    """Reads images from shards that are still what the catalogue says they are."""

    def __init__(self, shards: Sequence[IndexedShard], num_threads: int = NUM_THREADS) -> None:
        self._shards = shards
        self._num_threads = num_threads

    def read(self, shard: npt.NDArray[np.int32], offset: Int64s, length: Int64s) -> list[bytes]:
        """Give the bytes of each image, in the order asked for."""
        images: list[bytes] = [b""] * len(shard)
        with ExitStack() as open_shards, ThreadPoolExecutor(self._num_threads) as pool:
            opening = {
                number: pool.submit(self._open, int(number), open_shards) for number in np.unique(shard)
            }
            tasks = []
            for number, coming in opening.items():
                source = _result(coming, list(opening.values()))
                wanted = np.flatnonzero(shard == number)
                for piece in coalesce(offset, length, wanted, source.far_bytes, source.chunk_bytes):
                    tasks.append(pool.submit(self._fetch, source, piece, offset, length, images))
            for task in tasks:
                _result(task, tasks)
        return images

    def _open(self, number: int, open_shards: ExitStack) -> ByteSource:
        """Open a shard after making sure of its version."""
        entry = self._shards[number]
        found = persistently(f"shard {entry.url}", lambda: version_of(entry.url))
        if found != entry.version:
            raise ShardError(_changed(entry, found))
        filesystem, path = filesystem_of(entry.url)
        if not is_local(filesystem):
            return RemoteSource(filesystem, path, entry.url, found.num_bytes)
        source = persistently(f"shard {entry.url}", lambda: FileSource(path, entry.url))
        open_shards.callback(source.close)
        return source

    @staticmethod
    def _fetch(source: ByteSource, piece: Range, offset: Int64s, length: Int64s, images: list[bytes]) -> None:
        num_bytes = piece.stop - piece.start

        def once() -> bytes:
            data = source.read(piece.start, num_bytes)
            if len(data) != num_bytes:
                raise OSError(f"{len(data):,} bytes came")
            return data

        data = persistently(f"shard {source.url}: {num_bytes:,} bytes at {piece.start:,}", once)
        for image in piece.images:
            begin = int(offset[image]) - piece.start
            images[image] = data[begin : begin + int(length[image])]


def coalesce(offset: Int64s, length: Int64s, wanted: Int64s, far_bytes: int, most_bytes: int) -> list[Range]:
    """Join images whose gap is at most `far_bytes` into ranges of at most `most_bytes`, or one image."""
    order = wanted[np.argsort(offset[wanted], kind="stable")]
    starts = offset[order].tolist()
    stops = (offset[order] + length[order]).tolist()
    ranges: list[Range] = []
    begin, end = 0, 0
    for place in range(1, len(order) + 1):
        end = max(end, stops[place - 1])
        if (
            place == len(order)
            or starts[place] - end > far_bytes
            or max(stops[place], end) - starts[begin] > most_bytes
        ):
            ranges.append(Range(starts[begin], end, order[begin:place]))
            begin, end = place, 0
    return ranges


def persistently(what: str, attempt: Callable[[], Result]) -> Result:
    """Try a few times, with growing random pauses; the last failure names what was tried and how often."""
    for number in range(1, MAX_ATTEMPTS + 1):
        try:
            return attempt()
        except Exception as error:
            if isinstance(_root(error), HOPELESS):
                raise ShardError(f"{what}: {_reason(error)}; check that it is there and readable") from error
            if number == MAX_ATTEMPTS:
                raise ShardError(
                    f"{what}: failed {MAX_ATTEMPTS} times, last with {_reason(error)}; check the store and "
                    "the network, then start the same command again"
                ) from error
            pause_s = random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2 ** (number - 1), LONGEST_PAUSE_S)
            logger.warning("%s: %s; attempt %d in %.1f s", what, _reason(error), number + 1, pause_s)
            time.sleep(pause_s)
    raise AssertionError("unreachable")


def _result(coming: "Future[Result]", all_coming: "Sequence[Future[Result]]") -> Result:
    """Wait for one; where it failed, what has not begun yet is not begun."""
    try:
        return coming.result()
    except BaseException:
        for task in all_coming:
            task.cancel()
        wait(all_coming)
        raise


def _changed(entry: IndexedShard, found: ShardVersion | None) -> str:
    if found is None:
        return f"shard {entry.url} is gone since it was indexed; bring it back, or run index_shards again"
    was = entry.version
    sizes = f"{was.num_bytes:,} bytes then, {found.num_bytes:,} now"
    difference = sizes if was.num_bytes != found.num_bytes else f"{was.tag} then, {found.tag} now"
    return f"shard {entry.url} changed since it was indexed: {difference}; run index_shards again"


def _root(error: BaseException) -> BaseException:
    """What the store itself said, under the words our own modules put around it."""
    return error.__cause__ if isinstance(error, PencilError) and error.__cause__ else error


def _reason(error: BaseException) -> str:
    root = _root(error)
    return f"{type(root).__name__} ({' '.join(str(root).split())[:200]})"
