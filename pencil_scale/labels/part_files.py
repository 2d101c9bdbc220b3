"""Part files: fixed-width columns in one Arrow file, one record batch a part, addressed by row.

A column is seen as one strided NumPy array over the whole file, in which a row's place is arithmetic:

    part = row >> shift
    item = starts[part] + (row - part * part_rows) * width

Nothing is ever compressed, null or variable in length here, so values are changed in place through the
memory map and the file stays a valid Arrow file, with exactly as many rows as the table has: the last part
is simply a shorter record batch.
"""

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.storage.errors import DamagedError, PencilError

VERSION = 2
MIN_PART_ROWS = 1024
MIN_PARTS = 64
MAX_PARTS = 4096
MAX_PART_BYTES = 64 * 2**20
HEADER_KEY = b"pencil_scale"
FAR_OUTSIDE = -(2**62)
Int64s: TypeAlias = npt.NDArray[np.int64]
NARROW_BYTES = 8 + 16 + 4 + 1  # row, sample_key, noisy_class, pinned


@dataclass(frozen=True)
class Layout:
    """The shape of a table: which row lives in which part is arithmetic on these numbers."""

    num_rows: int
    num_classes: int
    part_rows: int

    @property
    def num_parts(self) -> int:
        """How many parts the rows fill."""
        return -(-self.num_rows // self.part_rows)

    @property
    def shift(self) -> int:
        """`row >> shift` is the row's part: part_rows is a power of two."""
        return self.part_rows.bit_length() - 1

    def rows_of(self, part: int) -> range:
        """The rows of one part; only the last part may be short."""
        return range(part * self.part_rows, min((part + 1) * self.part_rows, self.num_rows))


def choose_layout(num_rows: int, num_classes: int) -> Layout:
    """Choose the largest part that leaves 64 parts and stays under 64 MB, but none under 1,024 rows."""
    row_bytes = NARROW_BYTES + 4 * num_classes
    most_rows = min(num_rows // MIN_PARTS, MAX_PART_BYTES // row_bytes)
    part_rows = max(MIN_PART_ROWS, 1 << max(most_rows, 1).bit_length() - 1)
    return grown_layout(Layout(0, num_classes, part_rows), num_rows)


def grown_layout(layout: Layout, num_rows: int) -> Layout:
    """Keep the size of a part while the table grows, until there would be more than 4,096 of them."""
    grown = replace(layout, num_rows=num_rows)
    while grown.num_parts > MAX_PARTS:
        grown = replace(grown, part_rows=2 * grown.part_rows)
    return grown


@dataclass(frozen=True)
class Header:
    """What a part file says about itself, as JSON in its Arrow schema's metadata."""

    layout: Layout
    parts: tuple[int, ...]  # the parts this file holds, in the order of its record batches
    first_epoch: int  # the epoch of the table's life that the present run calls 0
    scale: float  # K: a row starts, and is pinned, at K * one-hot
    class_names: tuple[str, ...]  # what the class numbers stand for
    run: str  # id of the run that writes it

    def encode(self) -> dict[bytes, bytes]:
        """As schema metadata."""
        return {HEADER_KEY: json.dumps({"version": VERSION} | asdict(self)).encode()}

    @classmethod
    def decode(cls, path: Path, metadata: dict[bytes, bytes] | None) -> "Header":
        """Read the metadata back, refusing what another program or version wrote."""
        if not metadata or HEADER_KEY not in metadata:
            raise PencilError(f"{path}: an Arrow file, but not a label table of pencil_scale")
        found = json.loads(metadata[HEADER_KEY])
        if found["version"] != VERSION:
            raise PencilError(
                f"{path}: a label table of version {found['version']}; this program reads version {VERSION}: "
                "restore the table from a manifest, or use the program that wrote it"
            )
        return cls(
            Layout(**found["layout"]),
            tuple(found["parts"]),
            found["first_epoch"],
            found["scale"],
            tuple(found["class_names"]),
            found["run"],
        )


def labels_schema(num_classes: int) -> pa.Schema:
    """The columns of the label table."""
    logits = pa.list_(pa.field("item", pa.float32(), nullable=False), num_classes)
    columns = [("row", pa.int64()), ("sample_key", pa.binary(16)), ("noisy_class", pa.int32())]
    columns += [("pinned", pa.uint8()), ("label_logits", logits)]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


LEDGER_SCHEMA = pa.schema([pa.field("last_epoch", pa.int32(), nullable=False)])


def fixed_width(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Wrap a contiguous array as an Arrow array of one value a row, without a copy."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    if pa.types.is_fixed_size_list(kind):
        items = pa.Array.from_buffers(kind.value_type, values.size, [None, buffer])
        return pa.FixedSizeListArray.from_arrays(items, type=kind)
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def fixed_batch(schema: pa.Schema, columns: Sequence[npt.NDArray[Any]]) -> pa.RecordBatch:
    """Wrap one array a column as a record batch, without a copy."""
    arrays = [fixed_width(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def write_part_file(sink: Any, schema: pa.Schema, header: Header, batches: Iterable[pa.RecordBatch]) -> None:
    """Write one record batch a part to an open file; blocks are really written, so a full disk shows here.

    A hole would show later, as a SIGBUS in whoever first touches the map.
    """
    with pa.ipc.new_file(sink, schema.with_metadata(header.encode())) as writer:
        for batch in batches:
            writer.write_batch(batch)


class Column:
    """One column of a mapped part file: every row is one item of a strided array over the whole file."""

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        dtype: npt.DTypeLike,
        width: int,
        layout: Layout,
        starts: list[int],
    ):
        self._dtype, self._width = np.dtype(dtype), width
        # A row of several values is one opaque item: NumPy then copies it with one call, not value by value.
        self._row_type = self._dtype if width == 1 else np.dtype((np.void, self._dtype.itemsize * width))
        step, num_bytes = self._dtype.itemsize, memory.size
        # Every value of the file starts an item. Items overlap, but a part's rows are `width` values apart,
        # and so one index reaches all parts, the shorter last one too.
        num_items = max(
            (num_bytes - self._row_type.itemsize) // step + 1, 0
        )  # none if the file holds no part
        first_item = memory[: self._row_type.itemsize * min(num_items, 1)].view(self._row_type)
        self._items = np.lib.stride_tricks.as_strided(first_item, (num_items,), (step,))
        self._starts = np.asarray(starts, np.int64) // step
        # Where row 0 would be if the whole table were laid out as this part is: start + slot = origin + row.
        # The rows of a part that is not in the file are then far outside of it, and NumPy refuses them.
        origins = self._starts - np.arange(len(starts)) * layout.part_rows * width
        self._origins = np.where(self._starts < 0, FAR_OUTSIDE, origins)

    def find(self, rows: Int64s, parts: Int64s) -> Int64s:
        """Where these rows, which lie in these parts, stand among the items."""
        return self._origins[parts] + (rows if self._width == 1 else rows * self._width)

    def get(self, items: Int64s) -> npt.NDArray[Any]:
        """The values of the rows found there: [B], or [B, width]."""
        found = self._items[items]
        return found if self._width == 1 else found.view(self._dtype).reshape(-1, self._width)

    def set(self, items: Int64s, values: npt.NDArray[Any] | int) -> None:
        """Change the rows found there in place: to a row each, or all to one number."""
        if self._width > 1:
            values = np.ascontiguousarray(values, self._dtype).view(self._row_type)[:, 0]
        self._items[items] = values


class PartFile:
    """A part file, mapped. Pages come in as rows are touched; nothing else of it is resident."""

    def __init__(self, path: Path, writable: bool):
        self.path = path
        with path.open("r+b" if writable else "rb") as file:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, access=access)
        # Rows are visited in random order: bring in the page of a row, not its neighbours.
        self._map.madvise(mmap.MADV_RANDOM)
        self._buffer = pa.py_buffer(self._map)
        try:
            self._reader = pa.ipc.open_file(self._buffer)
            self._batches = [self._reader.get_batch(k) for k in range(self._reader.num_record_batches)]
        except (pa.ArrowInvalid, OSError) as error:
            raise DamagedError(
                f"{path}: not a whole Arrow file ({error}); restore the table from its last manifest"
            ) from error
        self.header = Header.decode(path, self._reader.schema.metadata)
        self._place = {part: place for place, part in enumerate(self.header.parts)}

    def column(self, name: str, dtype: npt.DTypeLike, width: int = 1) -> Column:
        """One column as a strided array over the file."""
        starts = [-1] * self.header.layout.num_parts
        for part, place in self._place.items():
            starts[part] = self._batches[place].column(name).buffers()[-1].address - self._buffer.address
        return Column(np.frombuffer(self._map, np.uint8), dtype, width, self.header.layout, starts)

    def batch(self, part: int) -> pa.RecordBatch:
        """One part as it stands in the map now, without a copy; for reading all of it."""
        batch = self._batches[self._place[part]]
        first, last = (column.buffers()[-1] for column in (batch.columns[0], batch.columns[-1]))
        start = (first.address - self._buffer.address) // mmap.PAGESIZE * mmap.PAGESIZE
        end = last.address + last.size - self._buffer.address
        self._map.madvise(mmap.MADV_WILLNEED, start, end - start)
        return batch

    def forget_pages(self) -> None:
        """Let go of resident pages after a pass over the whole file; what was written stays in the file."""
        self._map.madvise(mmap.MADV_DONTNEED)
