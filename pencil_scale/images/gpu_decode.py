"""Decoding on the GPU: nvJPEG through torchvision for plain JPEGs, the CPU for everything else.

    images, problems = decode_on_gpu(batch.encoded, batch.images, "cuda", resize=256)
    images                      # uint8 [B, 3, 256, 256] on the device, channels_last
    problems                    # {number in the batch: reason}

A part of the batch may be decoded already. The other images are given by their numbers in the batch.

nvJPEG does not handle CMYK, other formats, EXIF orientation or truncated files. Such images are recognised by
their headers and decoded by `decode.py`, with the same conventions. On a CPU device all images go that way,
so the same call also works on a laptop.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pencil_scale.images.decode import UndecodableError, decode
from pencil_scale.images.inspect import format_of, inspect_image

SCALED_BYTES = 2**26  # of the images that are scaled at once
Decoded = tuple[Tensor, dict[int, str]]


def decode_on_gpu(
    encoded: dict[int, bytes], rest: Tensor, device: torch.device | str, resize: int | None
) -> Decoded:
    """Decode images, scale them to squares of `resize` pixels per side, and put them among the rest."""
    assert resize is not None  # the config requires it where a GPU decodes
    device = torch.device(device)
    if device.type != "cuda":
        return _batch(encoded, rest, device, resize)
    # nvJPEG writes on its own stream, without waiting for ours, into memory that PyTorch allocated for ours:
    # a running step may still read what was freed there. So decode on a separate stream, which has separate
    # memory, and wait for it.
    decoding = _decoding_stream(device)
    with torch.cuda.stream(decoding):
        pixels, problems = _batch(encoded, rest, device, resize)
    decoding.synchronize()
    pixels.record_stream(torch.cuda.current_stream(device))
    return pixels, problems


@lru_cache
def _decoding_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _batch(encoded: dict[int, bytes], rest: Tensor, device: torch.device, resize: int) -> Decoded:
    """Decode on the GPU or the CPU and scale to one size; images that give no pixels stay 0."""
    plain = [number for number, data in encoded.items() if device.type == "cuda" and fits_nvjpeg(data)]
    decoded = dict(zip(plain, _with_nvjpeg([encoded[number] for number in plain], device), strict=True))
    # The rest is copied after that: nvJPEG could get, and overwrite, memory from which a copy still reads.
    num_images = len(encoded) + len(rest)
    pixels = torch.zeros((num_images, resize, resize, 3), dtype=torch.uint8, device=device)
    pixels = pixels.permute(0, 3, 1, 2)
    others = [number for number in range(num_images) if number not in encoded]
    pixels[others] = rest.to(device, non_blocking=True)
    alike: dict[torch.Size, dict[int, Tensor]] = {}  # images of one size are scaled together
    problems: dict[int, str] = {}
    for number, data in encoded.items():
        if (image := decoded.get(number)) is not None:
            alike.setdefault(image.shape, {})[number] = image
            continue
        try:
            pixels[number] = torch.from_numpy(decode(data, resize).copy()).permute(2, 0, 1)
        except UndecodableError as problem:
            problems[number] = str(problem)
    for shape, found in alike.items():
        numbers, num = list(found), max(1, SCALED_BYTES // shape.numel())
        for some in (numbers[first : first + num] for first in range(0, len(numbers), num)):
            pixels[some] = scaled(torch.stack([found[number] for number in some]), resize)
    return pixels, problems


def scaled(images: Tensor, side: int) -> Tensor:
    """Scale uint8 [B, 3, H, W] to a square (bilinear, antialiased, as on the CPU), by two matrix products."""
    down, across = (_weights(length, side, images.device) for length in images.shape[-2:])
    exact: Tensor = down @ images.to(down.dtype) @ across.mT
    return exact.round_().clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=256)
def _weights(length: int, side: int, device: torch.device) -> Tensor:
    """The share of each of `length` pixels in each of `side`: a triangle around its centre.   [side, length]

    It covers two pixels of the result, or of the image if that is smaller. Half precision is exact for the
    256 levels, and for their averages to a fraction of a level.
    """
    centre = (torch.arange(side, dtype=torch.float64) + 0.5) * (length / side)
    distance = torch.arange(length, dtype=torch.float64) + 0.5 - centre[:, None]
    weights = (1 - distance.abs() / max(1.0, length / side)).clamp(min=0)
    precision = torch.float16 if device.type == "cuda" else torch.float32
    return (weights / weights.sum(1, keepdim=True)).to(device, precision)


def fits_nvjpeg(data: bytes) -> bool:
    """Decide from the header whether nvJPEG gives the same upright colours as the CPU."""
    if format_of(data) != "jpeg":
        return False
    facts = inspect_image(data)
    is_plain = facts.problem is None and facts.mode in ("RGB", "L")
    return is_plain and not {"truncated", "exif-rotated"} & set(facts.oddities)


def _with_nvjpeg(images: list[bytes], device: torch.device) -> list[Tensor | None]:
    """Decode with nvJPEG, which refuses a list for one bad file: then halve it until that file is alone."""
    if not images:
        return []
    from torchvision.io import ImageReadMode, decode_jpeg  # takes seconds to load; only a GPU needs it

    encoded = [torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for data in images]
    try:
        return list(decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device))
    except RuntimeError:
        torch.cuda.synchronize(device)  # what it has started is still being written
        if len(images) == 1:
            return [None]
    middle = len(images) // 2
    return _with_nvjpeg(images[:middle], device) + _with_nvjpeg(images[middle:], device)
