"""Folder: files under a local folder or any fsspec URL, each complete or not there at all.

Locally a file is written under a temporary name, fsynced and renamed; on an object store it is one put.

    folder = Folder("s3://lake/labels")
    folder.put("parts/ab12.arrow", data)
    data = folder.get("parts/ab12.arrow")
"""

import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pencil_scale.storage.errors import DamagedError, PencilError

BESIDE = ".unfinished"
LOCK = ".lock"  # in a local folder: locked while an object beside it is compared and replaced


@contextmanager
def named_storage_errors(path: str | Path) -> Iterator[None]:
    """Turn the system's refusal to write `path` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise PencilError(
                f"{path}: {reason}; nothing unfinished was kept: free some space, or choose another folder"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            raise PencilError(
                f"{path}: cannot be written ({reason}); choose a folder this user may write to"
            ) from error
        raise


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


class Folder:
    """Files under one folder or URL."""

    def __init__(self, url: str | Path):
        self._files, self._root = fsspec.core.url_to_fs(str(url).rstrip("/"))
        self._local = isinstance(self._files, LocalFileSystem)
        self.url = self._root if self._local else str(url).rstrip("/")
        # A listing cached before another process deleted files would still name them.
        self._files.invalidate_cache()

    def path(self, name: str) -> str:
        """The full address of a file, for messages and for other programs."""
        return f"{self.url}/{name}"

    def holds(self, name: str, num_bytes: int) -> bool:
        """Whether the file has all its bytes: a store without atomic puts may have cut it off."""
        try:
            info = self._files.info(f"{self._root}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return int(info["size"]) == num_bytes

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write a file, completely or not at all."""
        if self._local:
            with written_beside(Path(self._root) / name, durable=True) as beside:
                beside.write_bytes(data)
        else:
            with named_storage_errors(self.path(name)):
                self._files.pipe_file(f"{self._root}/{name}", bytes(data))

    def find(self, name: str) -> bytes | None:
        """Read a file; None if there is none."""
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}"))
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

    def delete_if_there(self, name: str) -> None:
        """Remove a file that may be gone already."""
        with suppress(FileNotFoundError):
            self.delete(name)

    def delete(self, name: str) -> None:
        """Remove a file."""
        with named_storage_errors(self.path(name)):
            self._files.rm_file(f"{self._root}/{name}")
