"""A frozen network for tests: its features are the mean colour and the mean of the left half of an image."""

import torch
from torch import Tensor, nn


class Colours(nn.Module):
    """Gives six numbers: each channel's mean, and that of the image's left half."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        left = images[..., : images.shape[-1] // 2]
        return self.scale * torch.cat([images.mean((2, 3)), left.mean((2, 3))], 1)


def colours(num_classes: int) -> nn.Module:
    """A network without a head."""
    return Colours()


def doubled(num_classes: int) -> nn.Module:
    """The same network with other weights."""
    network = Colours()
    nn.init.constant_(network.scale, 2.0)
    return network


def classifier(num_classes: int) -> nn.Module:
    """The same network with a head."""
    return nn.Sequential(Colours(), nn.Linear(6, num_classes))


class Picky(nn.Module):
    """Takes images of one size only, as vision transformers do."""

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] != 224:
            raise ValueError("wrong image height")
        return images.mean((2, 3))


def picky(num_classes: int) -> nn.Module:
    """A network for images of 224 pixels."""
    return Picky()
