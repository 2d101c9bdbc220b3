"""URLs: the bytes of one object, wherever it is stored, and the version they belong to.

Local files are read with `pread`, everything else through fsspec. A short read is an error, because a reader
would take it for the end of the object. Passwords in URLs are masked before they are printed.

    with open_source("s3://crawl/train-000000.tar") as source:
        window = Window(source)
        block = window.at(512, 512)
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.retries import TruncatedError, patient, patiently

# In bytes: the `far_bytes` and `chunk_bytes` of a source. On a disk seeking costs next to nothing; far away a
# request costs about as much as reading four megabytes.
IN_MEMORY = (1 << 16, 1 << 16)
ON_DISK = (1 << 18, 1 << 20)
REMOTE = (1 << 22, 1 << 23)


class ShardVersion(NamedTuple):
    """What must not change while offsets into an object are used: its size and its ETag or mtime."""

    num_bytes: int
    tag: str


@dataclass
class ByteSource:
    """An object of known size, of which any range of bytes can be read."""

    url: str
    num_bytes: int
    read: Callable[[int, int], bytes]  # from this byte on, this many bytes
    far_bytes: int  # a wider gap is cheaper to skip than to read
    chunk_bytes: int  # read ahead at most this much in one request

    def exactly(self, start: int, length: int) -> bytes:
        """Read this many bytes; fewer are an error."""
        try:
            with store_errors(f"shard {self.url}: reading {length:,} bytes at {start:,} failed"):
                data = self.read(start, length) if length > 0 else b""
        except FileNotFoundError as error:
            raise PencilError(f"shard {self.url}: it no longer exists; restore it and run again") from error
        if len(data) != length:
            raise PencilError(
                f"shard {self.url}: asked for {length:,} bytes at {start:,}, got {len(data):,}; "
                "it changed while it was read: run again when it is complete"
            )
        return data


class MemorySource(ByteSource):
    """Bytes in memory."""

    def __init__(self, data: bytes, url: str = "memory") -> None:
        super().__init__(url, len(data), lambda start, length: data[start : start + length], *IN_MEMORY)


def filesystem_of(url: str) -> tuple[Any, str]:
    """Find the fsspec filesystem of a URL and the path inside it; accesses to a store are retried."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise PencilError(f"{url}: cannot read this kind of URL ({error})") from error
    if filesystem.async_impl:  # all object stores, and HTTP
        filesystem = patient(type(filesystem), filesystem.storage_args, filesystem.storage_options)
    return filesystem, path


def open_url(url: str, mode: str = "rb", **options: Any) -> Any:
    """Open a file of any URL, as `fsspec.open` does; the folder of a local one that is written is made."""
    filesystem, path = filesystem_of(url)
    if is_local(filesystem) and "w" in mode:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return filesystem.open(path, mode, **options)


def is_local(filesystem: Any) -> bool:
    """Decide whether the paths of this filesystem are paths of this machine."""
    return isinstance(filesystem, LocalFileSystem)


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn any error of a store's library into one line; FileNotFoundError passes unchanged.

    The libraries raise their own classes (no credentials, endpoint down), too many to list.
    """
    try:
        yield
    except (PencilError, FileNotFoundError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PencilError(f"{what}: {reason}; check the URL, access and network") from error


def version_of(url: str) -> ShardVersion | None:
    """Ask the store for an object's size and version; None if it does not exist."""
    filesystem, path = filesystem_of(url)
    try:
        with store_errors(f"{url}: the store does not report its size"):
            if is_local(filesystem):
                status = Path(path).stat()
                return ShardVersion(status.st_size, f"mtime:{status.st_mtime_ns}")
            filesystem.invalidate_cache(filesystem._parent(path))
            info = filesystem.info(path)
            num_bytes = int(info["size"])
    except FileNotFoundError:
        return None
    return ShardVersion(num_bytes, version_tag(info))


def version_tag(info: Mapping[str, Any]) -> str:
    """Choose what distinguishes two versions of an object, from what its store reports.

    Stores that keep no hash report an empty ETag between quotes, the same for every object.
    """
    names = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
    known = [(name.lower(), info[name]) for name in names if info.get(name) is not None]
    return next((f"{name}:{value}" for name, value in known if str(value).strip('"')), "")


def versions_of(urls: list[str]) -> list[ShardVersion | None]:
    """Ask for many versions in parallel, to wait for the store's latency only once."""
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(version_of, urls))


@contextmanager
def open_source(url: str, num_bytes: int | None = None) -> Iterator[ByteSource]:
    """Open an object for range reads: a path, `file://`, `s3://` or any URL fsspec knows.

    A known `num_bytes` saves the request for the size of a remote object.
    """
    filesystem, path = filesystem_of(url)

    def read_once(start: int, length: int) -> bytes:
        data = bytes(filesystem.cat_file(path, start=start, end=start + length))
        if len(data) < length:
            found = version_of(url)
            if found is not None and found.num_bytes == num_bytes:
                raise TruncatedError(f"asked for {length:,} bytes at {start:,}, got {len(data):,}")
        return data

    def read_remote(start: int, length: int) -> bytes:
        return patiently(url, lambda: read_once(start, length))

    with ExitStack() as opened:
        try:
            with store_errors(f"shard {url}: cannot be opened"):
                if is_local(filesystem):
                    file = opened.enter_context(Path(path).open("rb")).fileno()
                    num_bytes = os.fstat(file).st_size
                    source = ByteSource(
                        url, num_bytes, lambda start, num: os.pread(file, num, start), *ON_DISK
                    )
                else:
                    num_bytes = int(filesystem.info(path)["size"]) if num_bytes is None else num_bytes
                    source = ByteSource(url, num_bytes, read_remote, *REMOTE)
        except FileNotFoundError as error:
            raise PencilError(f"shard {url}: it no longer exists; restore it and run again") from error
        yield source


class Window:
    """A buffer for a reader that mostly moves forward.

    Small members are close together and are read in growing sequential requests; a gap wider than the
    source's `far_bytes` is skipped, and the next request starts small again. `keep` is the lowest offset the
    reader may still need (None: its current one): bytes before it are dropped when the window moves.
    """

    first_bytes = 1 << 16

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.keep: int | None = None
        self._start = 0
        self._data = b""
        self._ahead = self.first_bytes

    def at(self, offset: int, length: int) -> bytes:
        """Give the bytes [offset, offset + length), fewer only at the end of the object."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._data):
            return self._fill(offset, min(length, max(0, self.source.num_bytes - offset)))
        return self._data[begin : begin + length]

    def holding(self, offset: int, length: int) -> tuple[bytes, int]:
        """Give a buffer and where these bytes start in it, without copying them."""
        begin = offset - self._start
        if begin >= 0 and begin + length <= len(self._data):
            return self._data, begin
        return self.at(offset, length), 0

    def peek(self, offset: int, length: int) -> bytes:
        """Give a few bytes from anywhere, without moving the window."""
        begin = offset - self._start
        if begin >= 0 and begin + length <= len(self._data):
            return self._data[begin : begin + length]
        return self._read(offset, length)

    def _fill(self, offset: int, length: int) -> bytes:
        end = self._start + len(self._data)
        if offset < self._start or length > 4 * self.source.chunk_bytes:
            return self._read(offset, length)
        if offset - end > self.source.far_bytes:
            self._ahead = self.first_bytes
            self._start, self._data = offset, self._read(offset, max(length, self._ahead))
        else:
            kept = max(self._start, min(offset if self.keep is None else self.keep, offset, end))
            if offset - kept > 4 * self.source.chunk_bytes:
                kept = min(offset, end)
            wanted = max(offset + length - end, self._ahead)
            self._data = self._data[kept - self._start :] + self._read(end, wanted)
            self._start = kept
            self._ahead = min(2 * self._ahead, self.source.chunk_bytes)
        return self._data[offset - self._start : offset - self._start + length]

    def _read(self, start: int, length: int) -> bytes:
        return self.source.exactly(start, max(0, min(length, self.source.num_bytes - start)))


# People write passwords unescaped, so where the credentials of a URL end is ambiguous. After `user:`, all up
# to the last `@` of the URL is the password, which may contain `/` and `@`: that may hide part of a path, but
# never shows a password. A colon with only a port after it is not a password. Without a colon, a token ends
# at the last `@` before the first `/`, so s3://bucket/a@b/x.tar stays. A match never includes the next URL.
CREDENTIALS = re.compile(
    r"://(?:(?P<user>[^/@:\s\[]*:)(?!//|\d{1,5}(?:[/?#\s]|$))(?:(?!://)\S)+@|[^/?#\s]+@)",
)
SECRET_IN_QUERY = re.compile(
    r"(?i)([?&][^=&\s]*(?:secret|token|password|signature|sig|key)[^=&\s]*=)[^&#\s'\"]+"
)


def without_passwords(value: Any) -> Any:
    """Blank out the passwords, signatures and tokens in every URL of a text."""
    if isinstance(value, list | tuple):
        return type(value)(without_passwords(item) for item in value)
    if not isinstance(value, str):
        return value
    value = CREDENTIALS.sub(lambda found: f"://{found['user'] or ''}***@", value)
    return SECRET_IN_QUERY.sub(r"\1***", value)
