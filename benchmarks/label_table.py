"""What a label costs: the table beside plain NumPy (the limit), SQLite and LMDB, and as it grows.

    python benchmarks/label_table.py                          # a minute or two
    python benchmarks/label_table.py --scale 1000000 10000000 100000000 --megabytes 512 --seconds 1

A batch is read and written back, as a training step does. NumPy does it with take and put on one array of the
same size, and nothing else: no ledger, no checks, no file. The stores keep the ledger too, and write a row
only if it does not bear the epoch; they commit once a batch, without fsync, in their fastest settings.
Large tables are sparse files, so they need little disk; NumPy then works on a mapped array of the same size.
"""

import argparse
import io
import multiprocessing
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np

from pencil_scale.label_table import LabelTable
from pencil_scale.labels.part_files import (
    LEDGER_SCHEMA,
    Header,
    choose_layout,
    fixed_batch,
    labels_schema,
    write_part_file,
)
from pencil_scale.labels.working_copy import LABELS_FILE, LEDGER_FILE

ReadAndWrite = Callable[[np.ndarray, np.ndarray], None]
SMALLEST_HOLE = 4096


def main() -> None:
    """Print both tables."""
    options = parse()
    print(f"rows/s of read + write, a table of at most {options.megabytes} MB of logits")
    print(f"{'C':>5} {'batch':>6} {'rows':>10} {'ours':>11} {'numpy':>11} {'sqlite':>9} {'lmdb':>9}", end="")
    print(f" {'ours/numpy':>11} {'ours/store':>11}")
    for num_classes in options.classes:
        compare(num_classes, options)
    print(f"\ntime a batch of {options.batch} as the table grows, C = 14, {options.touched:,} rows touched")
    print(f"{'rows':>12} {'parts':>6} {'file GB':>8} {'open s':>8} {'first ms':>9} {'again ms':>9}", end="")
    print(f" {'resident MB':>12} {'numpy ms':>9} {'ours/numpy':>11}")
    for num_rows in options.scale:
        # A process of its own, so that resident memory is that of this table alone.
        process = multiprocessing.get_context("spawn").Process(target=grow, args=(num_rows, options))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{num_rows:,} rows: the measuring process ended with {process.exitcode}")


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="*", default=[14, 100, 400, 1000])
    parser.add_argument("--batches", type=int, nargs="*", default=[32, 256, 1024])
    parser.add_argument("--megabytes", type=int, default=128, help="logits of the compared tables, at most")
    parser.add_argument("--seconds", type=float, default=0.5, help="to measure each number")
    parser.add_argument(
        "--scale", type=int, nargs="*", default=[10**6, 10**7, 10**8], help="rows as it grows"
    )
    parser.add_argument("--batch", type=int, default=256, help="as it grows")
    parser.add_argument("--touched", type=int, default=51_200, help="rows read and written as it grows")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to put the files; default: a new one"
    )
    return parser.parse_args()


def compare(num_classes: int, options: argparse.Namespace) -> None:
    """Print one line a batch size for one class count."""
    num_rows = min(10**6, options.megabytes * 2**20 // (4 * num_classes))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ways = {
            "ours": ours(Path(folder) / "ours", num_rows, num_classes),
            "numpy": plain(num_rows, num_classes),
            "sqlite": in_sqlite(Path(folder) / "labels.sqlite", num_rows, num_classes),
            "lmdb": in_lmdb(Path(folder) / "lmdb", num_rows, num_classes),
        }
        settle(Path(folder), [ways["ours"], ways["numpy"]], num_rows, num_classes)
        for batch in options.batches:
            speed = {
                name: rows_per_s(way, num_rows, num_classes, batch, options.seconds)
                for name, way in ways.items()
            }
            print(
                f"{num_classes:5} {batch:6} {num_rows:10,} {speed['ours']:11,.0f} {speed['numpy']:11,.0f}",
                end="",
            )
            print(
                f" {speed['sqlite']:9,.0f} {speed['lmdb']:9,.0f} {speed['ours'] / speed['numpy']:11.2f}",
                end="",
            )
            print(f" {speed['ours'] / max(speed['sqlite'], speed['lmdb']):11.1f}", flush=True)


def settle(folder: Path, ways: list[ReadAndWrite], num_rows: int, num_classes: int) -> None:
    """Let the disk have what was made, then visit every row once: not the first epoch is measured."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    order = np.random.default_rng(1).permutation(num_rows)
    logits = np.ones((1024, num_classes), np.float32)
    for way in ways:
        for start in range(0, num_rows - 1023, 1024):
            way(order[start : start + 1024], logits)


def rows_per_s(way: ReadAndWrite, num_rows: int, num_classes: int, batch: int, seconds: float) -> float:
    """Median speed over batches of distinct random rows."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(batch, num_classes)).astype(np.float32)
    batches = rng.permutation(num_rows)[: num_rows // batch * batch].reshape(-1, batch)
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        rows = batches[len(times) % len(batches)]
        started = time.perf_counter()
        way(rows, logits)
        times.append(time.perf_counter() - started)
    return batch / float(np.median(times))


def ours(folder: Path, num_rows: int, num_classes: int) -> ReadAndWrite:
    """The label table."""
    table = LabelTable.create(folder, np.arange(num_rows) % num_classes, num_classes)
    epochs = iter(range(10**9))

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        table.read(rows)
        table.write(rows, logits, epoch=next(epochs))

    return way


def plain(num_rows: int, num_classes: int) -> ReadAndWrite:
    """One array in memory: the limit."""
    array = np.ones((num_rows, num_classes), np.float32)

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        array.take(rows, axis=0)
        array[rows] = logits

    return way


def in_sqlite(path: Path, num_rows: int, num_classes: int) -> ReadAndWrite:
    """A table of blobs by row number."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("pragma journal_mode = off")
    database.execute("pragma synchronous = off")
    database.execute("create table labels (row integer primary key, last_epoch integer, logits blob)")
    blob = np.ones(num_classes, np.float32).tobytes()
    database.execute("begin")
    database.executemany("insert into labels values (?, -1, ?)", ((row, blob) for row in range(num_rows)))
    database.execute("commit")
    epochs = iter(range(10**9))

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        keys, epoch = rows.tolist(), next(epochs)
        select = "select logits from labels where row = ?"
        found = [database.execute(select, (key,)).fetchone()[0] for key in keys]
        np.frombuffer(b"".join(found), np.float32)
        database.execute("begin")
        changes = ((row.tobytes(), epoch, key, epoch) for row, key in zip(logits, keys, strict=True))
        update = "update labels set logits = ?, last_epoch = ? where row = ? and last_epoch < ?"
        assert database.executemany(update, changes).rowcount == len(keys)
        database.execute("commit")

    return way


def in_lmdb(path: Path, num_rows: int, num_classes: int) -> ReadAndWrite:
    """A memory-mapped tree by row number: the last epoch, then the logits."""
    store = lmdb.open(str(path), map_size=2**34, sync=False, metasync=False, writemap=True, map_async=True)
    epochs = iter(range(1, 10**9))
    value = bytes(4) + np.ones(num_classes, np.float32).tobytes()
    with store.begin(write=True) as change:
        for row in range(num_rows):
            change.put(row.to_bytes(8, "big"), value, append=True)

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        keys, epoch = [row.to_bytes(8, "big") for row in rows.tolist()], next(epochs).to_bytes(4, "big")
        with store.begin() as view:
            np.frombuffer(b"".join(view.get(key) for key in keys), np.float32)
        with store.begin(write=True) as change:
            for key, row in zip(keys, logits, strict=True):
                assert change.get(key)[:4] < epoch
                change.put(key, epoch + row.tobytes())

    return way


class SparseSink(io.RawIOBase):
    """A file that skips zeros instead of writing them."""

    def __init__(self, path: Path):
        self._file = path.open("wb")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: object) -> int:
        block = memoryview(data).cast("B")  # type: ignore[arg-type]
        if len(block) >= SMALLEST_HOLE and not np.frombuffer(block, np.uint8).any():
            self._file.seek(len(block), io.SEEK_CUR)
        else:
            self._file.write(block)
        return len(block)

    def close(self) -> None:
        self._file.close()
        super().close()


def make_sparse(folder: Path, num_rows: int, num_classes: int) -> None:
    """A table whose values are all zeros, and take no disk."""
    layout = choose_layout(num_rows, num_classes)
    header = Header(layout, tuple(range(layout.num_parts)), first_epoch=1, scale=10.0)
    sizes = [len(layout.rows_of(part)) for part in header.parts]
    shapes = [((), np.int64), ((16,), np.uint8), ((), np.int32), ((), np.uint8), ((num_classes,), np.float32)]

    def batches(schema: object, kinds: list) -> Iterator[object]:
        for size in sizes:
            yield fixed_batch(schema, [np.zeros((size, *shape), kind) for shape, kind in kinds])

    schema = labels_schema(num_classes)
    for name, columns, kinds in (
        (LEDGER_FILE, LEDGER_SCHEMA, [((), np.int32)]),
        (LABELS_FILE, schema, shapes),
    ):
        with SparseSink(folder / name) as sink:
            write_part_file(sink, columns, header, batches(columns, kinds))


def grow(num_rows: int, options: argparse.Namespace) -> None:
    """Print one line: opening, first and later touches, and memory, for a table of this size."""
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        make_sparse(folder, num_rows, num_classes=14)
        before = resident_mb()
        started = time.perf_counter()
        table = LabelTable.open(folder, writable_parts="all", num_classes=14)
        opened = time.perf_counter() - started
        rows = np.random.default_rng(0).choice(num_rows, options.touched, replace=False)
        epochs = iter(range(10**9))

        def way(rows: np.ndarray, logits: np.ndarray) -> None:
            table.read(rows)
            table.write(rows, logits, epoch=next(epochs))

        first, again = touch(way, rows, options.batch)
        resident = resident_mb() - before
        _, limit = touch(mapped(folder / "plain", num_rows), rows, options.batch)
        size = (folder / LABELS_FILE).stat().st_size / 2**30
        print(
            f"{num_rows:12,} {table.layout.num_parts:6} {size:8.2f} {opened:8.3f} {1e3 * first:9.3f}", end=""
        )
        print(f" {1e3 * again:9.3f} {resident:12.1f} {1e3 * limit:9.3f} {limit / again:11.2f}", flush=True)
    finally:
        shutil.rmtree(folder)


def mapped(path: Path, num_rows: int) -> ReadAndWrite:
    """One array in a sparse file, mapped: the limit where memory ends."""
    array = np.memmap(path, np.float32, "w+", shape=(num_rows, 14)).view(np.ndarray)

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        array.take(rows, axis=0)
        array[rows] = logits

    return way


def touch(way: ReadAndWrite, rows: np.ndarray, batch: int) -> tuple[float, float]:
    """The median time of a batch: when its rows were touched first, and in the best of 5 later passes."""
    logits = np.ones((batch, 14), np.float32)
    passes = []
    for _ in range(6):
        times = []
        for piece in rows[: len(rows) // batch * batch].reshape(-1, batch):
            started = time.perf_counter()
            way(piece, logits)
            times.append(time.perf_counter() - started)
        passes.append(float(np.median(times)))
    return passes[0], min(passes[1:])


def resident_mb() -> float:
    """The memory of this process that is in use now."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


if __name__ == "__main__":
    main()
