"""A run without its MLflow server: the records wait in its storage until a command delivers them."""

import re
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow_server import config_of, free_port, journal_of, tracker_of
from training_runs import EPOCHS, TinyData

from pencil_scale.storage.lease import Lease
from pipelines import deliver_records

pytestmark = pytest.mark.usefixtures("mlflow_of_tests")


def dead_server() -> str:
    return f"tracking.uri=http://127.0.0.1:{free_port()}"


def test_records_of_an_ended_run_are_delivered_once_from_its_storage(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, None, dead_server())
    for step in range(3):
        tracker.log_step("backbone", step, {"loss": 1.0})
    assert not tracker.finish(wait_s=0.1)
    config = config_of(tmp_path, f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", "run.name=other")
    assert deliver_records.run(config) == 8  # start, config, start of the stage, steps, two ends
    assert not list((journal_of(tmp_path) / "segments").iterdir())
    assert deliver_records.run(config) == 0
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("store").experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["demo", "demo-backbone"]
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_a_server_that_is_still_unreachable_is_an_error_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker_of(tmp_path, None, dead_server()).finish(wait_s=0)
    files = sorted(journal_of(tmp_path).rglob("*.jsonl"))
    assert deliver_records.main([str(tmp_path / "run.yaml"), dead_server()]) == 2
    assert "did not receive all records" in capsys.readouterr().err
    assert sorted(journal_of(tmp_path).rglob("*.jsonl")) == files


def test_a_run_that_is_being_trained_delivers_its_records_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker_of(tmp_path, None, dead_server()).finish(wait_s=0)
    with Lease.hold(str(tmp_path / "store"), "runs/demo/lease", "run demo is being trained"):
        config = config_of(tmp_path, f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
        assert deliver_records.run(config) == 0
    assert "run demo is left out: run demo is being trained, or" in capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_without_its_server_warns_at_both_ends_and_the_command_that_it_prints_delivers(
    tmp_path: Path,
) -> None:
    data = TinyData.make(tmp_path)
    with data.start("workers.count=1", "workers.in_process=true", dead_server(), "gate.hold=false") as run:
        assert run.wait() == 0, run.output
    lines = run.output.splitlines()
    first = next(
        n for n, line in enumerate(lines) if line.startswith("WARNING: MLflow") and "is unreachable" in line
    )
    (last,) = (n for n, line in enumerate(lines) if "to deliver them" in line)
    assert first < next(n for n, line in enumerate(lines) if "epoch 1/" in line) < last, run.output
    num, config = re.findall(
        r"(\d+) records of this run .*: python -m pipelines.deliver_records (\S+)", lines[last]
    )[0]
    database = f"sqlite:///{tmp_path}/mlflow.db"
    assert deliver_records.main([config, f"tracking.uri={database}"]) == 0
    client = MlflowClient(database)
    (parent,) = client.search_runs(["1"], "attributes.run_name = 'tiny'")
    values = client.get_metric_history(parent.info.run_id, "epoch/loss")
    assert [value.step for value in values] == list(range(sum(EPOCHS.values())))
    assert data.record()["tracking"]["runs"]["parent"] == parent.info.run_id
    assert int(num) > len(values)
