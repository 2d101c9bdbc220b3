"""Tally: what the steps of an epoch add up to, kept on the device and read over all ranks together.

tally.add(result)                      # every step; waits for nothing
sent = tally.send()                    # the steps since the last time, on their way from the device
tally.read(sent).mean_loss             # some steps later, on all ranks at the same step
tally.close()                          # the figures of the epoch
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pencil_scale.labels.host_copy import HostCopy
from pencil_scale.train.step import StepResult


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
    """One epoch at a time; `send` and `add` are local, the rest is collective."""

    def __init__(self, add_up: Callable[[Tensor], Tensor]) -> None:
        self._add_up = add_up
        self._clear()

    def _clear(self) -> None:
        self.num_recent = 0  # steps since the last `send`
        self._recent, self._counts = torch.zeros(3, dtype=torch.float64), torch.zeros(2, 1)
        self._read = Sums()
        self._is_empty = True

    def add(self, result: StepResult) -> None:
        """Add a step, before the next one may overwrite what it left."""
        if self._is_empty:
            self._counts, self._is_empty = torch.zeros_like(result.class_counts), False
        if self.num_recent == 0:
            self._recent = torch.zeros_like(result.sums)
        self._recent += result.sums
        self._counts += result.class_counts
        self.num_recent += 1

    def send(self) -> HostCopy:
        """Send the steps since the last time on their way to the host."""
        sent = HostCopy(self._recent)
        self.num_recent, self._recent = 0, torch.zeros_like(self._recent)
        return sent

    def read(self, sent: HostCopy) -> Sums:
        """Add up over all ranks what was sent."""
        sums = Sums(*self._add_up(sent.read()).tolist())
        self._read = Sums(*(total + more for total, more in zip(self._read, sums, strict=True)))
        return sums

    def peek(self) -> Sums:
        """Add up the steps since the last `send`, which stay where they are."""
        return Sums(*self._add_up(self._recent.cpu()).tolist())

    def close(self) -> dict[str, float]:
        """Give the figures of an epoch that has ended, and start the next one."""
        self.read(HostCopy(self._recent))
        given, agreeing = self._add_up(self._counts.cpu().double())
        figures = {"loss": self._read.mean_loss, "balanced_agreement": _balanced(given, agreeing)}
        self._clear()
        return figures


def _balanced(given: Tensor, agreeing: Tensor) -> float:
    """The mean over classes of the share that agrees; at chance 1/C, however the classes are balanced."""
    occurs = given > 0
    return float((agreeing[occurs] / given[occurs]).mean()) if occurs.any() else math.nan
