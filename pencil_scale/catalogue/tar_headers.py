"""Tar headers: what 512 bytes say, and what the extended headers before them add.

Nothing here reads a file. A block either parses to a `Header` or is not a header (`None`). Names stay bytes,
so that any name can be written back, and are never used as paths.

    header = parse_header(block)
    records = parse_pax(data)                # of an extended header: they override the name and the size
"""

import struct
import tarfile
import zlib
from functools import lru_cache
from typing import NamedTuple

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)

# No real size is larger, and sums of sizes up to this do not overflow.
MAX_SIZE = 1 << 56

REGULAR = frozenset(b"\x0007")
WITHOUT_DATA = frozenset(b"123456")
EXTENDED_TYPES = frozenset(b"gxXLK")  # pax: global, local in two spellings; GNU: long name, long link
GNU_SPARSE = ord("S")

MAGIC = b"ustar"
MAGIC_AT = 257
CHECKSUM_AT = 148
_POSIX_MAGIC = MAGIC + b"\x00"
_MAGICS = (_POSIX_MAGIC, MAGIC + b" ")  # the second is GNU's

# name, size, checksum, type, linkname, magic and version, prefix and padding
_PLAIN = struct.Struct("100s24x12s12x8sB100s8s80x167s")
_NO_LINK = bytes(100)
_NO_PREFIX = bytes(167)


class Header(NamedTuple):
    """One header block: its name and size, before any extended header overrides them."""

    name: bytes
    size: int
    typeflag: int


def plain_header(data: bytes, begin: int) -> tuple[bytes, int, int] | None:
    """Read name, size and type from the header nearly all members have; None: `parse_header` must decide.

    It has no link, no prefix and octal numbers. At most 245 of its bytes are not zero, so `adler32`, the
    fastest way to add bytes, gives their sum without wrapping around.
    """
    name, size, checksum, typeflag, link, magic, tail = _PLAIN.unpack_from(data, begin)
    if link != _NO_LINK or tail != _NO_PREFIX or magic[:6] not in _MAGICS:
        return None
    if (zlib.adler32(data[begin : begin + BLOCK]) & 0xFFFF) - 1 != _expected_sum(checksum):
        return None
    digits = size[:11]
    if size[11] > 32 or not digits.isdigit() or name[99]:
        return None
    try:
        return name.partition(b"\x00")[0], int(digits, 8), typeflag
    except ValueError:  # an 8 or a 9
        return None


@lru_cache(maxsize=4096)
def _expected_sum(checksum: bytes) -> int:
    """The sum of all 512 bytes if this checksum field is right; -1 if it is not a number."""
    stored = _octal(checksum)
    return -1 if stored is None else stored + sum(checksum) - 8 * ord(" ")


def _octal(field: bytes) -> int | None:
    digits = field.partition(b"\x00")[0].strip(b" ")
    try:
        return int(digits, 8) if digits.isdigit() else None
    except ValueError:
        return None


def parse_header(block: bytes) -> Header | None:
    """Read one complete block; None if its checksum is wrong or a field is not a number."""
    plain = plain_header(block, 0)
    return _parse_any(block) if plain is None else Header(*plain)


def _parse_any(block: bytes) -> Header | None:
    try:
        size = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").size
    except tarfile.TarError:
        return None
    if not 0 <= size < MAX_SIZE:
        return None
    name = block[:100].partition(b"\x00")[0]
    # Only POSIX has a prefix here. GNU's older format keeps times in its place, which tarfile overlooks.
    if block[MAGIC_AT : MAGIC_AT + 6] == _POSIX_MAGIC and block[345]:
        name = block[345:500].partition(b"\x00")[0] + b"/" + name
    return Header(name, size, block[156])


def certain_header(block: bytes) -> Header | None:
    """Read a block found by searching, if it can be trusted to be a header.

    In noise, one block in some thousands has a matching checksum by chance, so the magic, a known type, a
    name and a number in every numeric field are required as well.
    """
    header = _parse_any(block)
    if header is None or block[MAGIC_AT : MAGIC_AT + 6] not in _MAGICS or block[0] == 0:
        return None
    known = header.typeflag in REGULAR or chr(header.typeflag) in "123456gxXLKSDMNV"
    return header if known else None


def resembles_header(block: bytes) -> bool:
    """Decide whether a damaged block was a header: a name that ends in zeros, then a mode or the magic."""
    name = block[:100].rstrip(b"\x00")
    if not 0 < len(name) < 100 or b"\x00" in name:
        return False
    mode = block[100:108].strip(b" \x00")
    return block[MAGIC_AT : MAGIC_AT + 5] == MAGIC or (len(mode) < 8 and _octal(mode) is not None)


def holds_header(data: bytes, begin: int, end: int) -> bool:
    """Decide whether a member's data contain a certain header, at a multiple of 512 bytes from their start.

    This runs for every member, so it looks at one byte in 512.
    """
    column = data[begin + MAGIC_AT : end : BLOCK]
    row = column.find(MAGIC[0])
    while row >= 0:
        start = begin + BLOCK * row
        if start + BLOCK <= end and certain_header(data[start : start + BLOCK]):
            return True
        row = column.find(MAGIC[0], row + 1)
    return False


def padded(size: int) -> int:
    """Round a size up to whole blocks, as data is stored."""
    return (size + BLOCK - 1) & ~(BLOCK - 1)


def parse_pax(data: bytes) -> dict[bytes, bytes] | None:
    """Read the records `"%d %s=%s\\n"` of a pax header that give a member's place or name.

    None if the records do not fill the header exactly, or if a size is not a number. Times and owners are
    dropped: a hostile archive may have millions.
    """
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        space = data.find(b" ", position, position + 20)
        digits = data[position:space] if space > 0 else b""
        if not digits.isdigit():
            return None
        end = position + int(digits)
        equals = data.find(b"=", space, end)
        if end > len(data) or equals < 0 or data[end - 1 : end] != b"\n":
            return None
        name = data[space + 1 : equals]
        if name in (b"path", b"size") or name.startswith(b"GNU.sparse."):
            records[name] = data[equals + 1 : end - 1]
        position = end
    size = records.get(b"size", b"0")
    return records if size.isdigit() and len(size) <= 20 else None
