"""Head: the last layer of a network, trained on stored features as if on images.

    head = build_head(table, num_classes, layer)          # starts as `layer`, the last one of the network
    class_logits = head(features)                         # float32 [B, C]
    weights = joined(network.state_dict(), "fc", head.state_dict())     # a network that takes images

Features are standardised by the mean and deviation of the table, so that one learning rate suits all
networks. What is published is an ordinary linear layer, which has the standardisation in its weights.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pencil_scale.features.manifest import READY
from pencil_scale.features.table import FeatureTable

MOST_ROWS = 20_000  # that the mean and deviation are computed from
LEAST_SPREAD = 1e-3  # of features that hardly differ


class Head(nn.Module):
    """A linear layer on standardised features."""

    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Tensor, spread: Tensor, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)
        self.linear = nn.Linear(len(mean), num_classes)

    def forward(self, features: Tensor) -> Tensor:
        # The weights are standardised instead of the features: there are far fewer of them.
        weight = self.linear.weight / self.spread
        return functional.linear(features, weight, self.linear.bias - weight @ self.mean)


def build_head(table: FeatureTable, num_classes: int, layer: nn.Linear | None = None) -> Head:
    """Build a head for these features; it predicts what `layer` does, or starts at random."""
    head = Head(*_standard(table), num_classes)
    if layer is not None:
        with torch.no_grad():
            head.linear.bias.copy_(layer.bias + layer.weight @ head.mean)
            head.linear.weight.copy_(layer.weight * head.spread)
    return head


def _standard(table: FeatureTable) -> tuple[Tensor, Tensor]:
    """The mean and deviation of each number, over rows that depend on the table alone."""
    ready = np.flatnonzero(table.state == READY)
    some = ready[:: -(-len(ready) // MOST_ROWS) or 1]
    features = table.features[some].astype(np.float32).reshape(-1, table.manifest.dimension)
    mean, spread = features.mean(axis=0), features.std(axis=0)
    return torch.from_numpy(mean), torch.from_numpy(np.maximum(spread, LEAST_SPREAD))


def folded(head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a plain linear layer that predicts what the head does."""
    weight = head["linear.weight"] / head["spread"]
    return {"weight": weight, "bias": head["linear.bias"] - weight @ head["mean"]}


def joined(network: Mapping[str, Tensor], path: str, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a network whose last layer, at `path`, is the head."""
    return {**network, **{f"{path}.{name}": tensor for name, tensor in folded(head).items()}}
