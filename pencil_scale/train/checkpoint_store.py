"""Checkpoint store: where Ray Train keeps the checkpoints of a run, usable whenever it is killed.

Ray lists the checkpoints that count in one small file that it rewrites each time. On a local disk that file
is empty for a moment, and a run killed in it could never be resumed. Here a file gets its name when it is
complete. In an object store it does so anyway.

    store = CheckpointStore(storage, name, run_id)
    store.newest()              # (attempt, path) to resume from; None at the start of a run
"""

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs
from fsspec.implementations.local import LocalFileSystem

from pencil_scale.storage.errors import PencilError

SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray's list of the checkpoints that count
BESIDE = ".unfinished"


class WholeFile(io.BufferedWriter):
    """A file written beside its name, which it gets when it is closed without an error."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path + BESIDE, "wb"))
        self._path = path
        self._failed = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            self._failed = True
            raise

    def close(self) -> None:
        if self.closed:
            return
        if not self._failed:
            self.flush()
            os.fsync(self.fileno())
        super().close()
        if not self._failed:
            Path(self._path + BESIDE).replace(self._path)


class WholeFiles(LocalFileSystem):  # type: ignore[misc]
    """The local disk, on which a name that exists is a finished file."""

    def _open(self, path: str, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        if mode == "wb":
            return WholeFile(self._strip_protocol(path))
        return super()._open(path, mode, *arguments, **options)


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run: a folder for each attempt, in which Ray Train keeps its list.

    An attempt writes only into its own folder, so one that was given up for dead and wakes again cannot touch
    what a later one wrote. Folders bear the run's id: a run that reuses a name finds nothing of the one
    before.
    """

    storage: str
    name: str
    run: str  # id

    @property
    def url(self) -> str:
        return f"{self.storage.rstrip('/')}/checkpoints/{self.name}"

    def filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        """The filesystem and the folder that Ray Train is given for the attempts of this run."""
        files, path = fsspec.core.url_to_fs(self.url)
        if isinstance(files, LocalFileSystem):
            files = WholeFiles()
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files)), path

    def attempt_name(self, attempt: int) -> str:
        return f"{self.run}-{attempt:04d}"

    def attempts(self) -> list[int]:
        """The attempts of this run that left a folder, rising."""
        files, path = fsspec.core.url_to_fs(self.url)
        files.invalidate_cache()
        if not files.exists(path):
            return []
        names = [str(one).rstrip("/").rsplit("/", 1)[-1] for one in files.ls(path, detail=False)]
        return sorted(int(name[len(self.run) + 1 :]) for name in names if self._is_attempt(name))

    def _is_attempt(self, name: str) -> bool:
        run, _, attempt = name.rpartition("-")
        return run == self.run and attempt.isdigit()

    def newest(self) -> tuple[int, str] | None:
        """The newest attempt that committed a checkpoint, and the path of that checkpoint."""
        files, path = fsspec.core.url_to_fs(self.url)
        for attempt in reversed(self.attempts()):
            folder = f"{path}/{self.attempt_name(attempt)}"
            latest = _latest(files, f"{folder}/{SNAPSHOT}")
            if latest is not None:
                return attempt, f"{folder}/{latest}"
        return None

    def remove(self, before: int | None = None) -> list[int]:
        """Remove the attempts before one, or all of them; return which."""
        files, path = fsspec.core.url_to_fs(self.url)
        old = [attempt for attempt in self.attempts() if before is None or attempt < before]
        for attempt in old:
            files.rm(f"{path}/{self.attempt_name(attempt)}", recursive=True)
        if before is None and files.exists(path) and not files.ls(path, detail=False):
            files.rmdir(path)
        return old


def _latest(files: Any, path: str) -> str | None:
    """The checkpoint that Ray's list calls the latest; a checkpoint that is not listed does not count."""
    if not files.exists(path):
        return None
    try:
        latest = json.loads(files.cat_file(path))["latest_checkpoint_result"]
        return None if latest is None else str(latest["checkpoint_dir_name"])
    except (ValueError, KeyError, TypeError) as error:
        raise PencilError(
            f"{path}: not an intact list of checkpoints ({error}); restore it, or remove its folder to "
            "resume from an earlier attempt"
        ) from error
