"""The driver of a run, without workers: when it ends, and which errors it survives."""

import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from pencil_scale.storage.lease import Lease, LeaseLostError
from pencil_scale.tracking.narrator import Harmless
from pencil_scale.train import driver
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
    training, job = Training(), cast(Job, SimpleNamespace(control=None))
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
    control = driver.start_control()
    for number in (1, 2):
        control.report.remote(pickle.dumps({"kind": "step", "number": number}))
        control.note.remote("refused", f"reason {number}")
    assert [event["number"] for event in driver.take_events(control)] == [1, 2]
    assert driver.take_events(control) == []
    assert ray.get([control.noted.remote(name) for name in ("refused", "stop")]) == ["reason 1", ""]
