"""The driver of a run: starts the workers, tells people and MLflow how it goes, and passes on a wish to stop.

Ray Train runs in a thread of its own; this one takes the news the workers leave, until they are done.
"""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease
from pencil_scale.stream.ray_tasks import cause_of
from pencil_scale.tracking.tracker import Harmless
from pencil_scale.train.checkpoint_store import CheckpointStore
from pencil_scale.train.control import TellFailures, take_news
from pencil_scale.train.worker import Job, train_worker

NEWS_EVERY_S = 0.25


@dataclass(frozen=True)
class Outcome:
    """How training ended: finished, or stopped because somebody asked."""

    finished: bool
    record: list[dict[str, Any]]
    checkpoint: ray.train.Checkpoint


def drive(job: Job, on_news: Callable[[dict[str, Any]], None], lease: Lease) -> Outcome:
    """Train until done or asked to stop (SIGTERM, Ctrl-C); give every piece of news to `on_news`.

    When another command takes over the lease, this one ends at once, and its workers with it: nothing is
    saved, since the run's checkpoints now belong to the other.
    """
    trainer = _trainer(job)
    ended: dict[str, Any] = {}
    harmless = Harmless()
    fitting = threading.Thread(target=_fit, args=(trainer, ended), name="ray train", daemon=True)
    with _stop_on_signals(job.control) as wish:
        fitting.start()
        while fitting.is_alive():
            fitting.join(NEWS_EVERY_S)
            if lease.lost:
                lease.check()  # says who took over
            wish.pass_on()
            _pass_news(job, on_news, harmless)
        _pass_news(job, on_news, harmless)  # what was said between the last question and the end
    if "error" in ended:
        raise cause_of(ended["error"])
    result = ended["result"]
    if result.return_value.get("refused"):
        raise PencilError(result.return_value["refused"])
    return Outcome(result.return_value["finished"], result.return_value["record"], result.checkpoint)


def _pass_news(job: Job, on_news: Callable[[dict[str, Any]], None], harmless: Harmless) -> None:
    for event in take_news(job.control):
        with harmless(f"reporting news of kind '{event['kind']}'"):
            on_news(event)


def _trainer(job: Job) -> TorchTrainer:
    config = job.config
    fewest, most = config.workers.count
    store = CheckpointStore(config.run.storage, config.run.name, job.origin.run)
    filesystem, path = store.filesystem()
    some: Any = most if fewest == most else (fewest, most)
    scaling: dict[str, Any] = {
        "num_workers": 0 if config.workers.in_process else some,  # 0 is Ray Train's local mode
        "use_gpu": config.workers.gpu,
        "resources_per_worker": {"CPU": config.workers.cpus} | ({"GPU": 1} if config.workers.gpu else {}),
    }
    told: Any = TellFailures(job.control)
    failures: dict[str, Any] = {"max_failures": config.workers.max_failures, "controller_failure_limit": 3}
    return TorchTrainer(
        train_worker,
        train_loop_config={"job": job},
        scaling_config=ray.train.ScalingConfig(**scaling),
        run_config=ray.train.RunConfig(
            name=store.attempt_name(job.origin.attempt),
            storage_path=path,
            storage_filesystem=filesystem,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=config.checkpoint.keep),
            failure_config=ray.train.FailureConfig(**failures),
            callbacks=[told],
        ),
        torch_config=TorchConfig(
            backend="nccl" if config.workers.gpu else "gloo", timeout_s=config.workers.timeout_s
        ),
    )


def _fit(trainer: TorchTrainer, ended: dict[str, Any]) -> None:
    try:
        ended["result"] = trainer.fit()
    except Exception as error:
        ended["error"] = error


class _stop_on_signals:  # noqa: N801
    """While inside, SIGTERM and Ctrl-C ask the workers to save and end; a second one ends at once."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self._asked_at: float | None = None
        self._passed_on = False

    def __enter__(self) -> "_stop_on_signals":
        self._before = {
            number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        """Only take note: a handler runs in the middle of anything, also of Ray's own calls."""
        if self._asked_at is not None and time.monotonic() - self._asked_at > 1:
            raise SystemExit(128 + number)
        self._asked_at = time.monotonic()

    def pass_on(self) -> None:
        """Tell the workers, once."""
        if self._asked_at is not None and not self._passed_on:
            self._passed_on = True
            print("stopping: the workers finish their step and save; once more to end at once", flush=True)
            self._control.want_stop.remote()
