"""Measure how fast extract_features computes: against decoding and the network alone, same photos and cores.

    python benchmarks/features.py photos.tar                   # a tar or folder with class folders in it
    PENCIL_DATA=photos/ python benchmarks/features.py --backbone my_package.nets:make_net --rounds 5

The limit is a bare loop in one process per core: decode, crop, normalise, run the network in batches of 64 on
one thread. Both take turns, so that other work on the machine affects both equally. The job's time is that of
computing: Ray has started, and its processes have loaded the network, in a turn that does not count. The CPU
time of all processes of each (Linux) is printed too; other work changes it less.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ingest

from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.train.local_ray import start_local
from pipelines import extract_features

RAY_NICENESS = 15  # of the processes that Ray starts
_images: list[bytes] = []
_network: list[Any] = []


def main() -> None:
    """Print images per second of both, and their ratio."""
    options = parse()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback only
    # Keep processes with a loaded network alive during the other one's turn.
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "600000")
    start_local(num_cpus=options.cpus)
    with tempfile.TemporaryDirectory() as folder:
        ingest.prepare(Path(folder), options)
        overrides = [f"features.backbone={options.backbone}", "images.resize=256", "images.crop=224"]
        overrides += [f"features.weights={options.weights}"] if options.weights else []
        config = load_config(Path(folder, "config.yaml"), overrides)
        images = [
            data
            for url in sorted(Path(folder, "shards").glob("*.tar"))
            for data in ingest.photos_of(str(url))
        ]
        shares = [images[number :: options.cpus] for number in range(options.cpus)]
        loaded = [(share, options.backbone, options.weights) for share in shares]
        spawn = multiprocessing.get_context("spawn")
        pools = [spawn.Pool(1, load, one) for one in loaded]
        print(f"{len(images):,} photos, {options.cpus} cores, {options.backbone}", flush=True)
        rounds = []
        for number in range(options.rounds + 1):
            rounds.append((alone(pools), job(config)))
            print(
                f"  round {number}: seconds and CPU seconds alone, and of the job: {rounds[-1]}", flush=True
            )
        for pool in pools:
            pool.terminate()
    report(rounds[1:], len(images))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given = os.environ.get("PENCIL_DATA")
    parser.add_argument("photos", nargs="?" if given else None, default=given, help="tar or folder")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--weights", help="as features.weights; they do not change the speed")
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1, help="times the photos are read")
    parser.set_defaults(size=256, batch=64)
    return parser.parse_args()


def load(images: list[bytes], backbone: str, weights: str | None) -> None:
    """Prepare a process of the bare loop."""
    import torch

    from pencil_scale.method.backbones import build_features

    torch.set_num_threads(1)
    os.nice(RAY_NICENESS)
    _images.extend(images)
    _network.append(build_features(backbone, weights))


def loop(_: int) -> float:
    """Decode all photos of this process and run the network; return its CPU seconds."""
    import torch

    from pencil_scale.images.decode import decode

    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    start = time.process_time()
    with torch.inference_mode():
        for first in range(0, len(_images), 64):
            pixels = [torch.from_numpy(decode(data, 256)) for data in _images[first : first + 64]]
            batch = torch.stack([image[16:240, 16:240].permute(2, 0, 1) for image in pixels])
            _network[0]((batch.float() / 255 - mean) / std)
    return time.process_time() - start


def alone(pools: list[Any]) -> tuple[float, float]:
    """Run the bare loop in all processes; return seconds and CPU seconds."""
    start = time.perf_counter()
    running = [pool.apply_async(loop, (0,)) for pool in pools]
    cpu = sum(one.get() for one in running)
    return time.perf_counter() - start, cpu


def job(config: Config) -> tuple[float, float]:
    """Run the job from nothing; return seconds and CPU seconds."""
    start, cpu = time.perf_counter(), ingest.cpu_seconds(with_ray=True)
    summary = extract_features.run(config)
    found = time.perf_counter() - start, ingest.cpu_seconds(with_ray=True) - cpu
    shutil.rmtree(summary.folder)
    return found


def report(rounds: list[tuple[tuple[float, float], tuple[float, float]]], num_images: int) -> None:
    """Print medians; ratios are taken round by round."""
    for name, number in (("decode and network alone", 0), ("extract_features", 1)):
        seconds, cpu = (statistics.median(one[number][column] for one in rounds) for column in (0, 1))
        each = f"{1000 * cpu / num_images:.2f} ms of CPU per image"
        print(f"{name:<25}{num_images / seconds:7.1f} images/s, {each}")
    for name, column in (("images/s", 0), ("images per CPU second", 1)):
        ratios = [limit[column] / ours[column] for limit, ours in rounds]
        print(f"ratio of {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print("goal: at least 0.9")


if __name__ == "__main__":
    main()
