"""A real MLflow server, and runs that report to it: what the tests of tracking share."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path

from mlflow import MlflowClient

from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.tracking.tracker import Tracker


@cache
def empty_database() -> bytes:
    """A new database of MLflow: making one takes more of a processor than many a tiny run."""
    with tempfile.TemporaryDirectory() as folder:
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
        return Path(folder, "mlflow.db").read_bytes()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """A real `mlflow server` that can be frozen, killed and started again on the same store."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"http://127.0.0.1:{free_port()}"
        self.artifacts = folder / "artifacts"
        self._store = f"sqlite:///{folder}/mlflow.db"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--port", self.uri.rpartition(":")[2]]
        store = ["--backend-store-uri", self._store, "--workers", "1"]
        artifacts = ["--artifacts-destination", str(self.artifacts)]
        # Its eight processes for background jobs have nothing to do here, and take long to start.
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._process = subprocess.Popen(
            [*command, *store, *artifacts], env=environment, start_new_session=True
        )
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.uri}/version", timeout=1)
                return
            except OSError:
                time.sleep(0.25)
        self.kill()
        raise AssertionError("the MLflow server did not start")

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


NAMES = [f"class {number}" for number in range(10)]


def config_of(folder: Path, *overrides: str) -> Config:
    text = f"""
run: {{name: demo, storage: "{folder}/store", seed: 3}}
data: {{shards: x.tar, classes: classes.txt}}
images: {{crop: 8}}
model: {{backbone: small_convnet}}
optimizer: {{tuned_batch: 32, batch_per_worker: 32}}
stages:
  backbone: {{epochs: 1, rate: 0.1}}
  pencil: {{epochs: 1, rate: 0.1, lambda: 100, tuned_classes: 10}}
  finetune: {{epochs: 1, rate: 0.1}}
"""
    (folder / "run.yaml").write_text(text)
    return load_config(folder / "run.yaml", list(overrides))


def tracker_of(folder: Path, server: Server | None = None, *overrides: str) -> Tracker:
    """Track the run 'a1b2' of this folder, from its start or again."""
    where = [f"tracking.uri={server.uri}", f"tracking.experiment={folder.name}"] if server else []
    config = config_of(folder, *where, *overrides)
    return Tracker(config, catalogue_version=7, run_id="a1b2", every_s=0.1)


def journal_of(folder: Path) -> Path:
    """Where the journal of that run is."""
    return folder / "store" / "runs" / "demo" / "journal" / "a1b2"


def steps_of(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, key)]


def wait_for(true: Callable[[], bool]) -> None:
    for _ in range(1200):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("it never came true")
