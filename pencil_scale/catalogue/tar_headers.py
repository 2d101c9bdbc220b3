"""Tar headers: what 512 bytes say, and whether they can be a header at all.

Nothing here reads a file. A block either parses to a `Header` or is no header (`None`); extended
headers (pax records, GNU long names) are parsed from the bytes they came with. Names stay bytes until
the last moment and become text with surrogates for what is no UTF-8, so that every name is data that
can be written back, and none is ever a path.
"""

import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)

# A longer name, link or pax record set than this is an attack or damage: 10,000 characters still fit.
MAX_EXTENDED_BYTES = 1 << 20

# Sizes beyond 2**56 bytes are no sizes; they would only overflow the arithmetic of whoever adds them.
MAX_SIZE = 1 << 56

REGULAR = frozenset(b"\x0007")
LINKS = frozenset(b"12")
WITHOUT_DATA = frozenset(b"123456")
PAX_LOCAL = frozenset(b"xX")
PAX_GLOBAL = ord("g")
GNU_LONG_NAME = ord("L")
GNU_LONG_LINK = ord("K")
GNU_SPARSE = ord("S")
DIRECTORY = ord("5")

MAGIC = b"ustar"
MAGIC_AT = 257
CHECKSUM_AT = 148
_POSIX_MAGIC = MAGIC + b"\x00"
_GNU_MAGIC = MAGIC + b" "

_OTHER_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK": "zip",
    b"<": "HTML or XML",
}

# name, size, checksum, type, linkname, magic and version, prefix and padding
_PLAIN = struct.Struct("100s24x12s12x8sc100s8s80x167s")
_NO_LINK = bytes(100)
_NO_PREFIX = bytes(167)


class Header(NamedTuple):
    """One header block: the name and size it gives, before any extended header overrules them."""

    name: bytes
    size: int
    typeflag: int
    has_magic: bool


def plain_file(data: bytes, begin: int) -> tuple[bytes, int] | None:
    """Read name and size of the header nearly all members have; None where `parse_header` must look.

    A regular file with no link, no prefix and octal numbers. At most 245 of its bytes are not zero, so
    `adler32` gives their sum without wrapping around.
    """
    name, size, checksum, typeflag, link, magic, tail = _PLAIN.unpack_from(data, begin)
    if typeflag != b"0" or link != _NO_LINK or tail != _NO_PREFIX or magic[:5] != b"ustar":
        return None
    if (zlib.adler32(data[begin : begin + BLOCK]) & 0xFFFF) - 1 != _expected_sum(checksum):
        return None
    digits = size[:11]
    if size[11] > 32 or not digits.isdigit() or name[99]:
        return None
    try:
        return name.partition(b"\x00")[0], int(digits, 8)
    except ValueError:  # an 8 or a 9
        return None


def parse_header(block: bytes) -> Header | None:
    """Read one block, or say by None that it is no header: wrong checksum, or a size that is no number."""
    if not checksum_matches(block):
        return None
    size = parse_number(block[124:136])
    if size is None or not 0 <= size < MAX_SIZE:
        return None
    end = block.find(b"\x00", 0, 100)
    name = block[: end if end >= 0 else 100]
    magic = block[257:263]
    # Only POSIX puts a prefix there; GNU's older format keeps times at the same place.
    if magic == _POSIX_MAGIC and block[345]:
        name = block[345:500].partition(b"\x00")[0] + b"/" + name
    return Header(name, size, block[156], magic in (_POSIX_MAGIC, _GNU_MAGIC))


def checksum_matches(block: bytes) -> bool:
    """Compare the stored checksum with the sum of the bytes, its own field counted as spaces.

    Old writers summed signed bytes; both sums are accepted, as POSIX advises. `adler32` gives the sum
    modulo 65,521 ten times faster than a Python sum, and is exact where the sum stays below (at least
    256 bytes are zero, which is so in all but the oddest headers).
    """
    stored = parse_number(block[148:156])
    if stored is None:
        return False
    field = sum(block[148:156])
    few_bytes = block.count(0) >= 256
    unsigned = ((zlib.adler32(block) & 0xFFFF) - 1 if few_bytes else sum(block)) - field + 256
    if unsigned == stored:
        return True
    negative = sum(byte > 127 for byte in block) - sum(byte > 127 for byte in block[148:156])
    return unsigned - 256 * negative == stored


@lru_cache(maxsize=4096)
def _expected_sum(checksum: bytes) -> int:
    """Say what all 512 bytes add up to when this checksum field is right; -1 if it is no number."""
    stored = parse_number(checksum)
    return -1 if stored is None else stored + sum(checksum) - 8 * ord(" ")


def parse_number(field: bytes) -> int | None:
    """Read an octal number, or a base-256 one where the first bit says so; None for neither."""
    if field[0] >= 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] == 0x80 else None
    digits = field.partition(b"\x00")[0].strip(b" ")
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and b"8" not in digits and b"9" not in digits else None


def is_certain_header(block: bytes) -> bool:
    """Tell whether a block found by searching can be trusted to be a header.

    A checksum alone is met by chance in noise once in some thousand blocks, so the magic, numeric
    fields that parse, a known type and a name are asked for as well.
    """
    header = parse_header(block)
    if header is None or not header.has_magic or not header.name or block.find(b"\x00", 0, 100) == 0:
        return False
    numbers = (block[100:108], block[108:116], block[116:124], block[136:148])
    known_type = header.typeflag in REGULAR or chr(header.typeflag) in "123456gxXLKSDMNV"
    return known_type and all(parse_number(field) is not None for field in numbers)


def resembles_header(block: bytes) -> bool:
    """Tell whether a block that is no header was one: a name that ends in zeros, then a mode or the magic."""
    name = block[:100].rstrip(b"\x00")
    if not 0 < len(name) < 100 or b"\x00" in name:
        return False
    mode = block[100:108].strip(b" \x00")
    return block[MAGIC_AT : MAGIC_AT + 5] == MAGIC or (0 < len(mode) < 8 and parse_number(mode) is not None)


def holds_header(data: bytes, begin: int, end: int) -> bool:
    """Tell whether a certain header stands among a member's data, on the grid of their first byte.

    Looks at one byte in 512: this is asked of every member.
    """
    column = data[begin + MAGIC_AT : end : BLOCK]
    row = column.find(MAGIC[0])
    while row >= 0:
        start = begin + BLOCK * row
        if start + BLOCK <= end and is_certain_header(data[start : start + BLOCK]):
            return True
        row = column.find(MAGIC[0], row + 1)
    return False


def parse_pax(data: bytes) -> dict[bytes, bytes] | None:
    """Read the records `"%d %s=%s\\n"` of a pax header; None when they do not fill it exactly."""
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
        records[data[space + 1 : equals]] = data[equals + 1 : end - 1]
        position = end
    return records


def is_wanted(record: bytes) -> bool:
    """Tell whether a pax record says where a member is or what it is called."""
    return record in (b"path", b"size") or record.startswith(b"GNU.sparse.")


def long_name(data: bytes) -> bytes:
    """Cut a GNU long name at its NUL."""
    return data.partition(b"\x00")[0]


def padded(size: int) -> int:
    """Round a size up to whole blocks, as data is stored."""
    return (size + BLOCK - 1) & ~(BLOCK - 1)


def is_padding(num_zeros: int, num_bytes: int) -> bool:
    """Tell whether zeros at an archive's end are its marker and padding, or more than any writer pads.

    Writers fill the last record: 10,240 bytes by default, and powers of two up to 1 MiB are in use.
    """
    records = [10_240, *(BLOCK << doubled for doubled in range(12))]
    return num_zeros < 10_240 + 2 * BLOCK or any(
        num_bytes % record == 0 and num_zeros < record + 2 * BLOCK for record in records
    )


def name_text(name: bytes) -> str:
    """Turn a name into text; bytes that are no UTF-8 become surrogates and come back unchanged."""
    return name.decode("utf-8", "surrogateescape")


def member_kind(header: Header, name: bytes, sparse: bool) -> str:
    """Name what a member is: file, link, sparse, directory or other."""
    if sparse:
        return "sparse"
    if header.typeflag in REGULAR:
        return "directory" if name.endswith(b"/") else "file"
    if header.typeflag in LINKS:
        return "link"
    return "directory" if header.typeflag == DIRECTORY else "other"


def what_else(head: bytes) -> str:
    """Say what a file is that is no tar, as far as its first bytes tell."""
    for magic, name in _OTHER_MAGIC.items():
        if head.startswith(magic):
            return f"{name} data: shards must be plain tar, so that their bytes can be addressed"
    return "no tar header anywhere in it"


def what_was(block: bytes) -> str:
    """Say what stands where a header belongs; a name that can still be read is a hint, and no more."""
    if not resembles_header(block):
        return "no header where one belongs"
    name = block[:100].partition(b"\x00")[0].decode("utf-8", "backslashreplace")
    return f"a header with a wrong checksum, its name as far as it can be read {name!a}"
