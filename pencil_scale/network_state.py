"""Network state: what must hold of weights, momenta and running statistics before they are saved.

names = not_finite(model, optimizer)                  # waits for the device, once
average_buffers(model, ranks.add_up, ranks.world)     # every rank together
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pencil_scale.checkpoint import Progress
from pencil_scale.schema import PencilError

MOST_NAMES = 3


class NotFiniteError(PencilError):
    """Training has produced numbers that are not finite."""


def require_finite(problems: Sequence[str], stage: str, progress: Progress, num_steps: int) -> None:
    """End the run if anything is not finite, found after the last `num_steps` steps up to here."""
    if not problems:
        return
    named = list(dict.fromkeys(problems))
    more = f" and {len(named) - MOST_NAMES:,} more" if len(named) > MOST_NAMES else ""
    first = progress.step - max(num_steps, 1) + 1
    raise NotFiniteError(
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
