"""Retries: a store that does not answer delays a job instead of ending it.

`filesystem_of` returns filesystems of a class made here, so every access to a store is retried: reads,
writes and listings, also those that pyarrow and Ray Train make. Transient faults (timeouts, resets, 5xx,
SlowDown, DNS, truncated bodies) are retried with growing random pauses for `storage.retry_s`. Each process
logs one line when it starts waiting for a store and one when the store answers again. If it does not,
`UnreachableError` ends the attempt; a new attempt may succeed. Faults that waiting cannot fix (no access, no
credentials, no bucket) are raised at once, as one line.

    files = patient(S3FileSystem, (), {})                  # as S3FileSystem(), but patient
    data = patiently("s3://lake/x", lambda: files.cat_file("lake/x"))

The setting reaches every process of a job as an environment variable, because stores are also opened in
processes that Ray starts. `limited_to` is for clean-up that must not delay the end of a command.
"""

import io
import logging
import os
import platform
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, TypeVar

from fsspec.asyn import mirror_sync_methods

from pencil_scale.storage.errors import PencilError, ResumableError

Result = TypeVar("Result")

RETRY_VARIABLE = "PENCIL_SCALE_RETRY_S"
RETRY_S = 600.0  # the default of storage.retry_s
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
SILENT_S = 2.0  # shorter faults are not logged
BOTOCORE_RETRIES = {"mode": "standard", "total_max_attempts": 3}  # of each request, over some seconds
ACCESSES = (
    *("open", "info", "ls", "find", "glob", "cat_file", "get_file", "get"),
    *("pipe_file", "put_file", "put", "cp_file", "copy", "mkdir", "makedirs"),
)
REMOVALS = ("rm", "rm_file", "rmdir", "mv")  # repeated, they may find that the first attempt did it
# Classes of transient errors, by name: the libraries of stores share no base class. Subclasses count, too.
TRANSIENT = {
    *("ConnectionError", "TimeoutError", "gaierror", "IncompleteRead"),  # Python, urllib3, botocore
    *("HTTPClientError", "ResponseParserError", "IncompleteReadError", "FlexibleChecksumError"),  # botocore
    *("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),  # aiohttp: S3, GCS, HTTP
    *("ServiceRequestError", "ServiceResponseError", "TransportError"),  # Azure, Google
}
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
# Two conditional puts at the same moment, and bodies that were cut short on their way to the store.
TRANSIENT_CODES = {
    *("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable"),
    *("Throttling", "ThrottlingException", "ConditionalRequestConflict", "OperationAborted"),
    *("IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
}
DENIED = {
    *("PermissionError", "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
    *("TokenRetrievalError", "ProfileNotFound", "DefaultCredentialsError", "ClientAuthenticationError"),
}
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"  # what OpenSSL says; the classes of errors around it vary
DENIED_CODES = {"InvalidToken", "ExpiredToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed"}

log = logging.getLogger(__name__)
listeners: list[Callable[[str], object]] = []  # called with the store whenever an access is repeated
_limit_s: ContextVar[float] = ContextVar("limit_s", default=float("inf"))
_lock = threading.Lock()
_waiting: dict[str, dict[object, float]] = {}  # by store: the accesses that wait for it, and since when


class UnreachableError(ResumableError):
    """A store did not answer for storage.retry_s; a new attempt may succeed."""


class RefusedError(PencilError):
    """A store refuses access to an object, or has no such bucket; the message starts with the URL."""


class TruncatedError(ConnectionError):
    """A store sent fewer bytes than it has."""


def set_retry_s(seconds: float) -> None:
    """Set how long this process, and those it starts, wait for a store."""
    os.environ[RETRY_VARIABLE] = f"{seconds:g}"


@contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """Wait at most this long for a store, in this thread."""
    token = _limit_s.set(seconds)
    try:
        yield
    finally:
        _limit_s.reset(token)


def patiently(url: str, access: Callable[[], Result], removes: bool = False) -> Result:
    """Repeat an access to a store while its faults are transient, for up to storage.retry_s."""
    attempt, since, until, me = 0, time.monotonic(), 0.0, object()
    while True:
        fault = None
        try:
            return access()
        except Exception as error:
            if not is_transient(error):
                if removes and attempt and isinstance(error, FileNotFoundError):
                    return None  # type: ignore[return-value]
                _raise_if_refused(url, error)
                raise
            fault = error
        finally:
            if fault is None and attempt:
                _answered(store_of(url))
        now = time.monotonic()
        # The first attempt may have taken minutes: a limit includes it, storage.retry_s does not.
        until = until or min(now + float(os.environ.get(RETRY_VARIABLE, RETRY_S)), since + _limit_s.get())
        if now >= until:
            _gave_up(store_of(url), me)
            how_long = f" for {now - since:.0f} s, last" if attempt else ""
            raise UnreachableError(
                f"{url}: unreachable{how_long} with {_reason(fault)}; check the store and the network, then "
                "start the same command again, or raise storage.retry_s"
            ) from fault
        if now - since >= SILENT_S:
            _report(url, me, fault, until - now)
        pause_s = random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2 ** min(attempt, 9), LONGEST_PAUSE_S)
        time.sleep(min(pause_s, until - now))
        attempt += 1
        for listen in listeners:
            listen(store_of(url))


def store_of(url: str) -> str:
    """The protocol and bucket, or host, of a URL, as in s3://lake."""
    return "/".join(url.split("/", 3)[:3])


def _report(url: str, access: object, fault: Exception, left_s: float) -> None:
    store = store_of(url)
    with _lock:
        waiting = _waiting.setdefault(store, {})
        is_first = not waiting
        waiting.setdefault(access, time.monotonic())
    if is_first:
        text = "%s does not answer (%s): retrying for up to %.0f s"
        log.warning(text, url, _reason(fault), left_s, extra={"waits_for": store})


def _gave_up(store: str, access: object) -> None:
    """Stop waiting; others may go on, so that nothing is logged."""
    with _lock:
        _waiting.get(store, {}).pop(access, None)


def _answered(store: str) -> None:
    with _lock:
        waiting = _waiting.pop(store, {})
    if waiting:
        took_s = time.monotonic() - min(waiting.values())
        log.warning("%s answers again after %.0f s", store, took_s, extra={"answers": store})


# --- kinds of errors ---------------------------------------------------------------------------------


def is_transient(error: BaseException) -> bool:
    """Whether waiting may help."""
    if isinstance(error, PencilError) or UNTRUSTED in str(error):
        return False
    if _names(error) & TRANSIENT or _codes(error) & TRANSIENT_CODES:
        return True
    return bool(_statuses(error) & TRANSIENT_STATUS)


def _raise_if_refused(url: str, error: Exception) -> None:
    """Name the object if access to it is refused, there are no credentials, or the bucket is missing."""
    if isinstance(error, PencilError):
        return
    if "NoSuchBucket" in _codes(error):
        raise RefusedError(f"{url}: the bucket does not exist") from error
    if "ParamValidationError" in _names(error):
        raise RefusedError(f"{url}: this is not the name of a bucket or object") from error
    if UNTRUSTED in str(error):
        remedy = "check it, or name its authority in AWS_CA_BUNDLE"
        raise RefusedError(f"{url}: a certificate is not trusted ({_reason(error)}); {remedy}") from error
    if _names(error) & DENIED or _statuses(error) & {401, 403} or _codes(error) & DENIED_CODES:
        where = f"check the credentials on {platform.node()}"
        raise RefusedError(f"{url}: no access ({_reason(error)}); {where}") from error
    if 400 in _statuses(error) and _codes(error) == {""}:  # not in the words of S3: of something in between
        advice = (
            "check the endpoint (AWS_ENDPOINT_URL), what is between it and this host, and the credentials"
        )
        raise RefusedError(f"{url}: refused without a reason ({_reason(error)}); {advice}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes: libraries wrap the errors of other libraries."""
    while error is not None:
        yield error
        error = error.__cause__


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}


def _responses(error: BaseException) -> Iterator[dict[str, Any]]:
    """What an S3 server answered, as botocore keeps it."""
    for one in _chain(error):
        if isinstance(response := getattr(one, "response", None), dict):
            yield response


def _codes(error: BaseException) -> set[str]:
    return {str(response.get("Error", {}).get("Code", "")) for response in _responses(error)}


def _statuses(error: BaseException) -> set[int]:
    """The HTTP statuses: of botocore, aiohttp, gcsfs, and Azure's library."""
    found = {response.get("ResponseMetadata", {}).get("HTTPStatusCode") for response in _responses(error)}
    found |= {getattr(one, name, None) for one in _chain(error) for name in ("status", "code", "status_code")}
    return {status for status in found if isinstance(status, int)}


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {_masked(' '.join(str(error).split()))[:200]}"


def _masked(text: str) -> str:
    """Leave out of URLs what may be a secret: users, passwords and queries."""
    return re.sub(r"(?<=://)[^/@\s]*@", "***@", re.sub(r"\?[^\s'\")]*", "", text))


# --- filesystems -------------------------------------------------------------------------------------


def patient(kind: type, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Make a filesystem of an fsspec class, with every access retried."""
    return _patient_class(kind)(*arguments, **options)


@cache
def _patient_class(kind: Any) -> Any:
    class Patient(kind):  # type: ignore[misc]
        retries = 1  # of s3fs: together with botocore it would retry silently for minutes

        def __init__(self, *arguments: Any, **options: Any) -> None:
            if "s3" in kind.protocol:
                given = options.get("config_kwargs") or {}
                options["config_kwargs"] = {"retries": BOTOCORE_RETRIES, **given}
            super().__init__(*arguments, **options)
            mirror_sync_methods(self)  # makes `cat_file` of `_cat_file`, and so on
            for name in (*ACCESSES, *REMOVALS):
                setattr(self, name, _retried(self, name))

        def _open(self, path: str, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
            if mode == "wb":
                return Upload(partial(self.put_file, rpath=path))
            file = super()._open(path, mode, *arguments, **options)
            if fetch := getattr(getattr(file, "cache", None), "fetcher", None):
                file.cache.fetcher = lambda *places: patiently(_url(self, path), partial(fetch, *places))
            return file

        def exists(self, path: str, **_: Any) -> bool:  # fsspec takes any error for a no
            return self._type_of(path) is not None

        def isfile(self, path: str) -> bool:
            return self._type_of(path) == "file"

        def isdir(self, path: str) -> bool:
            return self._type_of(path) == "directory"

        def _type_of(self, path: str) -> str | None:
            try:
                return str(self.info(path)["type"])
            except FileNotFoundError:
                return None

        def __reduce__(self) -> Any:
            return patient, (kind, self.storage_args, self.storage_options)

    Patient.__name__ = Patient.__qualname__ = f"Patient{kind.__name__}"
    Patient._cache = kind._cache  # so that clearing the cache of the one clears that of the other
    return Patient


def _retried(files: Any, name: str) -> Callable[..., Any]:
    access = getattr(files, name)

    @wraps(access)
    def call(*arguments: Any, **options: Any) -> Any:
        places = [options.get("rpath"), options.get("path"), *arguments[name.startswith("put") :]]
        place = next((place for place in places if place), "")
        path = place if isinstance(place, str) else place[0]  # the first of many
        return patiently(_url(files, path), partial(access, *arguments, **options), name in REMOVALS)

    return call


def _url(files: Any, path: str) -> str:
    return _masked(files.unstrip_protocol(path))


class Upload(io.BufferedWriter):
    """A file that is put as a whole when it is closed, so that the put can be repeated."""

    def __init__(self, put: Callable[[str], Any]) -> None:
        self._local, self._put = tempfile.NamedTemporaryFile(), put  # noqa: SIM115
        super().__init__(io.FileIO(self._local.name, "wb"))

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self._put = lambda _: None
        self.close()

    def close(self) -> None:
        if not self.closed:
            with self._local:
                super().close()
                self._put(self._local.name)
