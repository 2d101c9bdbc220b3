"""TIFF tags: the directory of numbers that opens a TIFF file and every EXIF block.

Every read is checked against the end of the data, so no count or offset in it can lead astray.

    tags, following = tiff_tags(data)      # {256: (640,), 257: (480,), 258: (8, 8, 8)}, next directory
"""

import struct
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
