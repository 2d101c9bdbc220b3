"""Run lock: who works on a local storage, so that label parts are swept only by a command that is alone.

A lock on a file, which the system releases when its process dies, marks a run that is being trained. It keeps
nobody away: that is what the run's lease does.

    with run_lock("/data/lake", "demo"): ...      # being trained
    with alone("/data/lake", "demo") as is_alone: ...      # whether the holder may sweep what nobody names
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pencil_scale.reading.byte_source import filesystem_of, is_local
from pencil_scale.running.run_record import run_folder

SWEEP = ".sweep"  # held while label parts are swept
NIGHTS = ".nights"  # marks a job on the nights; no run can have this name


@contextmanager
def run_lock(storage: str, name: str) -> Iterator[None]:
    """Mark a run of a local storage as being trained, for `alone`; its lease keeps other commands away."""
    filesystem, folder = filesystem_of(run_folder(storage, name))
    if not is_local(filesystem):
        yield
        return
    path = Path(folder) / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with _no_sweep(path.parent.parent):
            _try(handle, fcntl.LOCK_EX)
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
