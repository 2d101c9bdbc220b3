"""Control of a run: an actor through which driver and workers exchange events and notes.

    control = start_control()                        # ends with the driver's job
    control.report.remote(pickle.dumps(event))       # from any process of the run
    events = take_events(control)                    # in the driver

Every process of Ray Train imports this module, so it imports neither torch nor MLflow.
"""

import pickle
import time
import traceback
from typing import Any

import ray
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pencil_scale.stream.ray_tasks import reason_of


def take_events(control: Any) -> list[dict[str, Any]]:
    """Take all events since the last call, in order."""
    return [pickle.loads(event) for event in ray.get(control.take_events.remote())]


def start_control() -> Any:
    """Start the control of a run: it keeps events, as bytes, and the first note of each name.

    Its class is local, so Ray sends it by value: the actor's process imports neither this module nor torch.
    """

    class Control:
        def __init__(self) -> None:
            self._events: list[bytes] = []
            self._notes: dict[str, str] = {}
            self._beat_at = time.monotonic()
            self._places: dict[int, tuple[str, float]] = {}  # of each rank, and when it was last heard
            self._actors: list[bytes] = []

        def beat(self, rank: int, place: str) -> None:
            self._beat_at = time.monotonic()
            self._places[rank] = place, self._beat_at

        def silent_s(self) -> float:
            return time.monotonic() - self._beat_at

        def places(self) -> dict[int, tuple[str, float]]:
            """Where the ranks of the attempt that has ended were, and how long they had been silent."""
            places, self._places = self._places, {}
            return {rank: (place, time.monotonic() - at) for rank, (place, at) in places.items()}

        def report(self, event: bytes) -> None:
            self._events.append(event)

        def take_events(self) -> list[bytes]:
            events, self._events = self._events, []
            return events

        def note_actor(self, handle: bytes) -> None:
            self._actors.append(handle)

        def actors(self) -> list[bytes]:
            return self._actors

        def note(self, name: str, text: str) -> None:
            self._notes.setdefault(name, text)

        def noted(self, name: str) -> str:
            return self._notes.get(name, "")

    # On the driver's node: if another node died with the actor, the driver would lose it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0)(Control).options(scheduling_strategy=here).remote()


def failure_reports(control: Any) -> Any:
    """Report workers that die: Ray Train's controller, which runs this, replaces them silently.

    The driver has no handles of the actors of Ray Train: each gives the control its own as it unpickles this.
    """

    class ReportFailures(ray.train.UserCallback):  # local, and so sent by value, as the control is
        def __init__(self) -> None:
            self._control = control

        def __setstate__(self, state: dict[str, Any]) -> None:
            self._control = state["_control"]
            handle = ray.get_runtime_context().current_actor
            self._control.note_actor.remote(pickle.dumps(handle))

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            errors = dict(sorted(worker_exceptions.items()))
            reasons = {f"worker {rank}": reason_of(error) for rank, error in errors.items()}
            self._control.report.remote(failed(reasons, next(iter(errors.values()))))

    return ReportFailures()


def failed(reasons: dict[str, str], error: BaseException) -> bytes:
    """An event: who failed, and why, with the traceback of one error."""
    trace = "".join(traceback.format_exception(error))
    return pickle.dumps({"kind": "failed", "reasons": reasons, "trace": trace})
