"""Process groups: what a command starts need not hear what is meant for the command.

with another_group():
    ray.init("local")           # Ctrl-C, `timeout` and schedulers signal a group: it reaches us, not Ray

Ray for a job: the cluster it was submitted to, or one of its own on this machine.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray

from pencil_scale.config.settings import Workers
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.ray_tasks import cluster_resource


@contextmanager
def another_group() -> Iterator[None]:
    """Put what is started inside into another process group; a signal to ours counts once we are back.

    A Ray that ended with SIGTERM would leave the workers nobody to save through. The leader of a session
    cannot leave its group: what it starts stays with it.
    """
    ours = os.getpgrp()
    with _idler() as keeper:  # a group needs a member to live on; this one also takes its signals
        with _idler(process_group=0) as other, suppress(PermissionError):
            os.setpgid(0, other.pid)
        try:
            yield
        finally:
            if os.getpgrp() != ours:
                os.setpgid(0, ours)
            keeper.send_signal(signal.SIGCONT)  # it may have been stopped, and has to end
    if keeper.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    if keeper.returncode < 0:
        raise SystemExit(128 - keeper.returncode)


def _idler(**options: Any) -> subprocess.Popen[bytes]:
    """A process that waits for the end of its `with`."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **options)


NAMESPACE = "pencil_scale"
ATTEMPTS = 3
TOO_SLOW = "timed out during startup"


def ensure_ray() -> None:
    """Join the cluster that RAY_ADDRESS names (`ray job submit` sets it), or start a local one.

    Never the cluster that happens to stand on this machine: a plain `ray.init()` would join it.
    """
    # The controller asks its workers for news this often; at its default of 2 s a checkpoint takes as long.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    # Actors count as processes, so a small machine has always "too many": Ray would end idle readers after a
    # second, and every epoch would start new ones.
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "60000")
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback only; no token file in anybody's home
        # A run has more small actors than a laptop has processors: Ray would warn whenever they start.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "16")
        # Nothing of anybody's data is told to Ray's makers; gathering it took an actor, and a query an epoch.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Nobody takes this machine away with notice; the actor that would watch for it costs 2 s of CPU.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        start_local(namespace=NAMESPACE, logging_level=logging.ERROR)
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler would end with the bare number of the signal, which no shell understands.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def start_local(**options: Any) -> None:
    """Start a Ray of our own. It gives itself 30 s, which a machine with much else to do may not keep."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with another_group():
                ray.init("local", include_dashboard=False, log_to_driver=False, **options)
            return
        except Exception as error:  # Ray has no class of its own for it
            if TOO_SLOW not in str(error):
                raise
            if attempt == ATTEMPTS:
                raise PencilError(
                    f"Ray did not start on this machine in {ATTEMPTS} attempts of 30 s: {error} "
                    "Try again when the machine has less to do"
                ) from error
            print("Ray did not start within its 30 s: the machine is busy; trying again", flush=True)


def require_room(workers: Workers) -> None:
    """Refuse workers that this machine can never hold; a cluster may grow: say what is waited for."""
    missing = what_is_missing(workers)
    if missing and os.environ.get("RAY_ADDRESS"):
        print(f"workers: {missing}; the run waits until the cluster has grown", flush=True)
    elif missing:
        raise PencilError(
            f"workers: {missing}; lower workers.count or workers.cpus, set workers.gpu=false, or submit the "
            "run to a cluster"
        )


def what_is_missing(workers: Workers) -> str:
    """Say what these workers need that Ray does not have; nothing if it has all."""
    num = workers.count[0]
    wanted = {"GPUs": float(num * workers.gpu), "CPUs": 0.0 if workers.in_process else num * workers.cpus}
    there = {kind: cluster_resource(kind[:-1]) for kind in wanted}
    few = [kind for kind in wanted if wanted[kind] > there[kind]]
    return ", ".join(f"{num} need {wanted[kind]:g} {kind}, {there[kind]:g} are there" for kind in few)
