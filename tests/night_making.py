"""For tests of the nights: a catalogue in memory without training, and a crawl that grows every night."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from catalogue_making import Bench
from mlflow_server import empty_database
from PIL import Image
from tar_making import python_tar

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import PINS, now
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.labels.table import LabelTable
from pencil_scale.nights.record import Night, NightFiles, night_name
from pencil_scale.storage.errors import sample_key

COLOURS = {"red": (200, 60, 60), "green": (60, 200, 60), "blue": (60, 60, 200), "yellow": (180, 180, 60)}
NAMES = list(COLOURS)
CONFIG = """
run: {{name: nightly, storage: {folder}/lake, seed: 1}}
data:
  shards: "{folder}/crawl-*.tar"
  test: "{folder}/clean.tar"
  label: txt
  classes: {folder}/classes.txt
images: {{crop: 8, pad: 1}}
optimizer: {{tuned_batch: 16, batch_per_worker: 16}}
stages:
  backbone: {{epochs: 0, rate: 0.05}}
  pencil: {{epochs: 1, rate: 0.02, alpha: 0.1, beta: 0.4, lambda: 600, tuned_classes: 4,
           allow_fast_labels: true}}
  finetune: {{epochs: 1, rate: 0.01}}
workers: {{count: 1, in_process: true, cpus: 0.5, timeout_s: 60, scratch: {folder}/scratch}}
checkpoint: {{every_steps: 2, keep: 2}}
evidence: {{watched: 0, planted: 0}}
tracking: {{register_as: colours}}
report: {{thumbnails: 4, audit: 4}}
nightly: {{first_epochs: [3, 2, 1], max_accuracy_fall: 0.5, keep_nights: 3}}
"""


class Crawl:
    """A folder that a crawler fills, and the config of its nights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        (folder / "classes.txt").write_text("\n".join(NAMES) + "\n")
        (folder / "scratch").mkdir()
        (folder / "lake").mkdir()
        (folder / "lake" / "mlflow.db").write_bytes(empty_database())
        self.config.write_text(CONFIG.format(folder=folder))
        (folder / "clean.tar").write_bytes(shard(range(90_000, 90_040), noise=0.0))

    @property
    def nights(self) -> NightFiles:
        return NightFiles(str(self.folder / "lake"))

    @property
    def current(self) -> str | None:
        night = self.nights.current()
        return None if night is None else night.name

    def settings(self, *overrides: str) -> Config:
        return load_config(self.config, overrides)

    def add(self, number: int, data: bytes | None = None, **options: object) -> Path:
        """One more shard of 80 samples."""
        path = self.folder / f"crawl-{number:03d}.tar"
        path.write_bytes(data or shard(range(80 * number, 80 * number + 80), **options))  # type: ignore[arg-type]
        return path


def shard(numbers: range, noise: float = 0.25, renamed: dict[str, str] | None = None) -> bytes:
    """Samples of the four colours in turn; `renamed` is what a crawler calls some of them now."""
    chance = np.random.default_rng(numbers.start)
    members: list[tuple[str, bytes]] = []
    for number in numbers:
        true = NAMES[number % 4]
        given = NAMES[chance.integers(4)] if chance.random() < noise else true
        pixels = np.clip(np.array(COLOURS[true]) + chance.normal(0, 25, (8, 8, 3)), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        text = (renamed or {}).get(given, given)
        members += [(f"{number:06d}.png", buffer.getvalue()), (f"{number:06d}.txt", text.encode())]
    return python_tar(members)


def started(number: int, parent: str | None = None, version: int = 1, **more: Any) -> Night:
    """The record of a night that has just started."""
    return Night(night_name(number), number, parent, version, id=f"id-{number}", **more)


class Nights(Bench):
    """A catalogue in memory, versions of it, and labels over it."""

    def version(self, **data: Any) -> Catalogue:
        return self.index(**data).catalogue

    def labels(self, catalogue: Catalogue) -> Manifest:
        return start_labels(catalogue, self.storage, 10.0)

    def table(self, manifest: Manifest) -> LabelTable:
        return LabelTable.restore(manifest, self.folder / f"table-{len(list(self.folder.iterdir()))}")

    @property
    def nights(self) -> NightFiles:
        return NightFiles(self.storage)


def pins_of(classes: dict[int, str]) -> pa.Table:
    """Pins of rows whose samples are named by six digits, as those of `samples` are."""
    ids = [f"{row:06d}" for row in classes]
    columns = {"row": list(classes), "sample_id": ids, "sample_key": [sample_key(name) for name in ids]}
    columns |= {"class": list(classes.values()), "by": ["ada"] * len(ids)}
    return pa.table({**columns, "at": [now()] * len(ids), "note": [None] * len(ids)}, schema=PINS)
