"""Control: the actor between a run's driver and its workers.

Workers tell it what happened and ask whether to stop; the driver takes the news and prints, tracks and
decides. It ends with the driver's job.

What Ray Train does about dead workers in silence, told to the driver: who died, and of what.
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
    """News in order, and one wish."""

    def __init__(self) -> None:
        self._news: list[bytes] = []
        self._stop = False
        self._refusal = ""

    def tell(self, sealed: bytes) -> None:
        """Leave word for the driver."""
        self._news.append(sealed)

    def take_news(self) -> list[bytes]:
        """Take all words left since the last time."""
        news, self._news = self._news, []
        return news

    def refuse(self, reason: str) -> None:
        """Say why this run cannot go on, however often it is tried; the first reason counts."""
        self._refusal = self._refusal or reason

    def refusal(self) -> str:
        """Tell the reason, if there is one."""
        return self._refusal

    def want_stop(self) -> None:
        """Ask the workers to finish their step, save and end."""
        self._stop = True

    def stop_wanted(self) -> bool:
        """Tell whether the driver wants the run to stop."""
        return self._stop


def tell(control: Any, event: dict[str, Any]) -> None:
    """Send word, sealed: an actor that only passes it on must not import all it speaks of, such as torch."""
    control.tell.remote(pickle.dumps(event))


def take_news(control: Any) -> list[dict[str, Any]]:
    """Take all words left since the last time, in order."""
    return [pickle.loads(sealed) for sealed in ray.get(control.take_news.remote())]


def start_control() -> Any:
    """Start the actor of a run."""
    # On the driver's own node: on another it would die with that node, and take the driver along.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Control.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]


class StopWatch:
    """Asks the driver now and then whether it wants the run to stop, without keeping the training waiting."""

    def __init__(self, control: Any) -> None:
        self.wanted = False
        self._control = control
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S) and not self.wanted:
            try:
                self.wanted = bool(ray.get(self._control.stop_wanted.remote(), timeout=30))
            except ray.exceptions.RayError:
                continue  # the driver is away for a moment, or for good: Ray Train sees to the latter

    def close(self) -> None:
        self._closed.set()


class TellFailures(UserCallback):
    """Runs beside Ray Train's controller, before it starts the workers again or gives up."""

    def __init__(self, control: Any) -> None:
        self._control = control

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Leave word of every rank that failed."""
        reasons = {rank: reason_of(error) for rank, error in sorted(worker_exceptions.items())}
        tell(self._control, {"kind": "failed", "reasons": reasons})
