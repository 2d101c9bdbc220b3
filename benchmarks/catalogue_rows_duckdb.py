"""The same work in DuckDB: finding duplicates and measuring a catalogue, for benchmarks/catalogue_rows.py.

Inside `in_duckdb`, publishing uses DuckDB for both. The answers are the same.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import duckdb
import numpy as np
import pyarrow as pa

from pencil_scale.catalogue import manifest, update
from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import ALIAS, MOVED, Decisions, Keys, Rows, equal_content
from pencil_scale.catalogue.schema import CHUNK_ROWS

# DuckDB stores a 16-byte Arrow binary as a string with a pointer; a UUID is one 128-bit number.
NEW_KEYS = pa.schema([("key", pa.uuid()), ("number", pa.int64())])
KNOWN_KEYS = pa.schema([("key", pa.uuid()), ("row", pa.int64()), ("valid", pa.bool_())])


@contextmanager
def in_duckdb(spill: str, memory: str) -> Iterator[None]:
    """Replace our code by DuckDB's, with two threads, a memory limit and a folder to spill to."""
    config: dict[str, str | int | float | list[str]] = {"memory_limit": memory, "temp_directory": spill}
    config |= {"threads": 2, "autoinstall_known_extensions": False}
    with duckdb.connect(config=config) as database:
        database.execute("SET enable_progress_bar = false")
        with (
            mock.patch.object(update, "decide", partial(decide, database)),
            mock.patch.object(manifest, "Measured", partial(Measured, database)),
            mock.patch.object(manifest, "find_equal_content", partial(find_equal_content, database)),
        ):
            yield


def decide(
    database: duckdb.DuckDBPyConnection, num_new: int, new_keys: Any, known: Any, first_row: int
) -> Decisions:
    """Do what `duplicates.decide` does; reads new and known keys once."""
    new = (pa.record_batch([uuids(keys), numbers], schema=NEW_KEYS) for keys, numbers in new_keys())
    database.register("new_keys", pa.RecordBatchReader.from_batches(NEW_KEYS, new))
    database.execute("CREATE OR REPLACE TEMP TABLE new AS FROM new_keys")
    old = (pa.record_batch([uuids(one.keys), one.rows, one.valid], schema=KNOWN_KEYS) for one in known())
    database.register("known_keys", pa.RecordBatchReader.from_batches(KNOWN_KEYS, old))
    database.execute("""
        CREATE OR REPLACE TEMP TABLE touched AS
        FROM (SELECT *, key IN (SELECT key FROM new) AS found FROM known_keys) WHERE found OR NOT valid
    """)
    others = database.execute(f"""
        SELECT number, coalesce(row, -1 - head) AS target,
               CASE WHEN number = head AND NOT valid THEN {MOVED} ELSE {ALIAS} END AS kind
        FROM (SELECT key, number, min(number) OVER (PARTITION BY key) AS head FROM new)
        LEFT JOIN (FROM touched WHERE found) USING (key)
        WHERE number != head OR row IS NOT NULL ORDER BY number
    """).fetchnumpy()
    orphans = database.execute("SELECT row FROM touched WHERE NOT found ORDER BY row").fetchnumpy()["row"]
    kind = np.zeros(num_new, np.uint8)
    numbers, targets = others["number"], others["target"]
    kind[numbers] = others["kind"]
    inside = targets < 0
    heads = -1 - targets[inside]
    targets[inside] = first_row + heads - np.searchsorted(numbers, heads)
    return Decisions(kind, numbers, targets, orphans)


def uuids(keys: Keys) -> pa.Array:
    """View 16-byte hashes as UUIDs."""
    buffers = [None, pa.py_buffer(keys.tobytes())]
    stored = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(keys), buffers)
    return pa.ExtensionArray.from_storage(pa.uuid(), stored)


class Measured(manifest.Measured):
    """The figures of a catalogue, from its rows grouped by chunk, status and class."""

    def __init__(self, database: duckdb.DuckDBPyConnection, catalogue: Catalogue) -> None:
        self._catalogue, self._database = catalogue, database
        rows = [f"{catalogue.folder}/{segment.file}" for segment in catalogue.segments]
        aliases = [f"{catalogue.folder}/{name}" for name in catalogue.manifest["alias_tables"]]
        database.execute(f"CREATE OR REPLACE TEMP VIEW rows AS FROM read_parquet({rows})")
        database.execute(f"CREATE OR REPLACE TEMP VIEW aliases AS FROM read_parquet({aliases})")
        database.execute(f"""
            CREATE OR REPLACE TEMP TABLE cells AS
            SELECT row // {CHUNK_ROWS} AS chunk, status, noisy_class AS class, count(*) AS num,
                   sum(image_bytes) AS bytes, count(true_class) AS num_true,
                   count_if(true_class != noisy_class) AS num_wrong
            FROM rows GROUP BY ALL
        """)
        statuses = "SELECT status, sum(num) FROM cells GROUP BY status"
        self._statuses = Counter(dict(database.execute(statuses).fetchall()))
        database.execute("DELETE FROM cells WHERE status != 'ok'")
        num_classes, num_chunks = catalogue.num_classes, -(-catalogue.num_rows // CHUNK_ROWS)
        mix = self._sums(f"chunk * {num_classes} + class", num_chunks * num_classes).reshape(-1, num_classes)
        num_ok = mix.sum(axis=1)
        self.num_ok, self.class_counts = num_ok.tolist(), mix.sum(axis=0)
        self._squares = float(np.sum((mix**2).sum(axis=1) / np.maximum(num_ok, 1)))
        self.ok_bytes = self._sums("chunk", num_chunks, "bytes").tolist()
        counts = "SELECT sum(num_true), sum(num_wrong) FROM cells"
        ((self._num_true, self._num_wrong),) = database.execute(counts).fetchall()
        examples = f"""
            SELECT status, min(row, {manifest.EXAMPLES}) FROM rows GROUP BY status
        """
        self._examples = dict(database.execute(examples).fetchall())
        ((self._num_other_content,),) = database.execute("""
            SELECT count(*) FROM aliases a JOIN rows r USING (row) WHERE a.content_key != r.content_key
        """).fetchall()

    def _sums(self, place: str, length: int, what: str = "num") -> Rows:
        query = f"SELECT {place} AS place, sum({what})::BIGINT AS total FROM cells GROUP BY place"
        found = self._database.execute(query).fetchnumpy()
        sums = np.zeros(length, np.int64)
        sums[found["place"]] = found["total"]
        return sums


def find_equal_content(database: duckdb.DuckDBPyConnection, *_: object) -> dict[str, float]:
    """Count images that occur more than once in what was just measured: first by a 64-bit hash, then exactly.

    Grouping the 16-byte hashes of 30 million rows directly fails with 2 GB, although it may spill.
    """
    database.execute("""
        CREATE OR REPLACE TEMP VIEW contents AS
        SELECT content_key, noisy_class FROM rows WHERE status = 'ok'
        UNION ALL SELECT content_key, noisy_class FROM aliases WHERE status = 'ok'
    """)
    database.execute("""
        CREATE OR REPLACE TEMP TABLE repeated AS
        SELECT hash(content_key) AS short FROM contents GROUP BY short HAVING count(*) > 1
    """)
    (found,) = database.execute("""
        SELECT (SELECT count(*) FROM contents), count(*), sum(num), count_if(num != most), sum(num - most)
        FROM (SELECT sum(num) AS num, max(num) AS most
              FROM (SELECT content_key, noisy_class, count(*) AS num FROM contents
                    WHERE hash(content_key) IN (SELECT short FROM repeated) GROUP BY ALL)
              GROUP BY content_key HAVING sum(num) > 1)
    """).fetchall()
    return equal_content(*found)
