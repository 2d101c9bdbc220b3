"""Measure what the options of the stages cost: seconds per epoch of each stage, and their ratio to none on.

    python benchmarks/cost.py configs/recipe.yaml workers.gpu=true optimizer.precision=bf16 \\
        optimizer.compile=default optimizer.cuda_graph=true

With random images in memory, as in recipe.py: only the steps of training count.
"""

import argparse
import time

import numpy as np
import torch
from recipe import Trial

from pencil_scale.config.loader import load_config
from pencil_scale.method.automatic import Facts
from pencil_scale.train.plan import fill_in

STAGES = ("backbone", "pencil", "finetune")
NONE: dict[str, dict[str, object]] = {
    "backbone": {"mixup": 0},
    "pencil": {"mixup": 0, "teacher": "null"},
    "finetune": {"mixup": 0, "average": "null", "schedule": "steps", "sharpen": 1, "move_labels": "false"},
}
EVERYTHING: dict[str, dict[str, object]] = {
    "backbone": {"mixup": 1, "augment": "strong"},
    "pencil": {"mixup": 1, "augment": "strong", "teacher": 0.999},
    "finetune": {
        "mixup": 1,
        "augment": "strong",
        "average": 0.998,
        "schedule": "cosine",
        "drop_after": "null",
        "move_labels": "true",
        "sharpen": 3,
    },
}
SETS = {"none": NONE, "the config's": {}, "everything": EVERYTHING}


def main() -> None:
    """Train a few epochs of every stage, with three sets of options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--images", type=int, default=48_000, help="images of 32 x 32")
    parser.add_argument("--epochs", type=int, default=3, help="of each stage; the first is not counted")
    options = parser.parse_intermixed_args()
    print(f"seconds per epoch of {options.images:,} images, and the ratio to none of the options")
    print(f"{'':<12}" + "".join(f"{name:>18}" for name in STAGES), flush=True)
    base: list[float] = []
    for name, chosen in SETS.items():
        found = measure(options, chosen)
        base = base or found
        pairs = zip(found, base, strict=True)
        shown = [f"{seconds:>11.3f} ({seconds / without:.2f})" for seconds, without in pairs]
        print(f"{name:<12}" + "".join(shown), flush=True)


def measure(options: argparse.Namespace, chosen: dict[str, dict[str, object]]) -> list[float]:
    """The least seconds that an epoch of each stage took."""
    lengths = [f"stages.{name}.epochs={options.epochs}" for name in STAGES]
    settings = [f"stages.{name}.{key}={value}" for name in chosen for key, value in chosen[name].items()]
    config = load_config(options.config, [*options.overrides, *lengths, *settings])
    chance = np.random.default_rng(1)
    pixels = torch.from_numpy(chance.integers(0, 256, (options.images, 3, 32, 32), dtype=np.uint8))
    given = chance.integers(0, 10, options.images)
    config, _ = fill_in(config, Facts(options.images, 10, {"32x32": options.images}))
    trial = Trial(config, pixels, given, np.arange(options.images))
    found: dict[str, list[float]] = {name: [] for name in STAGES}
    for epoch in range(trial.schedule.epochs):
        started = time.perf_counter()
        stage = trial.train(epoch, chance)
        if trial.device.type == "cuda":
            torch.cuda.synchronize()
        found[stage.name].append(time.perf_counter() - started)
    return [min(found[name][1:]) for name in STAGES]


if __name__ == "__main__":
    main()
