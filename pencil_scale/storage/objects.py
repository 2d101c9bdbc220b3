"""Objects of a storage that are written on a condition: what they promise, on a disk and in memory.

A local disk compares and renames under a lock on the file `.lock` of the folder. Memory belongs to one
process, and has a lock there. `open_objects` in `conditional` chooses the right kind for a URL.
"""

import errno
import fcntl
import hashlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import BESIDE, LOCK, named_storage_errors

LOCK_PATIENCE_S = 60.0
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

_memory_lock = threading.Lock()
_warned: set[str] = set()


class StorageError(PencilError):
    """A storage that cannot be read or written as it has to be."""


class Objects:
    """The objects below one folder or URL. An etag names one version of an object and means nothing else."""

    def __init__(self, url: str) -> None:
        self.url = url

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Read an object and the etag of exactly these bytes; None where there is none."""
        raise NotImplementedError

    def etag(self, name: str) -> str | None:
        """Find the etag of an object; None where there is none."""
        found = self.read(name)
        return None if found is None else found[1]

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that is not there yet; False if somebody else's is."""
        return self._create(name, data) or self._holds(name, data)

    def replace(self, name: str, data: bytes, etag: str | None) -> bool:
        """Write an object if it still has this etag (None: if there is none); False if it has changed."""
        if etag is None:
            return self.create(name, data)
        return self._replace(name, data, etag) or self._holds(name, data)

    def _holds(self, name: str, data: bytes) -> bool:
        found = self.read(name)
        return found is not None and found[0] == data

    def _create(self, name: str, data: bytes) -> bool:
        raise NotImplementedError

    def _replace(self, name: str, data: bytes, etag: str) -> bool:
        raise NotImplementedError


def warn_once(text: str) -> None:
    """Print a warning the first time it is due."""
    if text not in _warned:
        _warned.add(text)
        print(f"WARNING: {text}", file=sys.stderr, flush=True)


# --- a local disk ------------------------------------------------------------------------------------


class DiskObjects(Objects):
    """Files written beside and renamed; a comparison before that holds the folder's lock."""

    def read(self, name: str) -> tuple[bytes, str] | None:
        try:
            with Path(self.url, name).open("rb") as file:
                data = file.read()
                written_ns = os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data, f"{written_ns}-{hashlib.sha256(data).hexdigest()}"

    def _create(self, name: str, data: bytes) -> bool:
        path = Path(self.url, name)
        with _written_beside(path, data) as beside, _locked(path.parent):
            if path.exists():
                return False
            try:
                os.link(beside, path)
            except FileExistsError:  # on a disk without locks
                return False
            except OSError:  # on a disk without hard links
                beside.replace(path)
            _fsync(path.parent)
            return True

    def _replace(self, name: str, data: bytes, etag: str) -> bool:
        path = Path(self.url, name)
        with _written_beside(path, data) as beside, _locked(path.parent):
            if self.etag(name) != etag:
                return False
            beside.replace(path)
            _fsync(path.parent)
            return True


@contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}{BESIDE}")
    with named_storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(data)
            _fsync(beside)
            yield beside
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; a process that was paused while it held it must not stop others for ever."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    until = time.monotonic() + LOCK_PATIENCE_S
    try:
        while not _try_lock(handle, folder):
            if time.monotonic() > until:
                raise StorageError(f"{folder / LOCK}: another process has held it for {LOCK_PATIENCE_S:g} s")
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int, folder: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warn_once(f"{folder}: this disk has no file locks; two commands that start at once may both write")
    return True


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- memory, and stores without conditions -----------------------------------------------------------


class PlainObjects(Objects):
    """Look, then put: safe within one process, which is all that a store in memory has."""

    def __init__(self, url: str, files: Any, root: str) -> None:
        super().__init__(url)
        self._files, self._root = files, root

    def read(self, name: str) -> tuple[bytes, str] | None:
        try:
            data = bytes(self._files.cat_file(f"{self._root}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data, hashlib.sha256(data).hexdigest()

    def _create(self, name: str, data: bytes) -> bool:
        return self._put(name, data, None)

    def _replace(self, name: str, data: bytes, etag: str) -> bool:
        return self._put(name, data, etag)

    def _put(self, name: str, data: bytes, etag: str | None) -> bool:
        with _memory_lock:
            if self.etag(name) != etag:
                return False
            self._files.pipe_file(f"{self._root}/{name}", data)
            return True
