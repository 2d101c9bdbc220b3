"""Run lock: one command trains a run at a time, also where every command has a Ray of its own.

The actor of a run keeps a second job of the same cluster away. Two commands on a laptop share no cluster, but
they share the storage: the first holds a lock on a file there, which the system lets go of when it dies.

    with run_lock("/data/lake", "demo"): ...      # refuses if another command holds it
    with alone("/data/lake", "demo") as is_alone: ...      # whether the holder may sweep what nobody names
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pencil_scale.reading.byte_source import filesystem_of, is_local
from pencil_scale.running.run_record import RunNameError, run_folder

SWEEP = ".sweep"  # held while label parts are swept


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
        with _no_sweep(path.parent.parent):
            _lock(handle, name)
        yield
    finally:
        os.close(handle)


@contextmanager
def alone(storage: str, name: str) -> Iterator[bool]:
    """Tell whether nobody but the holder of a run works on a local storage.

    If so, nobody begins until this is left: who wants to begin waits.
    """
    filesystem, folder = filesystem_of(f"{storage.rstrip('/')}/runs")
    if not is_local(filesystem):
        yield False
        return
    with _opened(Path(folder) / SWEEP) as sweeping:
        others = (path for path in Path(folder).glob("*/lock") if path.parent.name != name)
        yield _try(sweeping, fcntl.LOCK_EX) and not any(_is_held(path) for path in others)


@contextmanager
def _no_sweep(folder: Path) -> Iterator[None]:
    """Wait for a sweep to end, and let none look for locks meanwhile."""
    with _opened(folder / SWEEP) as sweeping:
        with suppress(OSError):  # a disk that knows no locks
            fcntl.flock(sweeping, fcntl.LOCK_SH)
        yield


def _is_held(path: Path) -> bool:
    with _opened(path) as handle:
        return not _try(handle, fcntl.LOCK_EX)


def _try(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:  # somebody else has it, or the disk knows no locks
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield handle
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
