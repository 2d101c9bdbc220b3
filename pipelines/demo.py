"""See it work: digits of which four in ten labels are drawn anew, repaired on this machine in minutes.

    python -m pipelines.demo

Makes shards of scikit-learn's digits, indexes them, trains PENCIL with two workers on a local Ray, then plain
cross entropy for as long, and compares; exports the repaired labels, and makes a page to look at them.
Everything is under runs/demo, which is rebuilt each time, unless it holds something that the demo did not
make.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pencil_scale.config.command import exit_code, refuse_lost
from pencil_scale.config.loader import load_config
from pencil_scale.storage.errors import PencilError
from pencil_scale.train.local_ray import ensure_ray
from pencil_scale.train.run import train
from pipelines import export_labels, index_shards, make_shards, review_report

FOLDER = Path("runs/demo")
CONFIG = "configs/demo.yaml"
NOISE = "symmetric:0.4"
RUNS = {"demo", "demo-cross-entropy"}
THEIRS = ("nights", "subsets", "labels/pins")  # what people make with the demo's config
CROSS_ENTROPY = [
    "run.name=demo-cross-entropy",
    "stages.backbone.epochs=32",
    "stages.pencil.epochs=0",
    "stages.finetune.epochs=0",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, and give its exit code."""
    # It takes no arguments, but --help must not rebuild runs/demo.
    argparse.ArgumentParser(
        prog="python -m pipelines.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    return exit_code(run)


def run() -> dict[str, object]:
    """Make, index, train twice, export, show, compare."""
    refuse_lost("the demo, which is for one machine", str(FOLDER))
    clear(FOLDER)
    ensure_ray()
    _headline("1. Shards: 1,437 digits for training, 40 % of their labels drawn anew at random")
    make_shards.main(["digits", str(FOLDER / "shards"), "--noise", NOISE, "--samples-per-shard", "200"])
    _headline("2. Catalogue: every sample in the shards, found and checked")
    index_shards.run(load_config(CONFIG))
    _headline("3. PENCIL: the labels are trained together with the network")
    repaired = train(load_config(CONFIG)).facts
    _headline("4. For comparison: plain cross entropy on the labels as given, for as many epochs")
    plain = train(load_config(CONFIG, CROSS_ENTROPY)).facts
    _headline("5. Export: the repaired labels as Parquet, for other tools")
    export = export_labels.run(load_config(CONFIG))
    _headline("6. Review: what became of the labels, on one page")
    page = review_report.run(load_config(CONFIG)).page
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
    print(f"\nOpen this page in a browser, and judge the repairs:\n  {page}")
    print(f"The labels for other tools are in {export.folder}. Look also at {FOLDER}/summary.json and")
    print(f"{FOLDER}/catalogue/summary.html, at one sample with")
    print(f"  .venv/bin/python -m pipelines.why {CONFIG} digit-0555")
    print("and at every figure with")
    print(f"  .venv/bin/mlflow ui --backend-store-uri sqlite:///{FOLDER}/mlflow.db")
    return summary


def clear(folder: Path) -> None:
    """Remove what an earlier demo left; refuse a folder in which somebody has worked since."""
    runs = {path.name for path in (folder / "runs").glob("*")} - RUNS
    made = [f"runs/{name}" for name in sorted(runs)]
    made += [name for name in THEIRS if (folder / name).exists()]
    if folder.exists() and any(folder.iterdir()) and not (folder / "shards").exists():
        made.append("files that are not the demo's")
    if made:
        raise PencilError(
            f"{folder}: holds {made[0]}; the demo would remove it: move the folder away, or delete it"
        )
    shutil.rmtree(folder, ignore_errors=True)


def _headline(text: str) -> None:
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
