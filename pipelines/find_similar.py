"""Find near-duplicates and outliers by features, and what is most like each sample.

    python -m pipelines.find_similar CONFIG
    python -m pipelines.find_similar CONFIG features.name=clip features.duplicate_similarity=0.97

Needs features: run extract_features or import_features first. Near-duplicates are grouped across classes and
shards. Outliers are images far from every class. The result is stored beside the features; export_labels
then writes is_outlier, outlier_score and duplicate_group, and the review page shows outliers and, for each
sample, more like it. Run the job again after indexing; results of an older catalogue version are not used.

More than features.exact_rows different images need faiss: pip install 'pencil_scale[index]'.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.config.command import run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.features.exchange import rows_to_export
from pencil_scale.features.manifest import LEASE, FeatureManifest
from pencil_scale.features.neighbours import Vectors, compare_all, compare_indexed, load_faiss
from pencil_scale.features.similar import NEIGHBOURS, Facts, describe, put_results
from pencil_scale.features.table import FeatureTable
from pencil_scale.method.decisions import UNLABELLED
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pipelines.tasks import print_table, scratch_folder

LOG_EVERY_S = 5.0


@dataclass(frozen=True)
class Summary:
    """The results as they are stored."""

    file: str
    manifest: FeatureManifest
    facts: Facts
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.find_similar", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Read the features of all usable rows, compare them, and store what was found."""
    started_at, storage = time.monotonic(), Storage(config.run.storage)
    catalogue, manifest = Catalogue.open(storage.url), FeatureManifest.choose(storage, config.features.name)
    folder = storage.path(storage.features(manifest.key))
    lease_name = storage.features(manifest.key, LEASE)
    with (
        scratch_folder(config) as scratch,
        Lease.hold(storage.url, lease_name, what=f"{folder} is being written") as lease,
    ):
        chosen = rows_to_export(storage, manifest, catalogue, make_overlay(config.data.exclude).excluded)
        rows = np.flatnonzero(np.concatenate([np.zeros(0, np.bool_), *chosen]))
        if not len(rows):
            raise PencilError(
                f"{folder}: no sample of the catalogue has features; compute or import them again"
            )
        vectors = Vectors.of(FeatureTable.open(storage, manifest.key, Path(scratch)), rows)
        entries, facts = _compared(config, vectors, catalogue)
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        file = put_results(storage, lease, manifest, catalogue, entries, facts, made_at)
    summary = Summary(file, manifest, facts, time.monotonic() - started_at)
    print_summary(summary)
    return summary


def _compared(config: Config, vectors: Vectors, catalogue: Catalogue) -> tuple[pa.Table, Facts]:
    """Find neighbours, groups and outliers of the vectors, and add the ids of their rows."""
    exact, threshold = len(vectors) <= config.features.exact_rows, config.features.duplicate_similarity
    if not exact:
        load_faiss()  # before minutes of work
    compare = compare_all if exact else compare_indexed
    found = compare(vectors, NEIGHBOURS, threshold, Progress())
    names, given = list[pa.ChunkedArray](), list[pa.ChunkedArray]()
    for table in catalogue.batches(["row", "sample_id", "noisy_class"]):
        low, high = np.searchsorted(vectors.rows, [table["row"][0].as_py(), table["row"][-1].as_py() + 1])
        here = pa.array(vectors.rows[low:high] - table["row"][0].as_py())
        names.append(table["sample_id"].take(here))
        given.append(table["noisy_class"].take(here).fill_null(UNLABELLED))
    classes = pa.chunked_array([chunk for one in given for chunk in one.chunks]).to_numpy().astype(np.int64)
    entries, facts = describe(vectors, found, classes, threshold, exact)
    ids = pa.chunked_array([chunk for one in names for chunk in one.chunks], pa.string())
    return entries.append_column("sample_id", ids), facts


class Progress:
    """Prints on stderr now and then how far the job is."""

    def __init__(self) -> None:
        self._started_at = self._said_at = time.monotonic()

    def __call__(self, num_done: int, num: int) -> None:
        now = time.monotonic()
        if now - self._said_at > LOG_EVERY_S or num_done == num:
            self._said_at = now
            line = f"comparing images: {num_done:,} of {num:,} after {now - self._started_at:.0f} s"
            print(line, file=sys.stderr, flush=True)


def print_summary(summary: Summary) -> None:
    """Print the summary table."""
    facts = summary.facts
    shown = {
        "images": f"{facts.num_rows:,}",
        "  different": f"{facts.num_vectors:,}, compared {'exactly' if facts.is_exact else 'with an index'}",
        "near-duplicates": f"{facts.num_in_groups:,} in {facts.num_groups:,} groups (similarity from "
        f"{facts.duplicate_similarity:g})",
        "  groups of several classes": f"{facts.num_mixed_groups:,}",
        "  largest group": f"{facts.largest_group:,}",
        "outliers": f"{facts.num_outliers:,}, {facts.num_outliers / facts.num_rows:.1%} (score above "
        f"{facts.outlier_threshold:.3f})",
        "seconds": f"{summary.seconds:,.0f}",
    }
    print_table(f"similar, by {summary.manifest.about}", shown)
    say(f"results: {summary.file}")


if __name__ == "__main__":
    sys.exit(main())
