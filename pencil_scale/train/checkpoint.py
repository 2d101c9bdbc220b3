"""A checkpoint: weights, optimizer, progress and the labels' manifest, always as one pair.

The label parts themselves are in the label store before the checkpoint that names them is written. What a
checkpoint holds loads as weights and JSON only; nothing in it is ever executed.

    write_checkpoint(folder, Saved(origin, weights, optimizer, progress, manifest, record))
    saved = read_checkpoint(folder)
    saved.origin.require(origin, folder)       # refuse a checkpoint of anything else

Network state: what must hold of weights, momenta and running statistics before they are saved.

names = not_finite(model, optimizer)                  # waits for the device, once
average_buffers(model, ranks.add_up, ranks.world)     # every rank together
"""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pencil_scale.catalogue.class_names import difference
from pencil_scale.labels.manifest import Manifest
from pencil_scale.storage.errors import PencilError

VERSION = 2
WEIGHTS, OPTIMIZER, LABELS, STATE = "weights.pt", "optimizer.pt", "labels.json", "state.json"


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
            raise PencilError(
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
            raise PencilError(
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
        raise PencilError(f"{folder}: no whole checkpoint ({reason}); use the one before it") from error


MOST_NAMES = 3


def require_finite(problems: Sequence[str], stage: str, progress: Progress, num_steps: int) -> None:
    """End the run if anything is not finite, found after the last `num_steps` steps up to here."""
    if not problems:
        return
    named = list(dict.fromkeys(problems))
    more = f" and {len(named) - MOST_NAMES:,} more" if len(named) > MOST_NAMES else ""
    first = progress.step - max(num_steps, 1) + 1
    raise PencilError(
        f"epoch {progress.epoch + 1} ({stage}), around steps {first} to {progress.step}: not finite: "
        f"{', '.join(named[:MOST_NAMES])}{more}; none of it is saved, and the last checkpoint is intact. The "
        "same command resumes from there, which helps if the cause was transient, such as faulty hardware. "
        f"If it happens again, lower stages.{stage}.rate or raise optimizer.warmup_steps, and choose another "
        "run.name, because a run resumes only with the settings it started with"
    )


def not_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Name every weight, buffer and momentum with a value that is not finite.

    A gradient that was not finite shows here too: SGD leaves it in the momentum and in the weight.
    """
    found = {_plain(name): tensor for name, tensor in model.state_dict().items()}
    for name, weight in model.named_parameters():
        for kind, value in optimizer.state.get(weight, {}).items():
            found[f"{kind} of {_plain(name)}"] = value
    numbers = {
        name: value
        for name, value in found.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    norms = torch.stack(torch._foreach_norm([value.detach() for value in numbers.values()]))
    return [name for name, is_finite in zip(numbers, norms.isfinite().tolist(), strict=True) if not is_finite]


@torch.no_grad()
def average_buffers(model: nn.Module, add_up: Callable[[Tensor], Tensor], world: int) -> None:
    """Give every rank the mean of the ranks' buffers: batch norm's running statistics of each rank's batches.

    The mean uses what all ranks saw; rank 0's buffers would use its own share alone. A running statistic is a
    weighted sum over batches, so averaging more often, at checkpoints, does not change what comes out.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if world == 1 or not buffers:
        return
    mine = torch.cat([buffer.flatten().double() for buffer in buffers])
    mean = (add_up(mine.cpu()) / world).to(mine.device)
    for buffer, values in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))


def _plain(name: str) -> str:
    """The name a weight has in the network, without those of DDP and torch.compile around it."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")
