"""Window reader: a piece of an epoch's plan in, its images as Arrow tables out.

A read task looks up the rows of its piece in the catalogue, fetches their bytes, decodes them in the order of
the epoch and yields one block at a time: it holds about one window of bytes and one block of pixels.

    spec = ReadSpec("s3://lake/clothing1m", version=3, resize=256, size=(256, 256))
    for table in read_piece(spec, piece):       # row, noisy_class, image, problem
        ...

An image that does not decode is all zeros, and `problem` names the sample, its place and the reason. Neither
torch nor Ray is imported here: this runs in every process that reads, which should start fast and stay small.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import PLAN_COLUMNS, Catalogue
from pencil_scale.catalogue.ranges import RangeReader
from pencil_scale.images.decode import UndecodableError, check_size, decode
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.plan import CHUNK_ROWS, Int64s, Mask, Piece, RowCounts

BLOCK_BYTES = 32 << 20
NUM_PROBED = 32
_ONE_READER = Lock()  # a Parquet file must not be read by two threads at once


@dataclass(frozen=True)
class ReadSpec:
    """What a read task needs to know besides its piece."""

    storage: str
    version: int
    part: str = ""
    resize: int | None = None
    size: tuple[int, int] | None = None  # height and width of every image; None: leave them undecoded
    block_bytes: int = BLOCK_BYTES

    def catalogue(self) -> Catalogue:
        """Open the catalogue, once per process: its manifest names every shard."""
        return _opened(self.storage, self.version, self.part)

    @property
    def schema(self) -> pa.Schema:
        pixels = pa.large_binary() if self.size is None else pa.binary(3 * self.size[0] * self.size[1])
        return pa.schema(
            [("row", pa.int64()), ("noisy_class", pa.int64()), ("image", pixels), ("problem", pa.string())]
        )


class Selection:
    """The rows an epoch visits: the ok rows of a catalogue, or those of them in a subset."""

    def __init__(self, catalogue: Catalogue, subset: npt.NDArray[Any] | None = None) -> None:
        self._catalogue = catalogue
        self.mask = None if subset is None else _as_mask(subset, catalogue.num_rows)
        chunks = catalogue.chunks()
        self.counts = RowCounts(chunks.num_ok.astype(np.int64), chunks.ok_bytes)
        if self.mask is not None:
            num_rows, num_bytes = np.zeros((2, len(chunks.num_ok)), np.int64)
            for chunk in np.unique(np.flatnonzero(self.mask) // CHUNK_ROWS).tolist():
                table = self.table(chunk)
                num_rows[chunk], num_bytes[chunk] = len(table), pc.sum(table["image_bytes"]).as_py() or 0
            self.counts = RowCounts(num_rows, num_bytes)

    def members(self, chunk: int) -> Int64s:
        """Look up the rows of a chunk, in ascending order."""
        return self.table(chunk)["row"].to_numpy()  # type: ignore[no-any-return]

    def table(self, chunk: int) -> pa.Table:
        """Read the locations of the rows of a chunk."""
        table = ok_table(self._catalogue, chunk)
        return table if self.mask is None else table.filter(pa.array(self.mask[table["row"].to_numpy()]))

    def among(self, visited: Mask) -> Mask:
        """Leave out rows that this selection never visits; a table may be longer than the catalogue."""
        visited = visited[: self._catalogue.num_rows]
        return visited if self.mask is None else visited & self.mask


def ok_table(catalogue: Catalogue, chunk: int) -> pa.Table:
    """Read the locations of the ok rows of a chunk."""
    stop = min((chunk + 1) * CHUNK_ROWS, catalogue.num_rows)
    with _ONE_READER:
        table = catalogue.read(chunk * CHUNK_ROWS, stop, PLAN_COLUMNS)
    return table.filter(pc.equal(table["status"], "ok"))


def read_piece(spec: ReadSpec, piece: Piece) -> Iterator[pa.Table]:
    """Read one piece of an epoch, in the order of the epoch."""
    catalogue = spec.catalogue()
    tables = {chunk: ok_table(catalogue, chunk) for chunk in piece.chunks}
    try:
        rows = piece.rows(lambda chunk: tables[chunk]["row"].to_numpy())
    except ValueError as error:
        raise PencilError(
            f"{catalogue.folder}, version {catalogue.version}: {error}; the visited rows or the subset "
            "belong to another version: start a new run"
        ) from error
    known = pa.concat_tables(tables.values())  # in ascending order of rows
    places = known.take(pa.array(np.searchsorted(known["row"].to_numpy(), rows)))
    yield from _blocks(spec, places, _fetch(catalogue, places))


def read_pieces(spec: ReadSpec, pieces: Sequence[Piece], num_threads: int = 2) -> Iterator[pa.Table]:
    """Read pieces one after another in this process, some ahead: for small data and short trials."""

    def read_all(piece: Piece) -> list[pa.Table]:
        return list(read_piece(spec, piece))

    coming: deque[Future[list[pa.Table]]] = deque()
    waiting = iter(pieces)
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            coming.extend(pool.submit(read_all, piece) for piece in islice(waiting, num_threads))
            while coming:
                tables = coming.popleft().result()
                coming.extend(pool.submit(read_all, piece) for piece in islice(waiting, 1))
                yield from tables
        finally:
            for task in coming:
                task.cancel()


def common_size(spec: ReadSpec, selection: Selection) -> tuple[int, int]:
    """Find the height and width of images that are not resized: the most common among the first ones."""
    first_chunk = int(np.flatnonzero(selection.counts.num_rows)[0])
    places = selection.table(first_chunk)[:NUM_PROBED]
    sizes: Counter[tuple[int, int]] = Counter()
    for data in _fetch(spec.catalogue(), places):
        try:
            height, width, _ = decode(data).shape
            sizes[height, width] += 1
        except UndecodableError as problem:
            reason = problem
    if not sizes:
        raise PencilError(
            f"{spec.storage}: none of the first {len(places)} images can be decoded: {reason}; fetch the "
            "shards again, or index them with data.check_images=decode"
        )
    return sizes.most_common(1)[0][0]


def _fetch(catalogue: Catalogue, places: pa.Table) -> list[bytes]:
    columns = [places[name].to_numpy() for name in ("shard", "image_offset", "image_bytes")]
    return RangeReader(catalogue.shards).read(*columns)


def _blocks(spec: ReadSpec, places: pa.Table, images: list[bytes]) -> Iterator[pa.Table]:
    """Cut a window into blocks of about equal bytes, and release the bytes of each block on the way."""
    if spec.size is None:
        ends = np.cumsum([len(data) for data in images])
        block = ends // spec.block_bytes
    else:
        block = np.arange(len(images)) // max(1, spec.block_bytes // (3 * spec.size[0] * spec.size[1]))
    for number in np.unique(block):
        here = slice(*np.searchsorted(block, [number, number + 1]).tolist())
        column, problems = _column(spec, images[here])
        images[here] = [b""] * len(problems)
        part = places.slice(here.start, here.stop - here.start)
        named = [
            reason and name_problem(spec.catalogue(), part["row"][place].as_py(), reason)
            for place, reason in enumerate(problems)
        ]
        yield pa.table([part["row"], part["noisy_class"].cast(pa.int64()), column, named], schema=spec.schema)


def _column(spec: ReadSpec, images: list[bytes]) -> tuple[pa.Array, list[str | None]]:
    if spec.size is None:
        return pa.array(images, pa.large_binary()), [None] * len(images)
    pixels = np.zeros((len(images), *spec.size, 3), np.uint8)
    problems: list[str | None] = [None] * len(images)
    for number, data in enumerate(images):
        try:
            image = decode(data, spec.resize)
            check_size(image.shape[:2], spec.size)
            pixels[number] = image
        except UndecodableError as problem:
            problems[number] = str(problem)
    kind = spec.schema.field("image").type
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(images), [None, pa.py_buffer(pixels)]), problems


def name_problem(catalogue: Catalogue, row: int, reason: str) -> str:
    """Say in one line which sample could not be decoded, where it is, and why."""
    with _ONE_READER:
        found = catalogue.read(row, row + 1, ["sample_id", "shard", "image_offset"]).to_pylist()[0]
    url = catalogue.shards[found["shard"]].url
    return f"row {row} ({found['sample_id']!r}, {url} at byte {found['image_offset']:,}): {reason}"


def _as_mask(subset: npt.NDArray[Any], num_rows: int) -> Mask:
    """Accept a subset as a mask over all rows, or as row numbers."""
    if subset.dtype == np.bool_ and len(subset) == num_rows:
        return subset
    if subset.dtype == np.bool_ or (len(subset) and not 0 <= subset.min() <= subset.max() < num_rows):
        raise PencilError(
            f"a subset of {len(subset):,} rows does not fit a catalogue of {num_rows:,}; it was made for "
            "another version: run balance_subset again"
        )
    mask = np.zeros(num_rows, np.bool_)
    mask[subset] = True
    return mask


@lru_cache(maxsize=4)
def _opened(storage: str, version: int, part: str) -> Catalogue:
    return Catalogue.open(storage, version, part)
