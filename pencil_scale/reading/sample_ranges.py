"""Sample ranges: whole samples out of shards, by byte range, without reading what lies between.

The catalogue knows where every image is, and so where a neighbour's image ends and the next begins: between
the two lie all members of a sample, whichever order its writer chose. What belongs to it is told by its key.

    places = places_of(catalogue, rows)                      # row, shard, key, image_offset, start, stop
    for key, members in read_samples(catalogue, places):     # members: (name, bytes), as in the shard
        ...
"""

import io
import tarfile
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue import Catalogue
from pencil_scale.indexing.catalogue_schema import CHUNK_ROWS, DAMAGED_STATUSES
from pencil_scale.indexing.identity import shard_stem
from pencil_scale.indexing.raw_text import from_stored
from pencil_scale.reading.byte_source import MemorySource, ShardError
from pencil_scale.reading.range_reader import RangeReader
from pencil_scale.reading.tar_headers import BLOCK, padded
from pencil_scale.shards import Sample, ShardReader

SPAN_ROWS = 64 * CHUNK_ROWS
COLUMNS = ["row", "shard", "image_offset", "image_bytes", "key", "status"]
Int64s = npt.NDArray[np.int64]
Members = list[tuple[str, bytes]]


def places_of(catalogue: Catalogue, rows: Int64s) -> pa.Table:
    """Look up, for rows that rise, the range between each one's neighbours; sorted by shard and offset."""
    found = []
    for first in range(0, catalogue.num_rows, SPAN_ROWS):
        begin, end = np.searchsorted(rows, [first, first + SPAN_ROWS])
        if begin < end:
            found.append(_places(catalogue, rows[begin:end], first))
    return pa.concat_tables(found).sort_by([("shard", "ascending"), ("image_offset", "ascending")])


def _places(catalogue: Catalogue, rows: Int64s, first: int) -> pa.Table:
    # Neighbours may be in the chunk before or behind; one that is not seen only makes a range longer.
    stop = min(first + SPAN_ROWS + CHUNK_ROWS, catalogue.num_rows)
    table = catalogue.read(max(0, first - CHUNK_ROWS), stop, COLUMNS)
    known = pc.invert(pc.is_in(table["status"], pa.array([*DAMAGED_STATUSES, "vanished"])))
    table = table.filter(known).sort_by([("shard", "ascending"), ("image_offset", "ascending")])
    shard, offset = table["shard"].to_numpy(), table["image_offset"].to_numpy()
    ends = offset + table["image_bytes"].to_numpy()
    # Where a shard lost or gained bytes, padding may be shorter than it should: only on one grid is it sure.
    on_grid = np.append((offset[1:] - offset[:-1]) % BLOCK == 0, False)
    ends = np.where(on_grid, (ends - offset + BLOCK - 1) // BLOCK * BLOCK + offset, ends)
    after_other = np.append(False, shard[1:] == shard[:-1])
    before_other = np.append(shard[1:] == shard[:-1], False)
    sizes = np.array([entry.num_bytes for entry in catalogue.shards], np.int64)
    start = np.where(after_other, np.roll(ends, 1), 0)
    stops = np.where(before_other, np.roll(offset, -1) - BLOCK, sizes[shard])
    table = table.append_column("start", pa.array(start)).append_column("stop", pa.array(stops))
    return table.filter(pa.array(np.isin(table["row"].to_numpy(), rows))).drop_columns(["status"])


def read_samples(catalogue: Catalogue, places: pa.Table) -> Iterator[tuple[str, Members]]:
    """Read whole samples, in the order of their places; shards that changed since are refused by name."""
    start, stop = places["start"].to_numpy(), places["stop"].to_numpy()
    ranges = RangeReader(catalogue.shards).read(places["shard"].to_numpy(), start, stop - start)
    offsets = (places["image_offset"].to_numpy() - start).tolist()
    for number, (shard, key) in enumerate(
        zip(places["shard"].to_pylist(), places["key"].to_pylist(), strict=True)
    ):
        data, ranges[number] = ranges[number], b""
        reader = ShardReader(MemorySource(data, catalogue.shards[shard].url))
        sample = _sample_at(reader, from_stored(key), offsets[number])
        yield sample.key, [(member.name, reader.data(member)) for member in sample.members.values()]


def _sample_at(reader: ShardReader, key: str, image_offset: int) -> Sample:
    for found in reader.read():
        if isinstance(found, Sample) and found.key == key:
            image, _ = found.image()
            if image is not None and image.offset == image_offset:
                return found
    raise ShardError(
        f"shard {reader.window.source.url}: sample {key!r} is not where it was indexed; run index_shards "
        "again"
    )


def shard_bytes(samples: Iterable[tuple[str, Members]]) -> bytes:
    """Spell samples as a WebDataset shard: contents bit for bit, no clock, no user."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for key, members in samples:
            for name, data in members:
                info = tarfile.TarInfo(f"{key}{name[name.index('.', name.rfind('/') + 1) :]}")
                info.size, info.mode = len(data), 0o444
                archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def renamed(
    samples: Iterable[tuple[str, Members]], places: pa.Table, catalogue: Catalogue
) -> Iterator[tuple[str, Members]]:
    """Put the shard's name before keys that are only unique in their shard, as identity `shard_key` does."""
    unique = catalogue.manifest["identity"] == "key"
    for (key, members), shard in zip(samples, places["shard"].to_pylist(), strict=True):
        yield (key if unique else f"{shard_stem(catalogue.shards[shard].url)}/{key}"), members


def thinness(catalogue: Catalogue, places: pa.Table) -> float:
    """The share that these images have of the bytes of all shards they lie in."""
    shards = np.unique(places["shard"].to_numpy())
    num_bytes = sum(catalogue.shards[number].num_bytes for number in shards.tolist())
    taken = sum(padded(size) for size in places["image_bytes"].to_pylist())
    return float(taken / max(num_bytes, 1))
