"""Night lock: one job at a time works on the nights of a storage.

On a cluster an actor named after the storage keeps a second job away, and ends with the job that made it. On
one machine, where every command has a Ray of its own, a lock on a file of the storage does the same. Should
two jobs meet that share neither, CURRENT moves for the first alone.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from pencil_scale.nights.night_files import NightError
from pencil_scale.running.control import start_control
from pencil_scale.running.local_ray import ensure_ray
from pencil_scale.running.run_lock import run_lock
from pencil_scale.running.run_record import RunNameError

LOCK = ".nights"  # no run can have this name


@contextmanager
def night_lock(storage: str) -> Iterator[None]:
    """Hold the nights of a storage, or refuse."""
    try:
        with run_lock(storage, LOCK):
            actor = _actor(storage)
            try:
                yield
            finally:
                if actor is not None:
                    ray.kill(actor)
    except RunNameError as error:
        if f"run {LOCK} " not in str(error):
            raise
        raise NightError(f"{storage}: another job is at work on its nights; wait for it to end") from error


def _actor(storage: str) -> Any:
    """A cluster of our own, started for this command alone, would keep nobody away."""
    if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
        return None
    ensure_ray()
    return start_control(storage, LOCK)
