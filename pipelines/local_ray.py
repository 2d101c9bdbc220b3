"""Ray for a job: the cluster it was submitted to, or one of its own on this machine."""

import logging
import os
from collections.abc import Callable

import ray


def ensure_ray() -> None:
    """Join the cluster that RAY_ADDRESS names (`ray job submit` sets it), or start a local one.

    Never the cluster that happens to stand on this machine: a plain `ray.init()` would join it.
    """
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def num_processors() -> int:
    """Count the processors of the whole cluster."""
    resources: Callable[[], dict[str, float]] = ray.cluster_resources
    return max(1, int(resources().get("CPU", 1)))
