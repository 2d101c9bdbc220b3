"""Decoding on the CPU: the bytes of any image in, upright RGB pixels out, uint8 [height, width, 3].

Pixels stay in the order of the decoders: viewed as [3, height, width] that is torch's `channels_last`, which
the network wants, so no transpose is needed.

    pixels = decode(data, resize=256)        # uint8 [256, 256, 3], or UndecodableError with the reason

Conventions: EXIF orientation is applied; transparency is laid over white, as shops show their products;
16 bits per channel are cut to 8; of an animation or a document the first frame is used; pixels that are
missing from a truncated file are grey or black.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from pencil_scale.images.inspect import ORIENTATION, format_of, load_image

Pixels = npt.NDArray[np.uint8]


class UndecodableError(Exception):
    """One image that gives no pixels. The run continues: the sample gets weight 0 and is reported."""


def decode(data: bytes, resize: int | None = None) -> Pixels:
    """Decode one image, and scale it to a square of `resize` pixels per side (bilinear, antialiased)."""
    if not data:
        raise UndecodableError("0 bytes")
    try:
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
