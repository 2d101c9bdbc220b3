"""Folder: files under a local folder or any fsspec URL, each complete or not there at all.

Locally a file is written under a temporary name, fsynced and renamed; on an object store it is one put.

    folder = Folder("s3://lake/clothing1m")
    folder.put("labels/parts/ab12.arrow", data)
    data = folder.get("labels/parts/ab12.arrow")

A file can also be written on a condition: created once, or replaced only by a writer that knows its content.

    folder.create("nights/night-0012/night.json", data)       # False if another writer's file is there
    data, etag = folder.read("nights/CURRENT")
    folder.replace("nights/CURRENT", changed, etag)           # False if it has changed since

On S3 these are conditional puts, on a local disk a comparison and a rename under a lock on the folder's file
`.lock`. On a store without conditional puts, comparing and putting are two steps; this is reported once. A
put whose answer was lost is repeated and then refused, so a file that holds exactly the bytes of a refused
put counts as put: where two writers may write equal bytes, add something random.
"""

import errno
import fcntl
import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pencil_scale.storage import s3
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.urls import filesystem_of, is_local, store_errors

BESIDE = ".unfinished"
LOCK = ".lock"
LOCK_PATIENCE_S = 60.0
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
TWO_STEPS = "two commands that start at once may both write"

_memory_lock = threading.Lock()


class Folder:
    """Files under one folder or URL. An etag names one version of a file and means nothing else."""

    def __init__(self, url: str | Path):
        self._files, self._root = filesystem_of(str(url).rstrip("/"))
        self._local = is_local(self._files)
        self.url = self._root if self._local else str(url).rstrip("/")
        # s3fs would ask for the size first, to read large files in several requests.
        self._in_one_request = {"max_concurrency": 1} if self.url.startswith(("s3://", "s3a://")) else {}
        # A listing cached before another process deleted files would still name them.
        self._files.invalidate_cache()

    def path(self, name: str) -> str:
        """The full address of a file, for messages and for other programs."""
        return f"{self.url}/{name}"

    def holds(self, name: str, num_bytes: int) -> bool:
        """Whether the file has all its bytes: a store without atomic puts may have cut it off."""
        try:
            found = self._files.info(f"{self._root}/{name}", refresh=True)  # not from a cached listing
            return int(found["size"]) == num_bytes
        except (FileNotFoundError, NotADirectoryError):
            return False

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write a file, completely or not at all."""
        if self._local:
            with written_beside(Path(self._root, name), durable=True) as beside:
                beside.write_bytes(data)
        else:
            with named_storage_errors(self.path(name)):
                self._files.pipe_file(f"{self._root}/{name}", bytes(data))

    def find(self, name: str) -> bytes | None:
        """Read a file; None if there is none."""
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}", **self._in_one_request))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def get(self, name: str) -> bytes:
        """Read a file that must be there."""
        data = self.find(name)
        if data is None:
            raise DamagedError(
                f"{self.path(name)}: missing, though a manifest names it; restore another manifest"
            )
        return data

    def read_json(self, name: str) -> Any:
        """Read a JSON file; None if there is none, and an error if it is damaged."""
        data = self.find(name)
        try:
            return None if data is None else json.loads(data)
        except ValueError as error:
            raise DamagedError(f"{self.path(name)}: damaged JSON ({error}); restore it") from error

    def put_json(self, name: str, value: Any) -> None:
        """Write a JSON file, completely or not at all."""
        self.put(name, json.dumps(value, indent=2).encode())

    def names(self, folder: str) -> list[str]:
        """The files of one folder of the store, unfinished ones too."""
        try:
            found = self._files.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{name}" for name in (Path(path).name for path in found) if name != LOCK)

    def delete(self, name: str) -> None:
        """Remove a file that may be gone already."""
        with named_storage_errors(self.path(name)), suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def delete_all(self, names: Iterable[str]) -> None:
        """Remove files that may be gone already; on S3 a thousand per request."""
        paths = [f"{self._root}/{name}" for name in names]
        with named_storage_errors(self.url):
            if self._local:
                for path in paths:
                    Path(path).unlink(missing_ok=True)
            elif paths:
                with suppress(FileNotFoundError):
                    self._files.rm(paths)

    # --- on a condition --------------------------------------------------------------------------------

    @cached_property
    def _store_compares(self) -> bool:
        """Whether the store itself keeps the conditions of a put; a probe finds out, once per bucket."""
        protocol, bucket = self.url.partition("://")[0], self._root.partition("/")[0]
        if self._local or protocol == "memory":
            return False
        if protocol in ("s3", "s3a") and s3.keeps_conditions(self._files, self._root):
            return True
        warn_once(f"{protocol}://{bucket} ignores conditional puts: {TWO_STEPS}")
        return False

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Read a file and the etag of exactly these bytes; None if there is none."""
        path = f"{self._root}/{name}"
        with store_errors(self.path(name)):
            if self._store_compares:
                return s3.read(self._files, path)
            try:
                written_ns = Path(path).stat().st_mtime_ns if self._local else 0
            except (FileNotFoundError, NotADirectoryError):
                return None
            data = self.find(name)
            return None if data is None else (data, f"{written_ns}-{hashlib.sha256(data).hexdigest()}")

    def etag(self, name: str) -> str | None:
        """Find the etag of a file; None if there is none."""
        with store_errors(self.path(name)):
            if self._store_compares:
                return s3.etag(self._files, f"{self._root}/{name}")
        found = self.read(name)
        return None if found is None else found[1]

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that does not exist yet; False if another writer's does."""
        return self.replace(name, data, None)

    def replace(self, name: str, data: bytes, etag: str | None) -> bool:
        """Write a file if it still has this etag (None: if there is none); False if it has changed."""
        with store_errors(self.path(name)):
            if self._store_compares:
                return s3.put_if(self._files, f"{self._root}/{name}", data, etag)
            put = self._put_on_disk if self._local else self._put_in_two_steps
            return put(name, data, etag) or self.find(name) == data

    def _put_in_two_steps(self, name: str, data: bytes, etag: str | None) -> bool:
        with _memory_lock:  # enough for a store in memory
            if self.etag(name) != etag:
                return False
            self.put(name, data)
            return True

    def _put_on_disk(self, name: str, data: bytes, etag: str | None) -> bool:
        path = Path(self._root, name)
        with temporary_name(path) as beside:
            beside.write_bytes(data)
            fsync(beside)
            with _locked(path.parent):
                if self.etag(name) != etag:
                    return False
                try:
                    if etag is None:
                        os.link(beside, path)
                    else:
                        beside.replace(path)
                except FileExistsError:  # on a disk without locks
                    return False
                except OSError:  # on a disk without hard links
                    if etag is not None:
                        raise
                    beside.replace(path)
                fsync(path.parent)
                return True


# --- a local disk ------------------------------------------------------------------------------------


@contextmanager
def named_storage_errors(path: str | Path) -> Iterator[None]:
    """Turn the system's refusal to write `path` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = f"{reason}; nothing unfinished was kept: free some space, or choose another folder"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            advice = f"cannot be written ({reason}); choose a folder this user may write to"
        else:
            raise
        raise PencilError(f"{path}: {advice}") from error


@contextmanager
def temporary_name(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write to first; it is removed at the end, unless it was renamed."""
    # Two hosts may have the same process ids, so the name is random.
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}{BESIDE}")
    with named_storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield beside
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def written_beside(path: Path, durable: bool) -> Iterator[Path]:
    """Give a name to write to; the file gets its real name only when it is complete."""
    with temporary_name(path) as beside:
        yield beside
        if durable:
            fsync(beside)
        beside.replace(path)
        if durable:
            fsync(path.parent)  # the name itself must survive a power cut before a manifest relies on it


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; a process that is paused while it holds it must not block others forever."""
    with (folder / LOCK).open("a") as handle:
        until = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    text = f"{folder / LOCK}: another process has held it for {LOCK_PATIENCE_S:g} s"
                    raise PencilError(text) from None
                time.sleep(0.01)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                warn_once(f"{folder}: this disk has no file locks: {TWO_STEPS}")
                break
        yield


@cache
def warn_once(text: str) -> None:
    """Print a warning, the first time only."""
    print(f"WARNING: {text}", file=sys.stderr, flush=True)
