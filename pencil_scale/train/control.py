"""Control: the actor between a run's driver and its workers.

Workers report events to it and ask whether to stop; the driver takes the events, prints and tracks them. The
actor ends with the driver's job. It runs in a separate process, so this module must not import torch, and
events pass through it as bytes.
"""

import pickle
import threading
from typing import Any

import ray
from ray.train import UserCallback
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pencil_scale.stream.ray_tasks import reason_of

POLL_S = 0.5


@ray.remote(num_cpus=0)
class Control:
    """Events in order, a stop request, and a reason not to try again."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._stop = False
        self._refusal = ""

    def report(self, event: bytes) -> None:
        """Leave an event for the driver."""
        self._events.append(event)

    def take_events(self) -> list[bytes]:
        """Take all events since the last call."""
        events, self._events = self._events, []
        return events

    def refuse(self, reason: str) -> None:
        """Say why the run cannot continue, however often it is tried; the first reason counts."""
        self._refusal = self._refusal or reason

    def refusal(self) -> str:
        """The reason, if there is one."""
        return self._refusal

    def want_stop(self) -> None:
        """Ask the workers to finish their step, save and end."""
        self._stop = True

    def stop_wanted(self) -> bool:
        """Whether the driver wants the run to stop."""
        return self._stop


def start_control() -> Any:
    """Start the actor of a run."""
    # On the driver's node: if another node died with the actor, the driver would lose it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Control.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]


def report_event(control: Any, event: dict[str, Any]) -> None:
    """Report an event to the driver."""
    control.report.remote(pickle.dumps(event))


def take_events(control: Any) -> list[dict[str, Any]]:
    """Take all events since the last call, in order."""
    return [pickle.loads(event) for event in ray.get(control.take_events.remote())]


class ReportFailures(UserCallback):
    """Runs in Ray Train's controller, which says nothing itself when workers die and are started again."""

    def __init__(self, control: Any) -> None:
        self._control = control

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Report every rank that failed, with the reason."""
        reasons = {rank: reason_of(error) for rank, error in sorted(worker_exceptions.items())}
        report_event(self._control, {"kind": "failed", "reasons": reasons})


class StopWatch:
    """Polls for a stop request in a thread, so that the training never waits for the answer."""

    def __init__(self, control: Any) -> None:
        self.wanted = False
        self._control = control
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="stop watch", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S) and not self.wanted:
            try:
                self.wanted = bool(ray.get(self._control.stop_wanted.remote(), timeout=30))
            except ray.exceptions.RayError:
                continue  # the driver is unreachable for a moment, or gone: Ray Train then ends the workers

    def close(self) -> None:
        self._closed.set()
