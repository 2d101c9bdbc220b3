"""Training survives kills: real commands, real processes, real signals.

Starting Ray Train takes half a minute on two cores, so one run is killed several times, and all tests look at
its outcome.
"""

import io
import re
from contextlib import redirect_stderr
from typing import Any

import pytest
from training_runs import EPOCHS, NUM_EPOCHS, SPOILT, TinyData, mlflow_runs, require_complete, starts

from pencil_scale.train import __main__ as train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

TAKEN_DOWN = 777
AVERAGED = ("stages.pencil.teacher=0.9", "stages.finetune.average=0.8", "stages.finetune.move_labels=true")
STAGES = [stage for stage, epochs in EPOCHS.items() for _ in range(epochs)]


@pytest.fixture(scope="module")
def battered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A worker killed in the first stage and in the last, the command in between, then three workers.

    Before the run resumes, a sample is taken down.
    """
    # Epochs long enough that a kill at the end of one lands in the next, not in the next stage.
    data = TinyData.make(tmp_path_factory.mktemp("battered"), num_samples=1200)
    with data.start(*AVERAGED) as first:
        first.wait_until((data.storage / "runs" / "tiny" / "lease").exists, "lease of the run")
        with redirect_stderr(io.StringIO()) as intruder:  # while the first one still starts its Ray
            refused = train.main([str(data.folder / "config.yaml"), *AVERAGED])
        first.wait_for("backbone +epoch 1/")
        first.kill_worker()
        first.wait_for("pencil +epoch 3/")
        first.kill()
    data.take_down(TAKEN_DOWN)
    with data.start("workers.count=3", *AVERAGED) as second:
        second.wait_for("finetune +epoch 5/")
        second.kill_worker()
        code = second.wait()
    found = {"data": data, "first": first.output, "second": second.output, "code": code}
    return {**found, "refused": refused, "intruder": intruder.getvalue(), "pid": first.process.pid}


def test_a_second_command_is_refused_while_the_first_runs_and_takes_over_after_it_was_killed(
    battered: dict[str, Any],
) -> None:
    assert battered["refused"] == 2, battered["intruder"]
    by = f"pencil_scale.train, process {battered['pid']} on "
    assert f"error: run tiny is being trained by another command ({by}" in battered["intruder"]
    assert "watching for up to" not in battered["second"]
    assert battered["data"].record()["attempt"] == 2


def test_a_run_completes_though_it_is_killed_in_every_stage(battered: dict[str, Any]) -> None:
    assert battered["code"] == 0, battered["second"]
    resumed = [*starts(battered["first"])[1:], *starts(battered["second"])]
    assert [STAGES[progress.epoch] for _, progress in resumed] == ["backbone", "pencil", "finetune"]


def test_every_worker_that_died_is_reported_with_its_reason(battered: dict[str, Any]) -> None:
    reported = [
        re.findall(r"^worker \d failed: (\w+: .+)", battered[name], re.M) for name in ("first", "second")
    ]
    assert reported[0], battered["first"]
    assert reported[1], battered["second"]
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
