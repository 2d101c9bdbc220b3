"""The paper's augmentation, batched on the device: crop, mirror, subtract the mean.

What happens to an image is a function of (seed, epoch, row) alone: not of the batch it came in, nor of the
worker or device that computes it.

    pixels = augment(images, rows, seed=1, epoch=7, recipe=recipe)   # uint8 [B, 3, H, W] -> [B, 3, S, S]
    pixels = centre(images, recipe)                                  # the same without chance
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from pencil_scale.schema import PencilError
from pencil_scale.settings import Images


class ImageSizeError(PencilError):
    """Images too small for the crop that was asked for."""


@dataclass(frozen=True)
class Recipe:
    """What the network is shown of an image."""

    crop: int
    pad: int
    flip: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def from_config(cls, images: Images) -> "Recipe":
        return cls(images.crop, images.pad, images.flip, images.mean, images.std)


def augment(images: Tensor, rows: Tensor, seed: int, epoch: int, recipe: Recipe) -> Tensor:
    """Pad, take a random crop, mirror every other image, and normalise."""
    _require_room(images, recipe.crop, recipe.pad)
    padded = pad(images, [recipe.pad] * 4)
    bits = _bits(rows.to(images.device, non_blocking=True), seed, epoch)
    room_y = padded.shape[-2] - recipe.crop + 1
    room_x = padded.shape[-1] - recipe.crop + 1
    top = (bits & 0xFFFFF) % room_y
    left = ((bits >> 20) & 0xFFFFF) % room_x
    mirrored = ((bits >> 40) & 1).bool() & recipe.flip
    along = torch.arange(recipe.crop, device=images.device)
    y = top[:, None] + along  # [B, S]
    x = left[:, None] + torch.where(mirrored[:, None], along.flip(0), along)  # [B, S]
    samples = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(3, device=images.device)[None, :, None, None]
    return normalise(padded[samples, channels, y[:, None, :, None], x[:, None, None, :]], recipe)


def centre(images: Tensor, recipe: Recipe) -> Tensor:
    """Take the middle of every image, and normalise."""
    _require_room(images, recipe.crop, 0)
    top = (images.shape[-2] - recipe.crop) // 2
    left = (images.shape[-1] - recipe.crop) // 2
    return normalise(images[..., top : top + recipe.crop, left : left + recipe.crop], recipe)


def normalise(images: Tensor, recipe: Recipe) -> Tensor:
    """Bring bytes to [0, 1], subtract the mean and divide by the deviation of each channel."""
    mean, std = _a_channel(recipe.mean, images.device), _a_channel(recipe.std, images.device)
    return (images.float() / 255 - mean) / std


@lru_cache
def _a_channel(values: tuple[float, float, float], device: torch.device) -> Tensor:
    """Numbers a channel, kept on the device: to bring them there is to wait until it has nothing to do."""
    return torch.tensor(values, device=device)[:, None, None]


def _bits(rows: Tensor, seed: int, epoch: int) -> Tensor:
    """Forty-odd random bits for every row, alike on every device: splitmix64 in wrapping integers."""
    start = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % 2**64
    mixed = rows.long() * _signed(0x9E3779B97F4A7C15) + _signed(start)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(mixed ^ _shifted(mixed, 31), 20)


def _shifted(values: Tensor, places: int) -> Tensor:
    """Shift right, filling with zeros as unsigned numbers would."""
    return torch.bitwise_and(values >> places, 2 ** (64 - places) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _require_room(images: Tensor, crop: int, border: int) -> None:
    height, width = images.shape[-2:]
    if min(height, width) + 2 * border < crop:
        raise ImageSizeError(
            f"images of {width}x{height} pixels with images.pad {border} are too small for images.crop "
            f"{crop}; set images.resize, or a smaller images.crop"
        )
