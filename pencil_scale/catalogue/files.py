"""Catalogue files: Parquet tables written once, under names that were never used before.

Row groups have 4,096 rows: a chunk of an epoch plan is one row group and can be read alone.
"""

import io
import uuid

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Segment
from pencil_scale.catalogue.schema import CHUNK_ROWS, ROW
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import filesystem_of

SEGMENT_ROWS = 64 * CHUNK_ROWS

# Ids, keys and hashes differ in every row: a dictionary would only cost space.
_DICTIONARY = {
    "status",
    "found_status",
    "format",
    "oddity",
    "noisy_class",
    "true_class",
    "shard",
    "kind",
    "detail",
}


def parquet_bytes(table: pa.Table) -> bytes:
    """Write a table as the bytes of a Parquet file."""
    sink = io.BytesIO()
    names = [name for name in table.schema.names if name in _DICTIONARY]
    pq.write_table(table, sink, row_group_size=CHUNK_ROWS, compression="zstd", use_dictionary=names)
    return sink.getvalue()


def put_table(store: Folder, folder: str, table: pa.Table) -> str:
    """Write a table under a new name and return the name."""
    name = f"{folder}/{uuid.uuid4().hex}.parquet"
    store.put(name, parquet_bytes(table))
    return name


class TableWriter:
    """Takes tables in order and writes them as files of at most `SEGMENT_ROWS` rows."""

    def __init__(self, store: Folder, folder: str) -> None:
        self.num_rows = 0
        self._store = store
        self._folder = folder
        self._names: list[str] = []
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0

    def add(self, table: pa.Table) -> None:
        """Append some rows."""
        self._waiting.append(table)
        self.num_rows += len(table)
        self._num_waiting += len(table)
        while self._num_waiting >= SEGMENT_ROWS:
            self._write()

    def finish(self) -> list[str]:
        """Write the remaining rows and return the names of all files."""
        if self._num_waiting:
            self._write()
        return self._names

    def _write(self) -> None:
        table = pa.concat_tables(self._waiting).combine_chunks()
        self._names.append(put_table(self._store, self._folder, table.slice(0, SEGMENT_ROWS)))
        rest = table.slice(SEGMENT_ROWS)
        self._waiting, self._num_waiting = [rest], len(rest)


class RowsWriter(TableWriter):
    """Takes new rows, numbered consecutively from `first_row`, and writes them as segments."""

    def __init__(self, store: Folder, first_row: int) -> None:
        super().__init__(store, "segments")
        self.first_row = first_row

    @property
    def next_row(self) -> int:
        return self.first_row + self.num_rows

    def segments(self) -> list[Segment]:
        """Write the remaining rows and return all segments."""
        firsts = range(self.first_row, self.next_row, SEGMENT_ROWS)
        pairs = zip(self.finish(), firsts, strict=True)
        return [Segment(name, first, min(SEGMENT_ROWS, self.next_row - first)) for name, first in pairs]


class ChangedRows:
    """Newer versions of known rows: added in any order, each row once, and read back by range.

    Memory holds one segment of them; the others are kept as sorted files in the staging folder.
    """

    def __init__(self, store: Folder) -> None:
        self._store = store
        self._files: dict[str, tuple[int, int]] = {}  # name -> first and last row
        self._waiting: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        """Take some rows."""
        self._waiting.append(table)
        if sum(map(len, self._waiting)) >= SEGMENT_ROWS:
            table = pa.concat_tables(self._waiting).sort_by("row")
            name = put_table(self._store, "staging", table)
            self._files[name] = (table["row"][0].as_py(), table["row"][-1].as_py())
            self._waiting = []

    def between(self, first: int, stop: int) -> pa.Table:
        """Read the rows from `first` to `stop` - 1, in any order."""
        filesystem, root = filesystem_of(self._store.url)
        wanted = (pc.field("row") >= first) & (pc.field("row") < stop)
        names = [name for name, (low, high) in self._files.items() if low < stop and high >= first]
        found = [pq.read_table(f"{root}/{name}", filesystem=filesystem, filters=wanted) for name in names]
        found += [table.filter(wanted) for table in self._waiting]
        return pa.concat_tables([ROW.empty_table(), *found])
