"""Training survives kills: real commands, real processes, real signals.

Starting Ray Train takes half a minute on two cores, so each run is killed several times here, and several
tests look at its outcome.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from training_runs import EPOCHS, ROOT, SPOILT, TinyData

from benchmarks.processes import family
from pencil_scale.labels.columns import WATCHED
from pencil_scale.labels.manifest import manifests_of
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.labels.run_record import read_record, write_record
from pencil_scale.labels.table import LabelTable
from pencil_scale.train import __main__ as train
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.driver import RESIZE_VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_EPOCHS = sum(EPOCHS.values())
TAKEN_DOWN = 777
AVERAGED = ("stages.pencil.teacher=0.9", "stages.finetune.average=0.8")
STAGES = [stage for stage, epochs in EPOCHS.items() for _ in range(epochs)]


def starts(output: str) -> list[tuple[int, Progress]]:
    """Where each group of workers started, and how many there were."""
    found = re.findall(r"training with (\d+) workers? from (?:the start|epoch (\d+), step (\d+))", output)
    return [(int(world), Progress(int(epoch or 1) - 1, int(step or 0))) for world, epoch, step in found]


def require_complete(data: TinyData, name: str = "tiny", but: int | None = None) -> None:
    """Every row but one was trained on once per epoch or watched; the ledger refuses to count a row twice."""
    summary, labels = data.summary(name), PublishedLabels(data.labels(name)).rows(range(data.num_samples))
    assert summary["coverage"] == [1.0] * NUM_EPOCHS
    rows = np.setdiff1d(np.arange(data.num_samples), [] if but is None else [but])
    watched = labels.role[rows] == WATCHED
    assert (summary["samples"], summary["watched"]) == (np.count_nonzero(~watched), np.count_nonzero(watched))
    assert (data.epochs_of_rows(name)[rows[~watched]] == NUM_EPOCHS - 1).all()
    assert (labels.last_epoch[rows[watched]] == 0).all()
    assert not np.isnan(labels.predicted_log_p[np.setdiff1d(rows, [SPOILT])]).any()
    assert data.record(name)["status"] == "finished"
    assert data.scratch_folders() == []


def mlflow_runs(data: TinyData) -> tuple[mlflow.MlflowClient, list[Any]]:
    client = mlflow.MlflowClient(f"sqlite:///{data.storage}/mlflow.db")
    return client, client.search_runs([client.get_experiment_by_name("lake").experiment_id])


# --- many kills of one run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def battered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A worker killed in each stage, the driver killed in between, and three workers instead of two.

    Before the run resumes, a sample is taken down.
    """
    # Epochs long enough that a kill at the end of one lands in the next, not in the next stage.
    data = TinyData.make(tmp_path_factory.mktemp("battered"), num_samples=1200)
    with data.start(*AVERAGED) as first:
        first.wait_until((data.storage / "runs" / "tiny" / "lease").exists, "lease of the run")
        with data.start(*AVERAGED) as intruder:  # while the first one still starts its Ray
            refused = intruder.wait()
        first.wait_for("backbone +epoch 1/")
        first.kill_worker()
        first.wait_for("pencil +epoch 3/")
        first.kill_worker()
        first.wait_for("training with", times=3)
        first.kill()
    data.take_down(TAKEN_DOWN)
    with data.start("workers.count=3", *AVERAGED) as second:
        second.wait_for("finetune +epoch 5/")
        second.kill_worker()
        code = second.wait()
    found = {"data": data, "first": first.output, "second": second.output, "code": code}
    return {**found, "refused": refused, "intruder": intruder.output, "pid": first.process.pid}


def test_a_second_command_is_refused_while_the_first_runs_and_takes_over_after_it_was_killed(
    battered: dict[str, Any],
) -> None:
    assert battered["refused"] == 2, battered["intruder"]
    by = f"pencil_scale.train, process {battered['pid']} on "
    assert f"error: run tiny is being trained by another command ({by}" in battered["intruder"]
    assert "watching for up to" not in battered["second"]
    assert battered["data"].record()["attempt"] == 2


def test_a_run_completes_though_a_worker_is_killed_in_every_stage(battered: dict[str, Any]) -> None:
    assert battered["code"] == 0, battered["second"]
    resumed = [*starts(battered["first"])[1:], *starts(battered["second"])[1:]]
    assert [STAGES[progress.epoch] for _, progress in resumed] == ["backbone", "pencil", "finetune"]


def test_every_worker_that_died_is_reported_with_its_reason(battered: dict[str, Any]) -> None:
    reported = [
        re.findall(r"^worker \d failed: (\w+: .+)", battered[name], re.M) for name in ("first", "second")
    ]
    assert len(reported[0]) >= 2, battered["first"]
    assert len(reported[1]) >= 1, battered["second"]
    assert any("It was killed" in reason for reason in reported[0] + reported[1])
    assert not any("common causes" in reason for reason in reported[0] + reported[1])


def test_an_image_that_does_not_decode_is_named_once_and_kept_in_the_summary(
    battered: dict[str, Any],
) -> None:
    warning = rf"1 image cannot be decoded, weight set to 0: .*{SPOILT:05d}"
    assert len(re.findall(f"^WARNING: {warning}", battered["first"], re.M)) == 1, battered["first"]
    assert re.match(warning, battered["data"].summary()["warnings"]["unreadable_images"])


def test_every_epoch_visits_every_row_once_despite_all_kills(battered: dict[str, Any]) -> None:
    require_complete(battered["data"], but=TAKEN_DOWN)


def test_a_sample_that_was_taken_down_is_not_trained_or_counted_any_more(
    battered: dict[str, Any],
) -> None:
    data = battered["data"]
    assert "data.exclude: left out 1 more sample, taken down since" in battered["second"]
    assert data.epochs_of_rows()[TAKEN_DOWN] < NUM_EPOCHS - 2
    assert data.summary()["samples"] == data.num_samples - 1


def test_the_same_command_resumes_with_another_number_of_workers(battered: dict[str, Any]) -> None:
    assert "run tiny resumes, on catalogue version 1" in battered["second"]
    (before, _), *_ = starts(battered["first"])
    (after, progress), *_ = starts(battered["second"])
    assert (before, after) == (2, 3)
    assert STAGES[progress.epoch] == "pencil"


def test_a_resumed_run_is_the_same_run_in_mlflow(battered: dict[str, Any]) -> None:
    data = battered["data"]
    client, runs = mlflow_runs(data)
    assert sorted(run.info.run_name for run in runs) == [
        "tiny",
        "tiny-backbone",
        "tiny-finetune",
        "tiny-pencil",
    ]
    (parent,) = (run.info.run_id for run in runs if run.info.run_name == "tiny")
    assert data.record()["tracking"]["runs"]["parent"] == parent
    history = client.get_metric_history(parent, "epoch/rows_visited")
    assert [value.step for value in history] == list(range(NUM_EPOCHS))
    assert [value.value for value in history][:2] == [data.num_samples] * 2
    assert [value.value for value in history][-2:] == [data.num_samples - 1] * 2  # without the one taken down
    assert client.get_run(parent).info.status == "FINISHED"


def test_the_name_of_a_finished_run_is_refused_in_one_line(
    battered: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(battered["data"].folder / "config.yaml")
    assert train.main([config, *AVERAGED]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: run tiny is finished (")
    assert line.endswith("choose another run.name")


# --- bit for bit ---------------------------------------------------------------------------------------

ALONE = ("workers.count=1", "run.deterministic=true", "evidence.watched=null", "evidence.planted=0.02")
ALONE += ("evidence.folds=1", "gate.hold=false")  # so few samples prove nothing
ALONE += ("stages.pencil.teacher=0.9", "stages.pencil.augment=strong", "stages.finetune.average=0.8")
ALONE += ("stages.backbone.mixup=0.5", "stages.pencil.mixup=1.0")
ALONE += ("stages.finetune.restart=true", "stages.finetune.mixup=1.0", "stages.finetune.schedule=cosine")


@pytest.fixture(scope="module")
def undisturbed(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyData]:
    """An undisturbed run, in this process, on one thread as a worker has."""
    data = TinyData.make(tmp_path_factory.mktemp("undisturbed"))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert train.main([str(data.folder / "config.yaml"), *ALONE, "workers.in_process=true"]) == 0
    yield data
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same run, its worker killed in the middle of an epoch; then stopped, and resumed."""
    data = TinyData.make(tmp_path_factory.mktemp("stopped"))
    with data.start(*ALONE) as first:
        # An epoch has 30 steps: three steps into the second epoch, with most of it still to come.
        first.wait_until(lambda: data.has_checkpoint(33), "checkpoint in the middle of an epoch")
        first.kill_worker()
        first.wait_for("pencil +epoch 3/")
        first.stop()
        code = first.wait()
    found = {"data": data, "first": first.output, "code": code, "status": data.record()["status"]}
    found["mlflow"] = {run.info.run_name: run for run in mlflow_runs(data)[1]}
    changed = train.main([str(data.folder / "config.yaml"), *ALONE, "run.seed=2"])
    record = read_record(str(data.storage), "tiny")
    write_record(str(data.storage), replace(record, decoders="pillow 1.0"))
    decoded = train.main([str(data.folder / "config.yaml"), *ALONE])
    write_record(str(data.storage), record)
    with data.start(*ALONE) as second:
        last = second.wait()
    return {**found, "second": second.output, "last": last, "changed": changed, "decoded": decoded}


def test_a_command_asked_to_stop_saves_and_prints_the_resume_command(stopped: dict[str, Any]) -> None:
    assert stopped["code"] == 143, stopped["first"]
    assert stopped["status"] == "stopped"
    typed = " ".join([str(stopped["data"].folder / "config.yaml"), *ALONE])
    assert f"stopped and saved; to resume: python -m pencil_scale.train {typed}\n" in stopped["first"]
    run, stage = stopped["mlflow"]["tiny"], stopped["mlflow"]["tiny-pencil"]
    # KILLED would be shown in red; the stage may have been over when the stop was noticed.
    assert run.info.status == "SCHEDULED"
    assert stage.info.status in ("SCHEDULED", "FINISHED")
    assert run.data.tags["mlflow.note.content"].endswith(f"to resume: python -m pencil_scale.train {typed}")
    assert [one.dataset.name for one in run.inputs.dataset_inputs] == ["lake training"]


def test_the_resume_command_completes_the_run(stopped: dict[str, Any]) -> None:
    assert stopped["last"] == 0, stopped["second"]
    require_complete(stopped["data"])
    epochs = re.findall(r"^\w+ +epoch (\d)/6", stopped["first"] + stopped["second"], re.MULTILINE)
    assert sorted(set(epochs)) == list("123456")


def test_samples_are_watched_by_default_and_what_too_few_cannot_measure_is_said(
    stopped: dict[str, Any],
) -> None:
    summary = stopped["data"].summary()
    assert 60 < summary["watched"] < 130
    assert summary["planted"] == 0
    assert summary["wrong_labels_low"] < summary["wrong_labels"] < summary["wrong_labels_high"]
    for number in ("first", "second"):
        assert "not trained on, 0 labels are wrong on purpose" in stopped[number]
        assert "too few to measure what the repair gains" in stopped[number]
    warning = summary["warnings"]["evidence"]
    assert "what the repair gains could not be measured" in warning
    assert f"WARNING: {warning}" in stopped["second"].splitlines()[-2:]


def test_an_unfinished_run_is_not_resumed_with_other_settings_or_decoders(stopped: dict[str, Any]) -> None:
    assert stopped["changed"] == 2
    assert stopped["decoded"] == 2


def test_a_finished_run_leaves_no_unused_label_part(stopped: dict[str, Any]) -> None:
    storage = stopped["data"].storage
    manifests = manifests_of(str(storage))
    assert len(manifests) == 2  # what the run started with, and what it published
    entries = [entry for manifest in manifests for entry in manifest.parts.values()]
    named = {file.sha256 for entry in entries for file in (entry.labels, entry.ledger)}
    labels = storage / "labels"
    assert {path.stem for folder in ("parts", "ledger") for path in (labels / folder).glob("*/*")} == named
    assert not (storage / "checkpoints" / "tiny").exists()


def test_the_summary_has_the_estimate_and_the_outcome(stopped: dict[str, Any]) -> None:
    summary = stopped["data"].summary()
    for what in ("samples", "epochs", "steps_per_epoch"):
        assert summary["estimate"][what] == summary["came_to"][what], what
    for what, tolerance in (("table_bytes", 0.15), ("checkpoint_bytes", 0.1)):  # tables are compressed
        assert summary["estimate"][what] == pytest.approx(summary["came_to"][what], rel=tolerance), what
    assert summary["estimate"]["read_gb"] > 0
    assert summary["estimate"]["requests"] == NUM_EPOCHS
    assert summary["came_to"]["hours"] == pytest.approx(summary["seconds"] / 3600)


def test_one_deterministic_worker_ends_with_the_same_bits_however_often_it_was_interrupted(
    undisturbed: TinyData, stopped: dict[str, Any], tmp_path: Path
) -> None:
    (_, after_kill), *_ = starts(stopped["first"])[1:]
    assert after_kill.step > 0  # otherwise this would not test the middle of an epoch
    there, here = undisturbed, stopped["data"]
    one, other = (
        torch.load(data.storage / "models" / "tiny.pt", weights_only=True) for data in (there, here)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    rows = range(there.num_samples)
    tables = [LabelTable.restore(data.labels(), tmp_path / data.folder.name) for data in (there, here)]
    labels, others = (table.read(rows) for table in tables)
    assert np.array_equal(labels, others)
    assert (np.abs(labels).max(axis=1) > 0).all()


def test_a_run_in_this_process_ends_its_label_courier(undisturbed: TinyData) -> None:
    assert "label courier" not in [thread.name for thread in threading.enumerate()]


# --- numbers that are not finite -----------------------------------------------------------------------


def test_a_run_that_diverges_ends_with_its_reason_and_is_neither_retried_nor_published(
    tmp_path: Path,
) -> None:
    data = TinyData.make(tmp_path)
    with data.start("workers.count=1", "stages.backbone.rate=1e38") as command:
        assert command.wait() == 2, command.output
    assert len(starts(command.output)) == 1
    (line,) = re.findall("^error: .*", command.output, re.M)
    assert re.match(r"error: epoch 1 \(backbone\), around steps \d+ to \d+: not finite: ", line)
    assert "lower stages.backbone.rate" in line
    assert not data.has_checkpoint(1)
    assert not (data.storage / "models").exists()
    assert data.record()["status"] == "failed"


# --- a stop request in the middle of a very long step ----------------------------------------------------


def test_a_stop_request_is_obeyed_while_a_step_takes_minutes(tmp_path: Path) -> None:
    data = TinyData.make(tmp_path)
    factory = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    stuck = ("model.backbone=stuck_network:build", "workers.count=1", "workers.stop_s=2")
    with data.start(*stuck, env=factory) as command:
        command.wait_for("training with 1 worker from the start")
        command.stop()
        assert command.wait() == 143, command.output
    assert "the workers did not finish their step within 2 s" in command.output
    assert f"from the last checkpoint: python -m pencil_scale.train {data.folder}" in command.output
    assert data.record()["status"] == "stopped"


def test_a_stop_request_before_training_begins_ends_the_command_at_once(tmp_path: Path) -> None:
    data = TinyData.make(tmp_path)
    with data.start("workers.count=1", "workers.stop_s=300") as command:
        command.wait_until(lambda: "TrainController" in str(family(command.process.pid)), "controller")
        command.stop()
        assert command.wait() == 143, command.output
    assert "stopped; to resume, run the same command again" in command.output
    assert data.record()["status"] == "stopped"


# --- nodes leave, come and die -------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """A head without room for workers, and two nodes with room for one worker each."""
    from ray.cluster_utils import Cluster

    nodes = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    head = {**nodes, "num_cpus": 1, "include_dashboard": False}  # saves memory
    started = Cluster(initialize_head=True, head_node_args=head)
    yield started, [started.add_node(**nodes) for _ in range(2)]
    started.shutdown()


OTHER_JOB = """
import sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(log_to_driver=False)
class Other:
    def is_there(self):
        return True
there = NodeAffinitySchedulingStrategy(sys.argv[1], soft=False)
other = ray.remote(num_cpus=0, lifetime="detached", name="other")(Other)
assert ray.get(other.options(scheduling_strategy=there).remote().is_there.remote())
"""
COUNT = """
from pencil_scale.stream.ray_tasks import alive_nodes, cluster_resource
from pencil_scale.train.local_ray import ensure_ray
ensure_ray()
print(len(alive_nodes()), cluster_resource("CPU"))
"""


def run_beside(env: dict[str, str], code: str, *words: str) -> str:
    """Run some code in another job of the cluster; return what it prints."""
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_elastic_run_saves_before_a_node_leaves_continues_smaller_grows_again_and_survives_a_dead_node(
    cluster: Any, tmp_path: Path
) -> None:
    nodes, (_, leaving) = cluster
    data = TinyData.make(tmp_path, num_samples=800)
    options = ["workers.cpus=1.5", "workers.timeout_s=30", "workers.count=[1,2]", "gate.hold=false"]
    # Long epochs, so that the notice arrives in the middle of one.
    options += ["checkpoint.every_steps=null", "optimizer.batch_per_worker=2", "stages.finetune.epochs=200"]
    env = {"RAY_ADDRESS": nodes.address, RESIZE_VARIABLE: "5"}
    with data.start(*options, env=env) as command:
        command.wait_for("backbone +epoch 1/")
        run_beside(env, OTHER_JOB, leaving.node_id)  # without it, Ray would end the node when it is idle
        deadline_ms = time.time_ns() // 1_000_000 + 3_600_000
        reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
        client = GcsClient(address=nodes.address)
        assert client.drain_node(leaving.node_id, reason, "a spot notice", deadline_ms)[0]
        command.wait_for("worker . failed: PreemptedError")
        command.wait_for("training with 1 worker from epoch")
        command.wait_for(r"images/s", times=command.output.count("images/s") + 1)
        assert run_beside(env, COUNT) == "3 3.0\n"  # nodes, and processors of the two that stay
        nodes.remove_node(leaving)
        doomed = nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
        command.wait_for("training with 2 workers from epoch")  # Ray looks for new nodes every 20 s
        command.wait_for(r"images/s", times=command.output.count("images/s") + 1)
        nodes.remove_node(doomed, allow_graceful=False)
        command.wait_for("training with 1 worker from epoch", times=2)
        command.wait_for(r"images/s", times=command.output.count("images/s") + 1)
        command.stop()
        assert command.wait() == 143, command.output
    assert f"PreemptedError: node {leaving.node_id} is being taken away; saved" in command.output
    _, (_, smaller), *_ = starts(command.output)
    assert smaller.step > 0  # only the notice saves in the middle of an epoch
    client, runs = mlflow_runs(data)
    (parent,) = (run.info.run_id for run in runs if run.info.run_name == "tiny")
    visited = client.get_metric_history(parent, "epoch/rows_visited")
    assert [value.step for value in visited] == list(range(len(visited)))
    assert {value.value for value in visited} == {data.num_samples}
