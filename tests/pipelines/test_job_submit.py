"""Jobs submitted to a running cluster with `ray job submit`."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow.parquet as pq
import pytest
from tar_making import python_tar
from training_runs import ROOT, TinyData, sample, started

from benchmarks.processes import family
from pencil_scale.nights.record import NightFiles
from pencil_scale.subset.files import read_words

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

Submitted: TypeAlias = "subprocess.CompletedProcess[str]"
RAY = str(Path(sys.executable).parent / "ray")
ONE_EPOCH = ["stages.backbone.epochs=1", "stages.pencil.epochs=0", "stages.finetune.epochs=0"]
SHORT_NIGHT = [*ONE_EPOCH, "workers.count=1", "workers.in_process=true", "report.mlflow=false"]
SHORT_NIGHT += ["nightly.max_class_ratio=2"]


def free_ports(number: int) -> list[int]:
    """Find unused ports."""
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head and one worker node, started by the script for users."""
    port, dashboard = free_ports(2)
    words = [sys.executable, "cluster/local-cluster", "--workers", "1", "--cpus", "2"]
    words += ["--port", str(port), "--dashboard-port", str(dashboard), "--stop-wait-s", "60"]
    with started(words, tmp_path_factory.mktemp("cluster") / "cluster.log") as cluster:
        cluster.wait_for("ready;")
        nodes = family(cluster.process.pid)
        yield f"http://127.0.0.1:{dashboard}"
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.wait() == 0, cluster.output
        assert not [pid for pid in nodes if is_alive(pid)], "it left nodes behind"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        "Z" not in subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True).stdout.decode()
    )


def submit(address: str, job: str, *words: str) -> Submitted:
    """`ray job submit --working-dir . -- python -m JOB ...`, as in the README."""
    command = [RAY, "job", "submit", "--address", address, "--working-dir", ".", "--"]
    command += ["python", "-m", job, *words]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=400)


def printed(found: Submitted) -> str:
    """What the job itself printed, without the lines that Ray adds."""
    job = found.stdout.partition("Running entrypoint for job")[2].partition("\n")[2]
    return "\n".join(line for line in job.splitlines() if " cli.py:" not in line)


@pytest.fixture(scope="module")
def data(address: str, tmp_path_factory: pytest.TempPathFactory) -> TinyData:
    """Shards on which a submitted job has trained."""
    data = TinyData.make(tmp_path_factory.mktemp("tiny"))
    words = [str(data.folder / "config.yaml"), *ONE_EPOCH, "storage.retry_s=30"]
    first = submit(address, "pencil_scale.train", *words)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "run tiny starts, on catalogue version 1" in first.stdout
    return data


@pytest.fixture(scope="module")
def jobs(address: str, data: TinyData) -> dict[str, Submitted]:
    """Independent jobs, submitted at once because most of their time is start-up."""
    config = str(data.folder / "config.yaml")
    typed = {
        "train": ["pencil_scale.train", config, *ONE_EPOCH],
        "subset": ["pipelines.balance_subset", config, "subset.per_class=20"],
        "export": ["pipelines.export_labels", config, "export.corrected_shards=true"],
        "report": ["pipelines.review_report", config, "report.mlflow=false"],
        "misplaced": ["pipelines.reclean_nightly", "configs/demo.yaml"],
    }
    with ThreadPoolExecutor(len(typed)) as pool:
        return dict(zip(typed, pool.map(lambda words: submit(address, *words), typed.values()), strict=True))


def test_a_submitted_job_trains_on_the_cluster_and_a_second_one_is_refused(
    data: TinyData, jobs: dict[str, Submitted]
) -> None:
    assert data.summary()["coverage"] == [1.0]
    assert (
        data.storage / "mlflow.db"
    ).exists()  # it would be missing if it were in the job's temporary folder
    assert jobs["train"].returncode != 0
    assert "error: run tiny is finished" in jobs["train"].stdout


def test_the_other_submitted_jobs_leave_their_output_and_a_readable_log(
    data: TinyData, jobs: dict[str, Submitted]
) -> None:
    for name in ("subset", "export", "report"):
        assert jobs[name].returncode == 0, jobs[name].stdout + jobs[name].stderr
        assert not {"\x1b", "\r"} & set(printed(jobs[name])), printed(jobs[name])
    words = read_words(str(data.storage / "subsets" / "balanced"))
    assert words is not None
    assert words.class_counts == (20, 20, 20, 20)
    assert f"to train on it: data.subset={data.storage}/subsets/balanced" in printed(jobs["subset"])
    assert len(pq.read_table(data.storage / "exports" / "tiny" / "table")) == data.num_samples
    assert "correcting shards: 2 of 2" in printed(jobs["export"])  # two tasks, on the cluster
    assert "</html>" in (data.storage / "reports" / "tiny.html").read_text()
    assert f"page: {data.storage}/reports/tiny.html" in printed(jobs["report"])


def test_a_job_that_would_write_to_its_temporary_folder_is_refused(
    jobs: dict[str, Submitted],
) -> None:
    assert jobs["misplaced"].returncode != 0
    output = printed(jobs["misplaced"])
    assert "error: run.storage: runs/demo is in the folder of this job" in output
    assert "Traceback" not in output


def test_a_submitted_night_that_is_held_is_a_failed_job(
    address: str, data: TinyData, jobs: dict[str, Submitted]
) -> None:
    chance = np.random.default_rng(5)
    pictures = [sample(number, chance)[0] for number in range(1000, 1080)]
    poisoned = [(name.replace(".png", ".cls"), b"0") for name, _ in pictures]
    (data.folder / "002.tar").write_bytes(python_tar(sorted(pictures + poisoned)))
    night = submit(address, "pipelines.reclean_nightly", str(data.folder / "config.yaml"), *SHORT_NIGHT)
    assert night.returncode != 0
    assert "exit code 3" in night.stdout
    assert "HELD: the class balance jumped" in printed(night)
    assert not {"\x1b", "\r"} & set(printed(night)), printed(night)
    nights = NightFiles(str(data.storage))
    current = nights.current()
    assert current is not None
    assert current.name == "tiny"  # the run that the first night continues
    assert nights.must_find("night-0001").status == "held"
