"""Checkpoint store: where Ray Train keeps the checkpoints of a run, good whenever it is killed.

Ray tells which checkpoints count in one small file that it writes anew each time. On a local disk that file
is empty for a moment, and a run killed in it could never go on. Here a file gets its name when it is whole.
In an object store it does so anyway.
"""

import io
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs
from fsspec.implementations.local import LocalFileSystem

from pencil_scale.labels.part_store import PartStore

SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray's list of the checkpoints that count
BESIDE = ".unfinished"
YOUNG_S = 300.0


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


def checkpoint_store(storage: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """The filesystem and the folder in which Ray Train keeps the checkpoints of all runs of a storage."""
    files, path = fsspec.core.url_to_fs(f"{storage.rstrip('/')}/checkpoints")
    if isinstance(files, LocalFileSystem):
        files = WholeFiles()
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files)), path


def sweep_checkpoints(storage: str, name: str) -> list[str]:
    """Remove what killed uploads left of checkpoints that never counted; say which.

    For whoever holds the run: a checkpoint on its way is not in the list yet either. Workers of a command
    that was killed go on until their cluster notices, and a checkpoint that they list after it was swept
    would make the run useless for ever; so what is young is left for the next start.
    """
    files, path = fsspec.core.url_to_fs(f"{storage.rstrip('/')}/checkpoints/{name}")
    if not files.exists(f"{path}/{SNAPSHOT}"):
        return []
    counted = files.cat_file(f"{path}/{SNAPSHOT}").decode()
    found = [str(one).rstrip("/").rsplit("/", 1)[-1] for one in files.ls(path, detail=False)]
    left = [folder for folder in found if folder.startswith("checkpoint-") and folder not in counted]
    store = PartStore(f"{storage.rstrip('/')}/checkpoints/{name}")
    old = [folder for folder in left if _age_s(store, folder) >= YOUNG_S]
    for folder in old:
        files.rm(f"{path}/{folder}", recursive=True)
    return old


def _age_s(store: PartStore, folder: str) -> float:
    """How long ago the newest file of a folder was written."""
    return min((store.age_s(file) for file in store.names(folder)), default=YOUNG_S)
