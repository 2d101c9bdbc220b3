"""Tar search: where an archive goes on behind a place that could not be read.

Only a block that is certain to be a header counts: on a boundary of 512 bytes, with magic, checksum, sane
numbers, and data that fits the file. A header inside a member's data, as of a tar within a tar, cannot be
told from one of the archive's own once the header of that member is lost.
"""

from pencil_scale.reading.byte_source import Window
from pencil_scale.reading.tar_headers import BLOCK, is_certain_header, parse_header

# Searches begin small, because the next header is mostly near, and grow, because it may be far.
FIRST_BYTES = 1 << 12
MOST_BYTES = 1 << 20


def next_header(window: Window, position: int) -> int:
    """Find the next block that is certain to be a header, or the archive's end."""
    step = FIRST_BYTES
    while position < window.source.num_bytes:
        data = window.at(position, step)
        found = data.find(b"ustar")
        while found >= 0:
            begin = found - 257
            block = data[begin : begin + BLOCK] if begin >= 0 and begin % BLOCK == 0 else b""
            if _is_certain(block, window.source.num_bytes - position - begin):
                return position + begin
            found = data.find(b"ustar", found + 1)
        position += len(data)
        step = min(2 * step, MOST_BYTES)
    return window.source.num_bytes


def end_of_zeros(window: Window, position: int) -> int:
    """Find the first block that holds another byte than zero, or the archive's end."""
    step = FIRST_BYTES
    while position < window.source.num_bytes:
        data = window.at(position, step)
        rest = data.lstrip(b"\x00")
        if rest:
            return position + (len(data) - len(rest)) // BLOCK * BLOCK
        position += len(data)
        step = min(2 * step, MOST_BYTES)
    return position


def _is_certain(block: bytes, num_left: int) -> bool:
    if len(block) < BLOCK or not is_certain_header(block):
        return False
    header = parse_header(block)
    return header is not None and BLOCK + header.size <= num_left
