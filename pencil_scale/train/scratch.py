"""Scratch folders: what a worker keeps on its own disk, and what becomes of it when the worker is killed.

A folder is held by a lock on itself, which the system lets go of when its process dies, however it dies. Who
claims a folder first removes those beside it that nobody holds any more: `kill -9` leaves nothing for long.

    folder = claim(config.workers.scratch, "labels")
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "pencil_scale-held-"
UNLOCKED = "pencil_scale-new-"

_held: dict[Path, int] = {}  # our folders and the open handles that lock them


def claim(parent: str | None, kind: str) -> Path:
    """Make a folder of our own under `parent` (null: the system's temporary folder)."""
    base = Path(parent or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    _let_go_of_removed()
    sweep(base)
    # It gets the name by which others judge it only when it is locked.
    fresh = Path(tempfile.mkdtemp(prefix=UNLOCKED, dir=base))
    handle = os.open(fresh, os.O_RDONLY)
    folder = base / fresh.name.replace(UNLOCKED, f"{PREFIX}{kind}-")
    _lock(handle)
    _held[folder] = handle
    return fresh.rename(folder)


def sweep(base: Path) -> list[Path]:
    """Remove the folders of dead processes; say which."""
    left = [folder for folder in base.glob(f"{PREFIX}*") if folder not in _held and _is_abandoned(folder)]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    return left


def _is_abandoned(folder: Path) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False  # gone meanwhile, or another user's
    try:
        return _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Try to lock; a disk that knows no locks leaves everything as it is."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _let_go_of_removed() -> None:
    """A handle is kept for every folder, and a long run makes many."""
    for folder in [folder for folder in _held if not folder.exists()]:
        os.close(_held.pop(folder))
