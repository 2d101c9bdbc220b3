"""Write features by sample id for other programs: as Parquet, or as a .npy file with a file of ids.

    python -m pipelines.export_features CONFIG features.file=features.parquet
    python -m pipelines.export_features CONFIG features.name=clip features.file=clip.npy

Parquet has the columns sample_id and features (float32). The ids of FILE.npy (float16) are written to
features.ids, or to FILE.ids.txt, one per line. The views of a sample follow each other in its vector. Samples
without features are left out, and so are those that were excluded, have vanished or have another image since.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.config.command import refuse_lost, run_job
from pencil_scale.config.settings import Config
from pencil_scale.features.exchange import rows_to_export, vectors_of
from pencil_scale.features.interchange import write_vectors
from pencil_scale.features.manifest import FeatureManifest
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.storage import Storage
from pipelines.tasks import print_table


@dataclass(frozen=True)
class Summary:
    """What was written."""

    file: str
    manifest: FeatureManifest
    num_samples: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.export_features", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Choose the features and their rows, and write them."""
    file = config.features.file
    if file is None:
        raise PencilError("features.file is not set; name the file to write, as in features.file=out.parquet")
    refuse_lost("features.file", file)
    storage = Storage(config.run.storage)
    catalogue, manifest = Catalogue.open(storage.url), FeatureManifest.choose(storage, config.features.name)
    chosen = rows_to_export(storage, manifest, catalogue, make_overlay(config.data.exclude).excluded)
    num_samples = sum(int(np.count_nonzero(mask)) for mask in chosen)
    vectors = vectors_of(storage, manifest, catalogue, chosen)
    write_vectors(file, config.features.ids, num_samples, manifest.width, vectors)
    summary = Summary(file, manifest, num_samples)
    shown = {
        "samples": f"{num_samples:,}",
        "left out": f"{manifest.num_rows - num_samples:,}",
        "made by": manifest.about,
    }
    print_table(f"features {file}", shown)
    return summary


if __name__ == "__main__":
    sys.exit(main())
