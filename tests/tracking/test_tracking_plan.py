"""Before and without a server: where a run is tracked, what is tracked, and which servers are refused."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from mlflow_server import NAMES, free_port, plan_of, tracker_of, wait_for

from pencil_scale.storage.errors import PencilError
from pencil_scale.tracking.receiver import check_server
from pencil_scale.tracking.tracker import git_commit

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
    assert "did not report its version" in caplog.text
    assert "hush" not in caplog.records[-1].getMessage()


def test_a_database_is_asked_for_no_version(caplog: pytest.LogCaptureFixture) -> None:
    check_server("sqlite:///mlflow.db")
    assert not caplog.records


def test_remote_storage_without_a_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = "run.storage=memory://lake/demo"
    with pytest.raises(PencilError, match=r"memory://lake/demo is no local folder.*tracking\.uri or MLFLOW"):
        plan_of(tmp_path, None, remote)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    plan = plan_of(tmp_path, None, remote)
    assert (plan.uri, plan.artifacts) == ("http://tracking:5000", None)
    assert plan_of(tmp_path, None, remote, "tracking.uri=https://other").uri == "https://other"


def test_a_folder_is_no_place_for_runs(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match=r"tracking\.uri: './mlruns' is neither a server nor a database"):
        plan_of(tmp_path, None, "tracking.uri=./mlruns")


def test_no_password_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "hush-hush")
    plan = plan_of(
        tmp_path, None, "tracking.uri=https://me:${PASSWORD}@tracking", "run.storage=s3://k:hush-hush@lake/x"
    )
    assert plan.uri == "https://me:hush-hush@tracking"
    assert "hush" not in json.dumps([plan.params, plan.tags, plan.artifacts, plan.experiment])


def test_the_commit_is_absent_outside_a_checkout_and_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_commit(str(tmp_path)) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None


@pytest.mark.parametrize("alias", ["latest", "Latest", "v3", "two words", ""])
def test_an_alias_that_mlflow_keeps_for_itself_is_refused_at_once(alias: str, tmp_path: Path) -> None:
    tracker = tracker_of(plan_of(tmp_path, None, "tracking.uri=http://127.0.0.1:1"))
    with pytest.raises(PencilError, match="MLflow keeps for itself"):
        tracker.log_model("small_convnet", {}, NAMES, 8, alias=alias)
    assert tracker.finish(wait_s=0) == 3  # start, config, end


def test_training_never_waits_for_an_unreachable_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"http://me:hush-hush@127.0.0.1:{free_port()}"
    tracker = tracker_of(plan_of(tmp_path, None, f"tracking.uri={uri}"))
    for step in range(200):
        tracker.log_step("backbone", step, {"loss": 1.0})
    wait_for(lambda: "is unreachable" in caplog.text)
    assert tracker.finish(wait_s=0.1) == 205  # start and config, start and steps, two ends
    assert tracker.state()["runs"] == {}
    assert "hush" not in caplog.text
