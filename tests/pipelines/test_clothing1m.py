"""The paper's run, from the download to an export, on a miniature of Clothing1M in object storage.

The commands are those of configs/clothing1m.yaml and docs/training.md; what is overridden makes them small.
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import Image

from pencil_scale.config.loader import load_config
from pencil_scale.method.schedule import Schedule

ROOT = Path(__file__).parents[2]
CONFIG = "configs/clothing1m.yaml"
NAMES = """T-Shirt Shirt Knitwear Chiffon Sweater Hoodie Windbreaker Jacket Downcoat Suit Shawl Dress Vest
Underwear"""
NUM_CLASSES, PER_CLASS, BATCH = 14, 6, 28
SPLITS = ("noisy", "clean_val", "clean_test")
CLEAN = {"clean_train": 14, "clean_val": 28, "clean_test": 28}
SMALL = [
    *("data.shards=s3://crawl/noisy-{000000..000001}.tar", f"subset.total={NUM_CLASSES * PER_CLASS}"),
    *("images.decode=cpu", "images.resize=32", "images.crop=28", "model.backbone=resnet18"),
    *(f"optimizer.batch_per_worker={BATCH}", "optimizer.precision=fp32", "optimizer.compile=off"),
    *("stages.backbone.epochs=1", "stages.pencil.epochs=1", "stages.finetune.epochs=1"),
    *("workers.count=1", "workers.gpu=false", "workers.in_process=true", "gate.hold=false"),
]


def download(root: Path) -> None:
    """The folder as it is handed out: lists and labels at the top, images by the last digits of their names.

    The lists of noisy and clean samples share none, but some clean samples have a noisy label too.
    """
    chance = np.random.default_rng(3)
    noisy = [_image(root, number, chance) for number in range(200)]
    clean = {name: [_image(root, 1000 + n, chance) for n in range(num)] for name, num in CLEAN.items()}
    files = {
        "category_names_eng.txt": NAMES.split(),
        "category_names_chn.txt": NAMES.split(),
        "noisy_train_key_list.txt": noisy,
        "noisy_label_kv.txt": [
            f"{key} {n % NUM_CLASSES}" for n, key in enumerate(noisy + clean["clean_train"])
        ],
        "clean_label_kv.txt": [
            f"{key} {n % NUM_CLASSES}" for keys in clean.values() for n, key in enumerate(keys)
        ],
        **{f"{name}_key_list.txt": keys for name, keys in clean.items()},
        "README.md": ["# Clothing1M Dataset"],
    }
    for name, lines in files.items():
        (root / name).write_text("".join(f"{line}\n" for line in lines))
    (root / "venn.png").write_bytes(b"")


def _image(root: Path, number: int, chance: np.random.Generator) -> str:
    """Write a photo of its class's colour; return its key."""
    name = f"{chance.integers(10**9, 10**10)},{chance.integers(10**8, 10**9)}"
    key = f"images/{name[-1]}/{name[-3:-1]}/{name}.jpg"
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    colour = np.array([number % 14 * 18, number % 7 * 36, number % 2 * 250])
    pixels = np.clip(colour + chance.normal(0, 20, (40, 48, 3)), 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(root / key, "JPEG")
    return key


PROGRAM = """
import json, runpy, sys
for job, *words in json.loads(sys.argv.pop()):
    sys.argv[1:] = words
    try:
        runpy.run_module(job, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
"""


def commands(*typed: list[str]) -> str:
    """Run `python -m MODULE ...` for each, in one process with its own Ray; return what they print."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(typed)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("s3_endpoint", "mlflow_of_tests")
def test_a_miniature_of_the_download_goes_through_the_whole_flow(tmp_path: Path) -> None:
    store = fsspec.filesystem("s3")
    for bucket in ("crawl", "lake", "models"):
        store.mkdir(bucket)
    download(tmp_path / "download")
    shards = ["pipelines.make_shards", "clothing1m", str(tmp_path / "download"), "s3://crawl"]
    weights = io.BytesIO()
    torch.save(torchvision.models.resnet18().state_dict(), weights)
    store.pipe_file("models/resnet50.pt", weights.getvalue())
    small = [*SMALL, f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"workers.scratch={tmp_path}"]

    printed = commands(
        *([*shards, "--samples-per-shard", "100", "--split", split] for split in SPLITS),
        ["pipelines.index_shards", CONFIG, *small],
        ["pipelines.balance_subset", CONFIG, *small],
        ["pencil_scale.train", CONFIG, *small],
        ["pipelines.export_labels", CONFIG, *small],
    )
    assert f"to train on it: data.subset={load_config(ROOT / CONFIG).data.subset}" in printed
    assert f"{NUM_CLASSES * PER_CLASS} samples (s3://lake/clothing1m/subsets/260k) out of 200" in printed
    summary = json.loads(store.cat_file("lake/clothing1m/runs/clothing1m/summary.json"))
    assert summary["coverage"] == [1.0, 1.0, 1.0]
    assert {"validation_accuracy", "test_accuracy"} <= set(summary)
    table = pq.read_table("lake/clothing1m/exports/clothing1m/table", filesystem=store)
    assert len(table) == 200


def test_the_large_batch_warms_up_over_an_epoch_of_the_papers_subset() -> None:
    config = load_config(ROOT / CONFIG)
    options, total = config.optimizer, config.subset.total
    batch = options.batch_per_worker * config.workers.count[1]
    schedule = Schedule(config.stages, options, NUM_CLASSES, batch)
    assert total == 260_000
    assert config.data.subset == f"{config.run.storage}/subsets/{config.subset.name}"
    assert schedule.rate_factor == 16
    assert options.warmup_steps == -(-total // batch)


@pytest.mark.parametrize("path", ["configs/clothing1m.yaml", "docs/training.md"])
def test_the_three_commands_are_documented_in_their_order(path: str) -> None:
    jobs = ["pipelines.index_shards", "pipelines.balance_subset", "pencil_scale.train"]
    assert re.findall(r"python -m (\S+) configs/clothing1m.yaml\b", (ROOT / path).read_text()) == jobs
