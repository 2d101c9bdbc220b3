"""Measure the label exchange between ranks: alone, and how much time it adds to a training step.

    python benchmarks/owners.py                                  # about a minute
    python benchmarks/owners.py --ranks 2 4 8 --classes 14 1000 --batch 256 --step-ms 55

Ranks are processes on this machine that talk over loopback. `exchange` is one round, in which rows are
requested and moved and nothing else happens. A step is either `waiting`, as when a GPU computes and the CPU
is free, or `busy`, as when the CPU computes. `one by one` fetches, computes, moves and waits; `overlapped`
is what training does. The exposed time is what labels add to a step without labels.
"""

import argparse
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pencil_scale.labels.columns import prediction_width
from pencil_scale.labels.exchange import Exchange, Outgoing
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.owners import Batch, Owners, owned_parts
from pencil_scale.labels.start_labels import append
from pencil_scale.labels.table import LabelTable

Step = Callable[[], object]


def main() -> None:
    """Print one line per world size, class count and kind of step."""
    options = parse()
    print(f"batch {options.batch} per rank, steps of {options.step_ms:g} ms, {os.cpu_count()} cores")
    print(f"{'ranks':>6} {'C':>5} {'exchange ms':>12} {'step':>8} {'alone ms':>9} {'one by one':>11}", end="")
    print(f" {'overlapped':>11} {'exposed ms':>11} {'exposed %':>10} {'hidden %':>9}")
    for world in options.ranks:
        for num_classes in options.classes:
            with tempfile.TemporaryDirectory() as folder:
                measure(world, num_classes, Path(folder), options)


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--classes", type=int, nargs="*", default=[14, 1000])
    parser.add_argument("--batch", type=int, default=256, help="rows per rank and step")
    parser.add_argument("--step-ms", type=float, default=55.0, help="duration of a step without labels")
    parser.add_argument("--steps", type=int, default=30, help="steps in a pass over all rows")
    parser.add_argument("--repeats", type=int, default=3, help="passes; the fastest counts")
    return parser.parse_args()


def measure(world: int, num_classes: int, folder: Path, options: argparse.Namespace) -> None:
    """Start the ranks; rank 0 prints."""
    num_rows = world * options.batch * options.steps
    empty = Manifest.empty(folder / "store", [str(n) for n in range(num_classes)])
    append(empty, np.arange(num_rows) % num_classes).save(folder / "start.json")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, world, folder, options)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def run_rank(rank: int, world: int, folder: Path, options: argparse.Namespace) -> None:
    """Measure as one rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    manifest = Manifest.load(folder / "start.json")
    parts = owned_parts(manifest.layout.num_parts, rank, world)
    table = LabelTable.restore(manifest, folder / f"rank-{rank}", parts)
    rows = torch.randperm(manifest.layout.num_rows, generator=torch.Generator().manual_seed(0))[rank::world]
    batches = [Batch(piece, None, torch.ones(len(piece))) for piece in rows.split(options.batch)]
    epochs = itertools.count()
    exchange_s = exchange_alone(table, world, batches, next(epochs))
    for step in (waiting(options.step_ms / 1e3), busy(options.step_ms / 1e3)):
        with Owners(table, rank, world) as owners:
            # In turn, several times, and the best of each: the load on this machine varies.
            times = [
                (
                    no_labels(batches, step),
                    one_by_one(owners, batches, step, next(epochs)),
                    overlapped(owners, batches, step, next(epochs)),
                )
                for _ in range(options.repeats)
            ]
        alone, apart, together = np.min(times, axis=0)
        if rank == 0:
            exposed = together - alone
            print(
                f"{world:6} {table.layout.num_classes:5} {1e3 * exchange_s:12.2f} {step.__name__:>8}", end=""
            )
            print(
                f" {1e3 * alone:9.2f} {1e3 * apart:11.2f} {1e3 * together:11.2f} {1e3 * exposed:11.2f}",
                end="",
            )
            print(f" {100 * exposed / alone:10.2f} {hidden(apart - alone, exposed)}", flush=True)
    dist.destroy_process_group()


def hidden(whole: float, exposed: float) -> str:
    """Format the share of the label time that is hidden; a dash if noise is larger than that time."""
    return f"{100 * (1 - exposed / whole):9.0f}" if whole > 0 else f"{'-':>9}"


def waiting(seconds: float) -> Step:
    """Make a step in which the CPU waits."""

    def waiting() -> None:
        time.sleep(seconds)

    return waiting


def busy(seconds: float) -> Step:
    """Make a step with as much CPU work as takes this long while every rank works."""
    matrix = torch.rand(256, 256)

    def work(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            matrix @ matrix
        return time.perf_counter() - started

    dist.barrier()
    work(50)
    times = max(1, round(seconds / (work(100) / 100)))

    def busy() -> None:
        work(times)

    return busy


def exchange_alone(table: LabelTable, world: int, batches: list[Batch], epoch: int) -> float:
    """Measure one round that requests and moves equally many rows."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    exchange = Exchange(table, world, group)
    times = []
    for batch in batches:
        rows = batch.rows.numpy()
        num_classes = table.layout.num_classes
        values = np.ones((len(rows), num_classes + prediction_width(num_classes)), np.float32)
        dist.barrier()
        started = time.perf_counter()
        exchange.round(Outgoing(rows, rows, values, moves=True, epoch=epoch))
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def no_labels(batches: list[Batch], step: Step) -> float:
    """Measure seconds per step without labels."""
    return timed(step() for _ in batches)


def one_by_one(owners: Owners, batches: list[Batch], step: Step, epoch: int) -> float:
    """Measure seconds per step that fetches labels, computes, and waits until they are written."""

    def steps() -> Iterator[None]:
        for batch in batches:
            (labelled,) = owners.with_labels([batch], epoch)
            step()
            owners.move(labelled.rows, labelled.label_logits, predictions(owners, labelled), epoch)
            owners.drain()
            yield

    return timed(steps())


def overlapped(owners: Owners, batches: list[Batch], step: Step, epoch: int) -> float:
    """Measure seconds per step if labels are exchanged while other steps compute."""

    def steps() -> Iterator[None]:
        for batch in owners.with_labels(batches, epoch):
            step()
            owners.move(batch.rows, batch.label_logits, predictions(owners, batch), epoch)
            yield
        owners.drain()

    return timed(steps())


def predictions(owners: Owners, batch: Batch) -> torch.Tensor:
    """Make predictions of the right size."""
    return torch.zeros(len(batch.rows), prediction_width(owners.table.layout.num_classes))


def timed(steps: Iterator[object]) -> float:
    """Measure the mean seconds per step, starting when every rank is ready."""
    dist.barrier()
    started = time.perf_counter()
    num_steps = sum(1 for _ in steps)
    return (time.perf_counter() - started) / num_steps


if __name__ == "__main__":
    main()
