"""A run that trains several times is stopped in one training, killed in the next, and resumed."""

import re
from typing import Any

import mlflow
import numpy as np
import pytest
from training_runs import SPOILT, TinyData

from pencil_scale.labels.manifest import manifests_of
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.train import __main__ as train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

TWICE = ("workers.count=1", "evidence.watched=null", "evidence.planted=0.2", "evidence.folds=2")
TWICE = (*TWICE, "gate.hold=false", "checkpoint.history=true")
NUM_EPOCHS = 6


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = TinyData.make(tmp_path_factory.mktemp("folds"))
    with data.start(*TWICE) as first:
        first.wait_for("backbone +epoch 2/")
        first.stop()
        codes = [first.wait()]
    codes.append(train.main([str(data.folder / "config.yaml"), *TWICE, "run.seed=2"]))
    # What follows needs no workers of Ray Train, which take half a minute to start.
    with data.start(*TWICE, "workers.in_process=true") as second:
        second.wait_for("fold 2 of 2")
        second.kill()
    with data.start(*TWICE, "workers.in_process=true") as third:
        codes.append(third.wait())
    return {"data": data, "said": [one.output for one in (first, second, third)], "codes": codes}


def test_a_stop_in_a_fold_saves_it_and_the_same_command_resumes_there(resumed: dict[str, Any]) -> None:
    stopped, changed, done = resumed["codes"]
    first, second, third = resumed["said"]
    assert (stopped, done) == (143, 0), third
    assert changed == 2  # other settings are refused: a fold is saved
    assert "2 trainings, each watching another half of the samples (evidence.folds=1 trains once)" in first
    assert "fold 2 of 2" not in first
    assert re.search(r"fold 1 of 2.*training with 1 worker from epoch \d, step \d+\n", second, re.DOTALL), (
        second
    )
    assert "fold 1 of 2" not in third
    assert "fold 2 of 2" in third


def test_every_label_is_judged_by_a_network_that_was_never_trained_on_it(resumed: dict[str, Any]) -> None:
    data = resumed["data"]
    labels, summary = PublishedLabels(data.labels()).rows(range(data.num_samples)), data.summary()
    assert np.flatnonzero(~labels.is_unseen).tolist() == [SPOILT]  # it does not decode
    assert (summary["trainings"], summary["estimate"]["trainings"], summary["came_to"]["trainings"]) == (
        2,
        2,
        2,
    )
    assert summary["samples"] + summary["watched"] == data.num_samples
    assert summary["coverage"] == [1.0] * NUM_EPOCHS
    assert summary["estimate"]["requests"] == 2 * NUM_EPOCHS
    assert summary["gain"] > 0


def test_nothing_of_the_folds_is_left_but_their_figures(resumed: dict[str, Any]) -> None:
    data = resumed["data"]
    run = data.record()["id"]
    assert {manifest.run for manifest in manifests_of(str(data.storage))} == {run}
    files = [
        path for kind in ("parts", "ledger", "history") for path in data.storage.glob(f"labels/{kind}/*/*")
    ]
    assert {path.parent.name for path in files} == {run}
    assert not (data.storage / "checkpoints" / "tiny").exists()
    assert [path.name for path in (data.storage / "runs" / "tiny").glob("fold*")] == ["fold-1-epochs.json"]


def test_mlflow_has_the_figures_of_the_run_itself_only(resumed: dict[str, Any]) -> None:
    data = resumed["data"]
    client = mlflow.MlflowClient(f"sqlite:///{data.storage}/mlflow.db")
    history = client.get_metric_history(data.record()["tracking"]["runs"]["parent"], "epoch/rows_visited")
    assert [(value.step, value.value) for value in history] == [
        (epoch, data.summary()["samples"]) for epoch in range(NUM_EPOCHS)
    ]
