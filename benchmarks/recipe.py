"""Try settings with all images in memory: the steps of a run, without reading, label exchange and Ray.

    python benchmarks/recipe.py configs/recipe.yaml cifar10 --given cifar10n.npz#random1 workers.gpu=true \\
        optimizer.precision=bf16 optimizer.compile=default stages.backbone.epochs=15
    python benchmarks/recipe.py configs/recipe.yaml cifar100 --noise symmetric:0.4 --held 2500

The folder has Parquet files train-* and test-*. Trials need hardly any processors, so that several fit on one
GPU. Nothing is watched, planted or published: --held leaves out as many samples as a run would watch.

It prints the accuracy on the test set, the share of labels that are right, how many wrong labels are still as
given, and how many right ones have changed. `found` is the share of wrong given labels for which the network
predicts the true class, and `believed` the share for which it predicts the given one: this rises if the
network learns the noise.
"""

import argparse
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from no_harm import read_parquet
from PIL import Image

from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.labels.owners import Batch
from pencil_scale.method.automatic import Facts
from pencil_scale.method.noise import CIFAR10_FLIPS, asymmetric_noise, next_class_flips, symmetric_noise
from pencil_scale.method.outlook import label_scale
from pencil_scale.method.pencil import initial_logits
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.train.plan import fill_in
from pencil_scale.train.preparation import Preparation, build_network, set_up_process

TESTED = 1000  # images at a time


def main() -> None:
    """Train, and print a line of JSON every few epochs."""
    options = parse()
    (images, true), (test_images, test_classes) = (read(options.folder, kind) for kind in ("train", "test"))
    num_classes = int(true.max()) + 1
    given = labels_of(options, true, num_classes)
    config = load_config(options.config, options.overrides)
    side = images.shape[-1]
    config, _ = fill_in(config, Facts(len(true), num_classes, {f"{side}x{side}": len(true)}))
    chance = np.random.default_rng(config.run.seed)
    used = np.sort(chance.permutation(len(true))[options.held :])
    trial = Trial(config, images, given, used)
    if options.start:
        trial.label_logits = logits_of(options.start, options.sharpen).to(trial.device)
    print(json.dumps({"settings": options.overrides, "right": float(np.mean(given == true))}), flush=True)
    started = time.monotonic()
    for epoch in range(trial.schedule.epochs):
        stage = trial.train(epoch, chance)
        is_last = epoch + 1 == trial.schedule.epochs or trial.schedule.starts_at(epoch + 1)
        if is_last and options.out:
            folder = Path(options.out)
            folder.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(
                folder / f"{epoch + 1}-{stage.name}",
                labels=trial.label_logits.softmax(1).half().cpu().numpy(),
                predictions=trial.predictions(stage, images).half().numpy(),
                tested=trial.predictions(stage, test_images).half().numpy(),
                given=given,
                true=true,
                used=used,
            )
        if (epoch + 1) % options.every and not is_last:
            continue
        labels = trial.label_logits.argmax(1).cpu().numpy()[used]
        right, is_wrong = true[used], (given != true)[used]
        predicted = trial.predictions(stage, images[used]).argmax(1).numpy()
        line = {
            "epoch": epoch + 1,
            "stage": stage.name,
            "test": round(trial.accuracy(stage, test_images, test_classes), 4),
            "labels": round(float(np.mean(labels == right)), 4),
            "kept": int((labels == given[used])[is_wrong].sum()),
            "broken": int((labels != right)[~is_wrong].sum()),
            "found": round(float(np.mean((predicted == right)[is_wrong])), 4),
            "believed": round(float(np.mean((predicted == given[used])[is_wrong])), 4),
            "seconds": round(time.monotonic() - started),
        }
        print(json.dumps(line), flush=True)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("folder", help="with train-*.parquet and test-*.parquet")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--given", help="given labels, as FILE.npz#NAME")
    parser.add_argument("--noise", default="", help="symmetric:RATE or asymmetric:RATE")
    parser.add_argument("--held", type=int, default=0, help="samples to leave out")
    parser.add_argument("--out", help="folder in which labels and predictions are stored after each stage")
    parser.add_argument("--start", help="start from the labels in this file of --out")
    parser.add_argument("--sharpen", type=float, default=1.0, help="multiply the logits of --start")
    parser.add_argument("--every", type=int, default=5, help="epochs between two lines")
    return parser.parse_intermixed_args()


def read(folder: str, kind: str) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """Decode the images of one size: uint8 [N, 3, H, W], and their classes."""
    found = read_parquet(kind, f"{folder}/{kind}-*.parquet")
    with ProcessPoolExecutor() as pool:
        pixels = np.stack(list(pool.map(decode, found.files, chunksize=500)))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), found.classes


def decode(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def labels_of(
    options: argparse.Namespace, true: npt.NDArray[np.int64], num_classes: int
) -> npt.NDArray[np.int64]:
    """The given labels: from a file, or made wrong as in the paper."""
    if options.given:
        file, _, name = options.given.partition("#")
        found: npt.NDArray[np.int64] = np.load(Path(file))[name].astype(np.int64)
        return found
    kind, _, rate = options.noise.partition(":")
    if kind not in ("", "symmetric", "asymmetric"):
        raise SystemExit(f"--noise {options.noise}: symmetric:RATE or asymmetric:RATE was expected")
    if kind == "symmetric":
        return symmetric_noise(true, float(rate), num_classes, seed=1).noisy_class
    flips = CIFAR10_FLIPS if num_classes == 10 else next_class_flips(num_classes)
    return asymmetric_noise(true, float(rate or 0), flips, seed=1).noisy_class


def logits_of(file: str, factor: float) -> torch.Tensor:
    """The label logits in a file of --out, times a factor."""
    labels = torch.from_numpy(np.load(file)["labels"]).float()
    return labels.clamp(min=1e-7).log() * factor


class Trial:
    """The network, the labels and the images, all on one device."""

    def __init__(
        self,
        config: Config,
        images: torch.Tensor,
        given: npt.NDArray[np.int64],
        used: npt.NDArray[np.int64],
    ) -> None:
        self.config, self.device = config, torch.device("cuda" if config.workers.gpu else "cpu")
        set_up_process(config, self.device)
        num_classes = int(given.max()) + 1
        self.model, self.stepper = build_network(config, num_classes, self.device, world=1)
        self.schedule = Schedule(
            config.stages, config.optimizer, num_classes, config.optimizer.batch_per_worker
        )
        self.preparation = Preparation(config, self.device, lambda row, reason: f"row {row}: {reason}")
        self.images, self.given = images.to(self.device), torch.from_numpy(given).to(self.device)
        scale = label_scale(config.stages.pencil, num_classes)
        self.label_logits = initial_logits(self.given, num_classes, scale)
        self.used = torch.from_numpy(used)

    def train(self, epoch: int, chance: np.random.Generator) -> Stage:
        """Train one epoch; return its stage."""
        stage = self.schedule.stage_at(epoch)
        if self.schedule.starts_at(epoch):
            self.stepper.start(stage)
        for group in self.stepper.optimizer.param_groups:
            group["lr"] = stage.learning_rate
        batches = list(self.batches(chance))
        for nth, rows in enumerate(batches):
            here = rows.to(self.device)
            batch = Batch(
                rows=rows,
                images=self.images[here],
                weight=torch.ones(len(rows), device=self.device),
                label_logits=self.label_logits[here],
                noisy_class=self.given[here],
            )
            prepared = self.preparation.prepare(batch, epoch, stage)
            result = self.stepper.step(prepared, stage, nth, len(batches))
            if stage.moves_labels:
                self.label_logits[here] = result.label_logits
        return stage

    def batches(self, chance: np.random.Generator) -> Iterator[torch.Tensor]:
        """The rows of an epoch in a new order, in full batches."""
        order = self.used[torch.from_numpy(chance.permutation(len(self.used)))]
        size = self.config.optimizer.batch_per_worker
        yield from (order[first : first + size] for first in range(0, len(order) - size + 1, size))

    def accuracy(self, stage: Stage, images: torch.Tensor, classes: npt.NDArray[np.int64]) -> float:
        """The share of these images whose class is predicted."""
        return float((self.predictions(stage, images).argmax(1).numpy() == classes).mean())

    @torch.no_grad()
    def predictions(self, stage: Stage, images: torch.Tensor) -> torch.Tensor:
        """Probabilities of all classes, by the average if the stage has one."""
        average = self.stepper.average
        network = average.network if average is not None and stage.decay else self.model
        network.eval()
        found = [
            self.preparation.predictions(network, images[first : first + TESTED]).float().softmax(1).cpu()
            for first in range(0, len(images), TESTED)
        ]
        self.model.train()
        return torch.cat(found)


if __name__ == "__main__":
    main()
