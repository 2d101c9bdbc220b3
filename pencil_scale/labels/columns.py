"""Columns: what a label part holds, and which rows are in which part.

A part is a record batch of consecutive rows. Nothing in it is compressed, null or variable in length, so the
labels of a row are found by arithmetic and can be changed in place. A part is stored as two files: its labels
and its ledger, the last epoch in which each row was visited and what the network predicted then.

    layout = Layout.of(num_rows=100_000_000, num_classes=14)
    layout.rows_of(3)                                       # range(49152, 65536)
    batch = new_ledger(num_rows=16384, num_classes=14)      # never visited, never predicted
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.method.evidence import TOP

PART_ROWS = 16_384  # 100 million rows make 6,104 parts, of 1.4 MB each with 14 classes
MAX_PART_BYTES = 64 * 2**20  # with more than 1,016 classes a part has fewer rows
NARROW_BYTES = 8 + 16 + 4 + 1  # row, sample_key, noisy_class, role
# The role of a row. A pinned label never moves. A planted error is trained like a free row. A watched row is
# not trained on: the network predicts it.
FREE, PINNED, PLANTED, WATCHED = range(4)
Int64s: TypeAlias = npt.NDArray[np.int64]
KeyBytes: TypeAlias = npt.NDArray[np.uint8]  # [N, 16]
Keys: TypeAlias = pa.Array | pa.ChunkedArray  # of binary(16)


def labels_schema(num_classes: int) -> pa.Schema:
    """The columns of the labels."""
    columns = [("row", pa.int64()), ("sample_key", pa.binary(16)), ("noisy_class", pa.int32())]
    columns += [("role", pa.uint8()), ("label_logits", fixed_list(pa.float32(), num_classes))]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def ledger_schema(num_classes: int) -> pa.Schema:
    """The columns of the ledger: the last visit, and the most likely classes then."""
    number = pa.uint16() if num_classes <= 2**16 else pa.uint32()
    top = min(TOP, num_classes)
    columns = [("last_epoch", pa.int32()), ("predicted_class", fixed_list(number, top))]
    columns += [("predicted_log_p", fixed_list(pa.float16(), top))]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def fixed_list(kind: pa.DataType, size: int) -> pa.DataType:
    """The type of a column with this many values per row, none of them null."""
    return pa.list_(pa.field("item", kind, nullable=False), size)


def prediction_width(num_classes: int) -> int:
    """How many numbers a prediction has: K classes, and their log-probabilities."""
    return 2 * min(TOP, num_classes)


def new_ledger(num_rows: int, num_classes: int) -> pa.RecordBatch:
    """The ledger of rows that were never visited; a prediction that is missing is NaN."""
    schema, shape = ledger_schema(num_classes), (num_rows, min(TOP, num_classes))
    classes = np.zeros(shape, schema.field("predicted_class").type.value_type.to_pandas_dtype())
    missing = np.full(shape, np.nan, np.float16)
    columns = (np.zeros(num_rows, np.int32), classes, missing)
    return to_batch(schema, dict(zip(schema.names, columns, strict=True)))


@dataclass(frozen=True)
class Parts:
    """How the rows of a table are divided: which row is in which part is arithmetic on these numbers."""

    num_rows: int
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


def part_rows(row_bytes: int) -> int:
    """Choose the part size by the width of a row alone, so a table that grows only gains parts."""
    return min(PART_ROWS, 1 << max(MAX_PART_BYTES // row_bytes, 1).bit_length() - 1)


@dataclass(frozen=True)
class Layout(Parts):
    """The shape of a label table."""

    num_classes: int

    @classmethod
    def of(cls, num_rows: int, num_classes: int) -> "Layout":
        """Choose the part size by the class count alone.

        A table of few parts is owned by few ranks. Reading and writing one part costs its owner about 6 ms
        of CPU time per epoch with 14 classes, and 35 ms with 1,000.
        """
        return cls(num_rows, part_rows(NARROW_BYTES + 4 * num_classes), num_classes)


def to_batch(schema: pa.Schema, columns: Mapping[str, npt.NDArray[Any]]) -> pa.RecordBatch:
    """Wrap one array per column as a record batch, without a copy."""
    arrays = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        values = columns[name]
        buffer = pa.py_buffer(np.ascontiguousarray(values))
        if pa.types.is_fixed_size_list(kind):
            items = pa.Array.from_buffers(kind.value_type, values.size, [None, buffer])
            arrays.append(pa.FixedSizeListArray.from_arrays(items, type=kind))
        else:
            arrays.append(pa.Array.from_buffers(kind, len(values), [None, buffer]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def to_columns(batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
    """View each column of a batch as an array, [B] or [B, width]."""
    found = {}
    for name, kind, column in zip(batch.schema.names, batch.schema.types, batch.columns, strict=True):
        if pa.types.is_fixed_size_list(kind):
            found[name] = column.flatten().to_numpy().reshape(len(column), kind.list_size)
        else:
            found[name] = key_bytes(column) if pa.types.is_fixed_size_binary(kind) else column.to_numpy()
    return found


def key_bytes(keys: Keys) -> KeyBytes:
    """View 16-byte keys as uint8 [N, 16]."""
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    if not len(keys):
        return np.zeros((0, 16), np.uint8)
    first, stop = 16 * keys.offset, 16 * (keys.offset + len(keys))
    return np.frombuffer(keys.buffers()[1], np.uint8)[first:stop].reshape(-1, 16)


def scaled_one_hot(classes: npt.NDArray[np.int32], num_classes: int, scale: float) -> npt.NDArray[np.float32]:
    """`scale` at each row's class; all zeros where the class is -1."""
    logits = np.zeros((len(classes), num_classes), np.float32)
    labelled = np.flatnonzero(classes >= 0)
    logits[labelled, classes[labelled]] = scale
    return logits
