"""Catalogue files: how its Parquet files are written, whole and under names nobody had before.

Row groups hold 4,096 rows: one chunk of an epoch plan is one row group, read alone.
"""

import io
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Segment
from pencil_scale.catalogue.schema import CHUNK_ROWS, ROW
from pencil_scale.storage.folder import Folder

SEGMENT_ROWS = 64 * CHUNK_ROWS

# Ids, keys and hashes differ in every row: a dictionary would only cost.
_DICTIONARY = [
    "status",
    "found_status",
    "format",
    "oddity",
    "noisy_class",
    "true_class",
    "shard",
    "kind",
    "detail",
]


def parquet_bytes(table: pa.Table) -> bytes:
    """Spell a table as a Parquet file."""
    sink = io.BytesIO()
    names = [name for name in _DICTIONARY if name in table.schema.names]
    pq.write_table(table, sink, row_group_size=CHUNK_ROWS, compression="zstd", use_dictionary=names)
    return sink.getvalue()


def put_table(store: Folder, folder: str, table: pa.Table) -> str:
    """Write a table under a name of its own and give the name."""
    name = f"{folder}/{uuid.uuid4().hex}.parquet"
    store.put(name, parquet_bytes(table))
    return name


class TableWriter:
    """Takes tables in order and writes them as files of at most `SEGMENT_ROWS` rows each."""

    def __init__(self, store: Folder, folder: str) -> None:
        self.names: list[str] = []
        self._store = store
        self._folder = folder
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0

    def add(self, table: pa.Table) -> None:
        """Append some rows."""
        self._waiting.append(table)
        self._num_waiting += len(table)
        while self._num_waiting >= SEGMENT_ROWS:
            self._write(SEGMENT_ROWS)

    def finish(self) -> list[str]:
        """Write what is left and name all files."""
        if self._num_waiting:
            self._write(self._num_waiting)
        return self.names

    def _write(self, num_rows: int) -> None:
        table = pa.concat_tables(self._waiting).combine_chunks()
        head, rest = table.slice(0, num_rows), table.slice(num_rows)
        self._waiting, self._num_waiting = [rest], len(rest)
        self.names.append(put_table(self._store, self._folder, head))


class RowsWriter(TableWriter):
    """Takes new rows, numbered one after the other, and names the segments that hold them."""

    def __init__(self, store: Folder, first_row: int) -> None:
        super().__init__(store, "segments")
        self.first_row = self.next_row = first_row

    def add(self, table: pa.Table) -> None:
        """Append rows whose `row` continues where the last ones ended."""
        self.next_row += len(table)
        super().add(table)

    def segments(self) -> list[Segment]:
        """Write what is left and name all segments."""
        self.finish()
        starts = range(self.first_row, self.next_row, SEGMENT_ROWS)
        lasts = [min(first + SEGMENT_ROWS, self.next_row) - 1 for first in starts]
        places = zip(self.names, starts, lasts, strict=True)
        return [Segment(name, "rows", first, last, last - first + 1) for name, first, last in places]


class ChangesWriter:
    """Takes newer words on old rows in any order and writes them as segments sorted by row."""

    def __init__(self, store: Folder) -> None:
        self.segments: list[Segment] = []
        self._store = store
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0

    def add(self, table: pa.Table) -> None:
        """Take some changed rows; a row that comes again later is newer."""
        if len(table):
            self._waiting.append(table)
            self._num_waiting += len(table)
        if self._num_waiting >= SEGMENT_ROWS:
            self._write()

    def finish(self) -> list[Segment]:
        """Write what is left and name all segments."""
        if self._num_waiting:
            self._write()
        return self.segments

    def _write(self) -> None:
        table = pa.concat_tables(self._waiting).combine_chunks()
        self._waiting, self._num_waiting = [], 0
        # Of several words on one row in this segment only the last may stay: reading takes any.
        rows = table["row"].to_numpy()
        newest = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
        table = table.take(pa.array(newest))
        first, last = table["row"][0].as_py(), table["row"][-1].as_py()
        name = put_table(self._store, "segments", table)
        self.segments.append(Segment(name, "changes", first, last, len(table)))


def as_rows(records: pa.Table, row: Any, shard: int, status: Any) -> pa.Table:
    """Give records their place in the catalogue."""
    places = {
        "row": pa.array(row, pa.int64()),
        "shard": pa.array(np.full(len(records), shard, np.int32)),
        "status": status,
    }
    columns = [places[name] if name in places else records[name] for name in ROW.names]
    return pa.table(columns, schema=ROW)
