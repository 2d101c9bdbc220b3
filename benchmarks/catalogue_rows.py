"""Measure publishing a catalogue once its shards have been read, with our code and with DuckDB.

    python benchmarks/catalogue_rows.py                       # 1,000,000 rows, about a minute
    python benchmarks/catalogue_rows.py --rows 100000000      # needs 25 GB of disk, takes hours

Publishing is measured as a whole, then its two largest parts alone: statistics, and finding duplicates, both
for a first index and for an update that adds a tenth of the rows. Every step runs in its own process, and
peak memory includes libraries. The limit is pyarrow reading the same columns once (for publishing: reading
and writing all columns once). Ratios are of CPU time.
"""

import argparse
import hashlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from index import NUM_CLASSES, SHARD_ROWS, some_rows

from pencil_scale.catalogue import manifest, update
from pencil_scale.catalogue.catalogue import Catalogue, Segment, Shard
from pencil_scale.catalogue.catalogue import publish as publish_manifest
from pencil_scale.catalogue.class_names import LabelClasses
from pencil_scale.catalogue.rules import Overlay
from pencil_scale.catalogue.schema import DAMAGE, SAMPLE, parquet_bytes
from pencil_scale.catalogue.shard_index import IndexRules
from pencil_scale.catalogue.staging import staged_name, staged_samples
from pencil_scale.catalogue.update import TableWriter
from pencil_scale.storage.errors import sample_key
from pencil_scale.storage.folder import Folder

NO_LISTS = Overlay(np.empty(0, "S16"), np.empty(0, "S16"))
RULES = IndexRules("key", "cls", LabelClasses(tuple(map(str, range(NUM_CLASSES))), {}))
UPDATE_SHARE = 10  # an update adds a tenth of the rows
GONE_EVERY = 100  # and one shard in a hundred is gone
SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    """Print one table; fail if the answers differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="catalogue rows (default %(default)s)")
    parser.add_argument("--memory", default="2GB", help="DuckDB's memory limit (default %(default)s)")
    parser.add_argument("--folder", help="where to put the data (default: the temporary folder)")
    options = parser.parse_args()
    num_rows = -(-options.rows // SHARD_ROWS) * SHARD_ROWS
    with tempfile.TemporaryDirectory(prefix="pencil-rows-", dir=options.folder) as storage:
        with ProcessPoolExecutor(2, SPAWN) as pool:
            shards = staged_shards(0, num_rows + num_rows // UPDATE_SHARE)
            list(pool.map(partial(stage, storage), shards, chunksize=16))
        print(f"{num_rows:,} rows in shards of {SHARD_ROWS:,}; DuckDB has 2 threads and {options.memory}")
        print(f"{'step':<19} {'form':<6} {'seconds':>8} {'CPU s':>8} {'of limit':>8}", end="")
        print(f" {'peak MB':>8} {'spilled MB':>10}")
        for name in STEPS:
            compare(name, storage, num_rows, options.memory)


def compare(name: str, storage: str, num_rows: int, memory: str) -> None:
    """Run one step in every form, each in a new process, and watch how much DuckDB spills."""
    limit, answers = 0.0, {}
    for form in ("limit", "ours", "duckdb"):
        spilled = 0
        with ProcessPoolExecutor(1, SPAWN) as pool:
            future = pool.submit(measured, name, form, storage, num_rows, memory)
            while wait([future], 0.2).not_done:
                with suppress(FileNotFoundError):  # DuckDB removes its files while they are listed
                    files = Path(storage, "spill").glob("*")
                    spilled = max(spilled, sum(path.stat().st_blocks * 512 for path in files))
        seconds, cpu, peak, answers[form] = future.result()
        limit = limit or cpu
        print(f"{name:<19} {form:<6} {seconds:>8,.1f} {cpu:>8,.1f} {cpu / limit:>8.1f}", end="")
        print(f" {peak:>8,.0f} {spilled / 1e6:>10,.0f}", flush=True)
    if answers["ours"] != answers["duckdb"]:
        raise SystemExit(f"{name}: our code and DuckDB give different answers")


def measured(
    name: str, form: str, storage: str, num_rows: int, memory: str
) -> tuple[float, float, float, str]:
    """Measure one step: seconds, CPU seconds, peak MB, and the answer."""
    read, work = STEPS[name]
    library: Any = nullcontext()
    if form == "duckdb":
        from catalogue_rows_duckdb import in_duckdb  # here, so that the other forms do not load it

        library = in_duckdb(f"{storage}/spill", memory)
    with library:
        start, cpu_start = time.perf_counter(), time.process_time()
        found = sum(1 for _ in read(storage, num_rows)) if form == "limit" else work(storage, num_rows)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    # Not getrusage: that peak is inherited from the parent process.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    answer = json.dumps(found, sort_keys=True, default=lambda array: hashlib.sha256(array).hexdigest())
    return seconds, cpu, peak_kb * 1024 / 1e6, answer


# -- the steps, each with its limit -------------------------------------------------------------------


def copy_records(storage: str, num_rows: int) -> list[Segment]:
    """Read all staged samples once and write them once."""
    store = Folder(f"{storage}/catalogue")
    writer = TableWriter(store, "copies")
    for shard in staged_shards(0, num_rows):
        for table in staged_samples(store, shard):
            writer.add(table)
    return writer.finish()


def publish(storage: str, num_rows: int) -> dict[str, Any]:
    """Publish all staged shards, without using an older catalogue; returns the figures of the manifest."""
    store = Folder(f"{storage}/catalogue")
    version = len(store.names("manifests")) + 1
    written = make_update(storage, num_rows).write()
    found = manifest.describe(store, written, RULES, NO_LISTS, version, "rows")
    publish_manifest(store, found, version - 1)
    names = ("version", "created", "segments", "alias_tables", "chunks")
    return {name: value for name, value in found.items() if name not in names}


def read_columns(storage: str, num_rows: int) -> Iterator[pa.Table]:
    """Read what the statistics need."""
    return Catalogue.open(storage, 1).batches(manifest.COLUMNS)


def measure(storage: str, num_rows: int) -> dict[str, Any]:
    """Measure the published catalogue."""
    found = manifest.Measured(Catalogue.open(storage, 1))
    return {**found.figures(), "chunks": [found.num_ok, found.ok_bytes]}


def make_update(storage: str, num_rows: int, later: bool = False) -> update.CatalogueUpdate:
    """A first index, or later an update of the published catalogue: new shards, and some that are gone."""
    store = Folder(f"{storage}/catalogue")
    if not later:
        return update.CatalogueUpdate(store, None, staged_shards(0, num_rows), (), NO_LISTS)
    old, shards = Catalogue.open(storage, 1), staged_shards(num_rows, num_rows + num_rows // UPDATE_SHARE)
    return update.CatalogueUpdate(store, old, shards, range(0, len(old.shards), GONE_EVERY), NO_LISTS)


def read_keys(storage: str, num_rows: int, later: bool = False) -> Iterator[Any]:
    """Read new and known keys."""
    changes = make_update(storage, num_rows, later)
    return chain(changes._new_keys(), changes._known_rows())


def decide(storage: str, num_rows: int, later: bool = False) -> dict[str, Any]:
    """Find the duplicates of an update."""
    return vars(make_update(storage, num_rows, later).decisions())


STEPS: dict[str, tuple[Callable[..., Iterable[Any]], Callable[..., dict[str, Any]]]] = {
    "publishing": (copy_records, publish),
    "statistics": (read_columns, measure),
    "duplicates, first": (read_keys, decide),
    "duplicates, update": (partial(read_keys, later=True), partial(decide, later=True)),
}


# -- data ---------------------------------------------------------------------------------------------


def staged_shards(first: int, stop: int) -> list[Shard]:
    """List the shards of samples [first, stop)."""
    numbers = range(first // SHARD_ROWS, -(-stop // SHARD_ROWS))
    urls = [f"s3://crawl/{number:06d}.tar" for number in numbers]
    return [Shard(url, 0, "", "", num_samples=SHARD_ROWS, num_with_id=SHARD_ROWS) for url in urls]


def stage(storage: str, shard: Shard) -> None:
    """Write made-up samples of one shard: 1 % repeat an id, 1 % repeat an image, 0.6 % cannot be used."""
    number = int(shard.url[-10:-4])
    num, first = shard.num_with_id, number * SHARD_ROWS
    random = np.random.default_rng(number)
    ids, images = np.arange(first, first + num), np.arange(first, first + num)
    for numbers in (ids, images):
        again = random.random(num) < 0.01
        numbers[again] = random.integers(0, first + num, again.sum())
    columns = {
        "sample_key": [sample_key(str(number)) for number in ids],
        "true_class": random.integers(0, NUM_CLASSES, num),
        "found_status": random.choice(["ok", "unlabelled", "image_unreadable"], num, p=[0.994, 0.005, 0.001]),
        "content_key": [sample_key(f"image {number}") for number in images],
    }
    samples = some_rows(first, first + num, random).select(SAMPLE.names)
    for name, values in columns.items():
        field = SAMPLE.field(name)
        samples = samples.set_column(SAMPLE.get_field_index(name), field, pa.array(values, field.type))
    store = Folder(f"{storage}/catalogue")
    store.put(f"staging/{staged_name(shard)}.samples.parquet", parquet_bytes(samples))
    store.put(f"staging/{staged_name(shard)}.damage.parquet", parquet_bytes(DAMAGE.empty_table()))


if __name__ == "__main__":
    main()
