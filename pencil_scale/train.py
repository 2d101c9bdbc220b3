"""The main job: train in three stages on noisy shards, and repair their labels on the way.

    python -m pencil_scale.train configs/demo.yaml
    python -m pencil_scale.train configs/demo.yaml --dry-run       # what it will take; writes nothing
    ray job submit --working-dir . -- python -m pencil_scale.train configs/clothing1m.yaml

The same command again goes on where the run stopped; a run that is finished, or was begun with other
settings, is refused. On SIGTERM or Ctrl-C the workers save and the command ends with exit code 143.
"""

import sys
from collections.abc import Sequence

from pencil_scale.command import run_job
from pencil_scale.settings import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job a command line asks for, and give its exit code."""
    what = "Train on noisy shards and repair their labels."
    flags = {"dry_run": "say what the run will take (a trial of 30 seconds), write nothing, and end"}
    return run_job(run, argv, module="pencil_scale.train", what=what, flags=flags)


def run(config: Config, dry_run: bool = False) -> object:
    """Train to the end, publish the model and the labels, and give the summary."""
    # Ray, torch and MLflow take seconds to import; --help and a broken config answer at once.
    from pencil_scale.running.agreement import require_agreement
    from pencil_scale.running.training import foretell, train

    require_agreement(config)
    return foretell(config) if dry_run else train(config)


if __name__ == "__main__":
    sys.exit(main())
