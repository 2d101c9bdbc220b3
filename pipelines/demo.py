"""Run the demo: repair digits with 40 % random labels on this machine, and compare with cross entropy.

    python -m pipelines.demo               # takes a few minutes on two cores

Makes shards of scikit-learn's digits, indexes them, trains PENCIL with two workers on a local Ray, trains
plain cross entropy for the same number of epochs, and compares the two; exports the repaired labels, and
makes the review page. Everything is in runs/demo, which is rebuilt each time, unless it contains something
that the demo did not make.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pencil_scale.config.command import as_started, exit_code, program, refuse_lost, typed
from pencil_scale.config.loader import load_config
from pencil_scale.storage.errors import PencilError

FOLDER = Path("runs/demo")
CONFIG = os.path.relpath(Path(__file__).with_name("example_configs").resolve() / "demo.yaml")
NOISE = "symmetric:0.4"
RUNS = {"demo", "demo-cross-entropy", "demo-photos"}
THEIRS = ("nights", "subsets", "labels/pins")  # made by people with the demo's config
CROSS_ENTROPY = [
    "run.name=demo-cross-entropy",
    "stages.backbone.epochs=32",
    "stages.pencil.epochs=0",
    "stages.finetune.epochs=0",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, and return its exit code."""
    # The demo has no arguments, but --help must not rebuild runs/demo.
    argparse.ArgumentParser(
        prog=program("pipelines.demo"),
        description=as_started(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    with typed(CONFIG):
        return exit_code(run)


def run() -> dict[str, object]:
    """Make shards, index, train twice, export, make the review page, compare."""
    # Imported here because Ray, torch and MLflow take seconds; --help answers at once.
    from pencil_scale.train.local_ray import ensure_ray
    from pencil_scale.train.run import train
    from pipelines import export_labels, index_shards, make_shards, review_report

    refuse_lost("the demo, which is for one machine", str(FOLDER))
    clear(FOLDER)
    ensure_ray()
    headline("1. Shards: 1,437 digits for training, with 40 % of their labels redrawn at random")
    words = ["digits", str(FOLDER / "shards"), "--noise", NOISE, "--samples-per-shard", "200"]
    if code := make_shards.main(words):
        raise SystemExit(code)
    headline("2. Catalogue: find and check every sample in the shards")
    index_shards.run(load_config(CONFIG))
    headline("3. PENCIL: train the labels together with the network")
    repaired = train(load_config(CONFIG)).facts
    headline("4. For comparison: plain cross entropy on the given labels, for the same number of epochs")
    plain = train(load_config(CONFIG, CROSS_ENTROPY)).facts
    headline("5. Export: the repaired labels as Parquet, for other tools")
    export = export_labels.run(load_config(CONFIG))
    headline("6. Review: the label changes on one page")
    page = review_report.run(load_config(CONFIG)).page
    summary = repaired | {
        "cross_entropy_test_accuracy": plain["test_accuracy"],
        "cross_entropy_test_accuracy_best": plain["test_accuracy_best"],
    }
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=2))
    headline("Results")
    print(f"correct labels: {summary['given_label_accuracy']:.3f} as given")
    print(f"                {summary['corrected_label_accuracy']:.3f} repaired")
    last, best = (summary[f"cross_entropy_test_accuracy{which}"] for which in ("", "_best"))
    print(f"test accuracy:  {last:.3f} cross entropy, which learned the noise (best epoch: {best:.3f})")
    print(f"                {summary['test_accuracy']:.3f} PENCIL")
    print(f"\nOpen the review page in a browser, and check the repairs:\n  {page}")
    print(f"The labels for other tools are in {export.folder}. See also {FOLDER}/summary.json and")
    print(f"{FOLDER}/catalogue/summary.html. To see the story of one sample:")
    python = os.path.relpath(sys.executable)
    why = program("pipelines.why").replace("python", python)
    print(f"  {why} {CONFIG} digit-0555")
    print("To see all metrics:")
    print(f"  {python} -m mlflow ui --backend-store-uri sqlite:///{FOLDER}/mlflow.db")
    return summary


def clear(folder: Path) -> None:
    """Remove what an earlier demo left; refuse a folder that has been used for something else since."""
    runs = {path.name for path in (folder / "runs").glob("*")} - RUNS
    made = [f"runs/{name}" for name in sorted(runs)]
    made += [name for name in THEIRS if (folder / name).exists()]
    if folder.exists() and any(folder.iterdir()) and not (folder / "shards").exists():
        made.append("files that the demo did not make")
    if made:
        raise PencilError(
            f"{folder}: contains {made[0]}, which the demo would remove; move the folder, or delete it"
        )
    shutil.rmtree(folder, ignore_errors=True)


def headline(text: str) -> None:
    """Print the title of a step."""
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
