"""Ranks: what the training processes of a run say to each other, over gloo, and what they add up.

All ranks make every collective call together, from the training thread only.

    ranks = Ranks.meet(timeout_s=600)
    ranks.total(num_seen)

    tally = Tally(ranks.add_up)
    tally.add(result)                      # every step; does not wait for the device
    sent = tally.send()                    # the steps since the last time, on their way from the device
    tally.read(sent).mean_loss             # some steps later, on all ranks at the same step
    tally.close()                          # the figures of the epoch

Before anything is saved, `require_finite` makes sure that it is finite, and `average_buffers` that it is the
same on every rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pencil_scale.labels.owners import HostCopy
from pencil_scale.storage.errors import PencilError
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.step import StepResult

Message = TypeVar("Message")
MOST_NAMES = 3


@dataclass(frozen=True)
class Ranks:
    """This rank among the others; a single rank answers itself."""

    rank: int
    world: int
    group: Any = None

    @classmethod
    def meet(cls, timeout_s: float) -> "Ranks":
        """Join the process group that Ray Train made, if there is one."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1)
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

    def gather(self, message: Message) -> list[Message] | None:
        """Rank 0 gets the messages of all ranks in order, the others get None."""
        if self.world == 1:
            return [message]
        messages: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(message, messages, group=self.group)
        return messages

    def join(self, messages: list[Message]) -> list[Message]:
        """The messages of all ranks, in the order of the ranks; all get the same list."""
        if self.world == 1:
            return messages
        lists: list[Any] = [None] * self.world
        dist.all_gather_object(lists, messages, group=self.group)
        return [message for some in lists for message in some]


ALONE = Ranks(0, 1)


class Sums(NamedTuple):
    """What some steps add up to, over all ranks."""

    loss: float = 0.0  # weighted
    weight: float = 0.0
    num_broken: float = 0.0  # labels whose move was not finite

    @property
    def mean_loss(self) -> float:
        """The mean over samples."""
        return self.loss / max(self.weight, 1e-12)

    def problems(self) -> list[str]:
        """Name what is not finite."""
        labels = [f"the labels of {self.num_broken:,.0f} samples"] if self.num_broken else []
        return ([] if math.isfinite(self.loss) else ["the loss"]) + labels


class Tally:
    """The sums of one epoch at a time, on the device; `send` and `add` are local, the rest is collective."""

    def __init__(self, add_up: Callable[[Tensor], Tensor]) -> None:
        self._add_up = add_up
        self._clear()

    def _clear(self) -> None:
        self.num_recent = 0  # steps since the last `send`
        self._recent = torch.zeros(3, dtype=torch.float64)
        self._counts: Tensor | None = None
        self._read = Sums()

    def add(self, result: StepResult) -> None:
        """Add a step, before the next one may overwrite its result."""
        if self._counts is None:
            self._counts = torch.zeros_like(result.class_counts)
        if self.num_recent == 0:
            self._recent = torch.zeros_like(result.sums)
        self._recent += result.sums
        self._counts += result.class_counts
        self.num_recent += 1

    def send(self) -> HostCopy:
        """Start to copy the sums since the last time to the host."""
        sent = HostCopy(self._recent)
        self.num_recent, self._recent = 0, torch.zeros_like(self._recent)
        return sent

    def read(self, sent: HostCopy) -> Sums:
        """Add up over all ranks what was sent."""
        sums = Sums(*self._add_up(sent.read()).tolist())
        self._read = Sums(*(total + more for total, more in zip(self._read, sums, strict=True)))
        return sums

    def peek(self) -> Sums:
        """Add up the steps since the last `send`, which are kept."""
        return Sums(*self._add_up(self._recent.cpu()).tolist())

    def close(self) -> dict[str, float]:
        """Return the figures of an epoch that has ended, and start the next one."""
        self.read(HostCopy(self._recent))
        counts = torch.zeros(2, 1) if self._counts is None else self._counts
        given, agreeing = self._add_up(counts.cpu().double())
        # The mean over classes of the share that agrees: 1/C at chance, however the classes are balanced.
        occurs = given > 0
        balanced = float((agreeing[occurs] / given[occurs]).mean()) if occurs.any() else math.nan
        figures = {"loss": self._read.mean_loss, "balanced_agreement": balanced}
        self._clear()
        return figures


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
def average_buffers(model: nn.Module, add_up: Callable[[Tensor], Tensor], world: int) -> None:
    """Give every rank the mean of the ranks' buffers: batch norm's running statistics.

    The mean uses what all ranks saw; rank 0's buffers alone would use its share only. A running statistic is
    a weighted sum over batches, so averaging more often, at checkpoints, does not change the result.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if world == 1 or not buffers:
        return
    mine = torch.cat([buffer.flatten().double() for buffer in buffers])
    mean = (add_up(mine.cpu()) / world).to(mine.device)
    for buffer, values in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))
