"""Without a server: where a run is tracked, what is sent to MLflow, and which servers are refused."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from mlflow.entities import Metric, Run, RunData, RunInfo
from mlflow_server import config_of, free_port, journal_of, tracker_of, wait_for

from pencil_scale.storage.errors import PencilError
from pencil_scale.tracking.journal import Entry, Journal
from pencil_scale.tracking.receiver import Receiver, check_server
from pencil_scale.tracking.tracker import find_server, git_commit

pytestmark = pytest.mark.usefixtures("mlflow_of_tests")


def answering(text: str) -> HTTPServer:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


@pytest.mark.parametrize("version", ["2.22.0", "4.0.0", "3.16.9"])
def test_a_server_outside_the_range_stops_the_job(version: str) -> None:
    server = answering(version)
    uri = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(PencilError, match=rf"MLflow server {uri} {version} found; .*>=3.17,<4 is supported"):
        check_server(uri)
    server.shutdown()


def test_an_unreachable_server_is_logged_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    check_server(f"http://me:hush-hush@127.0.0.1:{free_port()}")
    assert "is unreachable, or did not report its version" in caplog.text
    assert "hush" not in caplog.records[-1].getMessage()


def test_a_database_is_asked_for_no_version(caplog: pytest.LogCaptureFixture) -> None:
    check_server("sqlite:///mlflow.db")
    assert not caplog.records


def test_remote_storage_without_a_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = "run.storage=memory://lake/demo"
    with pytest.raises(
        PencilError, match=r"memory://lake/demo is not a local folder.*tracking\.uri or MLFLOW"
    ):
        find_server(config_of(tmp_path, remote))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert find_server(config_of(tmp_path, remote)) == ("http://tracking:5000", None)
    assert find_server(config_of(tmp_path, remote, "tracking.uri=https://other"))[0] == "https://other"


def test_a_folder_for_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match=r"tracking\.uri: './mlruns' is neither a server nor a database"):
        find_server(config_of(tmp_path, "tracking.uri=./mlruns"))


def test_no_password_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "hush-hush")
    shards = "data.shards=s3://key:hush-hush@crawl/x.tar"
    tracker = tracker_of(tmp_path, None, "tracking.uri=http://me:${PASSWORD}@127.0.0.1:1", shards)
    assert not tracker.finish(wait_s=0)
    written = b"".join(path.read_bytes() for path in journal_of(tmp_path).rglob("*") if path.is_file())
    assert b"data.shards" in written
    assert b"hush" not in written


def test_the_commit_is_absent_outside_a_checkout_and_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_commit(str(tmp_path)) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None


def test_training_never_waits_for_an_unreachable_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"http://me:hush-hush@127.0.0.1:{free_port()}"
    tracker = tracker_of(tmp_path, None, f"tracking.uri={uri}")
    for step in range(200):
        tracker.log_step("backbone", step, {"loss": 1.0})
    wait_for(lambda: "is unreachable" in caplog.text)
    assert not tracker.finish(wait_s=0.1)
    assert tracker.state()["runs"] == {}
    assert "hush" not in caplog.text
    kept = Journal(str(journal_of(tmp_path))).first() or []
    assert len(kept) == 205  # start and config, start and steps, two ends


def values(stage: str, step: int, **values: float) -> Entry:
    return Entry("", "metrics", {"stage": stage, "step": step, "time": 1000 + step, "values": values})


def test_a_step_that_is_reported_twice_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str, int]] = []

    def search_runs(experiments: list[str], text: str, view: int) -> list[Run]:
        stage = "a" if "'a'" in text else "b"
        info = RunInfo(stage, "7", "me", "RUNNING", 0, None, "active")
        return [Run(info, RunData(metrics=[Metric("loss", 3.0, 1001, 1)] if stage == "a" else []))]

    def log_batch(run_id: str, metrics: list[Metric]) -> None:
        sent.extend((run_id, metric.key, metric.step) for metric in metrics)

    receiver = Receiver("http://tracking", "ab12", "demo")
    experiment = SimpleNamespace(lifecycle_stage="active", experiment_id="7")
    client = SimpleNamespace(
        search_runs=search_runs, log_batch=log_batch, get_experiment_by_name=lambda _: experiment
    )
    monkeypatch.setitem(vars(receiver), "_client", client)
    # MLflow has step 1 of the loss already; step 2 is repeated within the journal.
    entries = [
        values("a", 1, loss=3.0, rate=0.1),
        values("a", 2, loss=2.0),
        values("a", 2, loss=2.5, rate=0.1),
    ]
    assert receiver([*entries, values("b", 1, loss=9.0)]) == 3
    assert receiver([values("b", 1, loss=9.0)]) == 1
    assert receiver([values("b", 1, loss=8.0)]) == 1
    assert sent == [("a", "rate", 1), ("a", "loss", 2), ("a", "rate", 2), ("b", "loss", 1)]
