"""Estimate: what a run will take, counted from the catalogue, and timed in a trial.

What can be counted is counted for every run and stored with it. Hours are estimated by `--dry-run` in a trial
that writes nothing, and for a real run from its first two epochs. In the trial, one worker trains for some
seconds, with its CPUs and its GPU; it reads in threads of its process.

    print(table(estimate(plan, run_trial(plan))))
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from itertools import count as numbers
from statistics import median
from typing import Any

import ray
import torch

from pencil_scale.config.settings import Config
from pencil_scale.labels.part_files import NARROW_BYTES
from pencil_scale.method.schedule import Stage
from pencil_scale.stream.stream import Stream, StreamSpec
from pencil_scale.train.checkpoints import Saved
from pencil_scale.train.plan import RunPlan
from pencil_scale.train.preparation import Preparation, build_network

TRIAL_S = 20.0
FIRST_STEPS = 8  # not timed: they choose kernels and fill caches
WAIT_EVERY = 4  # steps


def count(plan: RunPlan) -> dict[str, Any]:
    """Count what follows from the catalogue and the network."""
    config, catalogue, epochs = plan.config, plan.catalogue, plan.schedule.epochs
    chunks, share = catalogue.chunks(), plan.num_samples / max(catalogue.num_ok, 1)
    batch = config.optimizer.batch_per_worker * config.workers.count[1]
    return {
        "samples": plan.num_samples,
        "epochs": epochs,
        "steps_per_epoch": -(-plan.num_samples // batch),
        "table_bytes": catalogue.num_rows * (NARROW_BYTES + 4 + 4 * len(plan.class_names)),
        "checkpoint_bytes": 2 * plan.weight_bytes,  # the weights, and their momentum
        "read_gb": float(chunks.ok_bytes.sum()) * share * epochs / 1e9,
        "requests": int((chunks.num_ok > 0).sum()) * epochs,
    }


def estimate(plan: RunPlan, images_per_s: float) -> dict[str, Any]:
    """Add to what is counted the time and the cost, if a worker trains this many images per second."""
    counted, rate = count(plan), plan.config.workers.count[1] * images_per_s
    hours = counted["samples"] * counted["epochs"] / rate / 3600
    return {**counted, "images_per_s": rate, "hours": hours, "cost": price_of(plan.config, hours)}


def price_of(config: Config, hours: float) -> float | None:
    """What this many hours of all workers cost, if the config says."""
    price = config.cost.gpu_hour
    return None if price is None else config.workers.count[1] * hours * price


def table(found: Mapping[str, Any]) -> str:
    """Spell an estimate, one line per item."""
    rows = [
        ("samples", f"{found['samples']:,}"),
        ("epochs", f"{found['epochs']} of {found['steps_per_epoch']:,} steps"),
        ("label table", f"{found['table_bytes'] / 1e6:,.1f} MB"),
        ("checkpoint", f"{found['checkpoint_bytes'] / 1e6:,.1f} MB, and the label parts that moved"),
        ("to read", f"{found['read_gb']:,.2f} GB in about {found['requests']:,} requests"),
        ("images/s, all workers", f"{found['images_per_s']:,.0f}"),
        ("hours", f"{found['hours']:,.2f}"),
        ("cost", "set cost.gpu_hour to know" if found["cost"] is None else f"{found['cost']:,.2f}"),
    ]
    return "\n".join(f"{name:<24} {value}" for name, value in rows)


def compare_with_outcome(config: Config, counted: Mapping[str, Any], saved: Saved) -> dict[str, Any]:
    """What a finished run was estimated to take, and what it took, under the same keys."""
    figures = saved.figures
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


def run_trial(plan: RunPlan) -> float:
    """Train for some seconds on a node that has what a worker needs; return images per second."""
    workers, num_classes = plan.config.workers, len(plan.class_names)
    task = ray.remote(num_cpus=workers.cpus, num_gpus=1 if workers.gpu else 0)(train_briefly)
    return float(ray.get(task.remote(plan.config, plan.stream, num_classes, plan.schedule.stage_at(0))))


def train_briefly(config: Config, spec: StreamSpec, num_classes: int, stage: Stage) -> float:
    """Read and train as one worker does, with zeros as labels; return images per second."""
    # Not compiled: compilation takes longer than the trial.
    options = config.optimizer.model_copy(update={"compile": "off"})
    config = config.model_copy(update={"optimizer": options})
    device = torch.device("cuda" if config.workers.gpu else "cpu")
    preparation = Preparation(config, device, lambda row, reason: reason)
    _, stepper = build_network(config, num_classes, device, world=1)
    stream = Stream(spec, in_process=True)
    epochs = (preparation.ahead(stream.batches(epoch)) for epoch in numbers())
    num_done, started = 0, time.perf_counter()
    for nth, batch in enumerate(chain.from_iterable(epochs)):
        prepared = preparation.prepare(batch, epoch=0)
        classes = torch.zeros(len(prepared.weight), dtype=torch.int64, device=device)
        label_logits = torch.zeros(len(classes), num_classes, device=device)
        labelled = replace(prepared, label_logits=label_logits, noisy_class=classes)
        loss = stepper.step(labelled, stage, 0, 1).loss
        num_done += len(batch.rows)
        if nth % WAIT_EVERY == 0:
            float(loss)  # waits for the device
        if nth == FIRST_STEPS:
            num_done, started = 0, time.perf_counter()
        elif nth > FIRST_STEPS and time.perf_counter() - started > TRIAL_S:
            break
    stream.close()
    return num_done / (time.perf_counter() - started)
