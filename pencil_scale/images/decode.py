"""Decoding on the CPU: the bytes of any image in, upright RGB pixels out, uint8 [height, width, 3].

Pixels stay in the order decoders give them: seen as [3, height, width] that is torch's `channels_last`,
which is what the network wants, so nobody ever transposes. PIL is used through its plugin classes and none
of its global switches; it imports in a tenth of torch's time, once in every process that reads.

    pixels = decode(data, resize=256)        # uint8 [256, 256, 3], or UndecodableError with the reason

Conventions: EXIF orientation is applied; transparency is laid over white, as shops show their products;
16 bits a channel are cut to 8; of an animation or a document the first frame counts; a file that was cut
short is completed, with grey or black where the pixels never came.
"""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps

from pencil_scale.images.headers import format_of
from pencil_scale.images.inspect import IMAGE_ERRORS, MAX_PIXELS, PLUGINS, complete_truncated

Pixels = npt.NDArray[np.uint8]
ORIENTATION = 0x0112  # the EXIF tag


class UndecodableError(Exception):
    """One image that gives no pixels. Not an error of the run: the sample weighs 0 and is named."""


def decode(data: bytes, resize: int | None = None) -> Pixels:
    """Decode one image, and scale it to a square of `resize` pixels a side (bilinear, antialiased)."""
    if not data:
        raise UndecodableError("0 bytes")
    try:
        return _decode(data, resize)
    except IMAGE_ERRORS as error:
        return _decode_completed(data, resize, error)


def check_size(found: tuple[int, ...], size: tuple[int, int]) -> None:
    """Without `images.resize` a batch is only possible where all images have one size (height, width)."""
    if found != size:
        raise UndecodableError(
            f"{found[1]} x {found[0]} pixels among images of {size[1]} x {size[0]}; set images.resize"
        )


def _decode_completed(data: bytes, resize: int | None, error: BaseException) -> Pixels:
    """Try again with a proper end where the file was cut short; else the first error is the reason."""
    try:
        completed = complete_truncated(data)
        if completed is not data:
            return _decode(completed, resize)
    except IMAGE_ERRORS:
        pass
    kind, reason = format_of(data), " ".join(str(error).split()) or type(error).__name__
    raise UndecodableError(f"{kind} of {len(data):,} bytes: {reason}"[:200]) from error


def _decode(data: bytes, resize: int | None) -> Pixels:
    kind = format_of(data)
    if kind not in PLUGINS:
        raise OSError("no image format this program reads")
    with PLUGINS[kind](io.BytesIO(data)) as image:
        if image.width * image.height > MAX_PIXELS:
            raise OSError(f"declares {image.width} x {image.height} pixels; at most {MAX_PIXELS:,} are safe")
        return _pixels(image, resize)


def _pixels(image: ImageFile.ImageFile, resize: int | None) -> Pixels:
    if resize is not None:
        # JPEG alone: decodes at 1/2, 1/4 or 1/8, but never to less than is asked for.
        image.draft(None, (resize, resize))
    image.load()
    upright: Image.Image = image
    if "exif" in image.info and image.getexif().get(ORIENTATION, 1) != 1:
        upright = ImageOps.exif_transpose(image)
    colours = _rgb(upright)
    if resize is not None and colours.size != (resize, resize):
        colours = colours.resize((resize, resize), Image.Resampling.BILINEAR)
    return np.frombuffer(colours.tobytes(), np.uint8).reshape(colours.height, colours.width, 3)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        return Image.fromarray(_eight_bits(np.asarray(image))).convert("RGB")
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")


def _eight_bits(values: npt.NDArray[Any]) -> Pixels:
    """Keep the upper half of 16 bits; PIL's own conversion would clip everything above 255 to white."""
    kept: Pixels = (np.clip(values, 0, 65535) >> 8).astype(np.uint8)
    return kept
