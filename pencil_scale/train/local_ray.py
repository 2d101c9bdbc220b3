"""Ray for a job: the cluster it was submitted to, or a local one on this machine.

    ensure_ray()
    require_room(config.workers)

A local Ray is started in another process group, because Ctrl-C, `timeout` and schedulers signal the group of
a command: the signal must reach the command, which lets the workers save, but not Ray.
"""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray

from pencil_scale.config.settings import Workers
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.retries import RETRY_S, RETRY_VARIABLE
from pencil_scale.stream.ray_tasks import cluster_resource

NAMESPACE = "pencil_scale"
ATTEMPTS = 3
TOO_SLOW = "timed out during startup"


def ensure_ray() -> None:
    """Join the cluster that RAY_ADDRESS names (`ray job submit` sets it), or start a local one.

    A plain `ray.init()` would also join any cluster that happens to run on this machine; this does not.
    """
    # The controller polls its workers this often; with the default of 2 s every checkpoint takes as long.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    # Actors count as processes, so a small machine always has "too many": Ray would end idle readers after
    # a second, and every epoch would start new ones.
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "60000")
    if ray.is_initialized():
        return
    try:
        _connect()
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:  # with which Ray's handler ends a process
            raise
        raise KeyboardInterrupt from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does


def _connect() -> None:
    if os.environ.get("RAY_ADDRESS"):
        # The processes of a local Ray inherit the setting; those of a cluster have to be given it. By default
        # they are not: Ray would start new processes for it.
        retry_s = float(os.environ.get(RETRY_VARIABLE, RETRY_S))
        given = {} if retry_s == RETRY_S else {"env_vars": {RETRY_VARIABLE: f"{retry_s:g}"}}
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING, runtime_env=given)
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback only; no token file in the home folder
        # A run has more small actors than a laptop has processors, and Ray would warn about each.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "16")
        # No usage statistics are sent; collecting them would take an actor, and a query per epoch.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # This machine is not preempted with notice; the actor that watches for it costs 2 s of CPU.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        start_local(namespace=NAMESPACE, logging_level=logging.ERROR)


def start_local(**options: Any) -> None:
    """Start a local Ray, which gives up after 30 s; on a busy machine it is tried again."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with another_group():
                ray.init("local", include_dashboard=False, log_to_driver=False, **options)
            return
        except Exception as error:  # Ray has no class for this
            if TOO_SLOW not in str(error):
                raise
            if attempt == ATTEMPTS:
                raise PencilError(
                    f"Ray did not start on this machine in {ATTEMPTS} attempts of 30 s: {error} "
                    "Try again when the machine is less busy"
                ) from error
            print("Ray did not start within 30 s: the machine is busy; trying again", flush=True)


@contextmanager
def another_group() -> Iterator[None]:
    """Start processes in another process group; a signal to our own group takes effect when we are back.

    If SIGTERM ended Ray, the workers could not save. The leader of a session cannot leave its group, so what
    it starts stays in it.
    """
    ours = os.getpgrp()
    with _idler() as keeper:  # keeps our group alive, and receives its signals
        with _idler(process_group=0) as other, suppress(PermissionError):
            os.setpgid(0, other.pid)
        try:
            yield
        finally:
            if os.getpgrp() != ours:
                os.setpgid(0, ours)
            keeper.send_signal(signal.SIGCONT)  # in case it was stopped: it has to end
    if keeper.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    if keeper.returncode < 0:
        raise SystemExit(128 - keeper.returncode)


def _idler(**options: Any) -> subprocess.Popen[bytes]:
    """A process that ends with its `with` block."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **options)


def require_room(workers: Workers) -> None:
    """Refuse workers for which this machine has no room; a cluster may grow, so there only print a note."""
    missing = what_is_missing(workers)
    if missing and os.environ.get("RAY_ADDRESS"):
        print(f"workers: {missing}; the run waits until the cluster has grown", flush=True)
    elif missing:
        raise PencilError(
            f"workers: {missing}; lower workers.count or workers.cpus, set workers.gpu=false, or submit the "
            "run to a cluster"
        )


def what_is_missing(workers: Workers) -> str:
    """Say what these workers need and Ray does not have; empty if it has everything."""
    num = workers.count[0]
    wanted = {"GPUs": float(num * workers.gpu), "CPUs": 0.0 if workers.in_process else num * workers.cpus}
    there = {kind: cluster_resource(kind[:-1]) for kind in wanted}
    few = [kind for kind in wanted if wanted[kind] > there[kind]]
    return ", ".join(f"{num} need {wanted[kind]:g} {kind}, {there[kind]:g} are there" for kind in few)
