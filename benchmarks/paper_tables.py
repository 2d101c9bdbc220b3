"""Run cells of the paper's tables for CIFAR-10 and CIFAR-100 with the commands of a user, several at once.

    python benchmarks/paper_tables.py --data cifar10 --folder runs/tables --cells symmetric:0.3,asymmetric:0.4
    python benchmarks/paper_tables.py --data cifar10 --folder runs/recipe --recipe \\
        --cells cifar10n.npz#random1,symmetric:0.5
    python benchmarks/paper_tables.py --data cifar100 --folder runs/tables --cells symmetric:0.4 \\
        --length 0.5 workers.gpu=true workers.cpus=1 optimizer.precision=bf16 optimizer.compile=default

`--data` is a folder with Parquet files train-* and test-*, whose name says which dataset it is. Without
`--cells`, all cells are run. Settings on the command line replace those of the paper. `--length 0.5` halves
every stage, and doubles a constant label rate, so that labels travel as far. CIFAR-100 has an alpha of 0.01
instead of 0.1, with which no label could change its class.

`--recipe` runs configs/recipe.yaml on all images instead, and then a cell can also be FILE.npz#NAME: labels
given by people. `learned` are the labels at the end of training, `repaired` those that are published.

The same command again prints what has finished, resumes what was interrupted, and starts the rest.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EPOCHS = {"backbone": 70, "pencil": 130, "finetune": 120}
DROPS = (40, 80)
# Of the paper, in percent after the last epoch: plain cross entropy, and PENCIL. With its settings nothing is
# watched, so our last epoch is published.
PAPER: dict[str, dict[str, tuple[float, float | None]]] = {
    "cifar10": {
        "symmetric:0.1": (88.43, 93.28),
        "symmetric:0.3": (72.78, 92.24),
        "symmetric:0.5": (53.11, 90.36),
        "symmetric:0.7": (33.32, 87.18),
        "symmetric:0.9": (16.30, 60.80),
        "asymmetric:0.1": (85.24, 93.04),
        "asymmetric:0.2": (80.74, 92.43),
        "asymmetric:0.3": (76.09, 91.80),
        "asymmetric:0.4": (76.12, 91.16),
        "asymmetric:0.5": (71.05, 80.06),
    },
    "cifar100": {
        "symmetric:0.2": (58.72, 73.86),
        "symmetric:0.4": (48.20, 69.12),
        "symmetric:0.6": (37.41, 57.79),
        "symmetric:0.8": (18.10, None),
        "asymmetric:0.1": (66.54, 75.93),
        "asymmetric:0.2": (59.20, 74.70),
        "asymmetric:0.3": (51.40, 72.52),
        "asymmetric:0.4": (42.74, 63.61),
    },
}
FLIPS = {"cifar10": "cifar10", "cifar100": "next"}
# Rate of the first two stages, alpha, beta, and lambda at the start and the end of the pencil stage.
SETTINGS: dict[str, tuple[float, float, float, float, float]] = {
    "symmetric:0.1": (0.02, 0.1, 0.8, 200, 200),
    "symmetric:0.3": (0.03, 0.1, 0.8, 300, 300),
    "symmetric:0.5": (0.04, 0.1, 0.8, 400, 400),
    "symmetric:0.7": (0.08, 0.1, 0.8, 800, 800),
    "symmetric:0.9": (0.12, 0.1, 0.4, 1200, 1200),
    "asymmetric:0.4": (0.03, 0.0, 0.4, 3000, 0),
    "asymmetric:0.5": (0.03, 0.0, 0.4, 4000, 0),
}
OTHERWISE = (0.06, 0.1, 0.4, 600, 600)  # CIFAR-10, asymmetric
CIFAR100 = (0.35, 0.01, 0.4, 10_000, 10_000)


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its noise, and where its run is."""

    data: Path
    noise: str
    folder: Path
    length: float
    num_shards: int
    overrides: Sequence[str]
    recipe: bool

    @property
    def dataset(self) -> str:
        return self.data.name

    @property
    def config(self) -> str:
        return "recipe" if self.recipe else self.dataset

    def stored(self, name: str) -> Any:
        """A JSON file of the run; None if there is none yet."""
        file = self.folder / "runs" / self.config / name
        return json.loads(file.read_text()) if file.exists() else None

    def claim(self) -> bool:
        """Note the settings in the cell's folder; false if it has others."""
        chosen = json.dumps([self.noise, self.num_shards, self.recipe, *self._all_settings()])
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / "settings.json"
        if not kept.exists():
            kept.write_text(chosen)
        return kept.read_text() == chosen

    def run(self) -> None:
        """Make the shards, index them, and train, as far as this has not been done."""
        if self.stored("summary.json") is not None:
            return
        if not (self.folder / "shards" / "done").exists():
            flips = ["--flips", FLIPS[self.dataset]] if self.noise.startswith("asymmetric") else []
            given = ["--given-labels" if "#" in self.noise else "--noise", self.noise, *flips]
            for part, noise in (("train", given), ("test", [])):
                source, shards = f"{self.data}/{part}-*.parquet", str(self.folder / "shards")
                self._command("pipelines.make_shards", "table", source, shards, "--prefix", part, *noise)
            (self.folder / "shards" / "done").touch()
        config = str(ROOT / "configs" / f"{self.config}.yaml")
        self._command("pipelines.index_shards", config, *self._places())
        self._command("pencil_scale.train", config, *self._places(), *self._all_settings())

    def _all_settings(self) -> list[str]:
        chosen = {setting.partition("=")[0] for setting in self.overrides}
        settings = [setting for setting in self.settings() if setting.partition("=")[0] not in chosen]
        return [*settings, *self.overrides]

    def _places(self) -> list[str]:
        shards = self.folder / "shards"
        return [
            f"run.storage={self.folder}",
            f"data.shards={shards}/train-{{000000..{self.num_shards - 1:06}}}.tar",
            f"data.test={shards}/test-*.tar",
            f"data.classes={shards}/classes.txt",
        ]

    def settings(self) -> list[str]:
        """The paper's settings for this noise, for a schedule of this length; none for the recipe."""
        if self.recipe:
            return ["gate.hold=false"]
        rate, alpha, beta, start, end = SETTINGS.get(self.noise, OTHERWISE)
        if self.dataset == "cifar100":
            rate, alpha, beta, start, end = CIFAR100
        # Where lambda falls to 0, a label changes after two or three visits, whatever the length is.
        lambda_ = f"{start / self.length:g}" if start == end else f"{{start: {start:g}, end: {end:g}}}"
        drops = [round(epoch * self.length) for epoch in DROPS]
        found: dict[str, Any] = {
            "backbone.rate": rate,
            "pencil.rate": rate,
            "pencil.alpha": alpha,
            "pencil.beta": beta,
        }
        found |= {"pencil.lambda": lambda_, "finetune.drop_after": drops}
        found |= {f"{name}.epochs": round(epochs * self.length) for name, epochs in EPOCHS.items()}
        return [f"stages.{key}={value}" for key, value in found.items()] + [
            "stages.pencil.allow_fast_labels=true",
            "gate.hold=false",
        ]

    def _command(self, *words: str) -> None:
        with (self.folder / "log.txt").open("ab") as log:
            subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=log, stderr=log, check=True)


def line_of(cell: Cell) -> str:
    """A line of the table."""
    noise, known = cell.noise.rpartition("#")[2], PAPER[cell.dataset].get(cell.noise, (None, None))
    plain, paper = ("-" if one is None else f"{one:.2f}" for one in known)
    shown = f"{cell.dataset:<9} {noise:<15} {plain:>13} {paper:>6}"
    if (found := cell.stored("summary.json")) is None:
        return f"{shown}   failed: see {cell.folder / 'log.txt'}"
    learned = cell.stored("epochs.json")[-1]["corrected_label_accuracy"]
    right = [
        found["test_accuracy"],
        found["given_label_accuracy"],
        learned,
        found["corrected_label_accuracy"],
    ]
    columns = [f"{100 * share:{width}.2f}" for share, width in zip(right, (6, 13, 8, 9), strict=True)]
    return f"{shown} {' '.join(columns)} {found['images_per_s']:>9,.0f}"


def parse() -> argparse.Namespace:
    """Read the command line; its cells are a list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="settings for every run")
    parser.add_argument("--data", type=Path, required=True, help="folder cifar10 or cifar100")
    parser.add_argument("--folder", type=Path, required=True, help="for shards and results")
    parser.add_argument("--cells", help="noises, as in symmetric:0.5,asymmetric:0.4 (all)")
    parser.add_argument("--recipe", action="store_true", help="configs/recipe.yaml, not the paper's settings")
    parser.add_argument("--length", type=float, default=1.0, help="share of the paper's epochs")
    parser.add_argument("--shards", type=int, help="thousands of images to train on (45; 50 by the recipe)")
    parser.add_argument("--at-once", type=int, default=4, help="runs at the same time")
    given = parser.parse_intermixed_args()
    if not (
        0 < given.length < float("inf") and given.at_once > 0 and (given.shards is None or given.shards > 0)
    ):
        parser.error("--length, --shards and --at-once: numbers above 0 were expected")
    if (dataset := given.data.name) not in PAPER:
        parser.error(f"--data {given.data}: a folder named {' or '.join(PAPER)} was expected")
    noises = list(PAPER[dataset] if given.cells is None else dict.fromkeys(given.cells.split(",")))
    unknown = {
        noise for noise in noises if noise not in PAPER[dataset] and not (given.recipe and "#" in noise)
    }
    if unknown:
        parser.error(f"--cells {min(unknown)}: not in the paper; it has {', '.join(PAPER[dataset])}")
    if given.recipe and given.length != 1:
        parser.error(
            "--length is for the paper's settings; give the recipe's epochs as stages.pencil.epochs=..."
        )
    given.cells = noises
    return given


def main() -> int:
    """Run the cells, and print the table."""
    given = parse()
    data = given.data.resolve()
    folder = given.folder.resolve() / data.name
    num_shards = given.shards or (50 if given.recipe else 45)
    cells = [
        Cell(
            data,
            str(Path(noise).resolve()) if "#" in noise else noise,
            folder / Path(noise).name.replace(".npz#", "-").replace(":", "-"),
            given.length,
            num_shards,
            given.overrides,
            given.recipe,
        )
        for noise in given.cells
    ]
    for cell in cells:
        if not cell.claim():
            raise SystemExit(f"error: {cell.folder} was begun with other settings; choose another --folder")
    how = "the recipe" if given.recipe else f"{given.length:g} of the paper's epochs"
    print(f"{how}; percent, of the test set by the published epoch, and of right labels")
    print("dataset   noise           cross entropy  paper   ours  labels given  learned  repaired  images/s")
    failed = 0
    pool = ThreadPoolExecutor(given.at_once)
    try:
        for cell, done in [(cell, pool.submit(cell.run)) for cell in cells]:
            if problem := done.exception():
                failed += 1
                if not isinstance(problem, subprocess.CalledProcessError):  # these are in the log
                    print(problem, file=sys.stderr)
            print(line_of(cell), flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
