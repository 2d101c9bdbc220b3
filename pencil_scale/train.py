"""The main job: train in three stages on noisy shards, and repair their labels on the way.

python -m pencil_scale.train configs/demo.yaml
ray job submit --working-dir . -- python -m pencil_scale.train configs/clothing1m.yaml
"""

import os
import sys
from collections.abc import Sequence

from pencil_scale.backbones import build_backbone
from pencil_scale.class_names import read_class_names
from pencil_scale.command import run_job
from pencil_scale.outlook import check_outlook
from pencil_scale.schedule import Schedule
from pencil_scale.settings import Config
from pencil_scale.tracking import check_server


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job a command line asks for, and give its exit code."""
    return run_job(
        run, argv, module="pencil_scale.train", what="Train on noisy shards and repair their labels."
    )


def run(config: Config) -> None:
    """Check all that can be checked before a worker starts, and say what will happen."""
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        check_server(uri)
    names = read_class_names(config.data.classes)
    batch = config.optimizer.batch_per_worker * config.optimizer.accumulation * config.workers.count[1]
    schedule = Schedule.from_config(config.stages, config.optimizer, len(names), batch)
    model = build_backbone(config.model.backbone, len(names), config.model.weights)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"run {config.run.name}: {len(names)} classes, {config.model.backbone} of {size:,} parameters")
    print(f"stages: {_stages(schedule)}")
    print(check_outlook(schedule, len(names)))
    print("This version stops here: it checks a run, and does not train yet.")


def _stages(schedule: Schedule) -> str:
    stages = schedule.stages
    lengths = (("backbone", stages.backbone), ("pencil", stages.pencil), ("finetune", stages.finetune))
    return ", ".join(f"{name} {stage.epochs} epochs" for name, stage in lengths)


if __name__ == "__main__":
    sys.exit(main())
