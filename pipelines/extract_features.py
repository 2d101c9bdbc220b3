"""Compute the features of all images with a frozen network, once, for jobs that need no more than these.

    python -m pipelines.extract_features CONFIG features.backbone=resnet50 features.weights=imagenet
    python -m pipelines.extract_features CONFIG features.backbone=my_package.nets:make_net features.views=2

The features are stored in <storage>/features/KEY; the key is a hash of the network, its weights, the image
settings and the decoders, so a change of any of these makes new features. A job that was killed resumes. Run
again after indexing, the job computes features of new and changed images only. Samples that were excluded or
have vanished lose their features. Images that cannot be decoded are counted and named.
"""

import sys
from collections.abc import Sequence

from pencil_scale.config.command import run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.train.extract import Summary, compute_features
from pipelines.tasks import print_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.extract_features", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Compute the features, and print what came of it."""
    summary = compute_features(config)
    print_summary(summary)
    return summary


def print_summary(summary: Summary) -> None:
    """Print the summary table, and images that could not be decoded."""
    counts, manifest = summary.manifest.counts, summary.manifest
    shown = {
        "images with features": f"{counts['ready']:,}",
        "computed now": f"{summary.num_computed:,}",
        "images that cannot be decoded": f"{counts['unreadable']:,}",
        "rows without an image to use": f"{counts['absent']:,}",
        "numbers per image": f"{manifest.views} x {manifest.dimension:,}",
        "seconds": f"{summary.seconds:,.0f}",
    }
    say(f"features {summary.folder}")
    print_table(f"made by {manifest.made_by.get('backbone')}", shown)
    for problem in summary.problems:
        say(f"cannot be decoded: {problem}")


if __name__ == "__main__":
    sys.exit(main())
