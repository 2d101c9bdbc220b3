"""Import features that another program computed, such as CLIP or DINO embeddings, by sample id.

    python -m pipelines.import_features CONFIG features.name=clip features.file=clip.parquet
    python -m pipelines.import_features CONFIG features.name=clip features.file=clip.npy features.ids=ids.txt

Parquet (a file or a folder) has a column sample_id and a column of lists, which features.column names; a .npy
file has the shape [samples, dimension]. Vectors of different lengths or with numbers that are not finite are
refused, and so is a second vector for a sample. Ids that the catalogue does not have, and samples without a
vector, are counted and reported. Importing again under the same name replaces the features.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.config.command import run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.features.exchange import Found, first_of, import_vectors
from pencil_scale.features.interchange import read_vectors
from pencil_scale.features.manifest import LEASE, FeatureManifest
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pipelines.tasks import print_table, scratch_folder


@dataclass(frozen=True)
class Summary:
    """The features as they are published, and what was found in the file."""

    folder: str
    manifest: FeatureManifest
    found: Found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.import_features", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Read the vectors, find their rows, and publish them as features."""
    wanted = config.features
    if wanted.name is None or wanted.file is None:
        missing = "name" if wanted.name is None else "file"
        raise PencilError(
            f"features.{missing} is not set; give a name and a file, as in features.name=clip "
            "features.file=clip.parquet"
        )
    storage = Storage(config.run.storage)
    catalogue = Catalogue.open(storage.url)
    excluded = make_overlay(config.data.exclude).excluded
    dimension, batches = first_of(read_vectors(wanted.file, wanted.ids, wanted.column), wanted.file)
    manifest = FeatureManifest({"imported": wanted.name}, 1, dimension, catalogue.id, catalogue.num_rows)
    folder = storage.path(storage.features(manifest.key))
    lease_name = storage.features(manifest.key, LEASE)
    with (
        scratch_folder(config) as scratch,
        Lease.hold(storage.url, lease_name, what=f"{folder} is being written") as lease,
    ):
        manifest, found = import_vectors(
            storage, manifest, batches, catalogue, excluded, lease, Path(scratch)
        )
    summary = Summary(folder, manifest, found)
    print_summary(summary)
    return summary


def print_summary(summary: Summary) -> None:
    """Print the summary table, and examples of ids that did not match."""
    found = summary.found
    shown = {
        "samples with features": f"{summary.manifest.counts['ready']:,}",
        "samples without a vector": f"{found.num_missing:,}",
        "vectors of unknown ids": f"{found.num_unknown:,}",
        "vectors of excluded or vanished samples": f"{found.num_left_out:,}",
        "numbers per sample": f"{summary.manifest.dimension:,}",
    }
    say(f"features {summary.folder}")
    print_table(f"imported as {summary.manifest.made_by['imported']}", shown)
    for what, names in (("without a vector", found.missing), ("not in the catalogue", found.unknown)):
        if names:
            say(f"{what}: such as {', '.join(map(repr, names))}")


if __name__ == "__main__":
    sys.exit(main())
