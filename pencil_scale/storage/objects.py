"""Objects that are written on a condition: created once, and replaced only by a writer that knows them.

On S3 these are conditional puts (`If-None-Match: *`, `If-Match: ETAG`), on a local disk a comparison and a
rename under a lock on the file `.lock` of the folder. A probe detects a store that ignores conditions; this
is reported once, and the check and the put are then two steps.

    objects = open_objects("s3://lake/clothing1m")
    objects.create("nights/night-0012/night.json", data)       # False if another writer's object is there
    data, etag = objects.read("nights/CURRENT")
    objects.replace("nights/CURRENT", changed, etag)           # False if it has changed since

A put whose answer was lost is repeated and then refused because of itself. An object that holds exactly the
bytes of a refused put therefore counts as put: where two writers may write equal bytes, add something random.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem

from pencil_scale.storage.errors import StorageError
from pencil_scale.storage.folder import LOCK, fsync, temporary_name

ONE_PUT = 5 * 2**30  # S3 takes no larger object in one put, and only a single put is conditional
REFUSED = ("PreconditionFailed", "412", "NoSuchKey")  # the last one: removed since its etag was read
CONFLICT = ("ConditionalRequestConflict", "OperationAborted", "409")  # two puts at the same moment: repeat
UNKNOWN = ("NotImplemented", "501", "InvalidArgument", "InvalidRequest", "400")
CONFLICT_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
LOCK_PATIENCE_S = 60.0
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

_memory_lock = threading.Lock()
_warned: set[str] = set()
_keeps_conditions: dict[str, bool] = {}  # by bucket


class Objects:
    """The objects below one folder or URL. An etag names one version of an object and means nothing else."""

    def __init__(self, url: str, files: Any, root: str) -> None:
        self.url, self._files, self._root = url, files, root

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Read an object and the etag of exactly these bytes; None if there is none."""
        raise NotImplementedError

    def etag(self, name: str) -> str | None:
        """Find the etag of an object; None if there is none."""
        found = self.read(name)
        return None if found is None else found[1]

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that does not exist yet; False if another writer's does."""
        return self.replace(name, data, None)

    def replace(self, name: str, data: bytes, etag: str | None) -> bool:
        """Write an object if it still has this etag (None: if there is none); False if it has changed."""
        if self._put(name, data, etag):
            return True
        found = self.read(name)
        return found is not None and found[0] == data

    def _put(self, name: str, data: bytes, etag: str | None) -> bool:
        raise NotImplementedError


def warn_once(text: str) -> None:
    """Print a warning, the first time only."""
    if text not in _warned:
        _warned.add(text)
        print(f"WARNING: {text}", file=sys.stderr, flush=True)


# --- a local disk ------------------------------------------------------------------------------------


class DiskObjects(Objects):
    """Files written under a temporary name; they are compared and renamed under the folder's lock."""

    def read(self, name: str) -> tuple[bytes, str] | None:
        try:
            with Path(self.url, name).open("rb") as file:
                data = file.read()
                written_ns = os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data, f"{written_ns}-{hashlib.sha256(data).hexdigest()}"

    def _put(self, name: str, data: bytes, etag: str | None) -> bool:
        path = Path(self.url, name)
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


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; a process that is paused while it holds it must not block others forever."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    until = time.monotonic() + LOCK_PATIENCE_S
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    text = f"{folder / LOCK}: another process has held it for {LOCK_PATIENCE_S:g} s"
                    raise StorageError(text) from None
                time.sleep(0.01)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                warn_once(
                    f"{folder}: this disk has no file locks; two commands that start at once may both write"
                )
                break
        yield
    finally:
        os.close(handle)


# --- memory, and stores without conditions -----------------------------------------------------------


class PlainObjects(Objects):
    """Check, then put: safe within one process, which is enough for a store in memory."""

    def read(self, name: str) -> tuple[bytes, str] | None:
        try:
            data = bytes(self._files.cat_file(f"{self._root}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return data, hashlib.sha256(data).hexdigest()

    def _put(self, name: str, data: bytes, etag: str | None) -> bool:
        with _memory_lock:
            if self.etag(name) != etag:
                return False
            self._files.pipe_file(f"{self._root}/{name}", data)
            return True


# --- S3 ----------------------------------------------------------------------------------------------


class _UnknownConditionError(StorageError):
    """A store that does not know conditional puts."""


class _S3Objects(Objects):
    """Objects on S3. Every answer comes from the store: s3fs's cache of listings would give an old etag."""

    def read(self, name: str) -> tuple[bytes, str] | None:
        with self._errors(name):
            try:
                found: tuple[bytes, str] = sync(self._files.loop, self._get, name)
                return found
            except FileNotFoundError:
                return None

    def etag(self, name: str) -> str | None:
        with self._errors(name):
            try:
                return str(self._files.call_s3("head_object", **self._key(name))["ETag"])
            except FileNotFoundError:
                return None

    async def _get(self, name: str) -> tuple[bytes, str]:
        answer = await self._files._call_s3("get_object", **self._key(name))
        async with answer["Body"] as body:
            return await body.read(), str(answer["ETag"])

    def _put(self, name: str, data: bytes, etag: str | None) -> bool:
        if len(data) >= ONE_PUT:
            raise StorageError(f"{self.url}/{name}: {len(data):,} bytes are too many for one conditional put")
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        waits_s = iter(CONFLICT_WAITS_S)
        with self._errors(name):
            while True:
                try:
                    self._files.pipe_file(f"{self._root}/{name}", data, chunksize=ONE_PUT, **condition)
                    return True
                except OSError as error:
                    code = _code(error)
                    if isinstance(error, FileExistsError) or code in REFUSED:
                        return False
                    if code in UNKNOWN:
                        raise _UnknownConditionError(f"{self.url}/{name}: {error}") from error
                    wait_s = next(waits_s, None)
                    if code not in CONFLICT or wait_s is None:
                        raise
                    time.sleep(wait_s)

    def keeps_conditions(self) -> bool:
        """Try each condition on a test object: those that are met, and those that are not."""
        name, wrong = f".probe-{uuid.uuid4().hex}", '"00000000000000000000000000000000"'
        try:
            kept = self.create(name, b"1") and not self.create(name, b"2")
            kept = kept and not self.replace(name, b"3", wrong)
            return kept and self.replace(name, b"4", self.etag(name))
        except _UnknownConditionError:
            return False
        finally:
            with suppress(Exception):  # a store may not let us delete
                self._files.rm_file(f"{self._root}/{name}")

    def _key(self, name: str) -> dict[str, str]:
        bucket, key, _ = self._files.split_path(f"{self._root}/{name}")
        return {"Bucket": bucket, "Key": key}

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn the errors of botocore (no credentials, no server) into a StorageError."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and _code(error) == "NoSuchKey":
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StorageError(f"{self.url}/{name}: {reason}; check the URL, access and network") from error


def _code(error: BaseException) -> str:
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


# --- choosing ----------------------------------------------------------------------------------------


def open_objects(url: str) -> Objects:
    """Open the objects below a folder or URL; the first time in a bucket, probe what its store can do."""
    url = url.rstrip("/")
    files, root = fsspec.core.url_to_fs(url)
    if isinstance(files, LocalFileSystem):
        return DiskObjects(root, files, root)
    plain, bucket = PlainObjects(url, files, root), root.partition("/")[0]
    protocols = {files.protocol} if isinstance(files.protocol, str) else {*files.protocol}
    if "memory" in protocols:
        return plain
    if "s3" in protocols:
        objects = _S3Objects(url, files, root)
        if bucket not in _keeps_conditions:
            _keeps_conditions[bucket] = objects.keeps_conditions()
        if _keeps_conditions[bucket]:
            return objects
    store = f"{url.partition('://')[0]}://{bucket}"
    warn_once(f"{store} ignores conditional puts: two commands that start at once may both write")
    return plain
