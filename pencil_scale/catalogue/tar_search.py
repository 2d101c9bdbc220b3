"""Tar search: where an archive continues after a place that could not be read.

Only a certain header counts: magic, checksum, valid numbers, data that fit the file. Bytes may have been lost
or added, so the search looks at every byte, not only at multiples of 512. The best header is one that leads
on: its data are followed by another header, the end marker, or the end of the file. A header inside a
member's data (a tar within a tar) looks like one of the archive's own if the header of that member is lost.
"""

import re
from typing import NamedTuple

from pencil_scale.catalogue.tar_headers import (
    BLOCK,
    CHECKSUM_AT,
    MAGIC,
    MAGIC_AT,
    WITHOUT_DATA,
    ZERO_BLOCK,
    certain_header,
    padded,
    resembles_header,
)
from pencil_scale.storage.urls import Window

# Searches start small, because the next header is mostly near, and grow, because it may be far.
FIRST_BYTES = 1 << 12
MOST_BYTES = 1 << 20

# This many zeros do not occur at the end of an image or a text.
TELLING_BYTES = 8

_CHECKSUM = re.compile(rb" *[0-7]+[\x00 ]")


class _Place(NamedTuple):
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

    def _next(self, position: int, stop: int) -> _Place | None:
        """Find the first certain header that starts in [position, stop)."""
        step = FIRST_BYTES
        while position < stop:
            # One block more than a step, so that a header that starts at its last byte is complete.
            data = self._window.at(position, step + BLOCK)
            magic = data.find(MAGIC, MAGIC_AT)
            while 0 <= magic < min(step, stop - position) + MAGIC_AT:
                begin = magic - MAGIC_AT
                # The checksum field is checked first, because a hostile file may be nothing but magic.
                if _CHECKSUM.match(data, begin + CHECKSUM_AT):
                    place = self._place(data[begin : begin + BLOCK], position + begin)
                    if place is not None:
                        return place
                magic = data.find(MAGIC, magic + 1)
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

    def _place(self, block: bytes, start: int) -> _Place | None:
        """Find what a block describes; None if it is not a certain header, or too large for the file."""
        header, offset = certain_header(block), start + BLOCK
        if header is None or offset + header.size > self._num_bytes:
            return None
        size = self.stored_size(header.typeflag, offset, header.size)
        return _Place(start, offset + size, offset + padded(size))

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
            place = self._place(block, end)
            if place is None:
                return False
            seen.add(end)
            end = place.end
        return self._leads_on(end) or (not strict and end > stop)
