"""A checkpoint: weights, optimizer, progress and the labels' manifest, always as one pair.

The label parts themselves are in the label store before the checkpoint that names them is written. What a
checkpoint holds loads as weights and JSON only; nothing in it is ever executed.

    write_checkpoint(folder, Saved(origin, weights, optimizer, progress, manifest, record))
    saved = read_checkpoint(folder)
    saved.origin.require(origin, folder)       # refuse a checkpoint of anything else
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pencil_scale.class_names import difference
from pencil_scale.labels.manifest import Manifest
from pencil_scale.schema import PencilError

VERSION = 2
WEIGHTS, OPTIMIZER, LABELS, STATE = "weights.pt", "optimizer.pt", "labels.json", "state.json"


class CheckpointError(PencilError):
    """A checkpoint that cannot be read, or belongs to something else."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands: what a checkpoint must remember besides weights and labels."""

    epoch: int = 0  # epochs done
    step: int = 0  # batches done of the epoch under way
    all_steps: int = 0  # batches done since the run began


@dataclass(frozen=True)
class Origin:
    """What a checkpoint belongs to: a run by its id, not by a name, and all that its numbers depend on."""

    run: str  # id
    attempt: int  # how often the run was started when this was written
    settings: str  # fingerprint of those that decide what is computed
    catalogue_version: int
    class_names: tuple[str, ...]
    clean: Mapping[str, int] = field(default_factory=dict)  # catalogue versions of validation and test

    def require(self, expected: "Origin", name: object) -> None:
        """Refuse a checkpoint of another run, or of the same run under other circumstances."""
        mine, theirs = vars(replace(self, attempt=expected.attempt)), vars(expected)
        for what in (what for what in mine if mine[what] != theirs[what]):
            found, wanted = f"{mine[what]}", f"{theirs[what]}"
            if what == "class_names":
                found, wanted = difference(self.class_names, expected.class_names), "the run's list"
            raise CheckpointError(
                f"{name}: belongs to something else: {what} is {found}, expected {wanted}; it is not used: "
                "choose another run.name, or put back what was changed"
            )


@dataclass(frozen=True)
class Saved:
    """Everything a run needs to resume."""

    origin: Origin
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    progress: Progress
    labels: Manifest
    record: list[dict[str, Any]] = field(default_factory=list)  # the figures of every epoch so far


def write_checkpoint(folder: Path, saved: Saved) -> None:
    """Write all files of a checkpoint into a folder that nobody reads yet."""
    torch.save(saved.weights, folder / WEIGHTS)
    torch.save(saved.optimizer, folder / OPTIMIZER)
    (folder / LABELS).write_bytes(saved.labels.encode())
    state = {"version": VERSION, "origin": asdict(saved.origin)}
    state |= {"progress": asdict(saved.progress), "record": saved.record}
    (folder / STATE).write_text(json.dumps(state))


def read_checkpoint(folder: Path) -> Saved:
    """Read a checkpoint back, as weights and JSON only."""
    try:
        state = json.loads((folder / STATE).read_text())
        if state["version"] != VERSION:
            raise CheckpointError(
                f"{folder}: a checkpoint of version {state['version']}; this program reads {VERSION}"
            )
        origin = state["origin"]
        return Saved(
            origin=Origin(**{**origin, "class_names": tuple(origin["class_names"])}),
            weights=torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True),
            optimizer=torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True),
            progress=Progress(**state["progress"]),
            labels=Manifest.decode((folder / LABELS).read_bytes(), str(folder / LABELS)),
            record=state["record"],
        )
    except (OSError, ValueError, KeyError, TypeError, pickle.UnpicklingError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder}: no whole checkpoint ({reason}); use the one before it") from error
