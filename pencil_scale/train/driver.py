"""Driver: starts the workers of a run, passes on their events, and forwards a stop request to them.

Ray Train runs in a thread; the main thread takes the events that the workers report, until they are done.
Driver and workers exchange events and notes through the control of a run.
"""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.train

from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import require_same_rows
from pencil_scale.labels.run_record import RunRecord
from pencil_scale.storage.errors import PencilError, ResumableError
from pencil_scale.storage.lease import Lease, command_line
from pencil_scale.storage.retries import UnreachableError
from pencil_scale.stream.ray_tasks import cause_of, reason_of
from pencil_scale.tracking.narrator import Harmless
from pencil_scale.train.checkpoints import CheckpointStore
from pencil_scale.train.control import failed, failure_reports, start_control, take_events
from pencil_scale.train.elastic import ElasticTrainer
from pencil_scale.train.local_ray import what_is_missing
from pencil_scale.train.network import NetworkConfig
from pencil_scale.train.plan import RunPlan
from pencil_scale.train.worker import REFUSED, STOP, Job, left_behind, train_worker

EVENTS_EVERY_S = 0.25
WORKERS_EVERY_S = 5.0  # how often the driver asks whether there are workers
SILENT_S = 30.0  # three beats of a worker, or its start
RESIZE_VARIABLE, RESIZE_S = "PENCIL_SCALE_RESIZE_S", 60.0  # how often an elastic run considers to grow
END_S = 10.0  # a controller that was told to end has ended by then
SAVES = {"saving", "epoch"}  # kinds of events after which a worker that was asked to stop saves


def make_job(plan: RunPlan, record: RunRecord, labels: Manifest) -> Job:
    """Put together what the workers are given; checkpoints that are not needed any more are removed."""
    checkpoints = CheckpointStore(plan.config.run.storage, record.name, record.id)
    attempt, resume = checkpoints.newest() or (record.attempt, None)
    checkpoints.remove(before=attempt)
    require_same_rows(labels, plan.catalogue)
    watched = plan.stream.for_evaluation(plan.config, plan.roles.watched) if len(plan.roles.watched) else None
    return Job(plan.config, record, plan.stream, plan.clean, watched, labels, resume, start_control())


def drive(job: Job, on_event: Callable[[dict[str, Any]], None], lease: Lease) -> ray.train.Checkpoint | None:
    """Train, passing every event to `on_event`; return the last checkpoint.

    Ray Train's controller restarts workers that fail. If the controller itself fails, because a store did not
    answer for `storage.retry_s`, a new one is started.

    Return None after a stop request (SIGTERM, Ctrl-C). Workers that do not start to save within
    `workers.stop_s`, because a network compiles or a step takes minutes, are ended: SystemExit is raised, and
    the run resumes from its last checkpoint. If no worker has begun to train, KeyboardInterrupt is raised.

    If another command takes over the lease, this one ends at once, and its workers with it: nothing is saved,
    because the run's checkpoints now belong to the other command.
    """
    harmless, attempts = Harmless(), Attempts(job)
    ended: dict[str, Any] = {}

    def fit() -> None:
        while not ended:
            try:
                ended["result"] = _trainer(job).fit()
            except Exception as error:
                cause = cause_of(error)
                if job.config.workers.in_process or not isinstance(cause, UnreachableError):
                    ended["error"] = cause
                else:
                    job.control.report.remote(failed({"the controller": reason_of(error)}, error))

    fitting = threading.Thread(target=fit, name="ray train", daemon=True)
    begun = stopping = saving = False
    with _noted_signals() as arrived, _controller_ended(fitting, job):
        fitting.start()
        while fitting.is_alive():
            fitting.join(EVENTS_EVERY_S)
            if lease.lost:
                lease.check()  # says who took over
            events = _pass_events(job, on_event, harmless)
            begun = begun or any(event["kind"] == "started" for event in events)
            if arrived and not stopping:
                if not begun and not job.config.workers.in_process:  # whose thread has to end first
                    raise KeyboardInterrupt
                stopping = True
                saved = "" if job.config.workers.in_process else " and save"
                print(f"stopping: the workers finish their step{saved}; Ctrl-C ends them at once", flush=True)
                job.control.note.remote(STOP, "requested")
            saving = saving or (stopping and any(event["kind"] in SAVES for event in events))
            attempts.check(events)
            if stopping and not saving and time.monotonic() - arrived[0] > job.config.workers.stop_s:
                raise _unsaved(job.config.workers.stop_s)
        _pass_events(job, on_event, harmless)  # what arrived between the last call and the end
    if "error" in ended:
        raise ended["error"]
    result = ended["result"]
    if reason := result.return_value.get(REFUSED):
        raise PencilError(reason)
    if not result.return_value["finished"]:
        return None
    return result.checkpoint or left_behind(job)  # if nothing remained to be trained


@contextmanager
def _controller_ended(fitting: threading.Thread, job: Job) -> Iterator[None]:
    """Afterwards, end a controller that the thread waits for: Ray crashes if it ends before the thread."""
    try:
        yield
    finally:
        give_up_at = time.monotonic() + (0 if job.config.workers.in_process else END_S)
        while fitting.is_alive() and time.monotonic() < give_up_at:
            for handle in ray.get(job.control.actors.remote()):
                ray.kill(pickle.loads(handle))
            fitting.join(EVENTS_EVERY_S)


def _unsaved(stop_s: float) -> SystemExit:
    """Say that the workers are ended without saving."""
    print(
        f"the workers did not finish their step within {stop_s:g} s (workers.stop_s) and are ended; to "
        f"resume from the last checkpoint: {command_line()}",
        flush=True,
    )
    return SystemExit(128 + signal.SIGTERM)


def _pass_events(
    job: Job, on_event: Callable[[dict[str, Any]], None], harmless: Harmless
) -> list[dict[str, Any]]:
    """Pass on what the workers reported since the last call, and return it."""
    events = take_events(job.control)
    for event in events:
        if event["kind"] == "failed":
            event["places"] = ray.get(job.control.places.remote())
        with harmless(f"reporting an event of kind '{event['kind']}'"):
            on_event(event)
    return events


class Attempts:
    """Ends a run whose workers fail again and again, or do not start because nodes are missing.

    Ray Train counts over the life of a run, which may take days; here progress resets the count.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._num_failed, self._all_steps, self._is_waiting = job, 0, 0, False
        self._checked_at = time.monotonic()

    def check(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "started" and event["progress"].all_steps > self._all_steps:
                self._num_failed, self._all_steps = 0, event["progress"].all_steps
            elif event["kind"] == "failed":
                self._num_failed += 1
                if self._num_failed > self._job.config.workers.max_failures:
                    raise self._failure(event)
        if time.monotonic() - self._checked_at > WORKERS_EVERY_S:
            self._checked_at = time.monotonic()
            self._limit_waiting(ray.get(self._job.control.silent_s.remote()))

    def _failure(self, event: dict[str, Any]) -> PencilError:
        if refused := ray.get(self._job.control.noted.remote(REFUSED)):
            return PencilError(refused)
        print(event["trace"], flush=True)
        who, reason = next(iter(event["reasons"].items()))
        return ResumableError(
            f"workers failed {self._num_failed} times without a new checkpoint in between (see "
            f"workers.max_failures), last {who}: {reason}; the same command resumes the run"
        )

    def _limit_waiting(self, silent_s: float) -> None:
        workers = self._job.config.workers
        missing = what_is_missing(workers) if silent_s > SILENT_S else ""
        is_waiting = silent_s > (SILENT_S if missing else 2 * SILENT_S)
        why = missing or (
            "the cluster has room for them, but they do not start; on a busy machine this takes minutes, as "
            "Ray's workers give way to other processes"
        )
        if is_waiting and not self._is_waiting:
            print(f"waiting for workers for up to {workers.wait_for_nodes_s:g} s: {why}", flush=True)
        self._is_waiting = is_waiting
        if silent_s > workers.wait_for_nodes_s:
            raise ResumableError(
                f"there was no worker for {silent_s:.0f} s (workers.wait_for_nodes_s): {why}; the same "
                "command resumes the run from its last checkpoint"
            )


def _trainer(job: Job) -> ElasticTrainer:
    config = job.config
    store = CheckpointStore(config.run.storage, config.run.name, job.record.id)
    filesystem, path = store.filesystem()
    fewest, most = config.workers.count
    num_workers: Any = most if fewest == most else (fewest, most)
    scaling: dict[str, Any] = {
        "num_workers": 0 if config.workers.in_process else num_workers,  # 0 is Ray Train's local mode
        "use_gpu": config.workers.gpu,
        "resources_per_worker": {"CPU": config.workers.cpus} | ({"GPU": 1} if config.workers.gpu else {}),
    }
    if fewest < most:
        # Ray may count on a node that has just died, and would wait a minute before it takes those left.
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "15")
        scaling["elastic_resize_monitor_interval_s"] = float(os.environ.get(RESIZE_VARIABLE, RESIZE_S))
    backend = "nccl" if config.workers.gpu else "gloo"
    return ElasticTrainer(
        train_worker,
        train_loop_config={"job": job},
        scaling_config=ray.train.ScalingConfig(**scaling),
        run_config=ray.train.RunConfig(
            name=store.attempt_name(job.record.attempt),
            storage_path=path,
            storage_filesystem=filesystem,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=config.checkpoint.keep),
            failure_config=ray.train.FailureConfig(max_failures=-1),  # Attempts limits them
            callbacks=[failure_reports(job.control)],
        ),
        torch_config=NetworkConfig(backend=backend, timeout_s=config.workers.timeout_s),
    )


@contextmanager
def _noted_signals() -> Iterator[list[float]]:
    """Note when SIGTERM or Ctrl-C arrive; Ctrl-C after more than a second ends the command at once.

    SIGTERM may be repeated by schedulers, which stop first the job and then its machine.
    """
    arrived: list[float] = []

    def note(number: int, _: object) -> None:  # does nothing else: it may interrupt a call into Ray
        if number == signal.SIGINT and arrived and time.monotonic() - arrived[-1] > 1:
            raise SystemExit(128 + number)
        arrived.append(time.monotonic())

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
