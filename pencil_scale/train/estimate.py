"""Estimate: what a run will take, counted from the catalogue, and timed in a trial.

What can be counted is counted for every run and stored with it. Hours are estimated by `--dry-run` in a
trial, which writes nothing, and for a real run from its first two epochs. The trial runs with the CPUs and
the GPU of one worker: some seconds of reading only, and some of computing only. On a CPU both share its time;
next to a GPU they overlap.

    estimate(config, checked, run_trial(config, checked)).table()
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import ray
import torch

from pencil_scale.config.settings import Config
from pencil_scale.labels.columns import NARROW_BYTES
from pencil_scale.labels.owners import Batch
from pencil_scale.method.schedule import Schedule
from pencil_scale.stream.stream import Stream, StreamSpec
from pencil_scale.train.checkpoints import Saved
from pencil_scale.train.preflight import Checked
from pencil_scale.train.preparation import Preparation, build_model, build_optimizer, build_stepper

READING_S = COMPUTING_S = 15.0


@dataclass(frozen=True)
class Trial:
    """Images per second of one worker, reading only and computing only."""

    read_per_s: float
    computed_per_s: float


@dataclass(frozen=True)
class Counted:
    """What a run will take, except time."""

    samples: int
    epochs: int
    steps_per_epoch: int
    table_bytes: int
    checkpoint_bytes: int
    read_gb: float
    requests: int


@dataclass(frozen=True)
class Estimate(Counted):
    """What a run will take, with time."""

    images_per_s: float
    hours: float
    cost: float | None

    def table(self) -> str:
        """The estimate, one line per item."""
        rows = [
            ("samples", f"{self.samples:,}"),
            ("epochs", f"{self.epochs} of {self.steps_per_epoch:,} steps"),
            ("label table", f"{self.table_bytes / 1e6:,.1f} MB"),
            ("checkpoint", f"{self.checkpoint_bytes / 1e6:,.1f} MB, and the label parts that moved"),
            ("to read", f"{self.read_gb:,.2f} GB in about {self.requests:,} requests"),
            ("images/s, all workers", f"{self.images_per_s:,.0f}"),
            ("hours", f"{self.hours:,.2f}"),
            ("cost", "set cost.gpu_hour to know" if self.cost is None else f"{self.cost:,.2f}"),
        ]
        return "\n".join(f"{name:<24} {value}" for name, value in rows)


def count(config: Config, checked: Checked) -> Counted:
    """Count what follows from the catalogue and the network."""
    samples = checked.catalogue.num_ok if checked.subset is None else len(checked.subset)
    epochs, chunks = checked.schedule.epochs, checked.catalogue.chunks()
    share = samples / max(checked.catalogue.num_ok, 1)
    return Counted(
        samples=samples,
        epochs=epochs,
        steps_per_epoch=-(-samples // (config.optimizer.batch_per_worker * config.workers.count[1])),
        table_bytes=checked.catalogue.num_rows * (NARROW_BYTES + 4 + 4 * len(checked.class_names)),
        checkpoint_bytes=2 * checked.weight_bytes,  # the weights, and their momentum
        read_gb=float(chunks.ok_bytes.sum()) * share * epochs / 1e9,
        requests=int((chunks.num_ok > 0).sum()) * epochs,
    )


def estimate(config: Config, checked: Checked, trial: Trial) -> Estimate:
    """Combine what is counted and what was timed."""
    counted = count(config, checked)
    rate = config.workers.count[1] * joined_rate(trial, config.workers.gpu)
    hours = counted.samples * counted.epochs / rate / 3600
    return Estimate(**asdict(counted), images_per_s=rate, hours=hours, cost=price_of(config, hours))


def price_of(config: Config, hours: float) -> float | None:
    """What this many hours of all workers cost, if the config says."""
    price = config.cost.gpu_hour
    return None if price is None else config.workers.count[1] * hours * price


def estimate_beside_outcome(
    config: Config, counted: Mapping[str, Any], figures: Sequence[Mapping[str, Any]], saved: Saved
) -> dict[str, dict[str, Any]]:
    """What a finished run was estimated to take, and what it took, under the same keys."""
    first, second = figures[0], figures[min(1, len(figures) - 1)]  # the first may include compilation
    hours = (first["epoch_s"] + second["epoch_s"] * (len(figures) - 1)) / 3600
    spent = sum(epoch["epoch_s"] for epoch in figures) / 3600
    expected = {
        "images_per_s": second["images_per_s"],
        "hours": hours,
        "cost": price_of(config, hours),
        "hours_from": "the first epoch, and the second for each later one, without evaluation and saving",
    }
    state = saved.optimizer.get("state", {}).values()
    momenta = sum(momentum.nbytes for slot in state for momentum in slot.values() if momentum is not None)
    files = [file for part in saved.labels.parts.values() for file in (part.labels, part.ledger)]
    came_to = {
        "samples": round(median(epoch["rows_visited"] for epoch in figures)),
        "epochs": len(figures),
        "steps_per_epoch": saved.progress.all_steps / len(figures),
        "table_bytes": sum(file.num_bytes for file in files),
        "checkpoint_bytes": momenta + sum(tensor.nbytes for tensor in saved.weights.values()),
        "images_per_s": median(epoch["images_per_s"] for epoch in figures),
        "hours": spent,
        "cost": price_of(config, spent),
    }
    return {"estimate": {**counted, **expected}, "came_to": came_to}


def joined_rate(trial: Trial, gpu: bool) -> float:
    """Images per second of one worker: the slower rate with a GPU, one after the other on a CPU."""
    if gpu:
        return min(trial.read_per_s, trial.computed_per_s)
    return 1 / (1 / trial.read_per_s + 1 / trial.computed_per_s)


def run_trial(config: Config, checked: Checked) -> Trial:
    """Time reading and computing, on a node that has what a worker needs."""
    spec = StreamSpec.from_config(config, checked.catalogue.version, subset=checked.subset)
    task = ray.remote(num_cpus=config.workers.cpus, num_gpus=1 if config.workers.gpu else 0)(_try)
    trial: Trial = ray.get(task.remote(config, spec, len(checked.class_names), checked.schedule))
    return trial


def _try(config: Config, spec: StreamSpec, num_classes: int, schedule: Schedule) -> Trial:
    stream = Stream(spec, in_process=True)
    batches: list[Batch] = []
    num_read, started = 0, time.perf_counter()
    for batch in stream.batches(0):
        batches = [*batches, batch][-4:]
        num_read += len(batch.rows)
        if time.perf_counter() - started > READING_S:
            break
    read_per_s = num_read / (time.perf_counter() - started)
    stream.close()
    # Not compiled: compilation takes longer than the trial.
    options = config.optimizer.model_copy(update={"compile": "off"})
    config = config.model_copy(update={"optimizer": options})
    device = torch.device("cuda" if config.workers.gpu else "cpu")
    preparation = Preparation(config, device, lambda row, reason: reason)
    prepared = [
        replace(  # with zeros as labels, whose values do not change the time
            preparation.prepare(batch, epoch=0),
            label_logits=torch.zeros(len(batch.rows), num_classes, device=device),
            noisy_class=torch.zeros(len(batch.rows), dtype=torch.int64, device=device),
        )
        for batch in batches
        if len(batch.rows) > 1
    ]
    model, stage = build_model(config, num_classes, device), schedule.stage_at(0)
    stepper = build_stepper(config, model, build_optimizer(config, model, device), device, world=1)
    for batch in prepared:
        stepper.step(batch, stage, 0, 1)  # the first steps choose kernels and fill caches
    num_done, started = 0, time.perf_counter()
    while time.perf_counter() - started < COMPUTING_S:
        losses = [stepper.step(batch, stage, 0, 1).loss for batch in prepared]
        num_done += sum(len(batch.rows) for batch in prepared)
        float(losses[-1])  # waits for the device
    return Trial(read_per_s, computed_per_s=num_done / (time.perf_counter() - started))
