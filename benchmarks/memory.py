"""Measure the memory of a training process as the catalogue grows: only its labels should take more.

    python benchmarks/memory.py                               # 10,000 to 1,000,000 rows, takes minutes
    python benchmarks/memory.py --rows 10000 10000000         # larger

One shard holds a few thousand real images of 8 x 8 pixels. A large catalogue points at them again and
again, and the real command trains on it until a checkpoint in the first epoch. Then the memory of every
training process is read: `private` is its own memory, `mapped` are pages of files (libraries, and the rows
of the label table that were touched), and `peak` is the largest sum of both. Ratios are to the first size.
Windows are 1 MB, which every size fills; with the default of 64 MB a small catalogue would be read in
smaller windows than a large one, and a rank holds up to three blocks of them. Other Ray processes do the
reading; their largest peak is printed too.
"""

import argparse
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image
from processes import family

from pencil_scale.catalogue.catalogue import Catalogue, publish
from pencil_scale.catalogue.schema import CHUNK_ROWS, ROW, put_table
from pencil_scale.catalogue.update import SEGMENT_ROWS, TableWriter
from pencil_scale.config.loader import load_config
from pencil_scale.storage.errors import sample_key
from pencil_scale.storage.folder import Folder
from pencil_scale.train.checkpoints import SNAPSHOT
from pipelines import index_shards

ROOT = Path(__file__).parent.parent
NUM_IMAGES = CHUNK_ROWS  # so that a chunk is read as usual: one stretch of one shard
NUM_CLASSES = 4
MOST_GROWTH = 1.1  # limit on the growth of private memory, from the first size to the last
PATIENCE_S = 600  # per size; the machine may be busy
CONFIG = """
run: {{name: memory, storage: {folder}/lake-{rows}, seed: 1}}
data: {{shards: "{folder}/tiny.tar", classes: {folder}/classes.txt, window_mb: {window_mb}}}
images: {{crop: 8, pad: 1}}
model: {{backbone: small_convnet}}
optimizer: {{tuned_batch: 32, batch_per_worker: 32}}
stages:
  backbone: {{epochs: 0, rate: 0.02}}
  pencil: {{epochs: 5, rate: 0.02, alpha: 0.1, beta: 0.4, lambda: 400, tuned_classes: 4,
           allow_fast_labels: true}}
  finetune: {{epochs: 0, rate: 0.02}}
workers: {{count: {workers}, cpus: 0.5, timeout_s: 120, scratch: {folder}/scratch, max_failures: 0}}
checkpoint: {{every_steps: {steps}, keep: 1}}
evidence: {{watched: 0, planted: 0}}
"""


@dataclass(frozen=True)
class Memory:
    """The memory of a process, in MB."""

    private: float
    mapped: float
    peak: float

    @classmethod
    def of(cls, pid: int) -> "Memory":
        """Read it from /proc."""
        words = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found = {
            line[0]: int(line[1]) / 1024 for line in words if line[0] in ("RssAnon:", "RssFile:", "VmHWM:")
        }
        return cls(found["RssAnon:"], found["RssFile:"], found["VmHWM:"])


def main() -> None:
    """Print one line per size and rank; fail if memory grows with the catalogue."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="training steps before memory is read")
    parser.add_argument(
        "--window-mb", type=int, default=1, help="data.window_mb: encoded images read at once"
    )
    options = parser.parse_args()
    print(
        f"{'rows':>10} {'rank':>5} {'private MB':>11} {'mapped MB':>10} {'peak MB':>8} {'ratio':>6}", end=""
    )
    print(f" {'peak ratio':>11} {'other processes MB':>19}")
    with tempfile.TemporaryDirectory(prefix="pencil-memory-", ignore_cleanup_errors=True) as folder:
        few, limit = make_shard(Path(folder)), list[Memory]()
        for num_rows in options.rows:
            found, other = measure(Path(folder), few, num_rows, options)
            limit = limit or found
            print_sizes(num_rows, found, limit, other)
    growth = max(now.private / then.private for now, then in zip(found, limit, strict=True))
    if growth > MOST_GROWTH:
        raise SystemExit(f"private memory grew by a factor of {growth:.2f}; the limit is {MOST_GROWTH}")


def print_sizes(num_rows: int, found: list[Memory], limit: list[Memory], other: Memory) -> None:
    """Print the memory of the processes of one size."""
    for rank, (now, then) in enumerate(zip(found, limit, strict=True)):
        print(f"{num_rows:10,} {rank:5} {now.private:11.1f} {now.mapped:10.1f} {now.peak:8.1f}", end="")
        print(
            f" {now.private / then.private:6.2f} {now.peak / then.peak:11.2f} {other.peak:19.1f}", flush=True
        )


# --- data ----------------------------------------------------------------------------------------------


def make_shard(folder: Path) -> Catalogue:
    """Write the images, and index just them with the real job."""
    random = np.random.default_rng(0)
    with tarfile.open(folder / "tiny.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(NUM_IMAGES):
            png = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).save(png, "PNG")
            for suffix, data in (("png", png.getvalue()), ("cls", b"%d" % (number % NUM_CLASSES))):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    (folder / "classes.txt").write_text("".join(f"class {number}\n" for number in range(NUM_CLASSES)))
    config = folder / "few.yaml"
    config.write_text(CONFIG.format(folder=folder, rows="few", workers=1, steps=1, window_mb=1))
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # in memory it needs no cluster
        return index_shards.run(load_config(config, ["run.storage=memory://few"])).catalogue


def make_catalogue(few: Catalogue, storage: Path, num_rows: int) -> None:
    """Publish a large catalogue over the few images; every row has its own id."""
    store = Folder(f"{storage}/catalogue")
    writer = TableWriter(store, "segments")
    for first in range(0, num_rows, SEGMENT_ROWS):
        writer.add(repeated_rows(few, first, min(first + SEGMENT_ROWS, num_rows)))
    num_ok = np.diff([*range(0, num_rows, CHUNK_ROWS), num_rows]).astype(np.int32)
    mean_bytes = few.chunks().ok_bytes.sum() / NUM_IMAGES
    chunks = pa.table({"num_ok": num_ok, "ok_bytes": pa.array((num_ok * mean_bytes).astype(np.int64))})
    manifest = {**few.manifest, "num_rows": num_rows, "num_ok": num_rows, "status": {"ok": num_rows}}
    manifest |= {"segments": [asdict(segment) for segment in writer.finish()]}
    publish(store, manifest | {"chunks": put_table(store, "chunks", chunks)}, 0)


def repeated_rows(few: Catalogue, first: int, stop: int) -> pa.Table:
    """Make rows [first, stop), each pointing at image number row % NUM_IMAGES."""
    rows = np.arange(first, stop)
    table = few.read(0, NUM_IMAGES).take(pa.array(rows % NUM_IMAGES))
    ids = [f"{row:09d}" for row in rows]
    fresh = {"row": rows, "sample_id": ids, "key": ids, "sample_key": [sample_key(one) for one in ids]}
    columns = [fresh.get(name, table[name] if name in table.schema.names else None) for name in ROW.names]
    return pa.table([pa.array(c) if isinstance(c, list) else c for c in columns], schema=ROW)


# --- the run -------------------------------------------------------------------------------------------


def measure(
    folder: Path, few: Catalogue, num_rows: int, options: argparse.Namespace
) -> tuple[list[Memory], Memory]:
    """Train to the checkpoint; read the memory of all training processes and of Ray's largest other one."""
    config, storage = folder / f"{num_rows}.yaml", folder / f"lake-{num_rows}"
    words = {"workers": options.workers, "steps": options.steps, "window_mb": options.window_mb}
    config.write_text(CONFIG.format(folder=folder, rows=num_rows, **words))
    make_catalogue(few, storage, num_rows)
    checkpoints, wanted = storage / "checkpoints" / "memory", f"checkpoint-{options.steps:09d}"
    with started(config, folder / f"{num_rows}.log") as process:
        until = time.monotonic() + PATIENCE_S
        while not any(wanted in path.read_text() for path in checkpoints.glob(f"*/{SNAPSHOT}")):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{num_rows:,} rows: {(folder / f'{num_rows}.log').read_text()[-2000:]}")
            time.sleep(0.1)
        running = family(process.pid).items()
        found = [Memory.of(pid) for pid, words in running if "RayTrainWorker" in words]
        others = [Memory.of(pid) for pid, words in running if "ray::" in words and "TrainWorker" not in words]
    return found, max(others, key=lambda memory: memory.peak)


@contextmanager
def started(config: Path, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the command as a user would; kill all its processes at the end."""
    command = [sys.executable, "-m", "pencil_scale.train", str(config)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        for pid in family(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
