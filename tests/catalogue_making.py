"""Shards and configs for tests of the catalogue; storage in memory, so no cluster is needed."""

import io
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tar_making import python_tar

from pencil_scale.config.loader import load_config
from pipelines.index_shards import Summary, run

CLASSES = ["ant", "bee", "cat"]
REST = """
model: {backbone: small_convnet}
optimizer: {tuned_batch: 64, batch_per_worker: 32}
stages:
  backbone: {epochs: 1, rate: 0.05}
  pencil: {epochs: 1, rate: 0.05, alpha: 0.1, beta: 0.4, lambda: 1200, tuned_classes: 3,
           allow_fast_labels: true}
  finetune: {epochs: 1, rate: 0.05}
evidence: {watched: 0, planted: 0}
"""


def image(number: int, form: str = "PNG", mode: str = "RGB", size: int = 4) -> bytes:
    """A small real image, different for every number."""
    picture = Image.new("RGB", (size, size), (number % 256, number // 256 % 256, 7)).convert(mode)
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return buffer.getvalue()


def sample(number: int, label: int | None = None, key: str | None = None) -> list[tuple[str, bytes]]:
    """The members of one intact sample."""
    key = f"{number:06d}" if key is None else key
    label = number % 3 if label is None else label
    fields = json.dumps({"url": f"https://x/{number}", "name": CLASSES[label % 3]}).encode()
    return [(f"{key}.png", image(number)), (f"{key}.cls", b"%d" % label), (f"{key}.json", fields)]


def samples(numbers: Sequence[int]) -> list[tuple[str, bytes]]:
    return [member for number in numbers for member in sample(number)]


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.write_bytes(python_tar(members))
    return path


class Bench:
    """A folder of shards and a catalogue in memory, indexed by the job itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = f"memory://{uuid.uuid4().hex}"
        (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")

    def shard(self, name: str, members: list[tuple[str, bytes]]) -> Path:
        return write_shard(self.folder / name, members)

    def index(self, **data: Any) -> Summary:
        """Run the job over every `*.tar` of the folder, or over what `shards` says."""
        keys = {"shards": f"{self.folder}/*.tar", "classes": f"{self.folder}/classes.txt", **data}
        keys = {"max_damaged_share": 1.0, **keys}
        config = self.folder / "config.yaml"
        head = {"run": {"name": "t", "storage": self.storage, "seed": 1}, "data": keys}
        config.write_text(_yaml(head) + REST)
        return run(load_config(config))

    def rows(self, summary: Summary) -> list[dict[str, Any]]:
        """All rows of the catalogue."""
        return summary.catalogue.read(0, summary.catalogue.num_rows).to_pylist()


def _yaml(head: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in head.items())


def accounted_for(summary: Summary) -> int:
    """Count the samples in rows, in duplicates of rows, and in the damage table."""
    manifest = summary.catalogue.manifest
    vanished = manifest["status"].get("vanished", 0)
    return manifest["num_rows"] - vanished + manifest["num_duplicates"] + manifest["num_lost_samples"]
