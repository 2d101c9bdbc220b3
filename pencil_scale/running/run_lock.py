"""Run lock: one command trains a run at a time, also where every command has a Ray of its own.

The actor of a run keeps a second job of the same cluster away. Two commands on a laptop share no cluster, but
they share the storage: the first holds a lock on a file there, which the system lets go of when it dies.

    with run_lock("/data/lake", "demo"): ...      # refuses if another command holds it
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pencil_scale.reading.byte_source import filesystem_of, is_local
from pencil_scale.running.run_record import RunNameError, run_folder


@contextmanager
def run_lock(storage: str, name: str) -> Iterator[None]:
    """Hold the run if its storage is local; in an object store the cluster's own lock has to do."""
    filesystem, folder = filesystem_of(run_folder(storage, name))
    if not is_local(filesystem):
        yield
        return
    path = Path(folder) / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(handle, name)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, name: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunNameError(
            f"run {name} is being trained by another command; wait for it, or choose another run.name"
        ) from error
    except OSError:  # a disk that knows no locks: the cluster's own has to do
        return
