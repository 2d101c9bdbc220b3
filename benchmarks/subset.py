"""Measure time and memory of drawing a balanced subset from a large catalogue.

    python benchmarks/subset.py                               # 2 million rows
    python benchmarks/subset.py --rows 100000000              # a large catalogue: needs 8 GB of disk, slow

Draws 260,000 samples, equally many of each of 14 classes, with an exclude list. That takes two passes: one to
count, one to pick. The limit is the time to read the same columns once, in one process.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from index import NUM_CLASSES, make_catalogue

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.stream.ray_tasks import num_processors, run_tasks
from pencil_scale.train.local_ray import ensure_ray
from pipelines import balance_subset

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
MOST_MB = 1500
MOST_TIMES_READING = 20.0  # two passes; each hashes every id and looks it up in a list of 100,000
SAMPLED = 8


def main() -> None:
    """Make a catalogue and draw from it; fail if a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--folder", help="folder for the catalogue (default: the temporary folder)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pencil-subset-", dir=options.folder))
    try:
        missed = measure(folder, options.rows)
    finally:
        shutil.rmtree(folder)
    if missed:
        raise SystemExit("limits missed: " + "; ".join(missed))


def measure(folder: Path, num_rows: int) -> list[str]:
    """Draw 260,000 samples, or a quarter of a small catalogue, and print time and memory."""
    make_catalogue(str(folder), num_rows)
    manifest = folder / "catalogue" / "manifest.json"
    words = {"classes": [f"class {number}" for number in range(NUM_CLASSES)], "identity": "key"}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | words))
    (folder / "exclude.txt").write_text("\n".join(map(str, range(0, num_rows, 1000))))
    total = min(260_000, num_rows // 4)
    keys = [f"run.storage={folder}", f"subset.total={total}", "subset.shards=never"]
    config = load_config(CONFIG, [*keys, f"subset.exclude={folder}/exclude.txt"])
    ensure_ray()
    start = time.perf_counter()
    summary = balance_subset.run(config)
    took_s = time.perf_counter() - start
    assert summary.words.num_members == total
    peak_mb = max(found for _, found in run_tasks(worker_peak_mb, [()] * 4 * num_processors(), None))
    own_mb = worker_peak_mb(None)
    reading_s = seconds_to_read(Catalogue.open(str(folder)))
    print(f"{num_rows:,} rows, {total:,} drawn on {num_processors()} CPUs in {took_s / 60:.2f} minutes")
    print(f"peak memory: driver {own_mb:,.0f} MB, largest task {peak_mb:,.0f} MB")
    print(f"reading the columns once: {reading_s / 60:.2f} minutes; ratio {took_s / reading_s:.2f}")
    slow = [f"{took_s / reading_s:.2f} times reading"] if took_s > MOST_TIMES_READING * reading_s + 10 else []
    large = [f"{max(own_mb, peak_mb):,.0f} MB"] if max(own_mb, peak_mb) > MOST_MB else []
    return slow + large


def worker_peak_mb(_: None) -> float:
    """Read the peak memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def seconds_to_read(catalogue: Catalogue) -> float:
    """Time reading some ranges of rows, and scale up to all rows."""
    step = 1 << 18
    firsts = np.unique(np.linspace(0, max(catalogue.num_rows - step, 0), SAMPLED, dtype=np.int64)).tolist()
    start, num_read = time.perf_counter(), 0
    for first in firsts:
        columns = ["row", "status", "noisy_class", "sample_key"]
        num_read += len(catalogue.read(first, min(first + step, catalogue.num_rows), columns))
    return (time.perf_counter() - start) * catalogue.num_rows / num_read


if __name__ == "__main__":
    main()
