"""Jobs submitted to a cluster as documented: data on object storage, its keys in the variables of the job."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow.parquet as pq
import pytest
import s3fs
from documented_job import documented
from moto.server import ThreadedMotoServer
from tar_making import python_tar
from training_runs import ROOT, TinyData, sample, started

from benchmarks.processes import family

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

Submitted: TypeAlias = "subprocess.CompletedProcess[str]"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
ONE_EPOCH = ["stages.backbone.epochs=1", "stages.pencil.epochs=0", "stages.finetune.epochs=0"]
SHORT_NIGHT = [*ONE_EPOCH, "workers.in_process=true", "report.mlflow=false"]
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


@dataclass(frozen=True)
class Lake:
    """Shards and catalogue of tiny runs on an object store; only submitted jobs get its address."""

    data: TinyData
    address: str  # of the cluster
    files: s3fs.S3FileSystem
    variables: dict[str, str]
    settings: list[str]

    @classmethod
    def make(cls, data: TinyData, address: str, endpoint: str) -> "Lake":
        given = {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        given |= {"AWS_ACCESS_KEY_ID": "testing-key", "AWS_SECRET_ACCESS_KEY": "testing-secret"}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
            files.mkdir("lake")
            words = data.put_into(files, "lake")
        s3fs.S3FileSystem.clear_instance_cache()
        return cls(data, address, files, given, words)

    def submit(self, job: str, *words: str, without: Collection[str] = ()) -> Submitted:
        """`ray job submit` as documented, with the variables of the object store."""
        given = {name: value for name, value in self.variables.items() if name not in without}
        ray, *typed = documented(given, job, *words)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        environment |= {"RAY_API_SERVER_ADDRESS": self.address, "RAY_AUTH_MODE": "disabled", "NO_COLOR": "1"}
        command = [str(Path(sys.executable).parent / ray), *typed]
        return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=400)

    @property
    def tiny(self) -> list[str]:
        """The config, and the settings that are different on the object store."""
        words = [str(self.data.folder / "config.yaml"), *self.settings, "storage.retry_s=30"]
        words += ["workers.count=1", "gate.hold=false"]
        return [*words, f"tracking.uri=sqlite:///{self.data.folder}/mlflow.db"]

    def json(self, path: str) -> Any:
        return json.loads(self.files.cat_file(f"lake/tiny/{path}"))


def printed(found: Submitted) -> str:
    """What the job itself printed, without the lines that Ray adds."""
    job = found.stdout.partition("Running entrypoint for job")[2].partition("\n")[2]
    return "\n".join(line for line in job.splitlines() if " cli.py:" not in line)


@pytest.fixture(scope="module")
def lake(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """An object store with a run that a submitted job has trained."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"))
    lake = Lake.make(TinyData.make(tmp_path_factory.mktemp("tiny")), address, endpoint)
    first = lake.submit("pencil_scale.train", *lake.tiny, *ONE_EPOCH)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "run tiny starts, on catalogue version 1" in first.stdout
    yield lake
    server.stop()


@pytest.fixture(scope="module")
def jobs(lake: Lake) -> dict[str, Submitted]:
    """Independent jobs, submitted at once because most of their time is start-up."""
    train = ["pencil_scale.train", *lake.tiny, *ONE_EPOCH]
    typed = {
        "train": train,
        "subset": ["pipelines.balance_subset", *lake.tiny, "subset.per_class=20"],
        "export": ["pipelines.export_labels", *lake.tiny, "export.corrected_shards=true"],
        "report": ["pipelines.review_report", *lake.tiny, "report.mlflow=false"],
        "misplaced": ["pipelines.reclean_nightly", "configs/demo.yaml"],
    }
    with ThreadPoolExecutor(len(typed) + 1) as pool:
        keyless = pool.submit(lake.submit, *train, "run.name=other", without=KEYS)
        found = dict(zip(typed, pool.map(lambda words: lake.submit(*words), typed.values()), strict=True))
        return {**found, "keyless": keyless.result()}


def test_a_submitted_job_trains_on_the_cluster_and_a_second_one_is_refused(
    lake: Lake, jobs: dict[str, Submitted]
) -> None:
    assert lake.json("runs/tiny/summary.json")["coverage"] == [1.0]
    assert jobs["train"].returncode != 0
    assert "error: run tiny is finished" in jobs["train"].stdout


def test_a_job_without_the_keys_of_the_store_is_refused_in_one_line(jobs: dict[str, Submitted]) -> None:
    assert jobs["keyless"].returncode != 0
    (line,) = set(re.findall("^error: .*", printed(jobs["keyless"]), re.MULTILINE))  # Ray repeats it
    assert re.match(r"error: s3://lake/\S+: no access ", line)


def test_the_other_submitted_jobs_leave_their_output_and_a_readable_log(
    lake: Lake, jobs: dict[str, Submitted]
) -> None:
    for name in ("subset", "export", "report"):
        assert jobs[name].returncode == 0, jobs[name].stdout + jobs[name].stderr
        assert not {"\x1b", "\r"} & set(printed(jobs[name])), printed(jobs[name])
    assert lake.json("subsets/balanced/manifest.json")["class_counts"] == [20, 20, 20, 20]
    assert "to train on it: data.subset=s3://lake/tiny/subsets/balanced" in printed(jobs["subset"])
    table = pq.read_table("lake/tiny/exports/tiny/table", filesystem=lake.files)
    assert len(table) == lake.data.num_samples
    assert "correcting shards: 2 of 2" in printed(jobs["export"])  # two tasks, on the cluster
    assert b"</html>" in lake.files.cat_file("lake/tiny/reports/tiny.html")
    assert "page: s3://lake/tiny/reports/tiny.html" in printed(jobs["report"])


def test_a_job_that_would_write_to_its_temporary_folder_is_refused(
    jobs: dict[str, Submitted],
) -> None:
    assert jobs["misplaced"].returncode != 0
    output = printed(jobs["misplaced"])
    assert "error: run.storage: runs/demo is in the folder of this job" in output
    assert "Traceback" not in output


def test_a_submitted_night_that_is_held_is_a_failed_job(lake: Lake, jobs: dict[str, Submitted]) -> None:
    chance = np.random.default_rng(5)
    pictures = [sample(number, chance)[0] for number in range(1000, 1080)]
    poisoned = [(name.replace(".png", ".cls"), b"0") for name, _ in pictures]
    lake.files.pipe_file("lake/shards/002.tar", python_tar(sorted(pictures + poisoned)))
    night = lake.submit("pipelines.reclean_nightly", *lake.tiny, *SHORT_NIGHT)
    assert night.returncode != 0
    assert "exit code 3" in night.stdout
    assert "HELD: the class balance jumped" in printed(night)
    assert not {"\x1b", "\r"} & set(printed(night)), printed(night)
    assert lake.json("nights/night-0001/night.json")["status"] == "held"
    assert lake.json("nights/CURRENT")["night"] == "tiny"  # the run that the first night continues
