"""Decoding on the GPU: nvJPEG through torchvision for plain JPEGs, the CPU for whatever it does not take.

    images, weight, problems = decode_on_gpu(batch.images, "cuda", resize=256)
    images                      # uint8 [B, 3, 256, 256] on the device, channels_last
    weight                      # float32 [B] on the host, 0 where an image gave no pixels
    problems                    # {place in the batch: reason}

nvJPEG knows no CMYK, no other format, no EXIF orientation and no file that was cut short. Those are found by
their headers and decoded by `decoding.py`, with the same conventions. On a device that is no GPU
everything goes that way, so the same call serves a trial on a laptop.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from pencil_scale.images.decode import UndecodableError, check_size, decode
from pencil_scale.images.headers import BadHeaderError, format_of, read_header


def decode_on_gpu(
    images: list[bytes],
    device: torch.device | str,
    resize: int | None = None,
    size: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, dict[int, str]]:
    """Decode a batch; without `resize` every image must have the `size` (height, width) of the dataset."""
    device = torch.device(device)
    if resize is not None:
        size = resize, resize
    if size is None:
        raise ValueError("either resize or size is needed: a batch has one size")
    if device.type != "cuda":
        return _batch(images, device, resize, size)
    # nvJPEG writes on a stream of its own, without waiting for ours, into memory that ours was given: a step
    # under way may still be reading there what was freed behind it. So decoding has a stream of its own, and
    # memory of its own with it, and leaves nothing undone there.
    decoding = _decoding_stream(device)
    with torch.cuda.stream(decoding):
        pixels, weight, problems = _batch(images, device, resize, size)
    decoding.synchronize()
    pixels.record_stream(torch.cuda.current_stream(device))
    return pixels, weight, problems


@lru_cache
def _decoding_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _batch(
    images: list[bytes], device: torch.device, resize: int | None, size: tuple[int, int]
) -> tuple[Tensor, Tensor, dict[int, str]]:
    decoded, problems = _decode_all(images, device, resize)
    pixels = torch.zeros((len(images), *size, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
    if resize is None:
        problems |= _drop_other_sizes(decoded, size)
    if decoded:
        scaled = torch.cat([_scaled(image, size) for image in decoded.values()])
        pixels[list(decoded)] = scaled.round_().to(torch.uint8)
    weight = torch.ones(len(images))
    weight[list(problems)] = 0.0
    return pixels, weight, problems


def fits_nvjpeg(data: bytes) -> bool:
    """Tell from the header whether nvJPEG will give the same upright colours as the CPU."""
    if format_of(data) != "jpeg":
        return False
    try:
        header = read_header(data, "jpeg")
    except BadHeaderError:
        return False
    return header.mode in ("RGB", "L") and header.whole and "exif-rotated" not in header.oddities


def _decode_all(
    images: list[bytes], device: torch.device, resize: int | None
) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Decode what can be, on the GPU or the CPU; the others get their reason."""
    plain = [place for place, data in enumerate(images) if device.type == "cuda" and fits_nvjpeg(data)]
    decoded = _on_gpu([images[place] for place in plain], device)
    found = {place: image for place, image in zip(plain, decoded, strict=True) if image is not None}
    problems: dict[int, str] = {}
    for place, data in enumerate(images):
        if place in found:
            continue
        try:
            pixels = torch.from_numpy(decode(data, resize).copy())
            found[place] = pixels.to(device, non_blocking=True).permute(2, 0, 1)
        except UndecodableError as problem:
            problems[place] = str(problem)
    return found, problems


def _on_gpu(images: list[bytes], device: torch.device) -> list[Tensor | None]:
    """Decode with nvJPEG. It refuses a whole list for one bad file, so then they are tried one by one."""
    if not images:
        return []
    from torchvision.io import ImageReadMode, decode_jpeg  # seconds to load, and only a GPU has use for it

    encoded = [torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for data in images]
    try:
        return list(decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device))
    except RuntimeError:
        torch.cuda.synchronize(device)  # what it had begun is still being written
        if len(images) == 1:
            return [None]
    middle = len(images) // 2
    return _on_gpu(images[:middle], device) + _on_gpu(images[middle:], device)


def _scaled(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale bilinearly with antialiasing, as on the CPU; the batch is rounded as a whole.   [1, 3, H, W]"""
    pixels = image[None].float()
    if pixels.shape[2:] == size:
        return pixels
    return interpolate(pixels, size=size, mode="bilinear", antialias=True)


def _drop_other_sizes(decoded: dict[int, Tensor], size: tuple[int, int]) -> dict[int, str]:
    """Take out the images that are not of the dataset's size, and give their reasons."""
    problems: dict[int, str] = {}
    for place, image in list(decoded.items()):
        try:
            check_size(tuple(image.shape[1:]), size)
        except UndecodableError as problem:
            problems[place] = str(problem)
            del decoded[place]
    return problems
