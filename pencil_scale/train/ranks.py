"""Ranks: the few words the training processes of a run say to each other, over gloo.

Used by the training thread alone, every call by all ranks together.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Word = TypeVar("Word")


@dataclass(frozen=True)
class Ranks:
    """This rank among the others; alone, every word is its own answer."""

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
        """The sum over all ranks; counts stay exact up to 2**53."""
        return float(self.add_up(torch.tensor(value, dtype=torch.float64)))

    def add_up(self, values: Tensor) -> Tensor:
        """The sums over all ranks of equally many numbers on the host."""
        if self.world == 1:
            return values
        summed = values.double().clone()
        dist.all_reduce(summed, group=self.group)
        return summed

    def any(self, wish: bool) -> bool:
        """Whether any rank wishes it; all hear the same answer."""
        return self.total(float(wish)) > 0

    def gather(self, word: Word) -> list[Word] | None:
        """Rank 0 gets everybody's word in order, the others get None."""
        if self.world == 1:
            return [word]
        heard: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(word, heard, group=self.group)
        return heard

    def join(self, words: list[Word]) -> list[Word]:
        """Everybody's words in the order of the ranks; all get the same list."""
        if self.world == 1:
            return words
        heard: list[Any] = [None] * self.world
        dist.all_gather_object(heard, words, group=self.group)
        return [word for some in heard for word in some]
