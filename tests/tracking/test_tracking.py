"""What a real MLflow server shows of a run, even if the server or the job stopped in between."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
import torch
from catalogue_making import Bench, samples
from mlflow import MlflowClient
from mlflow_server import NAMES, Server, config_of, journal_of, steps_of, tracker_of, wait_for

from pencil_scale.config.loader import describe
from pencil_scale.method.backbones import build_backbone
from pencil_scale.tracking.receiver import RESUMABLE, check_server
from pencil_scale.tracking.tracker import Tracker, git_commit

pytestmark = pytest.mark.usefixtures("mlflow_of_tests")


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    yield server
    server.kill()


@pytest.mark.slow
def test_the_installed_version_of_the_server_is_accepted(
    real_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    check_server(real_server.uri)
    assert not caplog.records


@pytest.mark.slow
def test_a_run_is_a_parent_with_a_child_per_stage_and_reads_back_completely(
    real_server: Server, tmp_path: Path
) -> None:
    long = "data.shards=[" + ", ".join(f"s3://crawl/{number:06}.tar" for number in range(500)) + "]"
    tracker = tracker_of(tmp_path, real_server, long)
    for step in range(1500):
        tracker.log_step("backbone", step, {"loss": 1 / (step + 1), "odd $name#": step})
    tracker.log_epoch("backbone", 0, {"label_accuracy": 0.64})
    tracker.log_epoch(
        "pencil", 1, {"label_accuracy": 0.9} | {f"class/{number}": 0.5 for number in range(1200)}
    )
    tracker.log_epoch("finetune", 2, {"label_accuracy": float("nan")})
    tracker.set_tag("warning.labels", "no label moved")
    tracker.log_picture("transitions", b"\x89PNG picture")
    tracker.log_json("summary", {"given_label_accuracy": 0.64})
    assert tracker.finish(wait_s=60)
    client, runs = MlflowClient(real_server.uri), tracker.state()["runs"]
    parent = client.get_run(runs["parent"])
    assert parent.info.run_name == "demo"
    assert parent.info.status == "FINISHED"
    assert client.get_experiment(parent.info.experiment_id).name == tmp_path.name
    assert parent.data.params["stages.pencil.epochs"] == "1"
    assert len(parent.data.params["data.shards"]) == 6000
    assert parent.data.tags["catalogue_version"] == "7"
    assert parent.data.tags["version.torch"] == torch.__version__.partition("+")[0]
    assert parent.data.tags["mlflow.source.git.commit"] == git_commit()
    assert parent.data.tags["warning.labels"] == "no label moved"
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{runs['parent']}'"
    )
    assert {child.info.run_name for child in children} == {"demo-backbone", "demo-pencil", "demo-finetune"}
    assert {child.info.status for child in children} == {"FINISHED"}
    expected = [(step, 1 / (step + 1)) for step in range(1500)]
    assert steps_of(client, runs["backbone"], "step/loss") == expected
    assert len(steps_of(client, runs["backbone"], "step/odd _name_")) == 1500
    accuracy = steps_of(client, runs["parent"], "epoch/label_accuracy")
    assert accuracy[:2] == [(0, 0.64), (1, 0.9)]
    assert math.isnan(accuracy[2][1])
    assert len(client.get_run(runs["pencil"]).data.metrics) == 1201
    picture = client.download_artifacts(runs["parent"], "pictures/transitions.png", str(tmp_path))
    assert Path(picture).read_bytes() == b"\x89PNG picture"
    where = {"tracking.uri": real_server.uri, "tracking.experiment": tmp_path.name}
    whole = Path(client.download_artifacts(runs["parent"], "config.json", str(tmp_path)))
    assert json.loads(whole.read_text()) == describe(config_of(tmp_path, long)) | where


@pytest.mark.slow
def test_a_resumed_job_continues_in_the_same_runs_and_repeats_no_step(
    real_server: Server, tmp_path: Path
) -> None:
    first = tracker_of(tmp_path, real_server)
    for step in range(20):
        first.log_step("pencil", step, {"loss": float(step)})
    assert first.finish(RESUMABLE, wait_s=60)
    state, client = first.state(), MlflowClient(real_server.uri)
    for run_id in state["runs"].values():  # not FAILED or KILLED, which MLflow shows in red
        waiting = client.get_run(run_id).info
        assert (waiting.status, waiting.end_time) == ("SCHEDULED", None)

    second = tracker_of(tmp_path, real_server, "workers.count=2")
    for step in range(10, 30):  # the checkpoint was older than the last step
        second.log_step("pencil", step, {"loss": float(step)})
    second.log_step("finetune", 30, {"loss": 30.0})
    assert second.finish(wait_s=60)
    runs = second.state()["runs"]
    assert runs["pencil"] == state["runs"]["pencil"]
    assert runs["parent"] == state["runs"]["parent"]
    assert steps_of(client, runs["pencil"], "step/loss") == [(step, float(step)) for step in range(30)]
    parent = client.get_run(runs["parent"])
    assert parent.info.status == "FINISHED"
    assert parent.data.params["workers.count"] == "[1, 1]"
    assert parent.data.tags["changed.workers.count"] == "[2, 2]"
    assert len(client.search_runs([parent.info.experiment_id])) == 3


@pytest.mark.slow
def test_a_run_names_its_data_describes_itself_and_shares_the_experiment_of_its_storage(
    real_server: Server, tmp_path: Path
) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(6)))
    catalogue = bench.index().catalogue
    found = []
    for name in ("first", "second"):
        config = config_of(tmp_path, f"run.name={name}", f"tracking.uri={real_server.uri}")
        tracker = Tracker(config, catalogue.version, run_id=name, every_s=0.1)
        tracker.about = ["run first: 6 samples", "storage: s3://key:hush@lake"]
        tracker.describe("labels right 0.98")
        for _ in range(2):  # as after a crash
            tracker.log_dataset("training", catalogue)
        assert tracker.finish(wait_s=60)
        found.append(MlflowClient(real_server.uri).get_run(tracker.state()["runs"]["parent"]))
    first, second = found
    assert first.info.experiment_id == second.info.experiment_id
    experiment = MlflowClient(real_server.uri).get_experiment(first.info.experiment_id)
    assert experiment.name == "store"  # the folder of config_of
    note = "run first: 6 samples\n\nstorage: s3://key:***@lake\n\nlabels right 0.98"
    assert first.data.tags["mlflow.note.content"] == note
    (read,) = first.inputs.dataset_inputs
    assert (read.dataset.name, read.dataset.digest) == ("store training", catalogue.digest)
    tags = {tag.key: tag.value for tag in read.tags}
    assert tags == {"mlflow.data.context": "training", "catalogue_version": "1"}
    assert json.loads(read.dataset.profile)["num_samples"] == 6
    assert json.loads(read.dataset.source)["uri"] == catalogue.folder
    assert second.inputs.dataset_inputs[0].dataset.digest == read.dataset.digest


@pytest.mark.slow
def test_runs_are_found_again_and_replaced_if_they_were_deleted(
    real_server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = tracker_of(tmp_path, real_server)
    first.start_stage("pencil")
    assert first.finish(wait_s=60)
    state, client = first.state(), MlflowClient(real_server.uri)

    second = tracker_of(tmp_path, real_server)
    second.start_stage("pencil")
    assert second.finish(wait_s=60)
    assert second.state() == state

    client.delete_run(state["runs"]["pencil"])
    third = tracker_of(tmp_path, real_server)
    third.log_step("pencil", 1, {"loss": 1.0})
    assert third.finish(wait_s=60)
    runs = third.state()["runs"]
    assert runs["parent"] == state["runs"]["parent"]
    assert runs["pencil"] != state["runs"]["pencil"]
    assert client.get_run(runs["pencil"]).data.tags["pencil_scale.continues"] == state["runs"]["pencil"]
    assert f"no longer has run {state['runs']['pencil']} of demo-pencil" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_a_server_that_was_unreachable_gets_everything_in_order_and_once(
    how: str, real_server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = tracker_of(tmp_path, real_server)
    for step in range(300):
        tracker.log_step("backbone", step, {"loss": float(step), "rate": 0.1})
        if step == 100:
            wait_for(lambda: "backbone" in tracker.state()["runs"])
            real_server.signal(signal.SIGSTOP) if how == "frozen" else real_server.kill()
    tracker.log_step("pencil", 300, {"loss": 300.0})
    wait_for(lambda: "is unreachable" in caplog.text)
    assert not tracker.finish(wait_s=1)
    assert "has not received" in caplog.text
    real_server.signal(signal.SIGCONT) if how == "frozen" else real_server.start()

    again = tracker_of(tmp_path, real_server)
    for step in range(301, 310):
        again.log_step("pencil", step, {"loss": float(step)})
    assert again.finish(wait_s=60)
    client, runs = MlflowClient(real_server.uri), again.state()["runs"]
    for key, value in (("step/loss", float), ("step/rate", lambda _: 0.1)):
        assert steps_of(client, runs["backbone"], key) == [(step, value(step)) for step in range(300)]
    assert steps_of(client, runs["pencil"], "step/loss") == [(step, float(step)) for step in range(300, 310)]
    assert len(client.search_runs([client.get_run(runs["parent"]).info.experiment_id])) == 3
    assert sum("is unreachable" in message for message in caplog.messages) == 1


@pytest.mark.slow
def test_the_same_process_says_that_the_server_is_back(
    real_server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = tracker_of(tmp_path, real_server)
    real_server.signal(signal.SIGSTOP)
    for step in range(50):
        tracker.log_step("backbone", step, {"loss": float(step)})
    wait_for(lambda: "is unreachable" in caplog.text)
    real_server.signal(signal.SIGCONT)
    wait_for(lambda: "is back" in caplog.text)
    assert tracker.finish(wait_s=60)
    runs = tracker.state()["runs"]
    assert len(steps_of(MlflowClient(real_server.uri), runs["backbone"], "step/loss")) == 50


@pytest.mark.slow
def test_a_registered_model_loads_back_by_its_alias_and_computes_the_same(
    real_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = build_backbone("small_convnet", 10)
    network(torch.randn(64, 3, 8, 8) * 3 + 1)  # gives the batch norms statistics
    network.eval()
    tracker = tracker_of(tmp_path, real_server, "tracking.register_as=digits")
    for _ in range(2):  # reported twice, as after a crash: one version
        tracker.log_model("small_convnet", network.state_dict(), NAMES, 8)
    assert tracker.finish(wait_s=100)
    client = MlflowClient(real_server.uri)
    version = client.get_model_version_by_alias("digits", "current")
    assert int(version.version) == 1
    assert len(client.search_model_versions("name = 'digits'")) == 1
    assert list(journal_of(tmp_path).glob("blobs/*")) == []
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", real_server.uri)
    images = torch.randn(5, 3, 8, 8)
    loaded = mlflow.pytorch.load_model("models:/digits@current")
    torch.testing.assert_close(loaded(images), network(images))
    general = mlflow.pyfunc.load_model("models:/digits@current")
    torch.testing.assert_close(torch.tensor(general.predict(images.numpy())), network(images).detach())
    assert general.metadata.metadata == {"class_names": NAMES, "backbone": "small_convnet"}
    signature = general.metadata.signature
    assert signature.inputs.inputs[0].shape == (-1, 3, 8, 8)
    assert signature.outputs.inputs[0].shape == (-1, 10)
    kept = [path.name for path in real_server.artifacts.rglob("data/*")]
    assert kept == ["model.pt2"]  # once, and nothing pickled


@pytest.mark.slow
def test_without_a_server_a_database_and_artifacts_are_kept_in_the_storage(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = tracker_of(tmp_path, None, "tracking.register_as=digits")
    tracker.log_step("pencil", 1, {"loss": 0.5})
    tracker.log_picture("transitions", b"picture")
    tracker.log_model("small_convnet", build_backbone("small_convnet", 10).state_dict(), NAMES, 8)
    tracker.log_model(f"{__name__}:choosy", {}, NAMES, 8)
    assert tracker.finish("FAILED", wait_s=100)
    assert "INFO" not in capfd.readouterr().err  # MLflow lists the tables of a new database
    store = tmp_path / "store"
    uri = f"sqlite:///{store}/mlflow.db"
    client, runs = MlflowClient(uri, uri), tracker.state()["runs"]
    assert client.get_run(runs["parent"]).info.status == "FAILED"
    assert steps_of(client, runs["pencil"], "step/loss") == [(1, 0.5)]
    assert [path.read_bytes() for path in store.glob("mlartifacts/**/transitions.png")] == [b"picture"]
    assert client.get_model_version_by_alias("digits", "current").run_id == runs["parent"]
    # The network that cannot be exported is not registered, but its weights are kept.
    assert len(client.search_model_versions("name = 'digits'")) == 1
    parent = client.get_run(runs["parent"])
    assert "not exported" in parent.data.tags["warning.model"]
    logged = client.search_logged_models([parent.info.experiment_id])
    assert sorted(model.status.value for model in logged) == ["FAILED", "READY"]
    assert len(list(store.glob("mlartifacts/**/model/weights-*.pt"))) == 1


class Choosy(torch.nn.Module):
    """What it computes depends on the images, which no graph can express."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)[:, :10] if images.sum() > 0 else images.flatten(1)[:, 1:11]


def choosy(num_classes: int) -> torch.nn.Module:
    return Choosy()


@pytest.mark.slow
def test_another_process_delivers_what_a_killed_one_left_in_the_storage(
    real_server: Server, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from mlflow_server import tracker_of\n"
        "tracker = tracker_of(Path(sys.argv[1]), None, 'tracking.uri=http://127.0.0.1:1', sys.argv[3])\n"
        "tracker.log_step('pencil', 1, {'loss': 0.5})\n"
        "tracker.log_picture('p', b'picture'); tracker._journal.flush()\n"
        "print('flushed', flush=True); sys.stdin.read()"
    )
    experiment = f"tracking.experiment={tmp_path.name}"
    words = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parents[1]), experiment]
    killed = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "flushed\n"
    killed.kill()
    killed.wait()
    resumed = tracker_of(tmp_path, real_server)
    resumed.log_step("pencil", 1, {"loss": 0.5})
    resumed.log_step("pencil", 2, {"loss": 0.25})
    assert resumed.finish(wait_s=60)
    client, runs = MlflowClient(real_server.uri), resumed.state()["runs"]
    assert steps_of(client, runs["pencil"], "step/loss") == [(1, 0.5), (2, 0.25)]
    picture = client.download_artifacts(runs["parent"], "pictures/p.png", str(tmp_path))
    assert Path(picture).read_bytes() == b"picture"
