"""Ranges: the bytes of images and samples out of many shards, in few requests.

Images that are close together in a shard are fetched with one request, several requests at a time by threads.
Before the first byte of a shard is used, its size and ETag (or modification time) are compared with the
index, because an offset into a rewritten shard would give another product's image.

    images = RangeReader(catalogue.shards).read(shard, image_offset, image_bytes)     # list of bytes

A complete sample is one range, too.

    located = locate_samples(catalogue, rows)                 # row, shard, key, sample_start, ...
    for key, members in read_samples(catalogue, located):     # members: (name, bytes), as in the shard
        ...
"""

import io
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue, Shard
from pencil_scale.catalogue.schema import ROW, from_stored, shard_stem
from pencil_scale.catalogue.shards import Sample, ShardReader
from pencil_scale.catalogue.tar_headers import padded
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import ByteSource, MemorySource, open_source

Int64s = npt.NDArray[np.int64]

NUM_THREADS = 8

IMAGE_COLUMNS = ["shard", "image_offset", "image_bytes"]
COLUMNS = ["row", "shard", "key", "sample_start", "sample_end", "image_offset", "image_bytes"]
Members = list[tuple[str, bytes]]


class Range(NamedTuple):
    """Bytes [start, stop) of a shard, and which of the requested images they hold, in order of offset."""

    start: int
    stop: int
    images: Int64s


class RangeReader:
    """Reads images from shards that have not changed since they were indexed."""

    def __init__(self, shards: Sequence[Shard], num_threads: int = NUM_THREADS) -> None:
        self._shards = shards
        self._num_threads = num_threads

    def read(self, shard: npt.NDArray[np.int32], offset: Int64s, length: Int64s) -> list[bytes]:
        """Give the bytes of each image, in the order of the arguments."""
        images: list[bytes] = [b""] * len(shard)
        with ExitStack() as open_shards, ThreadPoolExecutor(self._num_threads) as pool:
            try:
                opening = {
                    number: pool.submit(self._open, int(number), open_shards) for number in np.unique(shard)
                }
                tasks = []
                for number, coming in opening.items():
                    source, wanted = coming.result(), np.flatnonzero(shard == number)
                    for piece in coalesce(offset, length, wanted, source.far_bytes, source.chunk_bytes):
                        tasks.append(pool.submit(self._fetch, source, piece, offset, length, images))
                for task in tasks:
                    task.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return images

    def _open(self, number: int, open_shards: ExitStack) -> ByteSource:
        """Open a shard after checking its version."""
        entry = self._shards[number]
        entry.verify()
        return open_shards.enter_context(open_source(entry.url, entry.num_bytes))

    @staticmethod
    def _fetch(source: ByteSource, piece: Range, offset: Int64s, length: Int64s, images: list[bytes]) -> None:
        data = source.exactly(piece.start, piece.stop - piece.start)
        for image in piece.images:
            begin = int(offset[image]) - piece.start
            images[image] = data[begin : begin + int(length[image])]


def read_images(catalogue: Catalogue, rows: pa.Table) -> list[bytes]:
    """Read the bytes of images, given the columns that say where they are."""
    return RangeReader(catalogue.shards).read(*(rows[name].to_numpy() for name in IMAGE_COLUMNS))


def coalesce(offset: Int64s, length: Int64s, wanted: Int64s, far_bytes: int, most_bytes: int) -> list[Range]:
    """Join images at most `far_bytes` apart into ranges of one image, or of at most `most_bytes`."""
    order = wanted[np.argsort(offset[wanted], kind="stable")]
    starts = offset[order].tolist()
    stops = (offset[order] + length[order]).tolist()
    ranges: list[Range] = []
    begin, end = 0, 0
    for following in range(1, len(order) + 1):
        end = max(end, stops[following - 1])
        if (
            following == len(order)
            or starts[following] - end > far_bytes
            or max(stops[following], end) - starts[begin] > most_bytes
        ):
            ranges.append(Range(starts[begin], end, order[begin:following]))
            begin, end = following, 0
    return ranges


# -- samples ------------------------------------------------------------------------------------------


def locate_samples(catalogue: Catalogue, rows: Int64s) -> pa.Table:
    """Look up where the samples of ascending rows are, sorted by shard and offset."""
    found = [ROW.empty_table().select(COLUMNS)]
    for table in catalogue.batches(COLUMNS):
        first = table["row"][0].as_py()
        chosen = rows[slice(*np.searchsorted(rows, [first, first + len(table)]))]
        found.append(table.take(chosen - first))
    return pa.concat_tables(found).sort_by([("shard", "ascending"), ("image_offset", "ascending")])


def read_samples(catalogue: Catalogue, located: pa.Table) -> Iterator[tuple[str, Members]]:
    """Read complete samples, in the order of `located`; a shard that has changed is an error.

    Keys that are unique only within a shard get its name as a prefix, as identity `shard_key` does.
    """
    is_unique = catalogue.manifest["identity"] == "key"
    start, end = located["sample_start"].to_numpy(), located["sample_end"].to_numpy()
    ranges = RangeReader(catalogue.shards).read(located["shard"].to_numpy(), start, end - start)
    for number, row in enumerate(located.to_pylist()):
        data, ranges[number] = ranges[number], b""
        url, key = catalogue.shards[row["shard"]].url, from_stored(row["key"])
        reader = ShardReader(MemorySource(data, url))
        same = (found for found in reader.read() if isinstance(found, Sample) and found.key == key)
        sample = next(same, None)
        if sample is None:
            raise PencilError(
                f"shard {url}: sample {key!r} is not where it was indexed; run index_shards again"
            )
        members = [(member.name, reader.data(member)) for member in sample.members.values()]
        yield key if is_unique else f"{shard_stem(url)}/{key}", members


def shard_bytes(samples: Iterable[tuple[str, Members]]) -> bytes:
    """Write samples as a WebDataset shard: contents bit for bit, without times and owners."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for key, members in samples:
            for name, data in members:
                info = tarfile.TarInfo(f"{key}{name[name.index('.', name.rfind('/') + 1) :]}")
                info.size, info.mode = len(data), 0o444
                archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def thinness(catalogue: Catalogue, located: pa.Table) -> float:
    """The share of these images in the bytes of all shards that hold them."""
    shards = np.unique(located["shard"].to_numpy())
    num_bytes = sum(catalogue.shards[number].num_bytes for number in shards.tolist())
    taken = sum(padded(size) for size in located["image_bytes"].to_pylist())
    return float(taken / max(num_bytes, 1))
