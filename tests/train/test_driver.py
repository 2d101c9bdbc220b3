"""The driver of a run, without workers: when it ends, and which errors it survives."""

import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from pencil_scale.config.settings import Workers
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease, LeaseLostError
from pencil_scale.tracking.narrator import Harmless
from pencil_scale.train import driver
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.control import failure_reports, start_control, take_events
from pencil_scale.train.driver import drive
from pencil_scale.train.worker import Job


class Training:
    """A training that never ends, as Ray Train would run it."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def fit(self) -> None:
        self.started.set()
        threading.Event().wait()


def test_a_driver_that_lost_its_lease_ends_with_the_reason_while_training_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(workers=SimpleNamespace(in_process=True))
    training, job = Training(), cast(Job, SimpleNamespace(control=None, config=config))
    monkeypatch.setattr(driver, "_trainer", lambda _: training)

    def events(_: object) -> list[dict[str, Any]]:
        training.started.wait()
        (tmp_path / "lease").unlink(missing_ok=True)  # another command took over
        return []

    monkeypatch.setattr(driver, "take_events", events)
    with (
        Lease.hold(str(tmp_path), "lease", "run demo is being trained", lease_s=0.2) as lease,
        pytest.raises(LeaseLostError, match="the lease was removed while this command was paused"),
    ):
        drive(job, lambda _: None, lease)


def test_a_run_with_nothing_left_to_train_is_finished_with_the_checkpoint_that_it_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = SimpleNamespace(in_process=True)
    config = SimpleNamespace(workers=workers, run=SimpleNamespace(storage=str(tmp_path), name="tiny"))
    record, resume = SimpleNamespace(id="id"), str(tmp_path / "checkpoint-9")
    job = cast(Job, SimpleNamespace(control=None, config=config, record=record, resume=resume))
    # Ray Train knows only the checkpoints of this command, which reported none.
    result = SimpleNamespace(return_value={"finished": True}, checkpoint=None)
    monkeypatch.setattr(driver, "_trainer", lambda _: SimpleNamespace(fit=lambda: result))
    monkeypatch.setattr(driver, "take_events", lambda _: [])
    monkeypatch.setattr(driver.Attempts, "check", lambda *_: None)
    ended = drive(job, lambda _: None, cast(Lease, SimpleNamespace(lost=False)))
    assert ended is not None
    assert ended.path == resume


@ray.remote(num_cpus=0)
class Controller:
    """Waits for workers that never end, as Ray Train's would."""

    def __init__(self, callback: object) -> None:
        self._callback = callback

    def run(self) -> None:
        threading.Event().wait()


@pytest.mark.ray
def test_a_driver_that_gives_up_ends_the_controller_so_that_nothing_waits_in_ray(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, control = SimpleNamespace(workers=SimpleNamespace(in_process=False)), start_control()
    job = cast(Job, SimpleNamespace(control=control, config=config))

    def fit() -> None:
        controller = Controller.remote(failure_reports(control))  # type: ignore[attr-defined]
        ray.get(controller.run.remote())

    monkeypatch.setattr(driver, "_trainer", lambda _: SimpleNamespace(fit=fit))

    def check() -> None:
        while not ray.get(control.actors.remote()):
            time.sleep(0.1)  # the controller starts
        raise LeaseLostError("another command trains now")

    before = threading.enumerate()
    with pytest.raises(LeaseLostError):
        drive(job, lambda _: None, cast(Lease, SimpleNamespace(lost=True, check=check)))
    assert "ray train" not in [thread.name for thread in threading.enumerate() if thread not in before]


def test_an_event_that_cannot_be_reported_is_logged_and_the_rest_still_arrives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events = [{"kind": kind, "n": n} for n, kind in enumerate(["step", "epoch", "epoch", "step"])]
    monkeypatch.setattr(driver, "take_events", lambda control: events)
    seen: list[int] = []

    def see(event: dict[str, Any]) -> None:
        if event["kind"] == "epoch":
            raise ValueError("no such figure")
        seen.append(event["n"])

    driver._pass_events(SimpleNamespace(control=None), see, Harmless())
    assert seen == [0, 3]
    (message,) = caplog.messages
    assert "event of kind 'epoch' failed (ValueError: no such figure); training continues" in message


@pytest.mark.ray
def test_the_control_keeps_events_in_order_and_the_first_note_of_each_name(ray_session: None) -> None:
    control = start_control()
    for number in (1, 2):
        control.report.remote(pickle.dumps({"kind": "step", "number": number}))
        control.note.remote("refused", f"reason {number}")
    assert [event["number"] for event in take_events(control)] == [1, 2]
    assert take_events(control) == []
    assert ray.get([control.noted.remote(name) for name in ("refused", "stop")]) == ["reason 1", ""]


def test_a_repeated_sigterm_lets_the_workers_save_and_a_repeated_ctrl_c_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr(driver.time, "monotonic", lambda: float(next(clock)))
    with driver._noted_signals() as arrived:
        for _ in range(2):  # of the job, and then of its machine
            signal.raise_signal(signal.SIGTERM)
        assert len(arrived) == 2
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGINT)


def attempts(control: Any, **workers: float) -> driver.Attempts:
    settings = Workers(**{"max_failures": 1, "wait_for_nodes_s": 3600.0, **workers})
    return driver.Attempts(
        cast(Job, SimpleNamespace(control=control, config=SimpleNamespace(workers=settings)))
    )


def started(all_steps: int) -> dict[str, Any]:
    return {"kind": "started", "progress": Progress(all_steps=all_steps)}


FAILED = {
    "kind": "failed",
    "reasons": {"worker 1": "OwnersError: rank 0 is gone"},
    "trace": "a long traceback",
}


@pytest.mark.ray
def test_workers_may_fail_any_number_of_times_if_a_new_checkpoint_lies_in_between(
    ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = attempts(start_control())
    for all_steps in range(0, 1000, 100):
        found.check([started(all_steps), FAILED])
    found.check([started(900)])
    with pytest.raises(PencilError, match=r"failed 2 times without a new checkpoint.*worker 1: OwnersError"):
        found.check([FAILED])
    assert "a long traceback" in capsys.readouterr().out


@pytest.mark.ray
def test_a_run_waits_for_nodes_as_long_as_it_is_told_to_and_names_what_is_missing(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "SILENT_S", 0.0)
    monkeypatch.setattr(driver, "WORKERS_EVERY_S", 0.0)
    control = start_control()
    attempts(control, cpus=64.0).check([])
    assert "waiting for workers for up to 3600 s: 1 need 64 CPUs, 4 are there" in capsys.readouterr().out
    attempts(control, cpus=1.0).check([])
    assert "3600 s: the cluster has room for them, but they do not start" in capsys.readouterr().out
    with pytest.raises(PencilError, match=r"no worker for .*: 1 need 64 CPUs, 4 are there; the same command"):
        attempts(control, cpus=64.0, wait_for_nodes_s=1e-9).check([])


def test_what_the_processes_of_ray_train_are_sent_makes_them_import_neither_mlflow_nor_matplotlib() -> None:
    sent = ("control", "elastic", "network", "worker")
    imports = "; ".join(f"import pencil_scale.train.{name}" for name in sent)
    shown = f"import sys; {imports}; print(*{{'matplotlib', 'mlflow', 'torch'}} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["torch"]
