"""The main job: train in three stages on noisy shards, and repair their labels.

    python -m pencil_scale.train configs/demo.yaml
    python -m pencil_scale.train configs/demo.yaml --dry-run       # what it will take; writes nothing
    ray job submit --working-dir . -- python -m pencil_scale.train configs/clothing1m.yaml

The same command again resumes the run; a run that is finished, or was started with other settings, is
refused. On SIGTERM or Ctrl-C the workers save and the command ends with exit code 143.

Labels are held, not published, if the network is not clearly better than chance, if a class lost most of its
samples, or if they got worse according to data.truth. The command then prints the reasons and ends with exit
code 3; review the labels with pipelines.review_report, and release them with pipelines.promote. With
gate.hold=false it only warns.
"""

import sys
from collections.abc import Sequence

from pencil_scale.config.command import HELD, run_job
from pencil_scale.config.settings import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job and return its exit code; 3 means that the labels wait for a person."""
    ended: list[object] = []
    code = run_job(
        lambda config, dry_run: ended.append(run(config, dry_run)),
        argv,
        module="pencil_scale.train",
        what="Train on noisy shards and repair their labels.",
        flags={"dry_run": "train for 30 seconds, estimate what the run will take, and write nothing"},
    )
    return HELD if code == 0 and getattr(ended[-1], "held", False) else code


def run(config: Config, dry_run: bool = False) -> object:
    """Train to the end, publish the model and the labels, and return the summary."""
    # Imported here because Ray, torch and MLflow take seconds; --help and a broken config answer at once.
    from pencil_scale.train import run as training

    return training.dry_run(config) if dry_run else training.train(config)


if __name__ == "__main__":
    sys.exit(main())
