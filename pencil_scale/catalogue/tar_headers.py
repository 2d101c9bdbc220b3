"""Tar headers: what 512 bytes say, and where an archive continues after a place that could not be read.

A block either parses to a `Header` or is not a header (`None`). Names stay bytes, so that any name can be
written back, and are never used as paths.

In a search only a certain header counts: magic, checksum, valid numbers, data that fit the file. Bytes may
have been lost or added, so the search looks at every byte, not only at multiples of 512. The best header is
one that leads on: its data are followed by another header, the end marker, or the end of the file. A header
inside a member's data (a tar within a tar) looks like one of the archive's own if the header of that member
is lost.

    header = parse_header(block)
    position = TarSearch(window).after(position)
"""

import re
import struct
import tarfile
import zlib
from functools import lru_cache
from typing import NamedTuple

from pencil_scale.storage.urls import Window

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)

# No real size is larger, and sums of sizes up to this do not overflow.
MAX_SIZE = 1 << 56

REGULAR = frozenset(b"\x0007")
WITHOUT_DATA = frozenset(b"123456")
EXTENDED_TYPES = frozenset(b"gxXLK")  # pax: global, local in two spellings; GNU: long name, long link
GNU_SPARSE = ord("S")

_MAGIC = b"ustar"
_MAGIC_AT = 257
_POSIX_MAGIC = _MAGIC + b"\x00"
_MAGICS = (_POSIX_MAGIC, _MAGIC + b" ")  # the second is GNU's

# name, size, checksum, type, linkname, magic and version, prefix and padding
_PLAIN = struct.Struct("100s24x12s12x8sB100s8s80x167s")
_NO_LINK = bytes(100)
_NO_PREFIX = bytes(167)
_CHECKSUM_AT = 148
_CHECKSUM = re.compile(rb" *[0-7]+[\x00 ]")
_PAX_RECORD = re.compile(rb"(\d{1,19}) ([^=]*)=")

# Searches start small, because the next header is mostly near, and grow, because it may be far.
FIRST_BYTES = 1 << 12
MOST_BYTES = 1 << 20

# This many zeros do not occur at the end of an image or a text.
TELLING_BYTES = 8


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
    if block[_MAGIC_AT : _MAGIC_AT + 6] == _POSIX_MAGIC and block[345]:
        name = block[345:500].partition(b"\x00")[0] + b"/" + name
    return Header(name, size, block[156])


def certain_header(block: bytes) -> Header | None:
    """Read a block found by searching, if it can be trusted to be a header.

    In noise, one block in some thousands has a matching checksum by chance, so the magic, a known type, a
    name and a number in every numeric field are required as well.
    """
    header = _parse_any(block)
    if header is None or block[_MAGIC_AT : _MAGIC_AT + 6] not in _MAGICS or block[0] == 0:
        return None
    known = header.typeflag in REGULAR or chr(header.typeflag) in "123456gxXLKSDMNV"
    return header if known else None


def resembles_header(block: bytes) -> bool:
    """Decide whether a damaged block was a header: a name that ends in zeros, then a mode or the magic."""
    name = block[:100].rstrip(b"\x00")
    if not 0 < len(name) < 100 or b"\x00" in name:
        return False
    mode = block[100:108].strip(b" \x00")
    return block[_MAGIC_AT : _MAGIC_AT + 5] == _MAGIC or (len(mode) < 8 and _octal(mode) is not None)


def holds_header(data: bytes, begin: int, end: int) -> bool:
    """Decide whether a member's data contain a certain header, at a multiple of 512 bytes from their start.

    This runs for every member, so it looks at one byte in 512.
    """
    column = data[begin + _MAGIC_AT : end : BLOCK]
    row = column.find(_MAGIC[0])
    while row >= 0:
        start = begin + BLOCK * row
        if start + BLOCK <= end and certain_header(data[start : start + BLOCK]):
            return True
        row = column.find(_MAGIC[0], row + 1)
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
    end = 0
    while end < len(data):
        match = _PAX_RECORD.match(data, end)
        end += int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            return None
        if match[2] in (b"path", b"size") or match[2].startswith(b"GNU.sparse."):
            records[match[2]] = data[match.end() : end - 1]
    size = records.get(b"size", b"0")
    return records if size.isdigit() and len(size) <= 20 else None


# -- searching ----------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """Where a header starts, its data end, and their padding ends."""

    start: int
    data_end: int
    end: int


class TarSearch:
    """Searches one archive through the window of its walk."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._num_bytes = window.source.num_bytes

    def after(self, position: int) -> int:
        """Find the next header from `position` on, or the archive's end.

        One that leads on is best. Another is accepted as well, because the header after it may be damaged or
        moved, unless one that leads on is inside its data and so contradicts it.
        """
        lone, stop = self._num_bytes, self._num_bytes
        while (found := self._next(position, stop)) is not None:
            if self._leads_on(found.end):
                return found.start
            if lone == self._num_bytes:
                lone, stop = found.start, found.data_end
            position = found.start + 1
        return lone

    def inside(self, start: int, stop: int, strict: bool = False) -> int | None:
        """Find a header among a member's bytes that leads past their end: bytes before it were lost.

        A tar within a tar ends with zeros before the member that holds it ends. If a header follows the
        member, as it should, `strict` requires that the header inside leads to another, too.
        """
        seen: set[int] = set()
        position = start
        while (found := self._next(position, stop)) is not None:
            new = found.start not in seen
            if new and self._leads_past(found.end, stop, seen, zeros=found.start > start, strict=strict):
                return found.start
            position = found.start + 1
        return None

    def is_intact(self, offset: int, size: int, following: int) -> bool:
        """Decide whether a member's data can be trusted although no header comes right after them.

        Lost bytes pull padding, or the next header, into the data; added bytes push the end of the data into
        the padding. So data whose last byte is not zero, followed by zeros, are intact. If the next header is
        at a multiple of 512 bytes, the last byte may be zero. Data without padding get the benefit of the
        doubt: a missing end of an image is found when the image is inspected.
        """
        stop, end = offset + size, offset + padded(size)
        if following < stop:
            return False
        block = self._window.peek(end, BLOCK)
        if size == 0 or (following >= end and (resembles_header(block) or certain_header(block))):
            return True
        if self._window.peek(stop, min(end - stop, following - stop, TELLING_BYTES)).strip(b"\x00"):
            return False
        shifted = (following - end) % BLOCK != 0
        return not shifted or self._window.peek(stop - 1, 1) != b"\x00"

    def end_of_zeros(self, position: int) -> int:
        """Find the first block that is not all zeros, or the archive's end."""
        step = FIRST_BYTES
        while position < self._num_bytes:
            data = self._window.at(position, step)
            rest = data.lstrip(b"\x00")
            if rest:
                return position + (len(data) - len(rest)) // BLOCK * BLOCK
            position += len(data)
            step = min(2 * step, MOST_BYTES)
        return position

    def _next(self, position: int, stop: int) -> _Span | None:
        """Find the first certain header that starts in [position, stop)."""
        step = FIRST_BYTES
        while position < stop:
            # One block more than a step, so that a header that starts at its last byte is complete.
            data = self._window.at(position, step + BLOCK)
            magic = data.find(_MAGIC, _MAGIC_AT)
            while 0 <= magic < min(step, stop - position) + _MAGIC_AT:
                begin = magic - _MAGIC_AT
                # The checksum field is checked first, because a hostile file may be nothing but magic.
                if _CHECKSUM.match(data, begin + _CHECKSUM_AT):
                    span = self._span(data[begin : begin + BLOCK], position + begin)
                    if span is not None:
                        return span
                magic = data.find(_MAGIC, magic + 1)
            position += step
            step = min(2 * step, MOST_BYTES)
        return None

    def stored_size(self, typeflag: int, offset: int, size: int) -> int:
        """The bytes that follow a header: a link gives the size of its target, and mostly stores nothing."""
        if typeflag not in WITHOUT_DATA or (
            offset + size <= self._num_bytes
            and not self._leads_on(offset)
            and self._leads_on(offset + padded(size))
        ):
            return size
        return 0

    def _span(self, block: bytes, start: int) -> _Span | None:
        """Find what a block describes; None if it is not a certain header, or too large for the file."""
        header, offset = certain_header(block), start + BLOCK
        if header is None or offset + header.size > self._num_bytes:
            return None
        size = self.stored_size(header.typeflag, offset, header.size)
        return _Span(start, offset + size, offset + padded(size))

    def _leads_on(self, end: int) -> bool:
        """Decide whether a member that ends here is followed by a header, zeros or the end of the file."""
        if end >= self._num_bytes:
            return True
        block = self._window.peek(end, BLOCK)
        return block == ZERO_BLOCK[: len(block)] or certain_header(block) is not None

    def _leads_past(self, end: int, stop: int, seen: set[int], zeros: bool, strict: bool) -> bool:
        """Follow headers from one to the next; zeros count only if they reach the stop."""
        while end < stop:
            block = self._window.peek(end, BLOCK)
            if block == ZERO_BLOCK[: len(block)]:
                return zeros and self.end_of_zeros(end) >= stop
            span = self._span(block, end)
            if span is None:
                return False
            seen.add(end)
            end = span.end
        return self._leads_on(end) or (not strict and end > stop)
