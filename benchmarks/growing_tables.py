"""Tables of several sizes, a million rows to a hundred million, opened in one process and measured in turn.

For benchmarks/label_table.py. The tables are sparse files: their values are zeros and need no disk space.
"""

import argparse
import io
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.columns import (
    Layout,
    labels_schema,
    ledger_schema,
    new_ledger,
    prediction_width,
    to_batch,
    to_columns,
)
from pencil_scale.labels.manifest import Manifest, StoredFile, StoredPart
from pencil_scale.labels.table import LABELS_FILE, LabelTable

ReadAndWrite = Callable[[np.ndarray, np.ndarray], None]
SMALLEST_HOLE = 4096
NUM_CLASSES = 14
NAMES = tuple(str(number) for number in range(NUM_CLASSES))


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


def make_sparse(folder: Path, num_rows: int) -> Manifest:
    """Make a table whose values are all zeros, and need no disk space."""
    layout = Layout.of(num_rows, NUM_CLASSES)
    schema = pa.schema([*labels_schema(NUM_CLASSES), *ledger_schema(NUM_CLASSES)])
    with SparseSink(folder / LABELS_FILE) as sink, pa.ipc.new_file(sink, schema) as writer:
        for part in range(layout.num_parts):
            size = len(layout.rows_of(part))
            columns: dict[str, npt.NDArray[Any]] = {"row": np.zeros(size, np.int64)}
            columns |= {"sample_key": np.zeros((size, 16), np.uint8)}
            columns |= {"noisy_class": np.zeros(size, np.int32), "role": np.zeros(size, np.uint8)}
            columns |= {"label_logits": np.zeros((size, NUM_CLASSES), np.float32)}
            ledger = to_columns(new_ledger(0, NUM_CLASSES))
            ledger = {name: np.zeros((size, *of.shape[1:]), of.dtype) for name, of in ledger.items()}
            writer.write_batch(to_batch(schema, columns | ledger))
    nothing = StoredFile("", 0, "")
    parts = {part: StoredPart(nothing, nothing) for part in range(layout.num_parts)}
    return replace(Manifest.empty(folder, NAMES), layout=layout, parts=parts)


@dataclass
class Grown:
    """A table of one size, a NumPy array of the same size, and the time each took for a batch."""

    num_rows: int
    words: str  # the first half of its line, known once it is open
    batches: np.ndarray
    ways: dict[str, ReadAndWrite]
    times: dict[str, list[float]]

    def took(self, name: str) -> float:
        return 1e3 * float(np.median(self.times[name]))


def grow(options: argparse.Namespace) -> None:
    """Print a line for each size: the cost of opening it and of a batch, compared with the smallest table."""
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        grown = [opened(folder / str(num_rows), num_rows, options) for num_rows in options.scale]
        for _ in range(options.passes):
            take_turns(grown, options.batch)
        ways = grown[0].ways
        for one in grown:
            rise = {name: one.took(name) / grown[0].took(name) for name in ways}
            print(
                f"{one.words} {one.took('ours'):8.3f} {one.took('numpy'):9.3f} {rise['ours']:11.2f}", end=""
            )
            print(f" {rise['numpy']:12.2f} {one.took('numpy') / one.took('ours'):11.2f}", flush=True)
    finally:
        shutil.rmtree(folder)


def opened(folder: Path, num_rows: int, options: argparse.Namespace) -> Grown:
    """Make a table, open it, and touch some rows for the first time."""
    folder.mkdir()
    manifest = make_sparse(folder, num_rows)
    before, started = resident_mb(), time.perf_counter()
    table = LabelTable(folder, manifest, tuple(manifest.parts))
    seconds = time.perf_counter() - started
    num_touched = min(options.touched, *options.scale) // options.batch * options.batch
    rows = np.random.default_rng(0).choice(num_rows, num_touched, replace=False)
    epochs = iter(range(10**9))
    predictions = np.zeros((options.batch, prediction_width(NUM_CLASSES)), np.float32)

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        table.read(rows)
        table.write(rows, logits, predictions[: len(rows)], epoch=next(epochs))

    grown = Grown(num_rows, "", rows.reshape(-1, options.batch), {"ours": way}, {"ours": [], "numpy": []})
    take_turns([grown], options.batch)
    size, resident = (folder / LABELS_FILE).stat().st_size / 2**30, resident_mb() - before
    grown.words = f"{num_rows:12,} {table.layout.num_parts:6} {size:8.2f} {seconds:7.3f} {resident:12.1f}"
    grown.words += f" {grown.took('ours'):9.3f}"
    grown.ways["numpy"], grown.times["ours"] = mapped(folder / "plain", num_rows), []
    for batch in grown.batches:
        grown.ways["numpy"](batch, np.ones((options.batch, NUM_CLASSES), np.float32))
    return grown


def take_turns(grown: list[Grown], batch: int) -> None:
    """Pass once over the rows of all sizes, a batch of each in turn."""
    logits = np.ones((batch, NUM_CLASSES), np.float32)
    for number in range(len(grown[0].batches)):
        for one in grown:
            for name, way in one.ways.items():
                started = time.perf_counter()
                way(one.batches[number], logits)
                one.times[name].append(time.perf_counter() - started)


def mapped(path: Path, num_rows: int) -> ReadAndWrite:
    """One array in a sparse file, mapped: the limit for tables larger than memory."""
    array = np.memmap(path, np.float32, "w+", shape=(num_rows, NUM_CLASSES)).view(np.ndarray)

    def way(rows: np.ndarray, logits: np.ndarray) -> None:
        array.take(rows, axis=0)
        array[rows] = logits

    return way


def resident_mb() -> float:
    """Read the resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024
