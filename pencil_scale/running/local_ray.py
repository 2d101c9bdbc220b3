"""Ray for a job: the cluster it was submitted to, or one of its own on this machine."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

import ray

NAMESPACE = "pencil_scale"


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
        ray.init(namespace=NAMESPACE, log_to_driver=False)
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback only; no token file in anybody's home
        # A run has more small actors than a laptop has processors: Ray would warn whenever they start.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "16")
        quiet = logging.ERROR
        ray.init(
            "local", namespace=NAMESPACE, include_dashboard=False, log_to_driver=False, logging_level=quiet
        )
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler would end with the bare number of the signal, which no shell understands.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def num_processors() -> int:
    """Count the processors of the whole cluster."""
    resources: Callable[[], dict[str, float]] = ray.cluster_resources
    return max(1, int(resources().get("CPU", 1)))
