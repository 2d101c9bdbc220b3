"""The main job as people submit it: to a head node that stands already, with `ray job submit`."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_runs import ROOT, TinyData, descendants, started

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

RAY = str(Path(sys.executable).parent / "ray")
ONE_EPOCH = ["stages.backbone.epochs=1", "stages.pencil.epochs=0", "stages.finetune.epochs=0"]


def free_ports(number: int) -> list[int]:
    """Ports nobody listens on."""
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head and one worker node, by the script that is there for people."""
    port, dashboard = free_ports(2)
    words = [sys.executable, "cluster/local-cluster", "--workers", "1", "--cpus", "2"]
    words += ["--port", str(port), "--dashboard-port", str(dashboard), "--stop-wait-s", "60"]
    with started(words, tmp_path_factory.mktemp("cluster") / "cluster.log") as cluster:
        cluster.wait_for("ready;")
        below = [pid for pid, _ in descendants(cluster.process.pid)]
        yield f"http://127.0.0.1:{dashboard}"
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.wait() == 0, cluster.output
        assert not [pid for pid in below if is_alive(pid)], "it left nodes behind"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        "Z" not in subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True).stdout.decode()
    )


def submit(address: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """`ray job submit --working-dir . -- python -m pencil_scale.train ...`, as the README has it."""
    command = [RAY, "job", "submit", "--address", address, "--working-dir", ".", "--"]
    command += ["python", "-m", "pencil_scale.train", *words]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=400)


def test_a_submitted_job_trains_on_the_cluster_and_is_refused_the_second_time(
    address: str, tmp_path: Path
) -> None:
    data = TinyData.make(tmp_path)
    config = str(tmp_path / "config.yaml")
    first = submit(address, config, *ONE_EPOCH)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "run tiny begins, on catalogue version 1" in first.stdout
    assert data.summary()["coverage"] == [1.0]
    assert (data.storage / "mlflow.db").exists()  # it fails to appear where a job's folder is taken away
    again = submit(address, config, *ONE_EPOCH)
    assert again.returncode != 0
    assert "error: run tiny is finished" in again.stdout


def test_a_submitted_job_with_a_broken_config_fails_and_says_what_is_wrong(address: str) -> None:
    found = submit(address, "configs/demo.yaml", "stages.pencil.epoch=3")
    assert found.returncode != 0
    assert "stages.pencil.epoch" in found.stdout
    assert "Traceback" not in found.stdout.split("stages.pencil.epoch")[0]
