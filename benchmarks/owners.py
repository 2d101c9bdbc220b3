"""The cost of fetching labels from their owners: the exchange alone, and how much of it delays a step.

    python benchmarks/owners.py                                  # about a minute
    python benchmarks/owners.py --ranks 2 4 8 --classes 14 1000 --batch 256 --step-ms 55

Ranks are processes on this machine, over loopback. `exchange` is one round: rows asked for and rows moved,
with nothing else running. A step is either `waiting`, as when a GPU computes and the processor is free, or
`busy`, as when the processor computes. `one by one` fetches, computes, moves and waits; `overlapped` is how
the owners do it. The exposed share is what the labels add to a step without labels.
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

from pencil_scale.labels.exchange import Exchange, Outgoing
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.owners import Batch, Owners, owned_parts
from pencil_scale.labels.table import LabelTable

Step = Callable[[], None]


def main() -> None:
    """Print one line for every world, class count and kind of step."""
    options = parse()
    print(
        f"batch {options.batch} per rank, steps of {options.step_ms:g} ms, {os.cpu_count()} cores, loopback"
    )
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
    parser.add_argument("--step-ms", type=float, default=55.0, help="a step without labels")
    parser.add_argument("--steps", type=int, default=30, help="in a pass over all rows")
    parser.add_argument("--repeats", type=int, default=3, help="passes, of which the fastest counts")
    return parser.parse_args()


def measure(world: int, num_classes: int, folder: Path, options: argparse.Namespace) -> None:
    """Start the ranks; the first one prints."""
    num_rows = world * options.batch * options.steps
    table = LabelTable.create(
        folder / "whole", np.arange(num_rows) % num_classes, [str(n) for n in range(num_classes)]
    )
    table.snapshot(folder / "store").save(folder / "start.json")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, world, folder, options)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def run_rank(rank: int, world: int, folder: Path, options: argparse.Namespace) -> None:
    """Measure as one of the ranks."""
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
            # In turn, several times, and the best of each: other programs may use this machine too.
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
    """The share of the labels' time that does not delay a step; unknown where noise is larger."""
    return f"{100 * (1 - exposed / whole):9.0f}" if whole > 0 else f"{'-':>9}"


def waiting(seconds: float) -> Step:
    """A step in which the processor waits."""

    def waiting() -> None:
        time.sleep(seconds)

    return waiting


def busy(seconds: float) -> Step:
    """A step with as much work as takes this time while every rank works."""
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
    """One round: as many rows asked for as moved."""
    exchange = Exchange(table, world, dist.new_group(backend="gloo"))
    exchange.capacity = max(len(batch.rows) for batch in batches)
    times = []
    for batch in batches:
        rows = batch.rows.numpy()
        logits = np.ones((len(rows), table.layout.num_classes), np.float32)
        dist.barrier()
        started = time.perf_counter()
        exchange.round(Outgoing(asked=rows, moved=rows, epoch=epoch), logits)
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def no_labels(batches: list[Batch], step: Step) -> float:
    """Seconds per step without labels."""
    return timed(step() for _ in batches)


def one_by_one(owners: Owners, batches: list[Batch], step: Step, epoch: int) -> float:
    """Seconds per step that fetches its labels, computes, and waits until they are written."""

    def steps() -> Iterator[None]:
        for batch in batches:
            (labelled,) = owners.with_labels([batch], epoch)
            step()
            owners.move(labelled.rows, labelled.label_logits, epoch)
            owners.drain()
            yield

    return timed(steps())


def overlapped(owners: Owners, batches: list[Batch], step: Step, epoch: int) -> float:
    """Seconds per step whose labels are exchanged while other steps compute."""

    def steps() -> Iterator[None]:
        for batch in owners.with_labels(batches, epoch):
            step()
            owners.move(batch.rows, batch.label_logits, epoch)
            yield
        owners.drain()

    return timed(steps())


def timed(steps: Iterator[None]) -> float:
    """Seconds per step, over all steps, once every rank is ready."""
    dist.barrier()
    started = time.perf_counter()
    num_steps = sum(1 for _ in steps)
    return (time.perf_counter() - started) / num_steps


if __name__ == "__main__":
    main()
