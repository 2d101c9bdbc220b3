"""Ranks: what the training processes of a run say to each other, over gloo, and what they add up.

All ranks make every collective call together, from the training thread only.

    ranks = Ranks.meet(timeout_s=600)
    ranks.total(num_seen)

    tally = Tally(ranks)
    tally.add(result)                      # every step; does not wait for the device
    sent = tally.send()                    # the steps since the last time, on their way from the device
    mean_loss(tally.read(sent))            # some steps later, on all ranks at the same step
    tally.close()                          # the figures of the epoch

Before anything is saved, `require_finite` makes sure that it is finite, and `average_buffers` that it is the
same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pencil_scale.labels.owners import HostCopy
from pencil_scale.storage.errors import PencilError, many
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.step import StepResult

Message = TypeVar("Message")
MOST_NAMES = 3


@dataclass(frozen=True)
class Ranks:
    """This rank among the others; a single rank answers itself."""

    rank: int = 0
    world: int = 1
    group: Any = None

    @classmethod
    def meet(cls, timeout_s: float) -> "Ranks":
        """Join the process group that Ray Train made, if there is one."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(dist.get_rank(), dist.get_world_size(), group)

    def total(self, value: float) -> float:
        """The sum over all ranks; counts are exact up to 2**53."""
        return float(self.add_up(torch.tensor(value, dtype=torch.float64)))

    def add_up(self, values: Tensor) -> Tensor:
        """The elementwise sums over all ranks of a tensor on the host."""
        if self.world == 1:
            return values
        summed = values.double().clone()
        dist.all_reduce(summed, group=self.group)
        return summed

    def gather(self, message: Message) -> list[Message]:
        """The messages of all ranks, in the order of the ranks; all get the same list."""
        if self.world == 1:
            return [message]
        messages: list[Any] = [None] * self.world
        dist.all_gather_object(messages, message, group=self.group)
        return messages


class Tally:
    """The sums of steps, over one epoch at a time; `add` and `send` are local, the rest is collective."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._clear()

    def _clear(self) -> None:
        self.num_recent = 0  # steps since the last `send`
        self._recent = torch.zeros(5, dtype=torch.float64)
        self._read = torch.zeros((), dtype=torch.float64)  # over all ranks

    def add(self, result: StepResult) -> None:
        """Add a step, before the next one may overwrite its result."""
        self._recent = self._recent + result.sums if self.num_recent else result.sums.clone()
        self.num_recent += 1

    def send(self) -> HostCopy:
        """Start to copy the sums since the last time to the host."""
        sent = HostCopy(self._recent)
        self.num_recent, self._recent = 0, torch.zeros_like(self._recent)
        return sent

    def read(self, sent: HostCopy) -> Tensor:
        """Add up over all ranks what was sent."""
        sums = self._ranks.add_up(sent.read())
        self._read = self._read + sums
        return sums

    def peek(self) -> Tensor:
        """Add up the steps since the last `send`, which are kept."""
        return self._ranks.add_up(self._recent.cpu())

    def close(self) -> dict[str, float]:
        """Return the figures of an epoch that has ended, and start the next one."""
        self.read(self.send())
        given, agreeing = self._read[3:].view(2, -1)
        # The mean over classes of the share that agrees: 1/C at chance, however the classes are balanced.
        occurs = given > 0
        balanced = float((agreeing[occurs] / given[occurs]).mean())  # NaN without a sample
        figures = {"loss": mean_loss(self._read), "balanced_agreement": balanced}
        self._clear()
        return figures


def mean_loss(sums: Tensor) -> float:
    """The mean over samples."""
    return float(sums[0] / sums[1].clamp(min=1e-12))


def problems_of(sums: Tensor) -> list[str]:
    """Name what is not finite in the sums of some steps."""
    labels = [f"the labels of {many(round(float(sums[2])), 'sample')}"] if sums[2] else []
    return ([] if sums[0].isfinite() else ["the loss"]) + labels


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
    """Name every weight, buffer and momentum with a value that is not finite; waits for the device once.

    A gradient that was not finite shows up here too: SGD leaves it in the momentum and in the weight.
    """
    found: dict[str, Any] = {_plain(name): tensor for name, tensor in model.state_dict().items()}
    for name, weight in model.named_parameters():
        for kind, value in optimizer.state.get(weight, {}).items():
            found[f"{kind} of {_plain(name)}"] = value
    numbers = {
        name: value for name, value in found.items() if torch.is_tensor(value) and value.is_floating_point()
    }
    norms = torch.stack(torch._foreach_norm([value.detach() for value in numbers.values()]))
    return [name for name, is_finite in zip(numbers, norms.isfinite().tolist(), strict=True) if not is_finite]


def _plain(name: str) -> str:
    """The name a weight has in the network, without the prefixes of DDP and torch.compile."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


@torch.no_grad()
def average_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the mean of the ranks' buffers: batch norm's running statistics.

    The mean uses what all ranks saw; rank 0's buffers alone would use its share only. A running statistic is
    a weighted sum over batches, so averaging more often, at checkpoints, does not change the result.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if ranks.world == 1 or not buffers:
        return
    mine = torch.cat([buffer.flatten().double() for buffer in buffers])
    mean = (ranks.add_up(mine.cpu()) / ranks.world).to(mine.device)
    for buffer, values in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))
