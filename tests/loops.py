"""A complete training run on lists of batches, without Ray, for the tests of the loop."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from label_making import names, new_table
from torch import nn

from pencil_scale.config.loader import load_config
from pencil_scale.images.augment import augment
from pencil_scale.labels.owners import Batch, Owners
from pencil_scale.method.backbones import build_backbone
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.loop import Loop, Readiness
from pencil_scale.train.ranks import Ranks
from pencil_scale.train.step import Stepper

torch.set_num_threads(1)  # images of 8 x 8: more threads are slower
START = Progress()
DEMO = Path(__file__).parent.parent / "configs" / "demo.yaml"


class SmallRun:
    """Images and noisy classes in memory, a table on disk, and lists of everything that was reported."""

    def __init__(
        self, folder: Path, images: torch.Tensor, noisy_class: np.ndarray, *overrides: str, **pace: Any
    ):
        self.config = load_config(DEMO, list(overrides))
        self.images, self.batch = images, self.config.optimizer.tuned_batch
        torch.manual_seed(self.config.run.seed)
        self.model: nn.Module = build_backbone("small_convnet", 10)
        self.table = new_table(folder, noisy_class, names(10))
        self.recipe = self.config.images
        self.schedule = Schedule(self.config.stages, self.config.optimizer, 10, self.batch)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        self.pace = pace
        self.ranks = Ranks()
        self.saved: list[Progress] = []
        self.epochs: list[dict[str, float]] = []
        self.steps: list[tuple[int, float]] = []  # a step, and the mean loss logged at it
        self.live: list[dict[str, float]] = []
        self.unreadable: set[int] = set()
        self.named: list[tuple[int, list[str]]] = []
        self.stop: Callable[[], bool] = lambda: False
        self.answers: list[Readiness] = []  # to whether labels may move

    def run(self, progress: Progress = START, stop: Callable[[], bool] = lambda: False) -> Progress:
        self.stop = stop
        with Owners(self.table, self.ranks.rank, self.ranks.world) as owners:
            loop = Loop(self.stepper(), self.schedule, owners, self, self.ranks, seed=1, **self.pace)
            return loop.run(progress)

    def stepper(self) -> Stepper:
        return Stepper(self.model, self.optimizer, accumulation=self.config.optimizer.accumulation)

    def epoch(self, epoch: int) -> tuple[int, Iterator[Batch]]:
        order = np.random.default_rng([1, epoch]).permutation(len(self.images))
        remaining = torch.from_numpy(
            order[self.table.read(order, "last_epoch") != self.table.manifest.first_epoch + epoch]
        )
        return -(-len(remaining) // self.batch), self.batches(remaining)

    def batches(self, rows: torch.Tensor) -> Iterator[Batch]:
        for some in rows.split(self.batch):
            weight = torch.tensor([float(int(row) not in self.unreadable) for row in some])
            problems = tuple(f"row {row}" for row in some.tolist() if row in self.unreadable)
            yield Batch(rows=some, images=self.images[some], weight=weight, problems=problems)

    def prepare(self, batch: Batch, epoch: int, stage: Stage) -> Batch:
        return replace(batch, images=augment(batch.images, batch.rows, 1, epoch, self.recipe))

    def readiness(self, schedule: Schedule) -> Readiness:
        return self.answers.pop(0) if self.answers else "ready"

    def report(self, kind: str, **what: Any) -> None:
        if kind == "step":
            self.steps.append((what["progress"].step, what["figures"]["loss"]))
        elif kind == "live":
            self.live.append(what["figures"])
        else:
            self.named.append((what["num"], sorted(what["names"])))

    def save(self, progress: Progress) -> None:
        self.saved.append(progress)

    def close_epoch(self, stage: Stage, progress: Progress, figures: dict[str, float]) -> None:
        self.saved.append(progress)
        self.epochs.append({"stage": stage.name, **figures})
