"""Tiny runs for tests: shards made on the spot, trained by the real command in a separate process.

data = TinyData.make(tmp_path)                     # shards, catalogue, config
with data.start("workers.count=2") as command:     # python -m pencil_scale.train CONFIG ...
    command.wait_for("pencil    epoch 3/6")        # a line it prints
    command.kill_worker()                          # SIGKILL, one of its own training processes
    assert command.wait() == 0
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import mlflow
import numpy as np
import numpy.typing as npt
from mlflow_server import empty_database
from PIL import Image
from tar_making import python_tar

from benchmarks.processes import family
from pencil_scale.config.loader import load_config
from pencil_scale.labels.columns import WATCHED
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.train.checkpoints import SNAPSHOT, Progress
from pipelines import index_shards

ROOT = Path(__file__).parent.parent
COLOURS = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200], [180, 180, 60]])
EPOCHS = {"backbone": 2, "pencil": 2, "finetune": 2}
NUM_EPOCHS = sum(EPOCHS.values())
SPOILT = 100  # the number of a sample with an intact header and damaged pixels
PATIENCE_S = 400  # rarely needed; the machine may be very busy
CONFIG = """
run: {{name: tiny, storage: {storage}, seed: 1}}
data: {{shards: "{folder}/*.tar", classes: {folder}/classes.txt, exclude: {folder}/exclude.txt,
       keep_mb: 0}}  # every epoch reads, so that a fault can hit it
images: {{crop: 8, pad: 1}}
model: {{backbone: small_convnet}}
optimizer: {{tuned_batch: 32, batch_per_worker: 16}}
stages:
  backbone: {{epochs: 2, rate: 0.02}}
  pencil: {{epochs: 2, rate: 0.02, alpha: 0.1, beta: 0.4, lambda: 400, tuned_classes: 4,
           allow_fast_labels: true}}
  finetune: {{epochs: 2, rate: 0.02, drop_after: [1]}}
workers: {{count: 2, cpus: 0.5, timeout_s: 60, scratch: {folder}/scratch, max_failures: 5}}
checkpoint: {{every_steps: 3, keep: 2}}
evidence: {{watched: 0, planted: 0}}
"""


@dataclass(frozen=True)
class TinyData:
    """Some hundred small pictures of four colours, a quarter of them with a wrong class, one damaged."""

    folder: Path
    num_samples: int

    @classmethod
    def make(cls, folder: Path, num_samples: int = 480) -> "TinyData":
        """Write two shards and their catalogue, and a config to train on them."""
        chance = np.random.default_rng(7)
        members = [sample(number, chance) for number in range(num_samples)]
        for shard, start in enumerate((0, num_samples // 2)):
            some = members[start : start + num_samples // 2]
            (folder / f"{shard:03d}.tar").write_bytes(python_tar([member for one in some for member in one]))
        (folder / "classes.txt").write_text("red\ngreen\nblue\nyellow\n")
        (folder / "exclude.txt").write_text("")
        (folder / "scratch").mkdir()
        (folder / "config.yaml").write_text(CONFIG.format(folder=folder, storage=folder / "lake"))
        data = cls(folder, num_samples)
        files, path = data._index()
        files.get(path, str(folder / "lake" / "catalogue"), recursive=True)
        (folder / "lake" / "mlflow.db").write_bytes(empty_database())
        return data

    def _index(self, *overrides: str) -> tuple[Any, str]:
        """Index in memory, which needs no cluster; return the filesystem and the folder of the catalogue."""
        memory = f"memory://{uuid.uuid4().hex}"
        index_shards.run(load_config(self.folder / "config.yaml", [f"run.storage={memory}", *overrides]))
        files, path = fsspec.core.url_to_fs(memory)
        return files, f"{path}/catalogue"

    def put_into(self, files: Any, bucket: str) -> list[str]:
        """Put shards and catalogue on an object store; return the settings of a run there."""
        for shard in self.folder.glob("*.tar"):
            files.put_file(str(shard), f"{bucket}/shards/{shard.name}")
        shards = f"data.shards=s3://{bucket}/shards/*.tar"
        made, folder = self._index(shards)
        for name in made.find(folder):
            files.pipe_file(f"{bucket}/tiny/catalogue{name.removeprefix(folder)}", made.cat_file(name))
        return [f"run.storage=s3://{bucket}/tiny", shards]

    def take_down(self, number: int) -> None:
        """Add a sample to the exclude list, and index again."""
        (self.folder / "exclude.txt").write_text(f"{number:05d}\n")
        index_shards.run(load_config(self.folder / "config.yaml"))

    @property
    def storage(self) -> Path:
        return self.folder / "lake"

    def command(self, *overrides: str) -> list[str]:
        """The command a person would type."""
        return [sys.executable, "-m", "pencil_scale.train", str(self.folder / "config.yaml"), *overrides]

    @contextmanager
    def start(self, *overrides: str, env: Mapping[str, str] | None = None) -> Iterator["Command"]:
        """Start the command; whatever is left of it at the end is killed."""
        with started(self.command(*overrides), self.folder / f"{uuid.uuid4().hex}.log", env) as command:
            yield command

    def summary(self, name: str = "tiny") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.storage / "runs" / name / "summary.json").read_text())
        return found

    def record(self, name: str = "tiny") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.storage / "runs" / name / "run.json").read_text())
        return found

    def labels(self, name: str = "tiny") -> Manifest:
        """The label table as it was published."""
        return Manifest.load(self.storage / "labels" / "published" / f"{name}.json")

    def epochs_of_rows(self, name: str = "tiny") -> npt.NDArray[np.int32]:
        """The ledger: the run's last epoch in which each row was trained."""
        manifest = self.labels(name)
        return PublishedLabels(manifest).last_epoch() - manifest.first_epoch

    def has_checkpoint(self, all_steps: int, name: str = "tiny") -> bool:
        """Whether a run would resume from this checkpoint, or from a later one, if it were killed now."""
        lists = [path.read_text() for path in (self.storage / "checkpoints" / name).glob(f"*/{SNAPSHOT}")]
        return any(int(steps) >= all_steps for steps in re.findall(r"checkpoint-(\d{9})", "".join(lists)))

    def scratch_folders(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "scratch").iterdir())


def sample(number: int, chance: np.random.Generator) -> list[tuple[str, bytes]]:
    """A picture and its class, which is wrong in a quarter of all cases."""
    true = number % len(COLOURS)
    given = chance.integers(len(COLOURS)) if chance.random() < 0.33 else true
    pixels = np.clip(COLOURS[true] + chance.normal(0, 25, (8, 8, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    data = buffer.getvalue()
    if number == SPOILT:
        data = data[:41] + bytes(40) + data[81:]
    return [(f"{number:05d}.png", data), (f"{number:05d}.cls", b"%d" % given)]


def starts(output: str) -> list[tuple[int, Progress]]:
    """Where each group of workers started, and how many there were."""
    found = re.findall(r"training with (\d+) workers? from (?:the start|epoch (\d+), step (\d+))", output)
    return [(int(world), Progress(int(epoch or 1) - 1, int(step or 0))) for world, epoch, step in found]


def require_complete(data: TinyData, name: str = "tiny", but: int | None = None) -> None:
    """Every row but one was trained on once per epoch or watched; the ledger refuses to count a row twice."""
    summary, labels = data.summary(name), PublishedLabels(data.labels(name)).rows(range(data.num_samples))
    assert summary["coverage"] == [1.0] * NUM_EPOCHS
    rows = np.setdiff1d(np.arange(data.num_samples), [] if but is None else [but])
    watched = labels.role[rows] == WATCHED
    assert (summary["samples"], summary["watched"]) == (np.count_nonzero(~watched), np.count_nonzero(watched))
    assert (data.epochs_of_rows(name)[rows[~watched]] == NUM_EPOCHS - 1).all()
    assert (labels.last_epoch[rows[watched]] == 0).all()
    assert not np.isnan(labels.predicted_log_p[np.setdiff1d(rows, [SPOILT])]).any()
    assert data.record(name)["status"] == "finished"
    assert data.scratch_folders() == []


def mlflow_runs(data: TinyData) -> tuple[mlflow.MlflowClient, list[Any]]:
    client = mlflow.MlflowClient(f"sqlite:///{data.storage}/mlflow.db")
    return client, client.search_runs([client.get_experiment_by_name("lake").experiment_id])


class Command:
    """A running command: what it prints, and the processes it started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, words: str, times: int = 1) -> None:
        """Wait until these words were printed this many times."""
        self.wait_until(lambda: len(re.findall(words, self.output)) >= times, f"words {words!r}")

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for something that the command does while it runs."""
        until = time.monotonic() + PATIENCE_S
        while not reached():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < until, f"no {what}:\n{self.output}"
            time.sleep(0.02)

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE_S} s:\n{self.output}") from None

    def workers(self) -> list[int]:
        """The training processes, by their process ids."""
        return [pid for pid, words in family(self.process.pid).items() if "RayTrainWorker" in words]

    def kill_worker(self) -> None:
        """SIGKILL one training process."""
        os.kill(self.workers()[-1], signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM to the command and all of its process group, as `timeout` and schedulers send it."""
        os.killpg(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the command itself; the processes it started have to notice that."""
        self.process.kill()
        self.process.wait()


@contextmanager
def started(words: list[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[Command]:
    """Start a command with its output in a file; kill what is left of it at the end."""
    # Ray's sockets need short paths, and no other cluster may be joined.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as short:
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment = {**inherited, "RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled", **(env or {})}
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, process_group=0
            )
        try:
            yield Command(process, log)
        finally:
            for pid in family(process.pid) if process.poll() is None else ():
                kill_quietly(pid)
            process.wait()


def kill_quietly(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
