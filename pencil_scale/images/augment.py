"""Augmentation, batched on the device: the paper's, and a stronger one; and a check of the image sizes.

The result for an image depends only on (seed, epoch, row), not on its batch, worker or device.

    recipe = config.images
    pixels = augment(images, rows, seed=1, epoch=7, recipe=recipe)   # uint8 [B, 3, H, W] -> [B, 3, S, S]
    pixels = strengthen(pixels, rows, seed=1, epoch=7)               # also turned, recoloured, partly covered
    pixels = centre(images, recipe)                                  # the same without randomness
    require_sizes(recipe, {"640x480": 900, "480x640": 100}, max_odd_share=0.01)       # refuses these
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from pencil_scale.config.settings import Images
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import GOLDEN, hashes

# Of the stronger augmentation; each number is drawn evenly, up to this much to either side.
TURN, SHEAR = 0.26, 0.2  # radians: 15 degrees; width per height
SCALE, SHIFT, COVER = 0.15, 0.2, 0.4  # shares of the size, of half the side, and of the side
COLOUR = 0.4  # of contrast and saturation; of light, in standard deviations
FAR = 9  # where the square of an image that is not covered lies: outside


class ImageSizeError(PencilError):
    """Images too small for the configured crop."""


def augment(images: Tensor, rows: Tensor, seed: int, epoch: int, recipe: Images) -> Tensor:
    """Pad, take a random crop, mirror half of the images at random, and normalise."""
    border = recipe.pad or 0
    _require_room(images, recipe.crop, border)
    padded = pad(images, [border] * 4)
    drawn = _draw(_bits(rows.numpy(), seed, epoch), padded.shape[-2], padded.shape[-1], recipe)
    top, start, step = torch.from_numpy(drawn).to(images.device, non_blocking=True)[:, :, None]  # each [B, 1]
    along = _count(recipe.crop, images.device)
    y, x = top + along, start + step * along  # [B, S]
    samples = _count(len(images), images.device)[:, None, None, None]
    channels = _count(3, images.device)[None, :, None, None]
    return normalise(padded[samples, channels, y[:, None, :, None], x[:, None, None, :]], recipe)


def strengthen(pixels: Tensor, rows: Tensor, seed: int, epoch: int) -> Tensor:
    """Turn, shear, scale and shift images, change their colours, and cover a square of them with grey.

    Each of the three happens to half of the images: the network is to know unchanged ones as well.
    """
    numbers = _uniform(rows.numpy(), seed, epoch, 14)
    numbers[:6] *= numbers[11] > 0
    numbers[6:9] *= numbers[12] > 0
    numbers[9:11] += np.where(numbers[13] > 0, 0, FAR)
    drawn = torch.from_numpy(numbers[:11]).to(pixels.device, non_blocking=True)
    angle, shear, width, height, right, down = drawn[:6]  # each [B]
    cos, sin, shear = (angle * TURN).cos(), (angle * TURN).sin(), shear * SHEAR
    width, height = 1 + width * SCALE, 1 + height * SCALE
    affine = torch.stack(
        [
            *(cos * width, (shear * cos - sin) * height, right * SHIFT),
            *(sin * width, (shear * sin + cos) * height, down * SHIFT),
        ],
        dim=-1,
    ).view(-1, 2, 3)
    grid = affine_grid(affine, list(pixels.shape), align_corners=False)
    light, contrast, colour, x, y = drawn[6:, :, None, None, None]
    # Where there is no image, as where it is covered, is the mean colour, which is 0 after normalising.
    moved = grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    grey = moved.mean(1, keepdim=True)
    moved = grey + (1 + colour * COLOUR) * (moved - grey)
    mean = grey.mean((2, 3), keepdim=True)
    moved = mean + (1 + contrast * COLOUR) * (moved - mean) + light * COLOUR
    side = pixels.shape[-1]
    along = (_count(side, pixels.device) + 0.5) / side * 2 - 1  # from -1 to 1
    covered = ((along[None, None, :, None] - y).abs() < COVER) & ((along - x).abs() < COVER)
    changed: Tensor = moved.masked_fill(covered, 0.0)
    return changed


def centre(images: Tensor, recipe: Images) -> Tensor:
    """Take the centre crop of every image, and normalise."""
    return normalise(centre_crop(images, recipe), recipe)


def centre_crop(images: Tensor, recipe: Images) -> Tensor:
    """Take the centre crop of every image."""
    _require_room(images, recipe.crop, 0)
    y, x = ((side - recipe.crop) // 2 for side in images.shape[-2:])
    return images[..., y : y + recipe.crop, x : x + recipe.crop]


def require_sizes(recipe: Images, sizes: Mapping[str, int], max_odd_share: float) -> None:
    """Refuse a recipe that does not fit images of these sizes, before anything is trained."""
    if recipe.resize is not None or not sizes:
        return  # all images get one size, which the config has checked against the crop
    num_images, most_common = sum(sizes.values()), max(sizes, key=lambda size: sizes[size])
    num_odd = num_images - sizes[most_common]
    if num_odd > max_odd_share * num_images:
        other = next(size for size in sizes if size != most_common)
        raise ImageSizeError(
            f"images.resize: not set, but the images have different sizes: {num_odd:,} of {num_images:,} are "
            f"not {most_common} pixels, such as {other}; set images.resize and images.crop, or leave out both"
        )
    width, height = map(int, most_common.split("x"))
    if min(width, height) < recipe.crop:
        raise ImageSizeError(
            f"images.crop: {recipe.crop}, but the images have {most_common} pixels; set a crop of at most "
            f"{min(width, height)}, or images.resize, or leave out both"
        )


def normalise(images: Tensor, recipe: Images) -> Tensor:
    """Scale bytes to [0, 1], subtract the mean and divide by the standard deviation of each channel."""
    mean, std = _per_channel(recipe.mean, images.device), _per_channel(recipe.std, images.device)
    return (images.float() / 255 - mean) / std


@lru_cache
def _per_channel(values: tuple[float, float, float], device: torch.device) -> Tensor:
    """One number per channel, cached on the device: copying them there would wait until it is idle."""
    return torch.tensor(values, device=device)[:, None, None]


@lru_cache
def _count(stop: int, device: torch.device) -> Tensor:
    return torch.arange(stop, device=device)


def _draw(bits: npt.NDArray[np.int64], height: int, width: int, recipe: Images) -> npt.NDArray[np.int64]:
    """Draw the top row, first column and column step (1, or -1 if mirrored) of every crop.   [3, B]

    This takes microseconds on the host; on a GPU the launches of its many small kernels would take longer.
    """
    top = (bits & 0xFFFFF) % (height - recipe.crop + 1)
    start = (bits >> 20 & 0xFFFFF) % (width - recipe.crop + 1)
    mirrored = bits >> 40 & recipe.flip
    return np.stack([top, start + mirrored * (recipe.crop - 1), 1 - 2 * mirrored])


def _bits(rows: npt.NDArray[np.int64], seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Draw 44 random bits per row."""
    key = seed * GOLDEN + epoch * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019
    return (hashes(rows, key) >> np.uint64(20)).astype(np.int64)


def _uniform(rows: npt.NDArray[np.int64], seed: int, epoch: int, num: int) -> npt.NDArray[np.float32]:
    """Draw numbers between -1 and 1.   [num, B]"""
    key = seed * GOLDEN + epoch * 0xD1B54A32D192ED03
    drawn = [hashes(rows, key + (number + 1) * 0xA0761D6478BD642F) >> np.uint64(40) for number in range(num)]
    return np.stack(drawn).astype(np.float32) / np.float32(2**23) - 1


def _require_room(images: Tensor, crop: int, border: int) -> None:
    height, width = images.shape[-2:]
    if min(height, width) + 2 * border < crop:
        raise ImageSizeError(
            f"images of {width}x{height} pixels with images.pad {border} are too small for images.crop "
            f"{crop}; set images.resize, or a smaller images.crop"
        )
