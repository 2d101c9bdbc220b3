"""Images: what the bytes of one image are, and whether a training run can use them.

Nothing in an image crashes, hangs or exhausts memory here: declared sizes are checked before PIL sees
a byte, only the formats named below are ever tried, and PIL's global switches (`MAX_IMAGE_PIXELS`,
`LOAD_TRUNCATED_IMAGES`) are neither needed nor touched. A file that was cut short is completed in
memory instead, so any decoder, in any thread, can take it.

    facts = inspect_image(data)                 # header only, microseconds
    facts = inspect_image(data, decode=True)    # every pixel
    facts.problem                               # None, "image_empty", "image_unreadable" or "image_bomb"
    facts.oddities                              # ("cmyk", "truncated"): usable, worth counting
"""

import io
import struct
import zlib
from collections.abc import Callable
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

from pencil_scale.images.headers import (
    MAX_SCANS,
    PARSED_HERE,
    BadHeaderError,
    Header,
    format_of,
    png_chunks,
    read_header,
)

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

    `image_empty`: 0 bytes. `image_unreadable`: no known format, a broken header, no pixels, or (with
    `decode`) a decoder refused it. `image_bomb`: too many pixels, or passes over them, were declared.
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
    return replace(facts, problem=_decoding_problem(data, facts)) if decode else facts


def complete_truncated(data: bytes) -> bytes:
    """Give an ok file that was cut short a proper end, so that strict decoders take it; others pass as is.

    The pixels that never arrived come out grey or black, as with PIL's own lenient mode, which is a
    switch for the whole process and all its threads and therefore not for us.
    """
    kind = format_of(data)
    header = read_header(data, kind) if kind in PARSED_HERE else None
    if header is None or header.whole:
        return data
    return _COMPLETIONS[kind](data, header)


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


def _decoding_problem(data: bytes, facts: ImageFacts) -> str | None:
    problem = _strict_problem(data, facts.format)
    if problem and "truncated" in facts.oddities:
        return _strict_problem(complete_truncated(data), facts.format)
    return problem


def _strict_problem(data: bytes, kind: str) -> str | None:
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


def _complete_jpeg(data: bytes, header: Header) -> bytes:
    return data + b"\xff\xd9"


def _complete_bmp(data: bytes, header: Header) -> bytes:
    return data + bytes(header.num_missing)


def _complete_gif(data: bytes, header: Header) -> bytes:
    """Fill the open block and add blocks of zeros: a code of zeros, of any width, is one pixel of colour 0.

    Codes have at most 12 bits, so 1.5 bytes a pixel reach the last pixel wherever the file was cut.
    """
    num_blocks = header.num_pixels * 3 // 2 // 255 + 1
    return data + bytes(header.num_missing) + (b"\xff" + bytes(255)) * num_blocks + b"\x00\x3b"


def _complete_png(data: bytes, header: Header) -> bytes:
    """Rebuild a PNG from the chunks, and the part of its pixels, that arrived; missing rows are zeros.

    A zlib stream that just stops is an error to decoders, so what can be unpacked is packed again.
    What a stream unpacks to beyond the declared pixels is never asked for.
    """
    packed, kept = [], [data[:8]]
    for name, start, end in png_chunks(data):
        if name == b"IDAT":
            packed.append(data[start:end])
        elif name in (b"IHDR", b"PLTE", b"tRNS") and end + 4 <= len(data):
            kept.append(data[start - 8 : end + 4])
    depth, colour = data[24], data[25]
    bits = depth * {2: 3, 4: 2, 6: 4}.get(colour, 1)
    # Each row has a filter byte and is rounded up to bytes; interlaced, there are 15/8 * height + 7 rows.
    num_bytes = header.num_pixels * bits // 8 + 2 * (2 * header.height + 8)
    try:
        rows = zlib.decompressobj().decompress(b"".join(packed), num_bytes)
    except zlib.error:
        return data  # damaged as well as cut: for the decoder to refuse
    pixels = zlib.compress(rows + bytes(num_bytes - len(rows)), 1)
    return b"".join([*kept, _png_chunk(b"IDAT", pixels), _png_chunk(b"IEND", b"")])


def _png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


_COMPLETIONS: dict[str, Callable[[bytes, Header], bytes]] = {
    "jpeg": _complete_jpeg,
    "png": _complete_png,
    "gif": _complete_gif,
    "bmp": _complete_bmp,
}
