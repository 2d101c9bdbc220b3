"""Checkpoints: weights, optimizer, progress and the labels' manifest, always saved and read as a unit.

The label parts themselves are in the label store before the checkpoint that names them is written. A
checkpoint loads as weights and JSON only; nothing in it is ever executed. `state.json` has the hashes of all
files, and of itself: a bit that flips on its way from a store would otherwise become a wrong weight.

    write_checkpoint(folder, Saved(run_id, weights, optimizer, progress, manifest, figures))
    saved = read_checkpoint(folder, run_id)    # refuses a checkpoint of another run, or other bytes

Ray Train keeps the checkpoints of a run in a `CheckpointStore` and lists those that are committed in one
small file, which it rewrites each time. On a local disk that file would be empty for a moment, and a run
killed in this moment could never be resumed; so every file is written under another name and renamed.

    store = CheckpointStore(storage, name, run_id)
    store.newest()                             # (attempt, path) to resume from; None for a new run
"""

import hashlib
import io
import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.fs
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from pencil_scale.labels.manifest import (
    IN_CHECKPOINTS,
    Manifest,
    manifests_beside_checkpoints,
    manifests_of,
    remove_unnamed,
)
from pencil_scale.labels.run_record import read_record
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import written_beside
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of

log = logging.getLogger(__name__)

VERSION = 5
WEIGHTS, OPTIMIZER, LABELS, STATE = "weights.pt", "optimizer.pt", "labels.json", "state.json"
AVERAGE = "average.pt"
BEST = "best"  # a folder with the weights and labels of an earlier epoch
SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray's list of the committed checkpoints


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    epoch: int = 0  # epochs done
    step: int = 0  # batches done of the current epoch
    all_steps: int = 0  # batches done since the run started
    extended: int = 0  # epochs by which the first stage is longer than planned
    num_unreadable: int = 0  # images of the current epoch that could not be decoded, on all ranks
    unreadable: list[str] = field(default_factory=list)  # the names of the first of them


@dataclass(frozen=True)
class Kept:
    """What an epoch ended with, kept because it may be returned to, or published."""

    epoch: int  # epochs done
    weights: dict[str, Tensor]
    labels: Manifest


@dataclass(frozen=True)
class Saved:
    """Everything a run needs to resume."""

    run: str  # its id; the record of this id fixes the settings, the data and the classes
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    progress: Progress
    labels: Manifest
    figures: list[dict[str, Any]] = field(default_factory=list)  # of every epoch so far
    best: Kept | None = None  # the best epoch by the watched samples, if it is not the last
    agreed: list[int] | None = None  # judging samples that were predicted as given before labels moved
    average: dict[str, Tensor] | None = None  # of the network over its steps
    average_steps: int = 0  # since the average was last equal to the network
    is_averaged: bool = False  # whether the average is what the last epoch was evaluated with

    @property
    def shown(self) -> dict[str, Tensor]:
        """The weights that the last epoch was evaluated with."""
        return self.average if self.is_averaged and self.average is not None else self.weights


def write_checkpoint(folder: Path, saved: Saved) -> None:
    """Write all files of a checkpoint into a folder, over those of an earlier one."""
    torch.save(saved.weights, folder / WEIGHTS)
    torch.save(saved.optimizer, folder / OPTIMIZER)
    if saved.average is not None:
        torch.save(saved.average, folder / AVERAGE)
    (folder / LABELS).write_bytes(saved.labels.encode())
    state = {"version": VERSION, "run": saved.run, "progress": asdict(saved.progress)}
    state |= {"figures": saved.figures, "agreed": saved.agreed, "is_averaged": saved.is_averaged}
    state["average_steps"] = saved.average_steps
    if saved.best is not None:
        (folder / BEST).mkdir(exist_ok=True)
        torch.save(saved.best.weights, folder / BEST / WEIGHTS)
        (folder / BEST / LABELS).write_bytes(saved.best.labels.encode())
        state["best"] = saved.best.epoch
    state["files"] = {name: _hash_of(folder / name) for name in _files(folder)}
    (folder / STATE).write_text(json.dumps(state | {"sha256": _hash_of_state(state)}))


def read_checkpoint(folder: Path, run: str) -> Saved:
    """Read a checkpoint of the run with this id, as weights and JSON only."""
    try:
        state = json.loads((folder / STATE).read_text())
        if state.pop("sha256", None) != _hash_of_state(state) and state["version"] == VERSION:
            raise ValueError(f"{STATE} is damaged")
        if (state["version"], state["run"]) != (VERSION, run):
            raise PencilError(
                f"{folder}: a checkpoint of version {state['version']} and run id {state['run']}; expected "
                f"version {VERSION} and run id {run}; it is not used: choose another run.name"
            )
        for name, expected in state["files"].items():
            if _hash_of(folder / name) != expected:
                raise ValueError(f"{name} is damaged")
        best = Kept(state["best"], *_read_pair(folder / BEST)) if "best" in state else None
        weights, labels = _read_pair(folder)
        return Saved(
            run=run,
            weights=weights,
            optimizer=torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True),
            progress=Progress(**state["progress"]),
            labels=labels,
            figures=state["figures"],
            best=best,
            agreed=state["agreed"],
            average=_read_weights(folder / AVERAGE) if (folder / AVERAGE).exists() else None,
            average_steps=state["average_steps"],
            is_averaged=state.get("is_averaged", False),
        )
    except (OSError, ValueError, KeyError, TypeError, pickle.UnpicklingError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        text = f"{folder}: not a complete checkpoint ({reason}); use the one before it"
        raise DamagedError(text) from error


def fetch_checkpoint(copied: Callable[[], AbstractContextManager[str]], run: str) -> Saved:
    """Read a checkpoint from a copy; one that was damaged on its way is copied a second time."""
    try:
        with copied() as folder:
            return read_checkpoint(Path(folder), run)
    except DamagedError:
        with copied() as folder:
            return read_checkpoint(Path(folder), run)


def _files(folder: Path) -> list[str]:
    """The files of a checkpoint but its state, which may be there from an earlier one."""
    names = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in names if name != STATE)


def _hash_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash_of_state(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _read_pair(folder: Path) -> tuple[dict[str, Tensor], Manifest]:
    weights = _read_weights(folder / WEIGHTS)
    return weights, Manifest.decode((folder / LABELS).read_bytes(), str(folder / LABELS))


def _read_weights(file: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return weights


class CheckpointStore:
    """The checkpoints of one run: a folder per attempt, in which Ray Train keeps its list.

    An attempt writes only into its own folder, so one that was taken for dead and wakes up cannot touch what
    a later one wrote. Folder names contain the run's id: a run that reuses a name finds nothing of the run
    before.
    """

    def __init__(self, storage: str, name: str, run: str) -> None:
        self._run, self._name = run, name  # `run` is its id
        self._storage = Storage(storage)
        self._folder = self._storage.checkpoints(name)
        self._files, self._path = filesystem_of(self._storage.path(self._folder))

    def filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        """The filesystem and the folder in which Ray Train keeps the attempts of this run."""
        files = AtomicFiles() if isinstance(self._files, LocalFileSystem) else self._files
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files)), self._path

    def attempt_name(self, attempt: int) -> str:
        return f"{self._run}-{attempt:04d}"

    def attempts(self) -> list[int]:
        """The attempts of this run that left a folder, in ascending order."""
        self._files.invalidate_cache()
        names = [name.rpartition("/")[2].rpartition("-") for name in self._storage.names(self._folder)]
        return sorted(int(number) for run, _, number in names if run == self._run and number.isdigit())

    def newest(self) -> tuple[int, str] | None:
        """The newest attempt that committed a checkpoint, and the path of that checkpoint."""
        for attempt in reversed(self.attempts()):
            snapshot = f"{self._folder}/{self.attempt_name(attempt)}/{SNAPSHOT}"
            try:  # a checkpoint that is not listed is not committed
                found = self._storage.read_json(snapshot)
                latest = found and found["latest_checkpoint_result"]
                name = latest and latest["checkpoint_dir_name"]
            except (DamagedError, KeyError, TypeError) as error:
                raise PencilError(
                    f"{self._storage.path(snapshot)}: not an intact list of checkpoints ({error}); restore "
                    "it, or remove its folder to resume from an earlier attempt"
                ) from error
            if name:
                return attempt, f"{self._path}/{self.attempt_name(attempt)}/{name}"
        return None

    def remove(self, before: int | None = None) -> list[int]:
        """Remove the attempts before this one, or all of them; return their numbers."""
        old = [attempt for attempt in self.attempts() if before is None or attempt < before]
        for attempt in old:
            self._files.rm(f"{self._path}/{self.attempt_name(attempt)}", recursive=True)
        if before is None and self._files.exists(self._path) and not self._storage.names(self._folder):
            self._files.rmdir(self._path)
        return old

    @cached_property
    def _beside(self) -> list[Manifest]:
        return manifests_beside_checkpoints(self._storage.url, self._run)

    def sweep(
        self, attempt: int, unsaved: Mapping[str, list[Manifest]], needed: Sequence[Manifest]
    ) -> dict[str, list[Manifest]]:
        """Remove earlier attempts and the label parts that no checkpoint names any more; never fail.

        No rank may write label parts meanwhile. `unsaved` are manifests of checkpoints, by name, that this
        attempt reported; those that are not committed yet are returned. `needed` is not stored either.
        Workers that were cut off from a command which another one has replaced remove nothing: they do not
        know what the workers of that one are about to name.
        """
        try:
            record = read_record(self._storage.url, self._name)
            if record is not None and record.attempt > attempt:
                return dict(unsaved)
            committed, newest = self.newest() or (0, "")
            if committed == attempt:
                self.remove(before=attempt)
                name = newest.rpartition("/")[2]
                unsaved = {later: labels for later, labels in unsaved.items() if later > name}
            stored = manifests_of(self._storage.url, [(self._folder, None, IN_CHECKPOINTS)])
            parts = self._storage.path(self._storage.labels)
            remove_unnamed(parts, self._run, [*needed, *chain(*unsaved.values()), *stored, *self._beside])
        except (PencilError, OSError) as error:
            log.warning("label parts that are not needed any more were not removed: %s", error)
        return dict(unsaved)


class AtomicFiles(LocalFileSystem):  # type: ignore[misc]
    """The local disk, with files that get their name when they are complete."""

    def _open(self, path: str, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        if mode == "wb":
            return AtomicFile(self._strip_protocol(path))
        return super()._open(path, mode, *arguments, **options)


class AtomicFile(io.BufferedWriter):
    """A file that replaces the one of its name when it is closed, unless a write failed."""

    def __init__(self, path: str) -> None:
        self._renaming = ExitStack()
        super().__init__(io.FileIO(self._renaming.enter_context(written_beside(Path(path), True)), "wb"))

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            with self._renaming:  # removes what was written
                raise

    def close(self) -> None:
        if not self.closed:
            with self._renaming:
                super().close()
