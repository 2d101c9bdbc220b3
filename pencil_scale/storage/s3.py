"""S3: objects read together with their etag, and put on a condition (`If-None-Match: *`, `If-Match: ETAG`).

Every answer comes from the store: s3fs's cache of listings would give an old etag. A store that merely speaks
S3 may ignore the conditions; a probe finds out. `Folder` calls these functions.

A put is retried as any access is, and may then meet what its own first attempt wrote, whose answer was lost:
it is refused, and finds its own bytes in the store. A late first attempt does no harm: the etag it waits for
is gone.
"""

import uuid
from contextlib import suppress
from typing import Any

from fsspec.asyn import sync

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.retries import patiently

ONE_PUT = 5 * 2**30  # S3 takes no larger object in one put, and only a single put is conditional
REFUSED = ("PreconditionFailed", "412", "NoSuchKey")  # the last one: removed since its etag was read
UNKNOWN = ("NotImplemented", "501", "InvalidArgument", "InvalidRequest", "400")

_known: dict[str, bool] = {}  # bucket -> whether its store keeps conditions


def read(files: Any, path: str) -> tuple[bytes, str] | None:
    """Read an object and the etag of exactly these bytes; None if there is none."""

    async def get() -> tuple[bytes, str]:
        answer = await files._call_s3("get_object", **_address(files, path))
        async with answer["Body"] as body:
            return await body.read(), str(answer["ETag"])

    try:
        found: tuple[bytes, str] = patiently(f"s3://{path}", lambda: sync(files.loop, get))
    except FileNotFoundError:
        return None
    return found


def etag(files: Any, path: str) -> str | None:
    """Find the etag of an object; None if there is none."""
    try:
        found = patiently(f"s3://{path}", lambda: files.call_s3("head_object", **_address(files, path)))
        return str(found["ETag"])
    except FileNotFoundError:
        return None


def put_if(files: Any, path: str, data: bytes, etag: str | None) -> bool:
    """Put an object if it still has this etag (None: if there is none), or holds these bytes already."""
    if len(data) >= ONE_PUT:
        raise PencilError(f"s3://{path}: {len(data):,} bytes are too many for one conditional put")
    condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
    try:
        files.pipe_file(path, data, chunksize=ONE_PUT, **condition)
        return True
    except OSError as error:
        if not isinstance(error, FileExistsError) and _code(error) not in REFUSED:
            raise
        found = read(files, path)
        return found is not None and found[0] == data


def keeps_conditions(files: Any, root: str) -> bool:
    """Try each condition on a test object, once per bucket: those that are met, and those that are not."""
    bucket = root.partition("/")[0]
    if bucket not in _known:
        path, wrong = f"{root}/.probe-{uuid.uuid4().hex}", '"00000000000000000000000000000000"'
        try:
            kept = put_if(files, path, b"1", None) and not put_if(files, path, b"2", None)
            kept = kept and not put_if(files, path, b"3", wrong)
            _known[bucket] = kept and put_if(files, path, b"4", etag(files, path))
        except OSError as error:
            if _code(error) not in UNKNOWN:
                raise
            _known[bucket] = False
        finally:
            with suppress(Exception):  # a store may not let us delete
                files.rm_file(path)
    return _known[bucket]


def _address(files: Any, path: str) -> dict[str, str]:
    bucket, key, _ = files.split_path(path)
    return {"Bucket": bucket, "Key": key}


def _code(error: BaseException) -> str:
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
