"""Part files: fixed-width columns in one Arrow file, one record batch per part, addressed by row.

A column is seen as one strided NumPy array over the whole file, in which a row's place is arithmetic:

    part = row >> shift
    item = starts[part] + (row - part * part_rows) * width

Nothing here is compressed, null or variable in length, so values are changed in place through the memory map
and the file stays a valid Arrow file, with exactly as many rows as the table: the last part is a shorter
record batch.
"""

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.storage.errors import DamagedError, PencilError

VERSION = 3
PART_ROWS = 16_384  # 100 million rows make 6,104 parts, of 1.4 MB each with 14 classes
MAX_PART_BYTES = 64 * 2**20  # with more than 1,016 classes a part has fewer rows
NARROW_BYTES = 8 + 16 + 4 + 1  # row, sample_key, noisy_class, pinned
HEADER_KEY = b"pencil_scale"
Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """The shape of a table: which row is in which part is arithmetic on these numbers."""

    num_rows: int
    num_classes: int
    part_rows: int

    @classmethod
    def of(cls, num_rows: int, num_classes: int) -> "Layout":
        """Choose the part size by the class count alone, so a table that grows only gains parts.

        A table of few parts is owned by few ranks. Reading and writing one part costs its owner about 6 ms
        of CPU time per epoch with 14 classes, and 35 ms with 1,000.
        """
        most_rows = MAX_PART_BYTES // (NARROW_BYTES + 4 * num_classes)
        return cls(num_rows, num_classes, min(PART_ROWS, 1 << max(most_rows, 1).bit_length() - 1))

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


@dataclass(frozen=True)
class TableHeader:
    """What a part file says about itself, as JSON in its Arrow schema's metadata."""

    layout: Layout
    parts: tuple[int, ...]  # the parts in this file, in the order of its record batches
    first_epoch: int  # the epoch of the table's life that the present run calls 0
    scale: float  # K: a row starts, and is pinned, at K * one-hot
    class_names: tuple[str, ...]  # the names of the class numbers
    run: str  # id of the run that writes it

    def encode(self) -> dict[bytes, bytes]:
        """As schema metadata."""
        return {HEADER_KEY: json.dumps({"version": VERSION} | asdict(self)).encode()}

    @classmethod
    def decode(cls, path: Path, metadata: dict[bytes, bytes] | None) -> "TableHeader":
        """Read the metadata back, refusing what another program or version wrote."""
        if not metadata or HEADER_KEY not in metadata:
            raise PencilError(f"{path}: an Arrow file, but not a label table of pencil_scale")
        found = json.loads(metadata[HEADER_KEY])
        version = found.pop("version")
        if version != VERSION:
            raise PencilError(
                f"{path}: a label table of version {version}; this program reads version {VERSION}: "
                "restore the table from a manifest, or use the program that wrote it"
            )
        lists = {name: tuple(found[name]) for name in ("parts", "class_names")}
        return cls(**found | lists | {"layout": Layout(**found["layout"])})


def labels_schema(num_classes: int) -> pa.Schema:
    """The columns of the label table."""
    logits = pa.list_(pa.field("item", pa.float32(), nullable=False), num_classes)
    columns = [("row", pa.int64()), ("sample_key", pa.binary(16)), ("noisy_class", pa.int32())]
    columns += [("pinned", pa.uint8()), ("label_logits", logits)]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


LEDGER_SCHEMA = pa.schema([pa.field("last_epoch", pa.int32(), nullable=False)])


def fixed_batch(schema: pa.Schema, columns: Sequence[npt.NDArray[Any]]) -> pa.RecordBatch:
    """Wrap one array per column as a record batch, without a copy."""
    arrays = []
    for values, kind in zip(columns, schema.types, strict=True):
        buffer = pa.py_buffer(np.ascontiguousarray(values))
        if pa.types.is_fixed_size_list(kind):
            items = pa.Array.from_buffers(kind.value_type, values.size, [None, buffer])
            arrays.append(pa.FixedSizeListArray.from_arrays(items, type=kind))
        else:
            arrays.append(pa.Array.from_buffers(kind, len(values), [None, buffer]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def write_part_file(
    sink: Any, schema: pa.Schema, header: TableHeader, batches: Iterable[pa.RecordBatch]
) -> None:
    """Write one record batch per part to an open file; every block is written, so a full disk fails here.

    A hole in the file would fail later, as a SIGBUS in the first process that touches it.
    """
    with pa.ipc.new_file(sink, schema.with_metadata(header.encode())) as writer:
        for batch in batches:
            writer.write_batch(batch)


class RowChecks:
    """Turns what a caller gives into row numbers that are safe to use, or refuses them by name.

    The checks run on every batch, so they are written for speed: on arrays this small `count_nonzero` and
    `argmax` are several times faster than `any`, `all` and `max`.
    """

    def __init__(self, folder: Path, layout: Layout, held: Iterable[int], writable: Iterable[int]):
        self._folder, self._num_rows, self._shift = folder, layout.num_rows, layout.shift
        self.held, self.writable = (np.zeros(layout.num_parts, np.bool_) for _ in range(2))
        self.held[list(held)] = True
        self.writable[list(writable)] = True

    def known(self, rows: npt.ArrayLike, outcome: str = "") -> tuple[Int64s, Int64s]:
        """These rows as an array, and the part of each, which may be held elsewhere."""
        found = np.asarray(rows)
        if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
            raise PencilError(f"rows of type {found.dtype}, shape {found.shape}; give a list of row numbers")
        given, found = found, found.astype(np.int64, copy=False)
        unsigned = found.view(np.uint64)  # a negative row is a huge one
        if found.size and unsigned.item(unsigned.argmax()) >= self._num_rows:
            outside = given[unsigned >= self._num_rows]
            self.refuse(outside, f"outside the table's {self._num_rows:,} rows{outcome}")
        return found, found >> self._shift

    def to_read(self, rows: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """The same, for rows whose parts are in this working copy."""
        found, parts = self.known(rows)
        held = self.held[parts]
        if np.count_nonzero(held) < len(found):
            self.refuse(found[~held], "in a part that is not in this working copy")
        return found, parts

    def to_write(self, rows: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """The same, for distinct rows whose parts are open for writing."""
        found, parts = self.known(rows, "; nothing was written")
        writable = self.writable[parts]
        if np.count_nonzero(writable) < len(found):
            self.refuse_write(found[~writable], "in a part that was not opened for writing")
        ordered = np.sort(found)
        repeated = ordered[1:] == ordered[:-1]
        if np.count_nonzero(repeated):
            self.refuse_write(ordered[1:][repeated], "given twice in one write")
        return found, parts

    def refuse(self, rows: npt.NDArray[Any], why: str) -> NoReturn:
        """Name the first of these rows, as it was given, and the reason."""
        others = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise PencilError(f"{self._folder}: row {rows[0]}{others}: {why}")

    def refuse_write(self, rows: npt.NDArray[Any], why: str) -> NoReturn:
        """The same, saying that the other rows were not written either."""
        self.refuse(rows, f"{why}; nothing was written")


class Column:
    """One column of a mapped part file: every row is one item of a strided array over the whole file."""

    def __init__(
        self, memory: npt.NDArray[np.uint8], dtype: npt.DTypeLike, width: int, starts: Int64s, part_rows: int
    ):
        """`starts` says at which byte the values of each part start."""
        self._dtype, self._width = np.dtype(dtype), width
        # A row of several values is one opaque item: NumPy then copies it with one call, not value by value.
        self._row_type = self._dtype if width == 1 else np.dtype((np.void, self._dtype.itemsize * width))
        step, row_bytes = self._dtype.itemsize, self._row_type.itemsize
        # Every value of the file starts an item. Items overlap, but a part's rows are `width` values apart,
        # and so one index reaches all parts, the shorter last one too.
        num_items = max((memory.size - row_bytes) // step + 1, 0)  # none if the file holds no part
        first_item = memory[: row_bytes * min(num_items, 1)].view(self._row_type)
        self._items = np.lib.stride_tricks.as_strided(first_item, (num_items,), (step,))
        # Where row 0 would be if the whole table were laid out as this part is: start + slot = origin + row.
        self._origins = starts // step - np.arange(len(starts)) * part_rows * width

    def find(self, rows: Int64s, parts: Int64s) -> Int64s:
        """The places of these rows, which are in these parts of the file, among the items."""
        return self._origins[parts] + (rows if self._width == 1 else rows * self._width)

    def get(self, items: Int64s) -> npt.NDArray[Any]:
        """The values of the rows found there: [B], or [B, width]."""
        found = self._items[items]
        return found if self._width == 1 else found.view(self._dtype).reshape(-1, self._width)

    def set(self, items: Int64s, values: npt.NDArray[Any] | int) -> None:
        """Change the rows found there in place: to one row each, or all to one number."""
        if self._width > 1:
            values = np.ascontiguousarray(values, self._dtype).view(self._row_type)[:, 0]
        self._items[items] = values


class PartFile:
    """A part file, mapped. Only the pages of rows that were touched are resident."""

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
                f"{path}: damaged Arrow file ({error}); restore the table from its last manifest"
            ) from error
        self.header = TableHeader.decode(path, self._reader.schema.metadata)
        self._place = {part: place for place, part in enumerate(self.header.parts)}

    def column(self, name: str, dtype: npt.DTypeLike, width: int = 1) -> Column:
        """One column as a strided array over the file."""
        layout, memory = self.header.layout, np.frombuffer(self._map, np.uint8)
        starts = np.zeros(layout.num_parts, np.int64)  # of the parts in this file; no other part is looked up
        for part, place in self._place.items():
            starts[part] = self._batches[place].column(name).buffers()[-1].address - self._buffer.address
        return Column(memory, dtype, width, starts, layout.part_rows)

    def batch(self, part: int) -> pa.RecordBatch:
        """One part as it is in the map now, without a copy; for reading all of it."""
        batch = self._batches[self._place[part]]
        first, last = (column.buffers()[-1] for column in (batch.columns[0], batch.columns[-1]))
        start = (first.address - self._buffer.address) // mmap.PAGESIZE * mmap.PAGESIZE
        end = last.address + last.size - self._buffer.address
        self._map.madvise(mmap.MADV_WILLNEED, start, end - start)
        return batch

    def forget_pages(self) -> None:
        """Release resident pages after a pass over the whole file; what was written stays in the file."""
        self._map.madvise(mmap.MADV_DONTNEED)
