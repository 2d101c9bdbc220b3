"""Window reader: a piece of an epoch's plan in, its images as Arrow tables out.

A read task looks up the rows of its piece in the catalogue, fetches their bytes, decodes them in the order of
the epoch and yields one block at a time: it holds about one window of bytes and one block of pixels.

    spec = ReadSpec("s3://lake/clothing1m", version=3, block_bytes=32 << 20, size=(256, 256))
    for table in read_piece(spec, piece):       # row, noisy_class, pixels, encoded, problem
        ...

An image that does not decode is all zeros, and `problem` names the sample, its shard and the reason. With
`gpu_share` some images, always the same ones, have no pixels: they stay `encoded` for a GPU to decode.
With `keep_bytes` a process keeps what it decoded, if that is enough for all images of the catalogue.
Neither torch nor Ray is imported here: this runs in every process that reads, which should start fast and
stay small.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import PLAN_COLUMNS, Catalogue, Chunks
from pencil_scale.catalogue.ranges import read_images
from pencil_scale.catalogue.schema import CHUNK_ROWS
from pencil_scale.images.decode import Pixels, UndecodableError, decode
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import hashes
from pencil_scale.stream.plan import Int64s, Mask, Piece

Objects = npt.NDArray[Any]

NUM_PROBED = 32
NUM_THREADS = 2
GPU_KEY = 0x6A706567  # the same in every run
_open_catalogue = lru_cache(maxsize=4)(Catalogue.open)
_ONE_READER = Lock()  # a Parquet file must not be read by two threads at once


@dataclass(frozen=True)
class ReadSpec:
    """What a read task needs to know besides its piece."""

    storage: str
    version: int
    block_bytes: int
    clean_set: str = ""
    resize: int | None = None
    size: tuple[int, int] = (0, 0)  # height and width of every image that is decoded
    gpu_share: float = 0.0  # of the images, which stay encoded
    keep_bytes: int = 0  # memory of a process for decoded images

    def catalogue(self) -> Catalogue:
        """Open the catalogue, once per process: its manifest names every shard."""
        return _open_catalogue(self.storage, self.version, self.clean_set)

    @property
    def schema(self) -> pa.Schema:
        numbers = [("row", pa.int64()), ("noisy_class", pa.int64())]
        images = [("pixels", pa.large_binary()), ("encoded", pa.large_binary())]
        return pa.schema([*numbers, *images, ("problem", pa.string())])

    @property
    def pixel_bytes(self) -> int:
        """The bytes of one decoded image."""
        return 3 * self.size[0] * self.size[1]

    def name_problem(self, row: int, reason: str) -> str:
        """Say in one line which sample could not be decoded, where it is, and why."""
        with _ONE_READER:
            found = self.catalogue().read(row, row + 1, ["sample_id", "shard", "image_offset"]).to_pylist()[0]
        url = self.catalogue().shards[found["shard"]].url
        return f"row {row} ({found['sample_id']!r}, {url} at byte {found['image_offset']:,}): {reason}"


class Kept:
    """The images that this process has decoded so far, by row; memory is taken as they arrive."""

    def __init__(self, spec: ReadSpec) -> None:
        num_rows = spec.catalogue().num_rows
        self.known = np.zeros(num_rows, np.bool_)
        self.pixels = np.zeros((num_rows, spec.pixel_bytes), np.uint8)
        self._reasons: dict[int, str] = {}  # of images that do not decode

    @staticmethod
    def of(spec: ReadSpec) -> "Kept | None":
        """What is kept of a catalogue; None if its images do not fit, or if a GPU decodes some of them."""
        needed = spec.catalogue().num_rows * spec.pixel_bytes
        return None if spec.gpu_share or needed > spec.keep_bytes else _kept(spec)

    def add(self, rows: Int64s, pixels: Pixels, reasons: Objects) -> None:
        self.pixels[rows] = pixels
        self._reasons |= {
            row: why for row, why in zip(rows.tolist(), reasons, strict=True) if why is not None
        }
        self.known[rows] = True  # last: another thread may read

    def reasons_of(self, rows: Int64s) -> Objects:
        """Why images did not decode; None for the others."""
        return np.array([self._reasons.get(row) for row in rows.tolist()], object)


_kept = lru_cache(maxsize=4)(Kept)


class LeftOut(NamedTuple):
    """Rows of a selection that are not visited, and the bytes of their images."""

    rows: Int64s
    num_bytes: Int64s


class Selection:
    """The rows an epoch visits: the ok rows of a catalogue, or those of them in a subset; some left out."""

    def __init__(
        self, catalogue: Catalogue, subset: Int64s | None = None, left_out: LeftOut | None = None
    ) -> None:
        self._catalogue = catalogue
        self.chunks, self.mask = catalogue.chunks(), None
        if subset is not None:
            if subset.max(initial=0) >= catalogue.num_rows:
                raise PencilError(
                    f"a subset with row {subset.max():,} does not fit a catalogue of {catalogue.num_rows:,} "
                    "rows; it was made for another version: run balance_subset again"
                )
            self.mask = np.zeros(catalogue.num_rows, np.bool_)
            self.mask[subset] = True
            self.chunks = Chunks(np.zeros_like(self.chunks.num_ok), np.zeros_like(self.chunks.ok_bytes))
            for chunk in np.unique(subset // CHUNK_ROWS).tolist():
                table = self.table(chunk)
                self.chunks.num_ok[chunk] = len(table)
                self.chunks.ok_bytes[chunk] = pc.sum(table["image_bytes"]).as_py() or 0
        if left_out is not None:
            self.mask = np.ones(catalogue.num_rows, np.bool_) if self.mask is None else self.mask
            self.mask[left_out.rows] = False
            self.chunks = Chunks(self.chunks.num_ok.copy(), self.chunks.ok_bytes.copy())
            np.subtract.at(self.chunks.num_ok, left_out.rows // CHUNK_ROWS, 1)
            np.subtract.at(self.chunks.ok_bytes, left_out.rows // CHUNK_ROWS, left_out.num_bytes)

    @property
    def num_rows(self) -> int:
        return int(self.chunks.num_ok.sum())

    def ok_rows(self, chunk: int) -> Int64s:
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
    """Read one piece of an epoch, in the order of the epoch, in blocks of about equal bytes."""
    catalogue = spec.catalogue()
    chunks = sorted({stretch.chunk for stretch in piece.stretches})
    tables = {chunk: ok_table(catalogue, chunk) for chunk in chunks}
    rows = piece.rows(lambda chunk: tables[chunk]["row"].to_numpy())
    known = pa.concat_tables(tables.values())  # in ascending order of rows
    samples = known.take(pa.array(np.searchsorted(known["row"].to_numpy(), rows)))
    kept, for_gpu = Kept.of(spec), choose_for_gpu(rows, spec.gpu_share)
    is_missing = np.ones(len(rows), np.bool_) if kept is None else ~kept.known[rows]
    images = np.full(len(rows), b"", object)
    images[is_missing] = read_images(catalogue, samples.filter(pa.array(is_missing)))
    num_bytes = np.where(for_gpu, [len(data) for data in images], spec.pixel_bytes).sum()
    step = max(1, spec.block_bytes * len(rows) // max(1, int(num_bytes)))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        block, encoded, here = samples[part], images[part], is_missing[part] & ~for_gpu[part]
        pixels, reasons = _decode(spec, encoded, here)
        if kept is not None:
            kept.add(rows[part][here], pixels, reasons[here])
            pixels, reasons = kept.pixels[rows[part]], kept.reasons_of(rows[part])
        problems = [
            reason and spec.name_problem(row, reason)
            for row, reason in zip(block["row"].to_pylist(), reasons, strict=True)
        ]
        columns = _columns(spec, pixels, encoded, for_gpu[part])
        images[part] = b""  # releases the bytes
        classes = block["noisy_class"].cast(pa.int64())
        yield pa.table([block["row"], classes, *columns, problems], schema=spec.schema)


def choose_for_gpu(rows: Int64s, share: float) -> Mask:
    """Choose about this share of rows, each by its number alone: the two decoders give unlike pixels."""
    return np.asarray(hashes(rows, GPU_KEY) >> np.uint64(11) < share * 2**53)  # exact as a float


def read_pieces(spec: ReadSpec, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
    """Read pieces one after another in this process, some ahead: for small data and short trials."""
    pool = ThreadPoolExecutor(NUM_THREADS)
    coming: deque[Future[list[pa.Table]]] = deque()
    try:
        for piece in pieces:
            coming.append(pool.submit(list, read_piece(spec, piece)))
            if len(coming) > NUM_THREADS:
                yield from coming.popleft().result()
        while coming:
            yield from coming.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def common_size(spec: ReadSpec, selection: Selection) -> tuple[int, int]:
    """Find the height and width of images that are not resized: the most common among the first ones."""
    samples = selection.table(int(np.flatnonzero(selection.chunks.num_ok)[0]))[:NUM_PROBED]
    sizes: Counter[tuple[int, int]] = Counter()
    for data in read_images(spec.catalogue(), samples):
        try:
            height, width, _ = decode(data).shape
            sizes[height, width] += 1
        except UndecodableError as problem:
            reason = problem
    if not sizes:
        raise PencilError(
            f"{spec.storage}: none of the first {len(samples)} images can be decoded: {reason}; fetch the "
            "shards again, or index them with data.check_images=decode"
        )
    return sizes.most_common(1)[0][0]


def _decode(spec: ReadSpec, images: Objects, wanted: Mask) -> tuple[Pixels, Objects]:
    """Decode the wanted images [N, bytes of an image]; also return what was wrong with each, or None."""
    reasons = np.full(len(images), None, object)
    pixels = np.zeros((np.count_nonzero(wanted), *spec.size, 3), np.uint8)
    for target, number in enumerate(np.flatnonzero(wanted)):
        try:
            image = decode(images[number], spec.resize)
            if image.shape[:2] != spec.size:
                found, expected = (f"{size[1]} x {size[0]}" for size in (image.shape, spec.size))
                raise UndecodableError(f"{found} pixels among images of {expected}; set images.resize")
            pixels[target] = image
        except UndecodableError as problem:
            reasons[number] = str(problem)
    return pixels.reshape(-1, spec.pixel_bytes), reasons


def _columns(spec: ReadSpec, pixels: Pixels, images: Objects, for_gpu: Mask) -> list[pa.Array]:
    """The pixels of all images but those for the GPU, and the encoded bytes of these."""
    offsets = np.append(0, np.cumsum(~for_gpu) * spec.pixel_bytes)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(pixels)]
    decoded = pa.Array.from_buffers(pa.large_binary(), len(images), buffers)
    return [decoded, pa.array(images, pa.large_binary(), mask=~for_gpu)]
