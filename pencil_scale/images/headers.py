"""TIFF tags: the directory of numbers that opens a TIFF file and every EXIF block.

Every read is checked against the end of the data, so no count or offset in it can lead astray.

    tags, following = tiff_tags(data)      # {256: (640,), 257: (480,), 258: (8, 8, 8)}, next directory

Image headers: what a file declares about itself, read without decoding and without PIL.

Each parser walks its format's own structure over the bytes and touches no pixel. It either returns a
`Header` or raises `BadHeaderError`; every read is checked against the end of the data, so nothing that a
file says about itself (a length, an offset, a count) can make a parser crash, hang or allocate.

    kind = format_of(data)               # "jpeg", from the first bytes alone
    header = read_header(data, kind)     # Header(format="jpeg", width=640, height=480, mode="RGB", ...)
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


class BadHeaderError(Exception):
    """The bytes do not follow the format their first bytes announce, or their kind cannot be decoded."""


def unpack(form: str, data: bytes, at: int) -> tuple[Any, ...]:
    """Unpack numbers at a byte position, or raise where the data ends before them."""
    if at < 0 or at + struct.calcsize(form) > len(data):
        raise BadHeaderError(f"ends at byte {len(data):,}, inside its header")
    return struct.unpack_from(form, data, at)


_FORMS = {1: "B", 3: "H", 4: "I", 16: "Q"}  # by field type: the whole numbers
# Width, height, bits, photometric, orientation, samples, tile width, tile height.
_WANTED = {256, 257, 258, 262, 274, 277, 322, 323}


def tiff_tags(data: bytes) -> tuple[dict[int, tuple[int, ...]], int]:
    """Read the whole-number tags of the first directory, and the place of the next one (0: none)."""
    order = {b"II": "<", b"MM": ">"}.get(data[:2], "")
    version = unpack(f"{order}H", data, 2)[0] if order else 0
    if version not in (42, 43):
        raise BadHeaderError("not a TIFF directory")
    offset, count, width = ("Q", "Q", 8) if version == 43 else ("I", "H", 4)
    (at,) = unpack(order + offset, data, 8 if version == 43 else 4)
    (num_tags,) = unpack(order + count, data, at)
    at += struct.calcsize(order + count)
    tags: dict[int, tuple[int, ...]] = {}
    for _ in range(num_tags):
        tag, kind, num = unpack(f"{order}HH{offset}", data, at)
        at += 4 + 2 * width
        if tag in _WANTED and kind in _FORMS and 1 <= num <= 16:
            form = f"{order}{num}{_FORMS[kind]}"
            inside = struct.calcsize(form) <= width
            tags[tag] = unpack(
                form, data, at - width if inside else unpack(order + offset, data, at - width)[0]
            )
    following = struct.calcsize(order + offset)
    return tags, unpack(order + offset, data, at)[0] if at + following <= len(data) else 0


# JPEG markers that no content follows: fill bytes, TEM, RST0 to RST7, SOI, EOI.
_BARE_MARKERS = frozenset((0x00, 0xFF, 0x01, *range(0xD0, 0xDA)))
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}

MAX_SCANS = 200  # an encoder makes about 10; a hostile file thousands, each a pass over every pixel


@dataclass(frozen=True)
class Header:
    """What the file declares; `mode` is in PIL's words, `whole` is False where the file ends too early.

    `num_pixels` is what decoding would have to hold: more than width * height where tiles are larger.
    `num_missing` is how many bytes the last block (GIF) or all rows (BMP) still lack.
    """

    format: str
    width: int
    height: int
    mode: str
    num_pixels: int
    oddities: tuple[str, ...] = ()
    whole: bool = True
    num_missing: int = 0
    num_scans: int = 1


def format_of(data: bytes) -> str:
    """Name the format that the first bytes announce, or "unknown"; the name of a file says nothing."""
    for kind, signatures in _SIGNATURES.items():
        if data.startswith(signatures):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return (
        "avif" if data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis", b"mif1", b"msf1") else "unknown"
    )


def read_header(data: bytes, kind: str) -> Header:
    """Parse the header of one of the formats in `PARSED_HERE`."""
    return _PARSERS[kind](data)


def _header(kind: str, size: tuple[int, int], mode: str, oddities: list[str], **more: Any) -> Header:
    width, height = size
    if width <= 0 or height <= 0:
        raise BadHeaderError(f"declares {width} x {height} pixels")
    more.setdefault("num_pixels", width * height)
    return Header(kind, width, height, mode, oddities=tuple(dict.fromkeys(oddities)), **more)


def _rotation(exif: bytes) -> list[str]:
    """Look up the orientation in a TIFF-shaped EXIF block; anything but upright is worth counting."""
    try:
        tags, _ = tiff_tags(exif)
    except BadHeaderError:
        return []  # decoders ignore broken EXIF, and so do we
    return ["exif-rotated"] if tags.get(274, (1,))[0] in range(2, 9) else []


def _jpeg(data: bytes) -> Header:
    frame: tuple[int, int, int, int, int] | None = None  # marker, bits, height, width, components
    oddities: list[str] = []
    for marker, start, end in _jpeg_segments(data):
        if marker in _FRAME_MARKERS:
            frame = (marker, *unpack(">BHHB", data, start))
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", start):
            oddities += _rotation(data[start + 6 : end])
        elif marker == 0xDA:
            return _jpeg_header(data, frame, end, oddities)
    raise BadHeaderError("JPEG without a scan: no pixels")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment's content up to and including the first scan's header."""
    at, last = 2, len(data) - 4
    while True:
        # Like PIL and libjpeg: whatever stands between segments is skipped, up to the next marker.
        at = data.find(b"\xff", at)
        if at < 0 or at > last:
            raise BadHeaderError("JPEG ends before its first scan")
        marker = data[at + 1]
        if marker in _BARE_MARKERS:
            if marker == 0xD9:
                raise BadHeaderError("JPEG ends before its first scan")
            at += 1 if marker == 0xFF else 2
            continue
        end = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if end < at + 4 or end > len(data):
            raise BadHeaderError(f"JPEG segment at byte {at:,} reaches past the end")
        yield marker, at + 4, end
        at = end


def _jpeg_header(
    data: bytes, frame: tuple[int, int, int, int, int] | None, scan: int, oddities: list[str]
) -> Header:
    if frame is None or scan >= len(data):
        raise BadHeaderError("JPEG without a frame or without a byte of its scan")
    marker, bits, height, width, components = frame
    mode = {1: "L", 3: "RGB", 4: "CMYK"}.get(components)
    if mode is None or bits != 8:
        raise BadHeaderError(f"JPEG with {components} components of {bits} bits")
    oddities = oddities + [kind for kind, of in (("grey", "L"), ("cmyk", "CMYK")) if of == mode]
    whole = data.rfind(b"\xff\xd9", scan) >= 0
    scans = data.count(b"\xff\xda", scan) + 1 if marker in (0xC2, 0xCA) else 1
    return _header("jpeg", (width, height), mode, oddities, whole=whole, num_scans=scans)


_PNG_MODES = {0: "L", 2: "RGB", 3: "P", 4: "LA", 6: "RGBA"}
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, start, end) of each chunk's content; the last one's end may lie past the data's."""
    at = 8
    while at + 8 <= len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        yield name, at + 8, at + 8 + size
        at += size + 12


def _png(data: bytes) -> Header:
    length, name, width, height, depth, colour = unpack(">I4sIIBB", data, 8)
    if name != b"IHDR" or length != 13 or depth not in _PNG_DEPTHS.get(colour, ()):
        raise BadHeaderError("PNG without a valid IHDR chunk")
    mode = "1" if (colour, depth) == (0, 1) else "I;16" if (colour, depth) == (0, 16) else _PNG_MODES[colour]
    oddities = {
        "P": ["palette"],
        "L": ["grey"],
        "1": ["grey"],
        "I;16": ["grey"],
        "LA": ["grey", "alpha"],
    }.get(mode, ["alpha"] if mode == "RGBA" else [])
    oddities = oddities + (["16-bit"] if depth == 16 else [])
    whole = pixels = False
    for name, start, end in png_chunks(data):
        pixels = pixels or (name == b"IDAT" and start < len(data))
        if name == b"acTL":
            oddities.append("animated")
        elif name == b"eXIf":
            oddities += _rotation(data[start:end])
        elif name == b"IEND":
            whole = True
            break
    if not pixels:
        raise BadHeaderError("PNG without a byte of pixels")
    return _header("png", (width, height), mode, oddities, whole=whole)


def _gif(data: bytes) -> Header:
    width, height, flags = unpack("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    frames, pixels, whole = 0, False, False
    while at < len(data) and frames < 2:
        if data[at] == 0x3B:
            whole = True
            break
        if data[at] == 0x2C:
            x, y, w, h, local = unpack("<HHHHB", data, at + 1)
            if frames == 0:  # decoders widen the screen to hold the first frame
                width, height = max(width, x + w), max(height, y + h)
            frames += 1
            at += 10 + (3 << (local & 7) + 1 if local & 0x80 else 0) + 1  # 1: the code size
            pixels = pixels or at < len(data)
        elif data[at] == 0x21:
            at += 2
        else:
            at += 1  # padding between blocks is skipped, as PIL does
            continue
        at = _after_sub_blocks(data, at)
    if not pixels:
        raise BadHeaderError("GIF without a byte of pixels")
    oddities = ["palette"] + (["animated"] if frames > 1 else [])
    missing = max(0, at - 1 - len(data))
    return _header("gif", (width, height), "P", oddities, whole=whole or frames > 1, num_missing=missing)


def _after_sub_blocks(data: bytes, at: int) -> int:
    while at < len(data) and data[at]:
        at += data[at] + 1
    return at + 1


def _bmp(data: bytes) -> Header:
    start, size = unpack("<II", data, 10)
    if size == 12:
        width, height, _, bits = unpack("<HHHH", data, 18)
        compression = 0
    elif size in (40, 52, 56, 64, 108, 124):
        width, height, _, bits, compression = unpack("<iiHHI", data, 18)
    else:
        raise BadHeaderError(f"BMP with a header of {size:,} bytes")
    if bits not in (1, 4, 8, 16, 24, 32) or start >= len(data):
        raise BadHeaderError(f"BMP with {bits} bits a pixel, or without a byte of pixels")
    height = abs(height)  # negative: stored from the top
    mode = "P" if bits <= 8 else "RGB"
    # Run-length coded pixels (1, 2) have no size that could be known without decoding them.
    end = 0 if compression in (1, 2) else start + (width * bits + 31) // 32 * 4 * height
    missing, oddities = max(0, end - len(data)), ["palette"] if mode == "P" else []
    return _header("bmp", (width, height), mode, oddities, whole=not missing, num_missing=missing)


def _webp(data: bytes) -> Header:
    size, kind = unpack("<I8x4s", data, 4)[0], data[12:16]
    if size + 8 > len(data):
        raise BadHeaderError("WebP cut short: its decoder takes whole files only")
    if kind == b"VP8 ":
        start_code, width, height = unpack("<3sHH", data, 23)
        if start_code != b"\x9d\x01\x2a":
            raise BadHeaderError("WebP without a key frame")
        return _header("webp", (width & 0x3FFF, height & 0x3FFF), "RGB", [])
    if kind == b"VP8L":
        mark, bits = unpack("<BI", data, 20)
        if mark != 0x2F:
            raise BadHeaderError("WebP without a lossless mark")
        alpha = bool(bits >> 28 & 1)
        pair = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        return _header("webp", pair, "RGBA" if alpha else "RGB", ["alpha"] if alpha else [])
    if kind == b"VP8X":
        return _webp_extended(data)
    raise BadHeaderError(f"WebP that starts with a chunk {kind!r}")


def _webp_extended(data: bytes) -> Header:
    flags, low, high, low2, high2 = unpack("<BxxxHBHB", data, 20)
    alpha, exif, animated = flags & 0x10, flags & 0x08, flags & 0x02
    oddities = (["alpha"] if alpha else []) + (["animated"] if animated else [])
    at = 12
    while exif and at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"EXIF":
            oddities += _rotation(data[at + 8 : at + 8 + size].removeprefix(b"Exif\0\0"))
        at += 8 + size + (size & 1)
    pair = (low | high << 16) + 1, (low2 | high2 << 16) + 1
    return _header("webp", pair, "RGBA" if alpha else "RGB", oddities)


def _tiff(data: bytes) -> Header:
    tags, following = tiff_tags(data)
    depth, photometric = max(tags.get(258, (1,))), tags.get(262, (0,))[0]
    samples = tags.get(277, (1,))[0]
    mode = {2: "RGB", 3: "P", 5: "CMYK", 6: "YCbCr", 8: "LAB"}.get(photometric, "1" if depth == 1 else "L")
    kinds = {"P": ["palette"], "CMYK": ["cmyk"], "L": ["grey"], "1": ["grey"]}
    oddities = (
        kinds.get(mode, []) + (["16-bit"] if depth == 16 else []) + (["multipage"] if following else [])
    )
    if (mode == "RGB" and samples > 3) or (mode == "L" and samples > 1):
        oddities.append("alpha")
    oddities += ["exif-rotated"] if tags.get(274, (1,))[0] in range(2, 9) else []
    width, height, tile_width, tile_height = (tags.get(tag, (0,))[0] for tag in (256, 257, 322, 323))
    # A tile may be declared larger than the image, and it is the tile that gets decoded.
    pixels = max(width * height, tile_width * tile_height)
    return _header("tiff", (width, height), mode, oddities, num_pixels=pixels)


_SIGNATURES = {
    "jpeg": (b"\xff\xd8\xff",),
    "png": (b"\x89PNG\r\n\x1a\n",),
    "gif": (b"GIF87a", b"GIF89a"),
    "bmp": (b"BM",),
    "tiff": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "jpeg2000": (b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n"),
}
_PARSERS: dict[str, Callable[[bytes], Header]] = {
    "jpeg": _jpeg,
    "png": _png,
    "gif": _gif,
    "bmp": _bmp,
    "tiff": _tiff,
    "webp": _webp,
}
PARSED_HERE = frozenset(_PARSERS)
