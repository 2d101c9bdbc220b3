"""The paper's augmentation, batched on the device: crop, mirror, subtract the mean.

What happens to an image is a function of (seed, epoch, row) alone: not of the batch it came in, nor of the
worker or device that computes it.

    pixels = augment(images, rows, seed=1, epoch=7, recipe=recipe)   # uint8 [B, 3, H, W] -> [B, 3, S, S]
    pixels = centre(images, recipe)                                  # the same without chance
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from pencil_scale.config.settings import Images
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import GOLDEN, hashes

Int64s = npt.NDArray[np.int64]


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
    drawn = _draw(_bits(rows.numpy(), seed, epoch), padded.shape[-2], padded.shape[-1], recipe)
    top, start, way = torch.from_numpy(drawn).to(images.device, non_blocking=True)[:, :, None]  # each [B, 1]
    along = _count(recipe.crop, images.device)
    y, x = top + along, start + way * along  # [B, S]
    samples = _count(len(images), images.device)[:, None, None, None]
    channels = _count(3, images.device)[None, :, None, None]
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


@lru_cache
def _count(stop: int, device: torch.device) -> Tensor:
    return torch.arange(stop, device=device)


def _draw(bits: Int64s, height: int, width: int, recipe: Recipe) -> Int64s:
    """Draw the top row, the first column and the way to go from there (1 or -1) of every crop.   [3, B]

    On the host, in a few microseconds: as many small kernels would keep a GPU waiting for their launches.
    """
    top = (bits & 0xFFFFF) % (height - recipe.crop + 1)
    left = (bits >> 20 & 0xFFFFF) % (width - recipe.crop + 1)
    mirrored = bits >> 40 & recipe.flip
    return np.stack([top, left + mirrored * (recipe.crop - 1), 1 - 2 * mirrored])


def _bits(rows: Int64s, seed: int, epoch: int) -> Int64s:
    """Draw 44 random bits per row."""
    key = seed * GOLDEN + epoch * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019
    return (hashes(rows, key) >> np.uint64(20)).astype(np.int64)


def _require_room(images: Tensor, crop: int, border: int) -> None:
    height, width = images.shape[-2:]
    if min(height, width) + 2 * border < crop:
        raise ImageSizeError(
            f"images of {width}x{height} pixels with images.pad {border} are too small for images.crop "
            f"{crop}; set images.resize, or a smaller images.crop"
        )
