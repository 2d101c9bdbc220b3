"""Decoding on the CPU: the bytes of any image in, upright RGB pixels out, uint8 [height, width, 3].

Pixels stay in the order of the decoders: viewed as [3, height, width] that is torch's `channels_last`, which
the network wants, so no transpose is needed.

    pixels = decode(data, resize=256)        # uint8 [256, 256, 3], or UndecodableError with the reason
    decoders()                               # "simplejpeg 1.9.0, opencv 5.0.0, pillow 12.0.0, scaling 3"

A JPEG that is scaled is decoded by libjpeg-turbo, which skips detail that would be lost, and scaled by
OpenCV: that takes less than half of PIL's time. PIL reads everything else: other formats, rotated, CMYK and
damaged JPEGs, and images that keep their size. The two differ by one or two grey levels, so a run keeps its
decoders.

Conventions: EXIF orientation is applied; transparency is laid over white, as shops show their products;
16 bits per channel are cut to 8; of an animation or a document the first frame is used; pixels that are
missing from a truncated file are grey or black.
"""

from importlib.metadata import version

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from pencil_scale.images.inspect import ORIENTATION, format_of, inspect_image, load_image

Pixels = npt.NDArray[np.uint8]

SCALING = 3  # to be raised when the same libraries give other pixels
BLURRED_FROM = 1.5  # times the side: scaling blurs the colours, so they need no fine interpolation
LINEAR_UP_TO = 2.2  # times the side: beyond that OpenCV's linear filter would skip many pixels

try:
    import cv2
    import simplejpeg

    cv2.setNumThreads(1)  # a reader per core is busy already
    IS_FAST = True
except ImportError:  # on a host without their wheels PIL reads everything; `decoders` says so
    IS_FAST = False


class UndecodableError(Exception):
    """One image that gives no pixels. The run continues: the sample gets weight 0 and is reported."""


def decode(data: bytes, resize: int | None = None) -> Pixels:
    """Decode one image, and scale it to a square of `resize` pixels per side (bilinear, antialiased)."""
    if not data:
        raise UndecodableError("0 bytes")
    try:
        if IS_FAST and resize is not None and (scaled := _scaled_jpeg(data, resize)) is not None:
            return scaled
        with load_image(data, resize) as image:
            upright: Image.Image = image
            if "exif" in image.info and image.getexif().get(ORIENTATION, 1) != 1:
                upright = ImageOps.exif_transpose(image)
            colours = _rgb(upright)
            if resize is not None and colours.size != (resize, resize):
                colours = colours.resize((resize, resize), Image.Resampling.BILINEAR)
            return np.frombuffer(colours.tobytes(), np.uint8).reshape(colours.height, colours.width, 3)
    except Exception as error:  # PIL's plugins raise nearly every class on damaged bytes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UndecodableError(f"{format_of(data)} of {len(data):,} bytes: {reason}"[:200]) from error


def decoders() -> str:
    """The libraries that decode images here, with their versions and that of our scaling."""
    names = {"simplejpeg": "simplejpeg", "opencv": "opencv-python-headless"} if IS_FAST else {}
    names["pillow"] = "pillow"
    found = {name: version(package) for name, package in names.items()}
    return ", ".join(f"{name} {number}" for name, number in {**found, "scaling": SCALING}.items())


def _scaled_jpeg(data: bytes, side: int) -> Pixels | None:
    """Decode an intact, upright JPEG to a square of this side; None for anything else."""
    facts = inspect_image(data)
    if facts.format != "jpeg" or facts.problem or not set(facts.oddities) <= {"grey"}:
        return None
    # libjpeg-turbo decodes at 1/8 to 8/8 of the size, but 5/8 to 7/8 take longer than 8/8: they are of use
    # only where the linear filter could not do the rest.
    is_near = max(facts.width, facts.height) <= LINEAR_UP_TO * side
    is_blurred = min(facts.width, facts.height) >= BLURRED_FROM * side
    least = {"min_height": side, "min_width": side, "min_factor": 2.0 if is_near else 1.0}
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", fastupsample=is_blurred, **least)
    except ValueError:
        return None  # damaged: PIL gives the pixels that arrived, or the reason
    how = cv2.INTER_AREA if max(pixels.shape) > LINEAR_UP_TO * side else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(pixels, (side, side), interpolation=how), np.uint8)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        # Keep the upper half of 16 bits: PIL's own conversion clips everything above 255 to white.
        upper = np.clip(np.asarray(image), 0, 65535) >> 8
        return Image.fromarray(upper.astype(np.uint8)).convert("RGB")
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")
