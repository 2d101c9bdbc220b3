"""A network whose first step takes longer than any test waits, as one that is being compiled."""

import time

from torch import Tensor, nn

from pencil_scale.method.backbones import build_backbone


class Stuck(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.inner = build_backbone("small_convnet", num_classes)

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(3600)
        found: Tensor = self.inner(images)
        return found


def build(num_classes: int) -> nn.Module:
    return Stuck(num_classes)
