"""Inspect: what the bytes of one image are, and whether training can use them.

Only the formats below are ever tried, images that declare too many pixels are refused before they are
decoded, and PIL's global switches (`MAX_IMAGE_PIXELS`, `LOAD_TRUNCATED_IMAGES`) are neither needed nor
changed. JPEG headers are parsed here, in microseconds; PIL opens all other formats.

    facts = inspect_image(data)                 # header only
    facts = inspect_image(data, decode=True)    # every pixel
    facts.problem                               # None, "image_empty", "image_unreadable" or "image_bomb"
    facts.oddities                              # ("cmyk", "truncated"): usable, worth counting
    image = load_image(data)                    # decoded by PIL, even if it is truncated
"""

import io
import struct
from collections.abc import Iterator
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

# 8,192 x 8,192: less than PIL's own warning threshold of 89 million pixels.
MAX_PIXELS = 2**26
MAX_SCANS = 200  # an encoder writes about 10; a hostile JPEG thousands, each a pass over every pixel
ORIENTATION = 0x0112  # the EXIF tag

# The plugins are called directly, not through `Image.open`, which warns by a global threshold and may choose
# any other plugin (EPS starts Ghostscript).
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
_SIGNATURES = {
    "jpeg": (b"\xff\xd8\xff",),
    "png": (b"\x89PNG\r\n\x1a\n",),
    "gif": (b"GIF87a", b"GIF89a"),
    "bmp": (b"BM",),
    "tiff": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "jpeg2000": (b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n"),
}
_MODE_ODDITIES = {
    "1": ("grey",),
    "L": ("grey",),
    "LA": ("grey", "alpha"),
    "I;16": ("grey", "16-bit"),
    "I;16B": ("grey", "16-bit"),
    "P": ("palette",),
    "PA": ("palette", "alpha"),
    "RGBA": ("alpha",),
    "CMYK": ("cmyk",),
}
# JPEG markers without content: fill bytes, TEM, RST0 to RST7, SOI, EOI.
_BARE_MARKERS = frozenset((0x00, 0xFF, 0x01, *range(0xD0, 0xDA)))
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class ImageBombError(OSError):
    """An image that declares more pixels, or passes over them, than can be decoded safely."""


@dataclass(frozen=True)
class ImageFacts:
    """What one image is; `mode` is PIL's. Width and height may be 0 if it has a problem."""

    format: str = "unknown"
    width: int = 0
    height: int = 0
    mode: str = ""
    oddities: tuple[str, ...] = ()
    problem: str | None = None


def inspect_image(data: bytes, decode: bool = False) -> ImageFacts:
    """Describe an image from its header, and on request check that all of it decodes.

    `image_empty`: 0 bytes. `image_unreadable`: unknown format, broken header, no pixels, or (with `decode`)
    refused by the decoder. `image_bomb`: declares too many pixels, or too many passes over them.
    """
    if not data:
        return ImageFacts(problem="image_empty")
    facts = ImageFacts(format_of(data))
    try:
        facts = _jpeg_facts(data) if facts.format == "jpeg" else _pil_facts(data, facts.format)
        if decode:
            load_image(data).close()
    except (ImageBombError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return replace(facts, problem="image_bomb")
    except Exception:  # on damaged bytes PIL's plugins raise nearly every class there is
        return replace(facts, problem="image_unreadable")
    return facts


def format_of(data: bytes) -> str:
    """Name the format that the first bytes announce, or "unknown"."""
    for kind, signatures in _SIGNATURES.items():
        if data.startswith(signatures):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    is_avif = data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis", b"mif1", b"msf1")
    return "avif" if is_avif else "unknown"


def open_image(data: bytes) -> ImageFile.ImageFile:
    """Open an image with PIL, which decodes nothing yet, and refuse one that is too large to decode."""
    kind = format_of(data)
    if kind not in PLUGINS:
        raise OSError("no image format that is supported")
    image = PLUGINS[kind](io.BytesIO(data))
    _require_size(image.width, image.height)
    if isinstance(image, TiffImageFile):  # a tile may be larger than the image, and is decoded completely
        _require_size(image.tag_v2.get(322, 0), image.tag_v2.get(323, 0))
    return image


def load_image(data: bytes, size: int | None = None) -> ImageFile.ImageFile:
    """Decode an image; pixels that are missing from a truncated file come out grey or black.

    PIL's lenient mode would do the same, but applies to the entire process. If only a square of `size` is
    needed, a JPEG may be decoded at 1/2, 1/4 or 1/8, but never to fewer pixels.
    """
    image = open_image(data)
    if size is not None:
        image.draft(None, (size, size))
    try:
        image.load()
    except Exception as error:
        facts = inspect_image(data)
        if facts.format == "jpeg" and "truncated" in facts.oddities:
            return load_image(data + b"\xff\xd9", size)  # at its end marker libjpeg fills in the rest
        if "truncated" not in facts.oddities or "truncated" not in str(error):
            raise
        image.tile = []  # nothing more to decode: PIL keeps the pixels that arrived
    return image


def _require_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageBombError(f"declares {width} x {height} pixels; at most {MAX_PIXELS:,} are safe")


def _pil_facts(data: bytes, kind: str) -> ImageFacts:
    with open_image(data) as image:
        oddities = list(_MODE_ODDITIES.get(image.mode, ()))
        is_rotated = _is_rotated(image.info.get("exif", b"").removeprefix(b"Exif\0\0"))
        bits: tuple[int, ...] = (data[24],) if kind == "png" else ()
        if isinstance(image, TiffImageFile):
            bits = image.tag_v2.get(258, ())
            is_rotated = image.tag_v2.get(ORIENTATION, 1) in range(2, 9)
        oddities += ["16-bit"] if 16 in bits else []
        try:
            is_animated = bool(getattr(image, "is_animated", False))
        except Exception:
            is_animated = True  # GIF: there is a second frame, but it is damaged; only the first is used
        if is_animated:
            oddities.append("multipage" if kind == "tiff" else "animated")
        oddities += ["exif-rotated"] if is_rotated else []
        oddities += ["1x1"] if image.size == (1, 1) else []
        oddities += ["truncated"] if _is_truncated(data, kind, image) else []
        return ImageFacts(kind, *image.size, image.mode, tuple(dict.fromkeys(oddities)))


def _is_truncated(data: bytes, kind: str, image: ImageFile.ImageFile) -> bool:
    """Whether pixels of a PNG, GIF or BMP are missing; decoders of other formats want all of the file."""
    if kind not in ("png", "gif", "bmp"):
        return False
    codec, _, at, arguments = image.tile[0]
    if at >= len(data):
        raise OSError(f"{kind} without pixels")
    if kind == "png":
        return data.find(b"IEND", at) < 0
    if kind == "bmp":  # the size of run-length coded pixels is not known
        row_bytes = arguments[1] if codec == "raw" and isinstance(arguments, tuple) else 0
        return at + row_bytes * image.height > len(data)
    while at < len(data) and data[at]:  # the blocks of the first frame, up to one of 0 bytes
        at += data[at] + 1
    return at + 1 >= len(data)


def _is_rotated(exif: bytes) -> bool:
    """Read the orientation from an EXIF block; a broken block counts as upright, as it does for decoders."""
    try:
        order = {b"II": "<", b"MM": ">"}[exif[:2]]
        (directory,) = struct.unpack_from(f"{order}I", exif, 4)
        (num_tags,) = struct.unpack_from(f"{order}H", exif, directory)
        for number in range(num_tags):
            tag, value = struct.unpack_from(f"{order}H6xH", exif, directory + 2 + 12 * number)
            if tag == ORIENTATION:
                return value in range(2, 9)
    except (KeyError, struct.error):
        return False  # a damaged EXIF block: decoders ignore it, too
    return False


# -- JPEG ---------------------------------------------------------------------------------------------


def _jpeg_facts(data: bytes) -> ImageFacts:
    frame: tuple[int, int, int, int, int] | None = None  # marker, bits, height, width, components
    oddities: list[str] = []
    for marker, start, end in _jpeg_segments(data):
        if marker in _FRAME_MARKERS:
            frame = (marker, *struct.unpack_from(">BHHB", data, start))
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", start):
            oddities += ["exif-rotated"] if _is_rotated(data[start + 6 : end]) else []
    scan = end
    if frame is None or scan >= len(data):
        raise OSError("JPEG without a frame or without pixels")
    marker, bits, height, width, components = frame
    mode = {1: "L", 3: "RGB", 4: "CMYK"}.get(components)
    if mode is None or bits != 8 or width == 0 or height == 0:
        raise OSError(f"JPEG of {width} x {height} pixels with {components} components of {bits} bits")
    _require_size(width, height)
    if marker in (0xC2, 0xCA) and data.count(b"\xff\xda", scan) >= MAX_SCANS:
        raise ImageBombError(f"more than {MAX_SCANS} scans")
    oddities += _MODE_ODDITIES.get(mode, ())
    oddities += ["1x1"] if width == height == 1 else []
    oddities += ["truncated"] if data.rfind(b"\xff\xd9", scan) < 0 else []
    return ImageFacts("jpeg", width, height, mode, tuple(dict.fromkeys(oddities)))


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment's content, up to the header of the first scan."""
    at, last, marker = 2, len(data) - 4, 0
    while marker != 0xDA:
        # Like PIL and libjpeg: whatever is between segments is skipped, up to the next marker.
        at = data.find(b"\xff", at)
        if at < 0 or at > last or data[at + 1] == 0xD9:
            raise OSError("JPEG ends before its first scan")
        marker = data[at + 1]
        if marker in _BARE_MARKERS:
            at += 1 if marker == 0xFF else 2
            continue
        end = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if end < at + 4 or end > len(data):
            raise OSError(f"JPEG segment at byte {at:,} reaches past the end")
        yield marker, at + 4, end
        at = end
