"""How near training comes to its two limits: reading alone, and computing alone, measured in the same run.

    python benchmarks/train.py configs/demo.yaml                      # shards must be indexed
    python benchmarks/train.py configs/cifar10.yaml --gpu --profile optimizer.cuda_graph=true

One worker. Reading goes through Ray Data, computing goes over batches kept in memory, both with the labels'
owners; end to end does both at once. On a GPU the limit is the slower of the two; on a CPU, where both share
the cores, it is 1/(1/reading + 1/computing).
"""

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from pencil_scale.catalogue import Catalogue
from pencil_scale.checkpoint import Progress
from pencil_scale.config import load_config
from pencil_scale.label_table import LabelTable
from pencil_scale.labels.start_labels import fresh_table
from pencil_scale.loop import Epoch, Hooks, Loop, Pace
from pencil_scale.owners import Batch, Owners
from pencil_scale.running.local_ray import ensure_ray
from pencil_scale.running.preparation import Preparation, build_model, build_optimizer, build_stepper, settle
from pencil_scale.running.training import with_absolute_storage
from pencil_scale.schedule import Schedule
from pencil_scale.settings import Config
from pencil_scale.stream import Stream, StreamSpec


@dataclass
class Bench:
    """One worker's parts, without Ray Train."""

    config: Config
    device: torch.device
    catalogue: Catalogue
    stream: Stream
    table: LabelTable

    def __post_init__(self) -> None:
        settle(self.config, self.device)
        self.num_classes = self.catalogue.num_classes
        model = build_model(self.config, self.num_classes, self.device)
        optimizer = build_optimizer(self.config, model, self.device)
        self.stepper = build_stepper(self.config, model, optimizer, self.device, world=1)
        self.preparation = Preparation(self.config, self.device, self.stream.name_problem)
        self.owners = Owners(self.table, device=self.device)
        self.epoch = 0

    def read(self) -> float:
        """Images a second of an epoch that is read and thrown away."""
        started, num = time.perf_counter(), 0
        for batch in self.stream.batches(10**6):  # past the run's last: none is begun ahead of it, or after
            num += len(batch.rows)
        return num / (time.perf_counter() - started)

    def train(self, kept: list[Batch] | None = None) -> dict[str, float]:
        """Train one epoch of the pencil stage, from the stream or from batches that are kept."""
        figures: dict[str, float] = {}
        overrides = {"backbone": self._epochs("backbone", 0), "finetune": self._epochs("finetune", 0)}
        stages = self.config.stages.model_copy(
            update=overrides | {"pencil": self._epochs("pencil", self.epoch + 1)}
        )
        schedule = Schedule.from_config(
            stages, self.config.optimizer, self.num_classes, self.config.optimizer.batch_per_worker
        )
        hooks = Hooks(
            epoch=lambda epoch: self._batches(epoch, kept),
            prepare=self.preparation.prepare,
            save=lambda progress: None,
            close_epoch=lambda stage, progress, found: figures.update(found),
            log_step=lambda stage, progress, found: None,
        )
        loop = Loop(self.stepper, schedule, self.owners, hooks, Pace(), seed=1)
        loop.run(Progress(epoch=self.epoch))
        self.epoch += 1
        return figures

    def _epochs(self, stage: str, num: int) -> object:
        return getattr(self.config.stages, stage).model_copy(update={"epochs": num})

    def _batches(self, epoch: int, kept: Iterable[Batch] | None) -> Epoch:
        batches: Iterator[Batch] = iter(kept) if kept is not None else self.stream.batches(epoch)
        return Epoch(self.stream.num_steps(epoch), batches)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--gpu", action="store_true", help="compute on the GPU")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each kind; the fastest counts")
    parser.add_argument(
        "--profile", action="store_true", help="also say where the training thread's time goes"
    )
    options = parser.parse_intermixed_args()
    config = with_absolute_storage(load_config(options.config, options.overrides))
    ensure_ray()
    catalogue = Catalogue.open(config.run.storage)
    stream = Stream(StreamSpec.from_config(config, catalogue.version))
    device = torch.device("cuda" if options.gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, device, catalogue, stream, fresh_table(catalogue, folder))
        kept = list(stream.batches(0))
        bench.train(kept)  # compiles, and warms up whatever there is
        reading = max(bench.read() for _ in range(options.epochs))
        computing = max(bench.train(kept)["images_per_s"] for _ in range(options.epochs))
        with cProfile.Profile() if options.profile else nullcontext() as profile:
            found = max(
                (bench.train() for _ in range(options.epochs)), key=lambda figures: figures["images_per_s"]
            )
        limit = min(reading, computing) if options.gpu else 1 / (1 / reading + 1 / computing)
        both = found["images_per_s"]
        print(f"samples {stream.num_rows:,}, batch {config.optimizer.batch_per_worker}, {device.type}")
        print(f"reading alone    {reading:10,.0f} images/s")
        print(f"computing alone  {computing:10,.0f} images/s")
        print(f"end to end       {both:10,.0f} images/s, {stream.num_rows / both:.2f} s an epoch")
        waits = found["data_wait_share"], found["label_wait_share"]
        print(f"waiting for data {waits[0]:.3f} of the time, for labels {waits[1]:.3f}")
        print(f"ratio to the limit of {limit:,.0f}: {both / limit:.3f}")
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        stream.close()


if __name__ == "__main__":
    main()
