"""Measure indexing: our tar reader against tarfile, webdataset and Ray, and opening a large catalogue.

    python benchmarks/index.py                                # about two minutes
    python benchmarks/index.py --rows 100000000               # a large catalogue: needs 8 GB of disk, slow

All readers read the same shards (a 10 kB JPEG, a .cls and a .json per sample) from the page cache, on one
core; Ray is warmed up, gets that one core, and decodes nothing. The figures are samples per second of CPU
time, summed over all processes involved, so other work on the machine does not count. The best of three
runs is reported.
"""

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from pencil_scale.catalogue.catalogue import FORMAT, Catalogue, Shard, publish
from pencil_scale.catalogue.class_names import LabelClasses
from pencil_scale.catalogue.schema import CHUNK_ROWS, ROW, put_table
from pencil_scale.catalogue.shard_index import IndexRules, ShardIndexer
from pencil_scale.catalogue.shards import ShardReader
from pencil_scale.catalogue.update import SEGMENT_ROWS, TableWriter
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import open_source
from pencil_scale.stream.plan import EpochOrder, deal, mixed_key
from pencil_scale.stream.window_reader import ok_table

LIMIT_OVER_RAY = 10
LIMIT_GB = 3.0
SHARD_ROWS = 10_000
NUM_CLASSES = 14


def main() -> None:
    """Print both tables; fail if a limit is missed."""
    options = parse()
    folder = Path(tempfile.mkdtemp(prefix="pencil-index-", dir=options.folder))
    try:
        missed = compare_readers(folder, options) + open_large(folder, options)
    finally:
        shutil.rmtree(folder)
    if missed:
        raise SystemExit("limits missed: " + "; ".join(missed))


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", type=int, default=4, help="shards to read (default %(default)s)")
    parser.add_argument("--samples", type=int, default=5000, help="samples per shard (default %(default)s)")
    parser.add_argument("--rows", type=int, default=4_000_000, help="catalogue rows (default %(default)s)")
    parser.add_argument("--folder", help="where to put the data (default: the temporary folder)")
    return parser.parse_args()


# -- reading ------------------------------------------------------------------------------------------


def compare_readers(folder: Path, options: argparse.Namespace) -> list[str]:
    """Time every reader in one process, on one core."""
    paths = make_shards(folder, options.shards, options.samples)
    num_bytes = sum(path.stat().st_size for path in paths)
    total = options.shards * options.samples
    print(f"{total:,} samples in {len(paths)} shards, {num_bytes / 1e6:,.0f} MB; one core")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    speed = {}
    for name, reader in READERS.items():
        speed[name] = total / best_of(3, reader, paths, total)
    ray_speed, plain = speed["ray read_webdataset"], speed["plain sequential read"]
    print(f"{'reader':<38} {'samples/s':>10} {'MB/s':>8} {'over ray':>9} {'of plain read':>14}")
    for name, value in speed.items():
        mb = value * num_bytes / total / 1e6
        print(f"{name:<38} {value:>10,.0f} {mb:>8,.0f} {value / ray_speed:>9.1f} {value / plain:>14.1%}")
    ratio = speed["ours: samples, offsets, damage"] / ray_speed
    print(f"ours over ray: {ratio:.1f} (at least {LIMIT_OVER_RAY})\n")
    return [f"ours is {ratio:.1f} times ray"] if ratio < LIMIT_OVER_RAY else []


def make_shards(folder: Path, num_shards: int, num_samples: int) -> list[Path]:
    """Write tars with Python's tarfile: 50 different JPEGs of about 10 kB."""
    random = np.random.default_rng(0)
    images = [jpeg(random) for _ in range(50)]
    paths = []
    for shard in range(num_shards):
        paths.append(folder / f"shard-{shard:04d}.tar")
        with tarfile.open(paths[-1], "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(num_samples):
                key = f"{shard * num_samples + number:08d}"
                label = b"%d" % (number % NUM_CLASSES)
                fields = json.dumps({"url": f"https://shop.example/{key}.jpg", "label": number}).encode()
                for suffix, data in (("jpg", images[number % 50]), ("cls", label), ("json", fields)):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    return paths


def jpeg(random: np.random.Generator) -> bytes:
    """Make a JPEG of noise, which compresses badly: 132 x 132 pixels take about 10 kB."""
    buffer = io.BytesIO()
    pixels = random.integers(0, 255, (132, 132, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=66)
    return buffer.getvalue()


def best_of(times: int, reader: Callable[[list[Path]], int], paths: list[Path], total: int) -> float:
    """Time a reader, which must find every sample; the first run warms it up."""
    best = float("inf")
    for _ in range(times):
        start, spent, runs = processor_s(), 0.0, 0
        while spent < 0.5:  # the clock ticks every 10 ms
            found = reader(paths)
            spent, runs = processor_s() - start, runs + 1
        best = min(best, spent / runs)
        if found not in (total, -1):
            raise SystemExit(f"{reader.__name__} found {found:,} of {total:,} samples")
    return best


def processor_s() -> float:
    """Add up the CPU time of this process and its descendants, from Linux's /proc."""
    parent, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            fields = path.read_text().rpartition(")")[2].split()
            parent[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    ours, newest = set[int](), {os.getpid()}
    while newest:  # ids wrap around, so a child may have a lower one than its parent
        ours |= newest
        newest = {pid for pid, starter in parent.items() if starter in newest} - ours
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


def read_plainly(paths: list[Path]) -> int:
    """Read all bytes once, in order: the limit. It counts no samples, so it returns -1."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
    return -1


def read_ours(paths: list[Path]) -> int:
    """Read with our reader: keys, members, offsets, damage."""
    found = 0
    for path in paths:
        with open_source(str(path)) as source:
            found += sum(1 for _ in ShardReader(source).read())
    return found


def index_ours(paths: list[Path]) -> int:
    """Do everything the index job does per sample: id, label, image header, content hash, Arrow."""
    names = tuple(f"class {number}" for number in range(NUM_CLASSES))
    rules = IndexRules("key", "cls", LabelClasses(names, {}))
    found = 0
    for path in paths:
        with open_source(str(path)) as source:
            shard = Shard(source.url, source.num_bytes, "", "")
            found += len(ShardIndexer(source, shard, rules).read()[0])
    return found


def read_tarfile(paths: list[Path]) -> int:
    """Read with Python's tarfile: headers only, no content."""
    found = 0
    for path in paths:
        with tarfile.open(path) as archive:
            found += sum(member.name.endswith(".jpg") for member in archive)
    return found


def read_webdataset(paths: list[Path]) -> int:
    """Read with webdataset's iterator, without decoding."""
    import webdataset

    dataset = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False, empty_check=False)
    return sum(1 for _ in dataset)


def read_with_ray(paths: list[Path]) -> int:
    """Read with Ray Data into Arrow, without decoding."""
    import ray

    if not ray.is_initialized():
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # the one core may be busy
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    dataset = ray.data.read_webdataset([str(path) for path in paths], decoder=None)
    return sum(len(batch) for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"))


READERS: dict[str, Callable[[list[Path]], int]] = {
    "plain sequential read": read_plainly,
    "ours: samples, offsets, damage": read_ours,
    "ours: also labels, images, hashes, rows": index_ours,
    "python tarfile (headers only)": read_tarfile,
    "webdataset iterator": read_webdataset,
    "ray read_webdataset": read_with_ray,
}


# -- a large catalogue --------------------------------------------------------------------------------


def open_large(folder: Path, options: argparse.Namespace) -> list[str]:
    """Make a large catalogue, then open it and plan an epoch in a process of its own."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    start = time.perf_counter()
    make_catalogue(str(folder), options.rows)
    size = sum(path.stat().st_size for path in (folder / "catalogue").rglob("*") if path.is_file())
    took = time.perf_counter() - start
    print(f"a catalogue of {options.rows:,} rows, {size / 1e9:.1f} GB, made in {took:.0f} s")
    print(f"{'step':<44} {'seconds':>8} {'peak MB':>8}")
    context = multiprocessing.get_context("spawn")
    missed = []
    for step in (plan_epoch, read_window, load_rows):
        queue = context.Queue()
        process = context.Process(target=measured, args=(step, str(folder), queue))
        process.start()
        seconds, peak = queue.get()
        process.join()
        print(f"{(step.__doc__ or '').rstrip('.'):<44} {seconds:>8.2f} {peak:>8,.0f}")
        if peak > LIMIT_GB * 1000:
            missed.append(f"{step.__name__} took {peak:,.0f} MB")
    print(f"peak memory under {LIMIT_GB * 1000:,.0f} MB: {'no' if missed else 'yes'}")
    return missed


def make_catalogue(storage: str, num_rows: int) -> None:
    """Write segments as the job does, with made-up ids."""
    store = Folder(f"{storage}/catalogue")
    writer = TableWriter(store, "segments")
    random = np.random.default_rng(0)
    for first in range(0, num_rows, SEGMENT_ROWS):
        writer.add(some_rows(first, min(first + SEGMENT_ROWS, num_rows), random))
    segments = writer.finish()
    num_chunks = -(-num_rows // CHUNK_ROWS)
    num_ok = np.full(num_chunks, CHUNK_ROWS, np.int32)
    num_ok[-1] = num_rows - (num_chunks - 1) * CHUNK_ROWS
    ok_bytes = pa.array(num_ok.astype(np.int64) * 10_000)
    chunks = put_table(store, "chunks", pa.table({"num_ok": num_ok, "ok_bytes": ok_bytes}))
    urls = [f"s3://crawl/{number:06d}.tar" for number in range(-(-num_rows // SHARD_ROWS))]
    manifest = {
        **{"format": FORMAT, "version": 1, "num_rows": num_rows, "num_ok": num_rows},
        **{"id": "benchmark", "classes": [f"class {number}" for number in range(NUM_CLASSES)]},
        **{"num_classes": NUM_CLASSES, "alias_tables": [], "damage_tables": [], "chunks": chunks},
        "shards": [vars(Shard(url, 0, "", "", num_samples=SHARD_ROWS)) for url in urls],
        "segments": [asdict(segment) for segment in segments],
    }
    publish(store, manifest, 0)


def some_rows(first: int, stop: int, random: np.random.Generator) -> pa.Table:
    """Make rows [first, stop) with random hashes and sizes, and offsets that rise within each shard."""
    num = stop - first
    rows = np.arange(first, stop)
    ids = pa.array(rows).cast(pa.string())
    hashes = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), num, [None, pa.py_buffer(random.bytes(16 * num))]
    )
    word = {name: pa.repeat(pa.scalar(name), num) for name in ("ok", "jpeg")}
    columns = {
        "row": rows,
        "shard": (rows // SHARD_ROWS).astype(np.int32),
        "status": word["ok"],
        "sample_id": ids,
        "sample_key": hashes,
        "key": ids,
        "sample_start": rows % SHARD_ROWS * 12_800,
        "sample_end": (rows % SHARD_ROWS + 1) * 12_800,
        "image_offset": rows % SHARD_ROWS * 12_800 + 512,
        "image_bytes": random.integers(8_000, 12_000, num),
        "format": word["jpeg"],
        "noisy_class": random.integers(0, NUM_CLASSES, num).astype(np.int32),
        "true_class": pa.nulls(num, pa.int32()),
        "found_status": word["ok"],
        "oddity": pa.nulls(num, pa.string()),
        "content_key": hashes,
    }
    return pa.table([columns[name] for name in ROW.names], schema=ROW)


def measured(
    step: Callable[[str], object], storage: str, queue: "multiprocessing.Queue[tuple[float, float]]"
) -> None:
    """Time one step, and report the process's peak memory, libraries included."""
    start = time.perf_counter()
    step(storage)
    seconds = time.perf_counter() - start
    # Not getrusage: that peak is inherited from the parent process.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    queue.put((seconds, peak_kb * 1024 / 1e6))


def plan_epoch(storage: str) -> EpochOrder:
    """Open it and plan an epoch for 8 ranks."""
    chunks = Catalogue.open(storage).chunks()
    order = EpochOrder(chunks, mixed_key(seed=1, epoch=0), window_bytes=64 << 20)
    shares = deal(order.num_unread(), 8)
    assert sum(cut.stop - cut.start for share in shares for cut in share) == chunks.num_ok.sum()
    return order


def read_window(storage: str) -> int:
    """Also look up the rows of the first window."""
    catalogue = Catalogue.open(storage)
    order = plan_epoch(storage)
    cut = deal(order.num_unread(), 8)[0][0]
    rows = order.piece(cut).rows(lambda chunk: ok_table(catalogue, chunk)["row"].to_numpy())
    return len(rows)


def load_rows(storage: str) -> int:
    """Open it and load the numbers of all rows."""
    return len(Catalogue.open(storage).ok_rows())


if __name__ == "__main__":
    main()
