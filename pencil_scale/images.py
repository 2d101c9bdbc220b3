"""Images: what the bytes of one image are, and whether a training run can use them.

Nothing in an image crashes, hangs or exhausts memory here: declared sizes are checked before PIL sees
a byte, only the formats named below are ever tried, and PIL's global switches (`MAX_IMAGE_PIXELS`,
`LOAD_TRUNCATED_IMAGES`) are neither needed nor touched. What was cut short is no image unless all its
pixels came: a picture that is black or grey from some row on would teach its class as if it were one.

    facts = inspect_image(data)                 # header only, microseconds
    facts = inspect_image(data, decode=True)    # every pixel
    facts.problem                               # None, "image_empty", "image_unreadable" or "image_bomb"
    facts.oddities                              # ("palette", "truncated"): usable, worth counting
"""

import io
import struct
import zlib
from dataclasses import dataclass, replace

from PIL import Image, ImageFile
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from pencil_scale.reading.image_headers import (
    MAX_SCANS,
    PARSED_HERE,
    Header,
    format_of,
    read_header,
)
from pencil_scale.reading.tiff_tags import BadHeaderError

# Under PIL's own warning threshold of 89 million, which therefore never speaks up: 8,192 x 8,192.
MAX_PIXELS = 2**26

# The plugins are called by class, not through `Image.open`: its bomb check reads a global and warns,
# and no other plugin (EPS starts Ghostscript, FPX and PSD have no use here) can ever be chosen.
PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "jpeg": JpegImageFile,
    "png": PngImageFile,
    "webp": WebPImageFile,
    "gif": GifImageFile,
    "bmp": BmpImageFile,
    "tiff": TiffImageFile,
    "avif": AvifImageFile,
    "jpeg2000": Jpeg2KImageFile,
}

# What those plugins were seen to raise, or can raise by their source, on bytes that are no good image.
IMAGE_ERRORS = (
    BadHeaderError,
    OSError,  # truncated, broken data stream, decoder errors; UnidentifiedImageError
    SyntaxError,  # PIL's word for "not a file of this format"
    ValueError,  # text chunks that unpack too large, sizes, modes, UnicodeDecodeError
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    AttributeError,
    AssertionError,
    OverflowError,
    ZeroDivisionError,
    RuntimeError,  # libavif; RecursionError, NotImplementedError
    MemoryError,
    struct.error,
    zlib.error,
    Warning,  # a plugin's warning where the interpreter runs with -W error
)


@dataclass(frozen=True)
class ImageFacts:
    """What one image is. Where it has a problem, width and height are what was declared, or 0."""

    format: str = "unknown"
    width: int = 0
    height: int = 0
    mode: str = ""
    oddities: tuple[str, ...] = ()
    problem: str | None = None


def inspect_image(data: bytes, decode: bool = False) -> ImageFacts:
    """Tell what an image is from its header, and on request whether all of it decodes.

    `image_empty`: 0 bytes. `image_unreadable`: no known format, a broken header, no pixels, or a decoder
    refused it, which is asked with `decode` and whenever the file lacks its end. `image_bomb`: too many
    pixels, or passes over them, were declared. `truncated` and no problem: only what follows the last
    pixel is lost.
    """
    if not data:
        return ImageFacts(problem="image_empty")
    kind = format_of(data)
    if kind == "unknown":
        return ImageFacts(problem="image_unreadable")
    try:
        header = _header_of(data, kind)
    except IMAGE_ERRORS:
        return ImageFacts(kind, problem="image_unreadable")
    oddities = header.oddities
    oddities += ("1x1",) if header.width == header.height == 1 else ()
    oddities += () if header.whole else ("truncated",)
    facts = ImageFacts(header.format, header.width, header.height, header.mode, oddities)
    if header.num_pixels > MAX_PIXELS or header.num_scans > MAX_SCANS:
        return replace(facts, problem="image_bomb")
    if decode or not header.whole:
        return replace(facts, problem=_decoding_problem(data, kind))
    return facts


def _header_of(data: bytes, kind: str) -> Header:
    """Parse the header ourselves where we can; the two rare formats are opened, not decoded, by PIL."""
    if kind in PARSED_HERE:
        return read_header(data, kind)
    with PLUGINS[kind](io.BytesIO(data)) as image:
        oddities = ["animated"] if getattr(image, "is_animated", False) else []
        oddities += ["grey"] if image.mode in ("L", "LA", "I;16") else []
        oddities += ["16-bit"] if image.mode == "I;16" else []
        oddities += ["alpha"] if image.mode in ("LA", "RGBA") else []
        return Header(kind, *image.size, image.mode, image.width * image.height, tuple(oddities))


def _decoding_problem(data: bytes, kind: str) -> str | None:
    try:
        with PLUGINS[kind](io.BytesIO(data)) as image:
            # The plugin parsed the header anew: its word on the size is what it is about to allocate.
            if image.width * image.height > MAX_PIXELS:
                return "image_bomb"
            image.load()
    except Image.DecompressionBombError:
        return "image_bomb"
    except IMAGE_ERRORS:
        return "image_unreadable"
    return None
