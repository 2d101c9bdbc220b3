"""Conditional access to objects: an object is created once, and replaced only by a writer that knows it.

On S3 these are conditional puts (`If-None-Match: *`, `If-Match: ETAG`), on a local disk a comparison and a
rename under a lock. A probe detects a store that ignores conditions; this is reported once, and there the
check and the put are two steps.

    objects = open_objects("s3://lake/clothing1m")
    objects.create("nights/night-0012/plan.json", data)        # False: somebody else's object is there
    data, etag = objects.read("nights/CURRENT")
    objects.replace("nights/CURRENT", changed, etag)           # False: it has changed since

A put whose answer was lost is repeated, and then fails because of itself. So an object that holds exactly the
bytes of a refused put counts as put: where two writers may write equal bytes, add something random.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem

from pencil_scale.storage.objects import DiskObjects, Objects, PlainObjects, StorageError, warn_once

ONE_PUT = 5 * 2**30  # S3 takes no larger object in one put, and only a single put is conditional
REFUSED = ("PreconditionFailed", "412")
CONFLICT = ("ConditionalRequestConflict", "OperationAborted", "409")  # two puts at the same moment: repeat
UNKNOWN = ("NotImplemented", "501", "InvalidArgument", "InvalidRequest", "400")
CONFLICT_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)

_keeps_conditions: dict[str, bool] = {}  # by bucket


def open_objects(url: str) -> Objects:
    """Open the objects below a folder or URL; the first time in a bucket, probe what its store can do."""
    url = url.rstrip("/")
    files, root = fsspec.core.url_to_fs(url)
    if isinstance(files, LocalFileSystem):
        return DiskObjects(root)
    plain = PlainObjects(url, files, root)
    protocols = {files.protocol} if isinstance(files.protocol, str) else {*files.protocol}
    if "memory" in protocols:
        return plain
    if "s3" in protocols:
        objects = _S3Objects(url, files, root)
        bucket = root.partition("/")[0]
        if bucket not in _keeps_conditions:
            _keeps_conditions[bucket] = _probe(objects)
        if _keeps_conditions[bucket]:
            return objects
    store = url.partition("://")[0] + "://" + root.partition("/")[0]
    warn_once(f"{store} ignores conditional puts: two commands that start at once may both write")
    return plain


def _probe(objects: "_S3Objects") -> bool:
    """Try each condition on an object of our own: those that hold, and those that do not."""
    name, wrong = f".probe-{uuid.uuid4().hex}", '"00000000000000000000000000000000"'
    try:
        kept = objects.create(name, b"1") and not objects.create(name, b"2")
        kept = kept and not objects.replace(name, b"3", wrong)
        return kept and objects.replace(name, b"4", objects.etag(name))
    except _UnknownConditionError:
        return False
    finally:
        with suppress(Exception):  # a store may not let us delete
            objects.delete(name)


# --- S3 ----------------------------------------------------------------------------------------------


class _UnknownConditionError(StorageError):
    """A store that refuses to hear of conditions."""


class _S3Objects(Objects):
    """Every answer comes from the store: s3fs's cache of listings would give an old etag."""

    def __init__(self, url: str, files: Any, root: str) -> None:
        super().__init__(url)
        self._files, self._root = files, root

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

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._files.rm_file(f"{self._root}/{name}")

    async def _get(self, name: str) -> tuple[bytes, str]:
        answer = await self._files._call_s3("get_object", **self._key(name))
        async with answer["Body"] as body:
            return await body.read(), str(answer["ETag"])

    def _create(self, name: str, data: bytes) -> bool:
        return self._put(name, data, IfNoneMatch="*")

    def _replace(self, name: str, data: bytes, etag: str) -> bool:
        try:
            return self._put(name, data, IfMatch=etag)
        except FileNotFoundError:
            return False

    def _put(self, name: str, data: bytes, **condition: str) -> bool:
        if len(data) >= ONE_PUT:
            raise StorageError(f"{self.url}/{name}: {len(data):,} bytes are too many for one conditional put")
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

    def _key(self, name: str) -> dict[str, str]:
        bucket, key, _ = self._files.split_path(f"{self._root}/{name}")
        return {"Bucket": bucket, "Key": key}

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Botocore raises classes of its own when there are no credentials, or no server."""
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
