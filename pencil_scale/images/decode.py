"""Decoding on the CPU: the bytes of any image in, upright RGB pixels out, uint8 [height, width, 3].

Pixels stay in the order of the decoders: viewed as [3, height, width] that is torch's `channels_last`, which
the network wants, so no transpose is needed.

    pixels = decode(data, resize=256)        # uint8 [256, 256, 3], or UndecodableError with the reason

Conventions: EXIF orientation is applied; transparency is laid over white, as shops show their products;
16 bits per channel are cut to 8; of an animation or a document the first frame is used; a truncated file is
completed, with grey or black in place of missing pixels.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from pencil_scale.images.inspect import ORIENTATION, complete_truncated, format_of, open_image

Pixels = npt.NDArray[np.uint8]


class UndecodableError(Exception):
    """One image that gives no pixels. The run continues: the sample gets weight 0 and is reported."""


def decode(data: bytes, resize: int | None = None) -> Pixels:
    """Decode one image, and scale it to a square of `resize` pixels per side (bilinear, antialiased)."""
    if not data:
        raise UndecodableError("0 bytes")
    try:
        return _decode(data, resize)
    except Exception as error:  # PIL's plugins raise nearly every class on damaged bytes
        completed = complete_truncated(data)
        if completed is not data:
            try:
                return _decode(completed, resize)
            except Exception:
                pass  # the first error is reported below
        reason = " ".join(str(error).split()) or type(error).__name__
        message = f"{format_of(data)} of {len(data):,} bytes: {reason}"
        raise UndecodableError(message[:200]) from error


def check_size(found: tuple[int, ...], size: tuple[int, int]) -> None:
    """Refuse an image of another size (height, width): without `images.resize`, a batch has one size."""
    if found != size:
        raise UndecodableError(
            f"{found[1]} x {found[0]} pixels among images of {size[1]} x {size[0]}; set images.resize"
        )


def _decode(data: bytes, resize: int | None) -> Pixels:
    with open_image(data) as image:
        if resize is not None:
            # JPEG only: decodes at 1/2, 1/4 or 1/8, but never to fewer pixels than requested.
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
        # Keep the upper half of 16 bits: PIL's own conversion clips everything above 255 to white.
        upper = np.clip(np.asarray(image), 0, 65535) >> 8
        return Image.fromarray(upper.astype(np.uint8)).convert("RGB")
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")
