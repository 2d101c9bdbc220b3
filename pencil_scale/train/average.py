"""An average of a network over its steps, which predicts better than the network at any one of them.

average = Average(model)
average.restart()                   # equal to the network
average.follow(decay=0.998)         # after every step: 0.998 of itself; less in the first steps
average.network(images)             # in evaluation mode, without gradients
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Average:
    """Follows the weights and buffers of a network; whole numbers are taken as they are."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.network = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        self.steps = torch.zeros((), device=next(model.parameters()).device)  # since it was equal

    @torch.no_grad()
    def restart(self) -> None:
        """Equal the network as it is now."""
        for mine, its in self._pairs():
            mine.copy_(its)
        self.steps.zero_()

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Move towards the network as it is now, keeping `decay` of what was there.

        In the first steps less is kept: the mean age of what is averaged is then a tenth of the steps so far.
        Weights change fast at the start of a stage, and an average over too many of them predicts badly.
        """
        pairs = self._pairs()
        numbers = [pair for pair in pairs if pair[0].is_floating_point()]
        mine, its = ([pair[side] for pair in numbers] for side in (0, 1))
        self.steps += 1
        pace = (9 / (self.steps + 9)).clamp(min=1 - decay)  # a tensor: a recorded step computes it anew
        moves = torch._foreach_sub(its, mine)
        torch._foreach_mul_(moves, pace)
        torch._foreach_add_(mine, moves)
        for count, newer in (pair for pair in pairs if not pair[0].is_floating_point()):
            count.copy_(newer)

    @torch.no_grad()
    def become(self) -> None:
        """Let the network equal its average."""
        for mine, its in self._pairs():
            its.copy_(mine)

    def load(self, weights: Mapping[str, Tensor], steps: int) -> None:
        """Continue from stored weights, after this many steps."""
        self.network.load_state_dict(weights)
        self.steps.fill_(steps)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(_tensors(self.network), _tensors(self._model), strict=True))


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
