"""Part files: fixed-width columns in one Arrow file, one record batch a part, addressed by row.

A column is seen as one strided NumPy array over the whole file, in which a row's place is arithmetic:

    element = starts[row >> shift] + (row & mask) * width

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
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.schema import PencilError

VERSION = 1
MIN_PART_ROWS = 1024
MIN_PARTS = 64
MAX_PARTS = 4096
MAX_PART_BYTES = 64 * 2**20
HEADER_KEY = b"pencil_scale"
NARROW_BYTES = 8 + 16 + 4 + 1  # row, sample_key, noisy_class, pinned


class LabelTableError(PencilError):
    """The label table cannot do what was asked."""


class TableDamagedError(LabelTableError):
    """A file of the table is missing, cut short, or not what its name promises."""


class TableMismatchError(LabelTableError):
    """A whole table, but not one of this version, class count or shape."""


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

    def encode(self) -> dict[bytes, bytes]:
        """As schema metadata."""
        return {HEADER_KEY: json.dumps({"version": VERSION} | asdict(self)).encode()}

    @classmethod
    def decode(cls, path: Path, metadata: dict[bytes, bytes] | None) -> "Header":
        """Read the metadata back, refusing what another program or version wrote."""
        if not metadata or HEADER_KEY not in metadata:
            raise TableMismatchError(f"{path}: an Arrow file, but not a label table of pencil_scale")
        found = json.loads(metadata[HEADER_KEY])
        if found["version"] != VERSION:
            raise TableMismatchError(
                f"{path}: a label table of version {found['version']}; this program reads version {VERSION}: "
                "restore the table from a manifest, or use the program that wrote it"
            )
        return cls(Layout(**found["layout"]), tuple(found["parts"]), found["first_epoch"], found["scale"])


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
    """One column of a mapped part file: `values[at(parts, slots)]` are the values of those rows."""

    def __init__(self, memory: npt.NDArray[np.uint8], dtype: npt.DTypeLike, width: int, starts: list[int]):
        flat = memory[: memory.size // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(dtype)
        item = flat.itemsize
        self.width = width
        self.starts = np.asarray(starts, np.int64) // item
        # Every element of the file starts a "row" of `width` elements. Overlapping, but a part's rows are
        # picked `width` apart, and so one index array reaches every part, the shorter last one too.
        shape = (max(flat.size - width + 1, 0), width)
        self.values = flat if width == 1 else np.lib.stride_tricks.as_strided(flat, shape, (item, item))

    def at(self, parts: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where these rows stand in `values`."""
        return self.starts[parts] + (slots if self.width == 1 else slots * self.width)

    def part(self, part: int, num_rows: int) -> npt.NDArray[Any]:
        """All rows of one part, as a view."""
        start = self.starts[part]
        return self.values[start : start + num_rows * self.width : self.width]


class PartFile:
    """A part file, mapped. Pages come in as rows are touched; nothing else of it is resident."""

    def __init__(self, path: Path, writable: bool):
        self.path = path
        with path.open("r+b" if writable else "rb") as file:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, access=access)
        self._buffer = pa.py_buffer(self._map)
        try:
            self._reader = pa.ipc.open_file(self._buffer)
            self._batches = [self._reader.get_batch(k) for k in range(self._reader.num_record_batches)]
        except (pa.ArrowInvalid, OSError) as error:
            raise TableDamagedError(
                f"{path}: not a whole Arrow file ({error}); restore the table from its last manifest"
            ) from error
        self.header = Header.decode(path, self._reader.schema.metadata)
        self._place = {part: place for place, part in enumerate(self.header.parts)}

    def column(self, name: str, dtype: npt.DTypeLike, width: int = 1) -> Column:
        """One column as a strided array over the file."""
        starts = [-1] * self.header.layout.num_parts
        for part, place in self._place.items():
            starts[part] = self._batches[place].column(name).buffers()[-1].address - self._buffer.address
        return Column(np.frombuffer(self._map, np.uint8), dtype, width, starts)

    def batch(self, part: int) -> pa.RecordBatch:
        """One part as it stands in the map now, without a copy."""
        return self._batches[self._place[part]]

    def forget_pages(self) -> None:
        """Let go of resident pages after a pass over the whole file; what was written stays in the file."""
        self._map.madvise(mmap.MADV_DONTNEED)
