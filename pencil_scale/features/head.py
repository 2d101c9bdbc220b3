"""Head: the last layer of a network, trained on stored features as if on images.

    head = build_head(table, num_classes, layer)          # starts as `layer`, the last one of the network
    class_logits = head(features)                         # float32 [B, C]
    weights = joined(network.state_dict(), "fc", head.state_dict())     # a network that takes images

Features are standardised by the mean and deviation of the table, so that one learning rate suits all
networks. What is published is an ordinary linear layer, or an `MlpHead`, which has the standardisation in its
weights.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pencil_scale.features.manifest import READY
from pencil_scale.features.table import FeatureTable
from pencil_scale.method.backbones import MlpHead
from pencil_scale.storage.errors import PencilError

MOST_ROWS = 20_000  # that the mean and deviation are computed from
NUM_HIDDEN = 256  # of an MLP
LEAST_SPREAD = 1e-3  # of features that hardly differ


class Head(nn.Module):
    """A linear layer on standardised features, or one with a hidden layer before it."""

    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Tensor, spread: Tensor, num_classes: int, num_hidden: int = 0) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)
        self.linear = nn.Linear(len(mean), num_hidden or num_classes)
        self.output = nn.Linear(num_hidden, num_classes) if num_hidden else None

    def forward(self, features: Tensor) -> Tensor:
        # The weights are standardised instead of the features: there are far fewer of them.
        weight = self.linear.weight / self.spread
        bias = self.linear.bias - weight @ self.mean
        outputs = (functional.linear if features.is_cuda else _Linear.apply)(features, weight, bias)
        class_logits: Tensor = outputs if self.output is None else self.output(outputs.relu())
        return class_logits


class _Linear(torch.autograd.Function):
    """A linear layer on inputs that need no gradient; the gradient of few outputs is faster in this order."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (inputs,), (gradient,) = ctx.saved_tensors, gradients
        return None, (inputs.t() @ gradient).t(), gradient.sum(0)


def build_head(
    table: FeatureTable, num_classes: int, layer: nn.Module | None = None, kind: str = "linear"
) -> Head:
    """Build a head for these features; it predicts what `layer` does if that is of its kind.

    A hidden layer starts at random if the network's last layer is linear.
    """
    require_kind(layer, kind)
    if isinstance(layer, MlpHead):
        head = Head(*_standard(table), num_classes, layer.mlp_hidden.out_features)
        assert head.output is not None
        head.output.load_state_dict(layer.mlp_output.state_dict())
        first: nn.Module | None = layer.mlp_hidden
    else:
        head = Head(*_standard(table), num_classes, NUM_HIDDEN if kind == "mlp" else 0)
        first = layer if kind == "linear" else None
    if isinstance(first, nn.Linear):
        with torch.no_grad():
            head.linear.bias.copy_(first.bias + first.weight @ head.mean)
            head.linear.weight.copy_(first.weight * head.spread)
    return head


def require_kind(layer: nn.Module | None, kind: str | None) -> None:
    """Refuse a linear head where the last layer of the network has a hidden one."""
    if isinstance(layer, MlpHead) and kind != "mlp":
        raise PencilError(f"model.head: {kind}, but model.weights has a hidden layer; set model.head=mlp")


def _standard(table: FeatureTable) -> tuple[Tensor, Tensor]:
    """The mean and deviation of each number, over rows that depend on the table alone."""
    ready = np.flatnonzero(table.state == READY)
    some = ready[:: -(-len(ready) // MOST_ROWS) or 1]
    features = table.features[some].astype(np.float32).reshape(-1, table.manifest.dimension)
    mean, spread = features.mean(axis=0), features.std(axis=0)
    return torch.from_numpy(mean), torch.from_numpy(np.maximum(spread, LEAST_SPREAD))


def folded(head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a plain linear layer, or of an `MlpHead`, that predicts what the head does."""
    weight = head["linear.weight"] / head["spread"]
    first = {"weight": weight, "bias": head["linear.bias"] - weight @ head["mean"]}
    if "output.weight" not in head:
        return first
    layers = {"mlp_hidden": first, "mlp_output": {name: head[f"output.{name}"] for name in first}}
    return {f"{layer}.{name}": tensor for layer, state in layers.items() for name, tensor in state.items()}


def joined(network: Mapping[str, Tensor], path: str, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a network whose last layer, at `path`, is the head."""
    return {**network, **{f"{path}.{name}": tensor for name, tensor in folded(head).items()}}
