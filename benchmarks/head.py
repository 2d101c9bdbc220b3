"""Measure how fast a head is trained on features, against a bare torch loop over the same mapped table.

    python benchmarks/head.py                        # 100,000 rows of 1,280 numbers, about two minutes
    python benchmarks/head.py --rows 1000000         # needs 3 GB of disk
    python benchmarks/head.py --batch 1024           # of ours; the bare loop always has 1,024

Ours is the training loop of a worker, with all three stages, the epoch plan, the owners of the labels and the
ledger; without Ray, and without what happens between epochs. Its batch is what a run chooses for many rows.
The bare loop takes consecutive rows of the table, and has a linear layer, cross entropy and SGD. Both take
turns, so that other work on the machine affects both; the CPU time of both is printed too.
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import catalogue_rows
import numpy as np
import torch
from index import NUM_CLASSES
from torch.nn import functional

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.features.manifest import READY, FeatureManifest
from pencil_scale.features.stream import FeatureStream, full
from pencil_scale.features.table import FILE, FeatureTable
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.owners import Batch, Owners
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.stream.stream import StreamSpec
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.loop import Loop, Readiness
from pencil_scale.train.preparation import Preparation, build_network, set_up_process
from pencil_scale.train.ranks import Ranks

BLOCK_ROWS = 8192
RATE = 0.003
CONFIG = """
run: {{name: head, storage: {folder}}}
data: {{shards: "{folder}/*.tar", classes: {folder}/classes.txt}}
images: {{crop: 224, resize: 256}}
model: {{backbone: "features:{dimension}", head: linear}}
optimizer: {{tuned_batch: {batch}, batch_per_worker: {batch}, weight_decay: 0.0001}}
stages:
  backbone: {{epochs: 2, rate: {rate}}}
  pencil: {{epochs: 3, rate: {rate}, alpha: 0.1, beta: 0.4, lambda: 4000, tuned_classes: 10}}
  finetune: {{epochs: 2, rate: {rate}, drop_after: [1]}}
"""
NUM_EPOCHS, BARE_BATCH = 7, 1024
NUM_THREADS = torch.get_num_threads()


def main() -> None:
    """Print samples per second of both, and their ratio."""
    options = parse()
    with tempfile.TemporaryDirectory(prefix="pencil-head-", dir=options.folder) as folder:
        config = prepare(folder, options.rows, options.dimension, options.batch)
        catalogue = Catalogue.open(folder)
        table = make_features(Path(folder), catalogue.num_rows, options.dimension)
        labels = start_labels(catalogue, folder, 10.0)
        rows, given = catalogue.ok_rows(), torch.from_numpy(np.arange(catalogue.num_rows) % NUM_CLASSES)
        print(
            f"{len(rows):,} rows of {options.dimension:,} numbers, {NUM_CLASSES} classes, batch "
            f"{options.batch:,}, {NUM_EPOCHS} epochs, torch {torch.__version__}"
        )
        bare(table, given, 1)  # the first pass fills the page cache
        ratios = []
        for number in range(options.rounds):
            alone = timed(lambda: bare(table, given, NUM_EPOCHS))
            with (
                trainer(config, table, labels, Path(folder, f"labels-{number}")) as train,
                cProfile.Profile() if options.profile else nullcontext() as profile,
            ):
                ours = timed(train)
            speed = [NUM_EPOCHS * num / found[0] for num, found in ((len(given), alone), (len(rows), ours))]
            ratios.append(speed[1] / speed[0])
            print(
                f"  round {number + 1}: bare {speed[0]:9,.0f} samples/s ({alone[1]:5.1f} CPU s)   "
                f"ours {speed[1]:9,.0f} samples/s ({ours[1]:5.1f} CPU s)   ratio {ratios[-1]:.2f}",
                flush=True,
            )
        print(f"ratio to the bare loop: {statistics.median(ratios):.2f} (median), {max(ratios):.2f} (best)")
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dimension", type=int, default=1280)
    parser.add_argument("--batch", type=int, default=4096, help="of ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to put the data (default: the temporary folder)")
    parser.add_argument("--profile", action="store_true", help="also profile the training thread")
    return parser.parse_args()


def prepare(folder: str, num_rows: int, dimension: int, batch: int) -> Config:
    """Publish a catalogue of made-up samples."""
    for shard in catalogue_rows.staged_shards(0, num_rows):
        catalogue_rows.stage(folder, shard)
    catalogue_rows.publish(folder, num_rows)
    text = CONFIG.format(folder=folder, dimension=dimension, batch=batch, rate=RATE)
    Path(folder, "config.yaml").write_text(text)
    return load_config(Path(folder, "config.yaml"), [])


def make_features(folder: Path, num_rows: int, dimension: int) -> FeatureTable:
    """Write a table of random numbers; blocks of them repeat."""
    shape = (num_rows, 1, dimension)
    features = np.lib.format.open_memmap(folder / FILE, "w+", np.float16, shape)
    block = np.random.default_rng(1).normal(0.5, 0.5, (BLOCK_ROWS, 1, dimension)).astype(np.float16)
    for first in range(0, num_rows, BLOCK_ROWS):
        features[first : first + BLOCK_ROWS] = block[: num_rows - first]
    features.flush()
    manifest = FeatureManifest({"imported": "random"}, 1, dimension, "catalogue", num_rows)
    return FeatureTable(manifest, folder / FILE, np.full(num_rows, READY, np.uint8))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Measure seconds, and CPU seconds of all threads."""
    gc.collect()
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def bare(table: FeatureTable, given: torch.Tensor, num_epochs: int) -> None:
    """Train a linear layer on consecutive rows."""
    torch.set_num_threads(NUM_THREADS)  # ours has set its own
    layer = torch.nn.Linear(table.manifest.dimension, NUM_CLASSES)
    optimizer = torch.optim.SGD(layer.parameters(), RATE, momentum=0.9, weight_decay=1e-4)
    for first in list(range(0, len(given), BARE_BATCH)) * num_epochs:
        features = full(torch.from_numpy(table.features[first : first + BARE_BATCH, 0]))
        loss = functional.cross_entropy(layer(features), given[first : first + BARE_BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@contextmanager
def trainer(
    config: Config, table: FeatureTable, labels: Manifest, folder: Path
) -> Iterator[Callable[[], object]]:
    """Make a function that trains all stages as a worker does."""
    device = torch.device("cpu")
    set_up_process(config, device)
    _, stepper = build_network(config, NUM_CLASSES, device, world=1, table=table)
    options = config.optimizer
    stream = FeatureStream(StreamSpec.from_config(config, version=1), table, in_full=True)
    schedule = Schedule(config.stages, options, NUM_CLASSES, options.batch_per_worker)
    with Owners(LabelTable.restore(labels, folder)) as owners:
        host = Host(Preparation(config, device, stream.read.name_problem), stream)
        loop = Loop(stepper, schedule, owners, host, Ranks(), seed=1)
        yield lambda: loop.run(Progress())
    stream.close()


class Host:
    """Reads epochs; saves and reports nothing."""

    def __init__(self, preparation: Preparation, stream: FeatureStream) -> None:
        self.prepare, self._ahead, self._stream = preparation.prepare, preparation.ahead, stream

    def epoch(self, epoch: int) -> tuple[int, Iterable[Batch]]:
        return self._stream.num_steps(), self._ahead(self._stream.batches(epoch))

    def save(self, progress: Progress) -> None:
        """Save nothing."""

    def close_epoch(self, stage: Stage, progress: Progress, figures: dict[str, float]) -> None:
        """Require that every row was visited."""
        assert figures["rows_visited"] == self._stream.num_rows

    def report(self, kind: str, **what: object) -> None:
        """Report nothing."""

    def stop(self) -> bool:
        return False

    def readiness(self, schedule: Schedule) -> Readiness:
        return "ready"


if __name__ == "__main__":
    main()
