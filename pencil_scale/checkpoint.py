"""A checkpoint: weights, optimizer, progress and the labels' manifest, always as one pair.

The label parts themselves are in the label store before the checkpoint that names them is written. What a
checkpoint holds loads as weights and JSON only; nothing in it is ever executed.

    write_checkpoint(folder, Saved(weights, optimizer, progress, manifest, record))
    saved = read_checkpoint(folder)
"""

import json
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pencil_scale.labels.manifest import Manifest
from pencil_scale.schema import PencilError

VERSION = 1
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
class Saved:
    """Everything a run needs to go on."""

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
    state = {"version": VERSION, "progress": asdict(saved.progress), "record": saved.record}
    (folder / STATE).write_text(json.dumps(state))


def read_checkpoint(folder: Path) -> Saved:
    """Read a checkpoint back, as weights and JSON only."""
    try:
        state = json.loads((folder / STATE).read_text())
        if state["version"] != VERSION:
            raise CheckpointError(
                f"{folder}: a checkpoint of version {state['version']}; this program reads {VERSION}"
            )
        return Saved(
            weights=torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True),
            optimizer=torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True),
            progress=Progress(**state["progress"]),
            labels=Manifest.decode((folder / LABELS).read_bytes(), str(folder / LABELS)),
            record=state["record"],
        )
    except (OSError, ValueError, KeyError, TypeError, pickle.UnpicklingError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder}: no whole checkpoint ({reason}); use the one before it") from error
