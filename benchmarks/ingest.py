"""Measure how fast photos become batches: our stream against webdataset's WebLoader, same shards and cores.

    python benchmarks/ingest.py photos.tar                     # a tar or folder with class folders in it
    PENCIL_DATA=photos/ python benchmarks/ingest.py --cpus 2 --rounds 5

Both read the same tars from the same disk and yield batches of shuffled uint8 images of 256 x 256, scaled
with PIL's bilinear filter. Both are warmed up and then take turns of a few epochs, so that other work on
the machine affects both equally. The CPU time of all processes of each (Linux) is printed too; other work
does not change it. The last figure is the speed of decoding alone, on all cores.
"""

import argparse
import contextlib
import logging
import os
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
import webdataset as wds
from PIL import Image
from processes import family

from pencil_scale.config.loader import load_config
from pencil_scale.images.decode import decode
from pencil_scale.stream.stream import Stream, StreamSpec
from pipelines import index_shards, make_shards

CONFIG = """
run: {{name: ingest, storage: "{folder}/storage"}}
data: {{shards: "{folder}/shards/*.tar", classes: "{folder}/classes.txt", identity: shard_key}}
images: {{resize: {size}, crop: {crop}}}
model: {{backbone: resnet50}}
optimizer: {{tuned_batch: 32, batch_per_worker: {batch}}}
stages:
  backbone: {{epochs: 1, rate: 0.1}}
  pencil: {{epochs: 1, rate: 0.1, lambda: 400, tuned_classes: 10}}
  finetune: {{epochs: 1, rate: 0.1}}
"""


class Measured(NamedTuple):
    """One turn of one reader."""

    images_per_s: float
    cpu_ms: float

    def __str__(self) -> str:
        return f"{self.images_per_s:6.0f} images/s, {self.cpu_ms:5.2f} ms of CPU per image"


Turn = Callable[[], Generator[tuple[int, int], None, None]]  # yields epoch and number of images per batch


def main() -> None:
    """Print images per second of both, and their ratio."""
    options = parse()
    # Keep readers alive during the other one's turn.
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "600000")
    ray.init(
        address="local",
        num_cpus=options.cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    with tempfile.TemporaryDirectory() as folder:
        spec = prepare(Path(folder), options)
        urls = [str(path) for path in sorted(Path(folder, "shards").glob("*.tar"))]
        loader = web_loader(urls, options)
        readers: dict[str, Turn] = {
            "pencil_scale": partial(turn_of_stream, replace(spec, num_epochs=options.epochs + 1)),
            "webdataset": partial(turn_of_loader, loader, options.epochs + 1),
        }
        print(f"{len(urls)} shards, {options.cpus} cores, batch {options.batch}")
        print(f"each reader reads {options.epochs} epochs per turn")
        found = take_turns(readers, options.rounds, options.epochs)
        limit = options.cpus * decoding_alone(urls[0], options.size)
    report(found, limit)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given = os.environ.get("PENCIL_DATA")
    parser.add_argument("photos", nargs="?" if given else None, default=given, help="tar or folder")
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 1, help="cores for each reader")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=2, help="times the photos are read per epoch")
    parser.add_argument("--epochs", type=int, default=4, help="epochs per turn")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=256)
    return parser.parse_args()


def prepare(folder: Path, options: argparse.Namespace) -> StreamSpec:
    """Make shards with the requested copies of the photos, and index them."""
    source = Path(options.photos)
    if source.is_file():
        with tarfile.open(source) as archive:
            archive.extractall(folder / "photos", filter="data")
        source = folder / "photos"
    tree = class_tree(source, folder / "classes")
    for copy in range(options.copies):
        arguments = ["folder", str(tree), str(folder / "shards"), "--prefix", f"copy{copy}"]
        if make_shards.main([*arguments, "--samples-per-shard", "400"]) != 0:
            raise SystemExit("could not make the shards")
    names = sorted(path.name for path in tree.iterdir())
    (folder / "classes.txt").write_text("\n".join(names) + "\n")
    text = CONFIG.format(folder=folder, size=options.size, crop=options.size * 7 // 8, batch=options.batch)
    (folder / "config.yaml").write_text(text)
    config = load_config(folder / "config.yaml")
    spec = StreamSpec.from_config(config, index_shards.run(config).catalogue.version)
    return replace(spec, worker_cpus=0.0)  # nothing trains here: all cores read


def class_tree(source: Path, tree: Path) -> Path:
    """Gather all photos in class folders, whatever split they belong to."""
    for path in sorted(source.rglob("*.jpg")):
        (tree / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tree / path.parent.name / path.name)
    if not tree.exists():
        raise SystemExit(f"{source}: no *.jpg found below it")
    return tree


def web_loader(urls: list[str], options: argparse.Namespace) -> Any:
    """Build the loader as in webdataset's own examples, with one worker process per core."""
    dataset = (
        wds.WebDataset(urls, shardshuffle=len(urls), nodesplitter=wds.split_by_node, seed=1)
        .shuffle(1000)
        .decode("pilrgb")
        .to_tuple("jpg", "cls")
        .map_tuple(partial(scaled, size=options.size), int)
        .batched(options.batch)
    )
    workers = {"num_workers": options.cpus, "persistent_workers": True}
    return wds.WebLoader(dataset, batch_size=None, multiprocessing_context="fork", **workers)


def scaled(image: Image.Image, size: int) -> torch.Tensor:
    """Scale as the stream does."""
    return torch.from_numpy(np.array(image.resize((size, size), Image.Resampling.BILINEAR)))


def turn_of_stream(spec: StreamSpec) -> Generator[tuple[int, int], None, None]:
    """Read some epochs with our stream."""
    stream = Stream(spec)
    try:
        for epoch in range(spec.num_epochs):
            for batch in stream.batches(epoch):
                yield epoch, int(batch.weight.sum())
    finally:
        stream.close()


def turn_of_loader(loader: Any, num_epochs: int) -> Generator[tuple[int, int], None, None]:
    """Read some epochs with webdataset's loader."""
    for epoch in range(num_epochs):
        for images, _ in loader:
            yield epoch, len(images)


def take_turns(readers: dict[str, Turn], rounds: int, num_epochs: int) -> dict[str, list[Measured]]:
    """Measure each reader in turn, after one turn that does not count."""
    found: dict[str, list[Measured]] = {name: [] for name in readers}
    for number in range(rounds + 1):
        for name, read in readers.items():
            with_ray = name == "pencil_scale"
            images, seconds, cpu = measured(read(), num_epochs, partial(cpu_seconds, with_ray))
            if number:
                found[name].append(Measured(images / seconds, 1000 * cpu / images))
                print(f"  round {number}: {name:<13} {found[name][-1]}", flush=True)
    return found


def measured(
    batches: Generator[tuple[int, int], None, None], num_epochs: int, cpu_seconds: Callable[[], float]
) -> tuple[int, float, float]:
    """Measure images, seconds and CPU seconds from the first batch of one epoch to that of another.

    As many batches are read ahead at the start as at the end.
    """
    next(batches)
    start, cpu_start, images = time.perf_counter(), cpu_seconds(), 0
    for epoch, num in batches:
        images += num
        if epoch == num_epochs:
            break
    found = images, time.perf_counter() - start, cpu_seconds() - cpu_start
    batches.close()
    return found


def cpu_seconds(with_ray: bool) -> float:
    """Add up the CPU time of this process and its descendants: those of Ray, or all the others.

    The loader's workers are forks of this process and have its command line; Ray's processes do not.
    """
    me, ticks = os.getpid(), 0
    running = family(me)
    for process, command in running.items():
        if process == me or (command != running[me]) == with_ray:
            with contextlib.suppress(OSError):  # the process has just ended
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def photos_of(url: str) -> Iterator[bytes]:
    """Read the photos of one shard."""
    with tarfile.open(url) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(".jpg") else None
            if content is not None:
                yield content.read()


def decoding_alone(url: str, size: int) -> float:
    """Measure images per CPU second on one core that does nothing else."""
    photos = list(photos_of(url))[:200]
    start = time.process_time()
    for data in photos:
        decode(data, size)
    return len(photos) / (time.process_time() - start)


def report(found: dict[str, list[Measured]], limit: float) -> None:
    """Print medians; ratios are taken round by round."""
    ours, theirs = found["pencil_scale"], found["webdataset"]
    for name, rounds in found.items():
        middle = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:<14}{Measured(*middle)}")
    ratios = [one.images_per_s / other.images_per_s for one, other in zip(ours, theirs, strict=True)]
    costs = [other.cpu_ms / one.cpu_ms for one, other in zip(ours, theirs, strict=True)]
    for name, values in (("images/s", ratios), ("images per CPU second", costs)):
        print(f"ratio of {name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    rate = statistics.median(one.images_per_s for one in ours)
    print(f"decoding alone, all cores: {limit:.0f} images/s; the stream reaches {rate / limit:.2f} of it")
    print("goal: both ratios above 1")


if __name__ == "__main__":
    main()
