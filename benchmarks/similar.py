"""Similar images: time and memory to compare synthetic features, and how many near-duplicates are found.

    python benchmarks/similar.py 100000                  # all pairs
    python benchmarks/similar.py 1000000 --index         # with faiss

Rows have 1,280 features of 50 classes. One in 100 is a near-duplicate of another, and 1 % are equal.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pencil_scale.features.neighbours import Vectors, compare_all, compare_indexed
from pencil_scale.features.outliers import outlier_scores

DIMENSION, CLASSES, FACTORS = 1280, 50, 200
THRESHOLD, NEIGHBOURS, EVERY, BACK = 0.92, 12, 100, 50
BLOCK = 20_000


def main() -> None:
    """Make the rows, compare them, score them, and print figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("num_rows", type=int)
    parser.add_argument("--index", action="store_true", help="use faiss")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        features, copies = make_rows(given.num_rows, Path(folder) / "rows.npy")
        table: Any = SimpleNamespace(features=features, manifest=SimpleNamespace(dimension=DIMENSION))
        vectors = timed("finding equal rows", lambda: Vectors.of(table, np.arange(given.num_rows)))
        compare = compare_indexed if given.index else compare_all
        found = timed("comparing", lambda: compare(vectors, NEIGHBOURS, THRESHOLD, lambda done, num: None))
        classes = np.random.default_rng(2).integers(0, CLASSES, len(vectors))
        timed("outliers", lambda: outlier_scores(vectors, classes))
        group = found.groups[vectors.place]
        grouped = np.count_nonzero(group[copies] == group[copies - BACK])
    print(f"near-duplicates found: {grouped:,} of {len(copies):,}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.1f} GiB, mapped rows included")


def make_rows(num: int, path: Path) -> tuple[Any, Any]:
    """Write the rows to a mapped file; return it with the rows that are near-duplicates."""
    chance = np.random.default_rng(1)
    basis = (
        chance.standard_normal((FACTORS, DIMENSION), np.float32) * np.linspace(1, 0.05, FACTORS)[:, None] / 8
    )
    centres = chance.standard_normal((CLASSES, FACTORS), np.float32)
    rows = np.lib.format.open_memmap(path, "w+", np.float16, (num, 1, DIMENSION))
    for first in range(0, num, BLOCK):
        some = min(BLOCK, num - first)
        hidden = centres[chance.integers(0, CLASSES, some)] + chance.standard_normal(
            (some, FACTORS), np.float32
        )
        noise = chance.standard_normal((some, DIMENSION), np.float32) / 10
        rows[first : first + some, 0] = np.maximum(hidden @ basis + noise, 0)
    num_equal = num // 100
    copies = np.arange(EVERY, num - num_equal, EVERY)
    for row in copies:
        original = rows[row - BACK, 0].astype(np.float32)
        spread = chance.uniform(0.05, 0.3) * original.std()
        rows[row, 0] = original + spread * np.abs(chance.standard_normal(DIMENSION, np.float32))
    rows[num - num_equal :] = rows[7]
    return rows, copies


def timed(what: str, work: Any) -> Any:
    """Do some work, and print how long it took."""
    started_at, cpu = time.monotonic(), time.process_time()
    result = work()
    print(
        f"{what}: {time.monotonic() - started_at:.1f} s, {time.process_time() - cpu:.1f} s of CPU", flush=True
    )
    return result


if __name__ == "__main__":
    main()
