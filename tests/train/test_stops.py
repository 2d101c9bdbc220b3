"""Training that is asked to stop saves, and resumes with the same bits; training that diverges ends."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train
import torch
from training_runs import NUM_EPOCHS, ROOT, TinyData, mlflow_runs, require_complete, starts

from benchmarks.processes import family
from pencil_scale.labels.manifest import manifests_of
from pencil_scale.labels.run_record import read_record, write_record
from pencil_scale.labels.table import LabelTable
from pencil_scale.train import __main__ as train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

ALONE = ("workers.count=1", "run.deterministic=true", "evidence.watched=null", "evidence.planted=0.02")
ALONE += ("evidence.folds=1", "gate.hold=false")  # so few samples prove nothing
ALONE += ("stages.pencil.teacher=0.9", "stages.pencil.augment=strong", "stages.finetune.average=0.8")
ALONE += ("stages.backbone.mixup=0.5", "stages.pencil.mixup=1.0")
ALONE += ("stages.finetune.restart=true", "stages.finetune.mixup=1.0", "stages.finetune.schedule=cosine")
ALONE += ("stages.finetune.drop_after=null", "stages.finetune.sharpen=2")


@pytest.fixture(scope="module")
def saved_after() -> list[int]:
    """The epochs after which the undisturbed run saved."""
    return []


@pytest.fixture(scope="module")
def undisturbed(
    ray_session: None, tmp_path_factory: pytest.TempPathFactory, saved_after: list[int]
) -> Iterator[TinyData]:
    """An undisturbed run, in this process, on one thread as a worker has; saving may take no time."""
    data = TinyData.make(tmp_path_factory.mktemp("undisturbed"))
    num_threads, report = torch.get_num_threads(), ray.train.report

    def noted(figures: dict[str, Any], **checkpoint: Any) -> None:
        saved_after.append(figures["epoch"])
        report(figures, **checkpoint)

    torch.set_num_threads(1)
    options = [
        *ALONE,
        "workers.in_process=true",
        "checkpoint.every_steps=null",
        "checkpoint.max_time_share=0",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray.train, "report", noted)
        assert train.main([str(data.folder / "config.yaml"), *options]) == 0
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


def test_a_run_whose_saving_takes_too_long_saves_after_its_first_epoch_and_at_its_end(
    undisturbed: TinyData, saved_after: list[int]
) -> None:
    assert saved_after == [1, NUM_EPOCHS]


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
