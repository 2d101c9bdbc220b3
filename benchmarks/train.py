"""Measure how close training comes to its limits: reading alone and computing alone, in the same run.

    python benchmarks/train.py configs/demo.yaml                      # index the shards first
    python benchmarks/train.py configs/cifar10.yaml --gpu --profile optimizer.cuda_graph=true workers.gpu=true

With one worker. Reading goes through Ray Data; computing uses batches kept in memory and exchanges labels;
end to end does both. Each is measured over several consecutive epochs, reading from its first batch on. On
a GPU the limit is the slower of the two; on a CPU, where both share the cores, it is 1/(1/reading +
1/computing).
"""

import argparse
import cProfile
import gc
import pstats
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain

import torch

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.labels.owners import Batch, Owners
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.automatic import Facts
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.stream.stream import Stream, StreamSpec
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.local_ray import ensure_ray
from pencil_scale.train.loop import Loop, Readiness
from pencil_scale.train.plan import fill_in
from pencil_scale.train.preparation import Preparation, build_network, set_up_process
from pencil_scale.train.ranks import Ranks
from pencil_scale.train.run import with_absolute_storage

KEPT = 64  # batches to compute with: the last of an epoch, of which two are smaller


@dataclass(frozen=True)
class Trained:
    """The mean of some training epochs."""

    images_per_s: float
    epoch_s: float
    data_wait: float  # share of the time
    label_wait: float


class Bench:
    """What one worker consists of, without Ray Train."""

    def __init__(self, config: Config, device: torch.device, catalogue: Catalogue, folder: str) -> None:
        self.config, self.device, self.num_classes = config, device, catalogue.num_classes
        self.spec = StreamSpec.from_config(config, catalogue.version)
        set_up_process(config, device)
        _, self.stepper = build_network(config, self.num_classes, device, world=1)
        self.preparation = Preparation(config, device, lambda row, reason: f"row {row}: {reason}")
        table = LabelTable.restore(start_labels(catalogue, folder, 10.0), f"{folder}/table")
        self.owners = Owners(table, device=device)
        self.epoch = 0

    def read(self, num_epochs: int) -> tuple[float, list[Batch]]:
        """Measure images per second of reading alone; also return the last batches."""
        with self._stream(num_epochs) as (stream, first_epoch):
            started, num, kept = time.perf_counter(), 0, deque[Batch](maxlen=KEPT)
            for batch in chain(first_epoch, *(stream.batches(n) for n in range(1, num_epochs))):
                num += len(batch.rows)
                kept.append(batch)
            return num / (time.perf_counter() - started), list(kept)

    def compute(self, kept: list[Batch], num_epochs: int) -> Trained:
        """Train on the same batches repeatedly, after one epoch in which kernels are chosen."""
        self._train_epoch(kept, len(kept))
        gc.collect()
        gc.freeze()  # as a worker does
        return self._train([kept] * num_epochs, len(kept))

    def both(self, num_epochs: int) -> Trained:
        """Train while reading."""
        with self._stream(num_epochs) as (stream, first_epoch):
            return self._train(
                [first_epoch, *(stream.batches(n) for n in range(1, num_epochs))], stream.num_steps()
            )

    @contextmanager
    def _stream(self, num_epochs: int) -> Iterator[tuple[Stream, Iterator[Batch]]]:
        """Open a stream that has its first batch, and that ends with these epochs.

        If it read further, it would disturb the next measurement.
        """
        stream = Stream(replace(self.spec, num_epochs=num_epochs))
        first_epoch = stream.batches(0)
        first_batch = next(first_epoch)
        try:
            yield stream, chain([first_batch], first_epoch)
        finally:
            stream.close()

    def _train(self, epochs: Sequence[Iterable[Batch]], num_steps: int) -> Trained:
        started = time.perf_counter()
        found = [self._train_epoch(batches, num_steps) for batches in epochs]
        seconds = time.perf_counter() - started
        num = sum(figures["rows_visited"] for figures in found)
        waits = [
            sum(figures[f"{what}_wait_share"] * figures["epoch_s"] for figures in found) / seconds
            for what in ("data", "label")
        ]
        return Trained(num / seconds, seconds / len(epochs), *waits)

    def _train_epoch(self, batches: Iterable[Batch], num_steps: int) -> dict[str, float]:
        """Train one epoch of the pencil stage."""
        host = OneEpoch(self.preparation, num_steps, batches)
        loop = Loop(self.stepper, self._schedule(), self.owners, host, Ranks(), seed=1)
        loop.run(Progress(epoch=self.epoch))
        self.epoch += 1
        return host.figures

    def _schedule(self) -> Schedule:
        """Make a schedule that is all pencil stage and ends with this epoch."""
        lengths = {"backbone": 0, "pencil": self.epoch + 1, "finetune": 0}
        stages = {
            name: stage.model_copy(update={"epochs": lengths[name]}) for name, stage in self.config.stages
        }
        return Schedule(
            self.config.stages.model_copy(update=stages),
            self.config.optimizer,
            self.num_classes,
            self.spec.batch,
        )


class OneEpoch:
    """The host of a loop that trains one epoch and keeps its figures."""

    def __init__(self, preparation: Preparation, num_steps: int, batches: Iterable[Batch]) -> None:
        self.prepare, self.num_steps = preparation.prepare, num_steps
        self.batches = preparation.ahead(iter(batches))
        self.figures: dict[str, float] = {}

    def epoch(self, epoch: int) -> tuple[int, Iterable[Batch]]:
        return self.num_steps, self.batches

    def readiness(self, schedule: Schedule) -> Readiness:
        return "ready"

    def save(self, progress: Progress) -> None:
        """Save nothing."""

    def close_epoch(self, stage: Stage, progress: Progress, figures: dict[str, float]) -> None:
        self.figures = figures

    def report(self, kind: str, **what: object) -> None:
        """Report nothing."""

    def stop(self) -> bool:
        return False


def main() -> None:
    options = parse()
    config = with_absolute_storage(load_config(options.config, options.overrides))
    ensure_ray()
    device = torch.device("cuda" if options.gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        catalogue = Catalogue.open(config.run.storage)
        facts = Facts(catalogue.num_ok, catalogue.num_classes, catalogue.manifest["sizes"])
        config, _ = fill_in(config, facts)
        bench = Bench(config, device, catalogue, folder)
        reading, kept = bench.read(options.epochs)
        computing = bench.compute(kept, options.epochs).images_per_s
        with cProfile.Profile() if options.profile else nullcontext() as profile:
            both = bench.both(options.epochs)
        gc.unfreeze()
    limit = min(reading, computing) if options.gpu else 1 / (1 / reading + 1 / computing)
    print(f"samples {catalogue.num_ok:,}, batch {config.optimizer.batch_per_worker}, {device.type}")
    print(f"reading alone    {reading:10,.0f} images/s")
    print(f"computing alone  {computing:10,.0f} images/s")
    print(f"end to end       {both.images_per_s:10,.0f} images/s, {both.epoch_s:.2f} s per epoch")
    print(f"waiting for data {both.data_wait:.3f} of the time, for labels {both.label_wait:.3f}")
    print(f"ratio to the limit of {limit:,.0f}: {both.images_per_s / limit:.3f}")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--gpu", action="store_true", help="compute on the GPU")
    parser.add_argument("--epochs", type=int, default=5, help="epochs per measurement")
    parser.add_argument("--profile", action="store_true", help="also profile the training thread")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
