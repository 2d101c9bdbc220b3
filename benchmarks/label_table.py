"""Measure the label table against plain NumPy (the limit), SQLite and LMDB, and as it grows.

    python benchmarks/label_table.py                          # a minute or two
    python benchmarks/label_table.py --scale 1000000 10000000 100000000 --megabytes 512 --seconds 1

A batch is read and written back, as in a training step. NumPy does this with take and put on one array of
the same size, without ledger, checks or file. SQLite and LMDB keep a ledger too and write a row only if it
does not have the epoch yet; they commit once per batch, without fsync, in their fastest settings. Large
tables are sparse files, so they need little disk; NumPy then works on a mapped array of the same size. All
sizes stay open and take turns, batch by batch, so that other work on the machine affects them equally. In a
larger table a step touches pages further apart, which slows NumPy down too; its slowdown is printed next to
ours.
"""

import argparse
import multiprocessing
import os
import sqlite3
import tempfile
import time
from pathlib import Path

import lmdb
import numpy as np
from growing_tables import ReadAndWrite, grow

from pencil_scale.labels.columns import prediction_width
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.start_labels import append
from pencil_scale.labels.table import LabelTable


def main() -> None:
    """Print both tables."""
    options = parse()
    print(f"rows/s of read + write, tables with at most {options.megabytes} MB of logits")
    print(f"{'C':>5} {'batch':>6} {'rows':>10} {'ours':>11} {'numpy':>11} {'sqlite':>9} {'lmdb':>9}", end="")
    print(f" {'ours/numpy':>11} {'ours/store':>11}")
    for num_classes in options.classes:
        compare(num_classes, options)
    print(f"\ntime per batch of {options.batch} as the table grows, C = 14, {options.touched:,} rows touched")
    print(
        f"{'rows':>12} {'parts':>6} {'file GB':>8} {'open s':>7} {'resident MB':>12} {'first ms':>9}", end=""
    )
    print(f" {'ours ms':>8} {'numpy ms':>9} {'ours/first':>11} {'numpy/first':>12} {'ours/numpy':>11}")
    # A separate process, so that resident memory is that of these tables only.
    process = multiprocessing.get_context("spawn").Process(target=grow, args=(options,))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the process that measures growing tables ended with code {process.exitcode}")


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, nargs="*", default=[14, 100, 400, 1000])
    parser.add_argument("--batches", type=int, nargs="*", default=[32, 256, 1024])
    parser.add_argument("--megabytes", type=int, default=128, help="most logits per compared table, in MB")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per measurement")
    parser.add_argument(
        "--scale", type=int, nargs="*", default=[10**6, 10**7, 10**8], help="rows of the growing table"
    )
    parser.add_argument("--batch", type=int, default=256, help="batch size for the growing table")
    parser.add_argument("--touched", type=int, default=51_200, help="rows used of the growing table")
    parser.add_argument("--passes", type=int, default=10, help="passes over those rows, after the first")
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder for the files (default: a temporary one)"
    )
    return parser.parse_args()


def compare(num_classes: int, options: argparse.Namespace) -> None:
    """Print one line per batch size for one class count."""
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
    """Flush the files to disk, then visit every row once, so that the first epoch is not measured."""
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
    """Measure the median speed over batches of distinct random rows."""
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
    """Use the label table."""
    empty = Manifest.empty(folder / "store", [str(n) for n in range(num_classes)])
    table = LabelTable.restore(append(empty, np.arange(num_rows) % num_classes), folder)
    epochs = iter(range(10**9))
    predictions = np.zeros((num_rows, prediction_width(num_classes)), np.float32)

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        table.read(rows)
        table.write(rows, logits, predictions[: len(rows)], epoch=next(epochs))

    return way


def plain(num_rows: int, num_classes: int) -> ReadAndWrite:
    """Use one array in memory: the limit."""
    array = np.ones((num_rows, num_classes), np.float32)

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        array.take(rows, axis=0)
        array[rows] = logits

    return way


def in_sqlite(path: Path, num_rows: int, num_classes: int) -> ReadAndWrite:
    """Use an SQLite table of blobs by row number."""
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
    """Use LMDB by row number: the last epoch, then the logits."""
    store = lmdb.open(str(path), map_size=2**34, sync=False, metasync=False, writemap=True, map_async=True)
    epochs = iter(range(1, 10**9))
    value = bytes(4) + np.ones(num_classes, np.float32).tobytes()
    with store.begin(write=True) as change:
        for row in range(num_rows):
            change.put(row.to_bytes(8, "big"), value, append=True)

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        keys, epoch = [row.to_bytes(8, "big") for row in rows.tolist()], next(epochs).to_bytes(4, "big")
        with store.begin() as view:
            np.frombuffer(b"".join(view.get(key, b"") for key in keys), np.float32)
        with store.begin(write=True) as change:
            for key, row in zip(keys, logits, strict=True):
                assert change.get(key, b"")[:4] < epoch
                change.put(key, epoch + row.tobytes())

    return way


if __name__ == "__main__":
    main()
