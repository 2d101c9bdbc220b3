"""See it work: digits of which four in ten labels are drawn anew, repaired on this machine in minutes.

    python -m pipelines.demo

Makes shards of scikit-learn's digits, indexes them, trains PENCIL with two workers on a local Ray, then plain
cross entropy for as long, and compares. Everything is under runs/demo, which is made anew each time.
"""

import json
import shutil
import sys
from pathlib import Path

from pencil_scale.command import exit_code
from pencil_scale.config import load_config
from pencil_scale.running.local_ray import ensure_ray
from pencil_scale.running.training import train
from pipelines import index_shards, make_shards

FOLDER = Path("runs/demo")
CONFIG = "configs/demo.yaml"
NOISE = "symmetric:0.4"
CROSS_ENTROPY = [
    "run.name=demo-cross-entropy",
    "stages.backbone.epochs=40",
    "stages.pencil.epochs=0",
    "stages.finetune.epochs=0",
]


def main() -> int:
    """Run the demo, and give its exit code."""
    return exit_code(run)


def run() -> dict[str, object]:
    """Make, index, train twice, compare."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    ensure_ray()
    _headline("1. Shards: 1,437 digits for training, 40 % of their labels drawn anew at random")
    make_shards.main(["digits", str(FOLDER / "shards"), "--noise", NOISE, "--samples-per-shard", "200"])
    _headline("2. Catalogue: every sample in the shards, found and checked")
    index_shards.run(load_config(CONFIG))
    _headline("3. PENCIL: the labels are trained together with the network")
    repaired = train(load_config(CONFIG)).facts
    _headline("4. For comparison: plain cross entropy on the labels as given, for as many epochs")
    plain = train(load_config(CONFIG, CROSS_ENTROPY)).facts
    summary = repaired | {
        "cross_entropy_test_accuracy": plain["test_accuracy"],
        "cross_entropy_test_accuracy_best": plain["test_accuracy_best"],
    }
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=2))
    _headline("What came of it")
    print(f"labels right:   {summary['given_label_accuracy']:.3f} as given")
    print(f"                {summary['corrected_label_accuracy']:.3f} as repaired")
    last, best = (summary[f"cross_entropy_test_accuracy{which}"] for which in ("", "_best"))
    print(f"test accuracy:  {last:.3f} cross entropy, which learned the noise ({best:.3f} at its best epoch)")
    print(f"                {summary['test_accuracy']:.3f} PENCIL")
    print(f"\nLook next at {FOLDER}/summary.json, {FOLDER}/catalogue/summary.html, and at every figure with")
    print(f"  .venv/bin/mlflow ui --backend-store-uri sqlite:///{FOLDER}/mlflow.db")
    return summary


def _headline(text: str) -> None:
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
