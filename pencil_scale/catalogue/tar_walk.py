"""Tar walk: splits an archive into members, filler and damage, without losing a byte.

The pieces come in order and cover the archive from its first byte to its last. Damage does not end the walk:
it resumes at the next header that is certain (`tar_search`), even if lost or added bytes have moved it, and
everything up to there is one piece of damage. A member whose data cannot be trusted, because no header
follows where they end, is part of the damage.

    for piece in TarWalk(Window(source)).pieces():
        ...                                  # Member | Filler | Damage
"""

from collections.abc import Iterator
from typing import NamedTuple

from pencil_scale.catalogue import tar_headers
from pencil_scale.catalogue.tar_headers import BLOCK, ZERO_BLOCK, Extensions, Header, padded, parse_header
from pencil_scale.catalogue.tar_search import TarSearch
from pencil_scale.storage.urls import Window

_OTHER_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK": "zip",
    b"<": "HTML or XML",
}
_KINDS = {"1": "link", "2": "link", "5": "directory"}  # by type; all others that are not files are "other"

# Writers fill the last record: 10,240 bytes by default, and powers of two up to 1 MiB are in use.
_RECORD_BYTES = (10_240, *(BLOCK << doubled for doubled in range(12)))

# Larger members than this are skipped unread, so their data are not checked for headers.
LOOK_BYTES = 1 << 21


class Member(NamedTuple):
    """One member: its name as text with surrogates, where its data are, and the bytes it occupies."""

    start: int
    end: int
    name: str
    kind: str  # file, link, sparse, directory, other; or cut, if made from a named piece of damage
    offset: int
    size: int


class Filler(NamedTuple):
    """Bytes that hold no sample: the end marker, padding, global pax headers."""

    start: int
    end: int


class Damage(NamedTuple):
    """Bytes that could not be read as they should; with a `name` if a header still had one."""

    start: int
    end: int
    kind: str  # a key of `schema.DAMAGE_KINDS`, which says what to do
    detail: str  # what was found
    name: str | None = None
    offset: int = 0
    size: int = 0
    num_samples: int = 0  # samples that are certainly lost; mostly unknown


Piece = Member | Filler | Damage


class TarWalk:
    """Walks the headers of one archive, keeping what extended headers say until their member comes."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._search = TarSearch(window)
        self._num_bytes = window.source.num_bytes
        self._extensions = Extensions()
        self._after = 0  # where the latest extended header ends
        self._has_header = False
        self._ended = False
        # A member is held back until what follows it is seen: only then are its data certain to be its own.
        self._held: Member | None = None
        self._data_from = 0  # where the data of the latest header start
        self._resumed_at = -1

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces in order; the last one shows whether the archive ended as it should."""
        position = 0
        while position + BLOCK <= self._num_bytes:
            member = self._plain_member(position)
            if member is not None:
                if self._held is not None:
                    yield self._held
                self._held = member
                self._data_from = member.offset
                position = member.end
                continue
            found, position = self._step(position)
            yield from found
        yield from self._tail(position)

    def _step(self, position: int) -> tuple[list[Piece], int]:
        """Read anything but a plain member; give the pieces that are now certain, and where to continue."""
        block = self._window.at(position, BLOCK)
        header = parse_header(block)
        if header is None:
            found = self._zeros(position) if block == ZERO_BLOCK else self._damaged(position)
            return found, found[-1].end
        self._has_header, self._ended = True, False
        self._data_from = position + BLOCK
        before = self._release()
        if header.typeflag in tar_headers.EXTENDED_TYPES:
            found = self._extension(header, position)
            return [*before, *found], found[-1].end if self._extensions.start is None else self._after
        piece = self._member(header, position, block)
        if isinstance(piece, Member):
            self._held = piece
            return before, piece.end
        return [*before, piece], piece.end

    def _start(self, position: int) -> int:
        """The start of the member whose own header is at this position, including its extended headers."""
        return position if self._extensions.start is None else self._extensions.start

    def _release(self) -> list[Piece]:
        held, self._held = self._held, None
        return [] if held is None else [held]

    def _plain_member(self, position: int) -> Member | None:
        """Read the header that nearly all members have, fast; None for anything else."""
        data, begin = self._window.holding(position, BLOCK)
        plain = tar_headers.plain_header(data, begin)
        if plain is None or not self._extensions.is_empty or position == self._resumed_at:
            return None
        name, size, typeflag = plain
        offset = position + BLOCK
        end = offset + ((size + 511) & ~511)
        if end > self._num_bytes or typeflag != b"0" or name[-1:] == b"/":
            return None
        if size > BLOCK and self._holds_header(offset, size):
            return None
        self._has_header, self._ended = True, False
        return Member(position, end, name.decode("utf-8", "surrogateescape"), "file", offset, size)

    def _holds_header(self, offset: int, size: int) -> bool:
        """Decide whether there is a header among data that are read in any case."""
        if size <= BLOCK or size > LOOK_BYTES:
            return False
        data, begin = self._window.holding(offset, size)
        return tar_headers.holds_header(data, begin, begin + size)

    def _extension(self, header: Header, position: int) -> list[Piece]:
        offset = position + BLOCK
        end = offset + padded(header.size)
        if end > self._num_bytes:
            detail = f"an extended header of {header.size:,} bytes, which would end past the end of the file"
            return self._damaged(position, "cut_short", detail)
        stray = self._stray_extension(position) if header.typeflag in self._extensions.types else []
        data = self._window.at(offset, min(header.size, tar_headers.MAX_EXTENDED_BYTES))
        if self._extensions.add(header, position, data):
            self._after = end
            return stray
        return [*stray, Filler(position, end)]

    def _stray_extension(self, position: int) -> list[Piece]:
        """Report extended headers, if there are any, that end here without the member they describe."""
        start = self._start(position)
        self._extensions.clear()
        detail = "an extended header without its member"
        return [Damage(start, position, "damaged_header", detail)] if start < position else []

    # -- members ------------------------------------------------------------------------------------

    def _member(self, header: Header, position: int, block: bytes) -> Piece:
        start = self._start(position)
        name, size, is_sparse = self._extensions.override(header)
        offset = position + BLOCK
        if header.typeflag == tar_headers.GNU_SPARSE:
            # Skip the blocks that continue an old GNU sparse header (flagged by byte 482, then 504).
            more = block[482]
            while more and offset + BLOCK <= self._num_bytes:
                more = self._window.at(offset, BLOCK)[504]
                offset += BLOCK
        elif header.typeflag in tar_headers.WITHOUT_DATA and size and not self._has_data(offset, size):
            size = 0
        fault = self._extensions.fault
        if self._extensions.start is not None:
            self._extensions.clear()
        elif position == self._resumed_at and (block[99] or b"?" in block[:99]):
            # Writers shorten a name like this after giving it in full in an extended header.
            fault = "the header with its full name is damaged"
        text = name.decode("utf-8", "surrogateescape")
        end = min(offset + padded(size), self._num_bytes)
        if offset + size > self._num_bytes:
            detail = f"a member of {size:,} bytes, of which {max(0, self._num_bytes - offset):,} are there"
            end = self._search.after(position + BLOCK)
            self._resume(end)
            return Damage(start, end, "cut_short", detail, text, offset, size)
        if fault:
            detail = f"a member of {size:,} bytes whose name is uncertain: {fault}"
            return Damage(start, end, "damaged_header", detail)
        if self._holds_header(offset, size):
            early = self._search.inside(offset, end, strict=True)
            if early is not None:
                self._resumed_at = early
                return self._torn(Member(start, end, text, "file", offset, size), early)
        kind = _KINDS.get(chr(header.typeflag), "other")
        if header.typeflag in tar_headers.REGULAR:
            kind = "directory" if name.endswith(b"/") else "file"
        return Member(start, end, text, "sparse" if is_sparse else kind, offset, size)

    def _has_data(self, offset: int, size: int) -> bool:
        """Decide whether a link or directory that gives a size is followed by this many bytes.

        Most writers give the size of a link's target and store nothing; some store the data again.
        """
        block = self._window.at(offset, BLOCK)
        if len(block) < BLOCK or block == ZERO_BLOCK or parse_header(block) is not None:
            return False
        after = self._window.at(offset + padded(size), BLOCK)
        return after == ZERO_BLOCK or parse_header(after) is not None

    # -- damage -------------------------------------------------------------------------------------

    def _zeros(self, position: int) -> list[Piece]:
        """Distinguish an end marker from a zeroed header: two zero blocks with nothing certain after them."""
        stop = self._search.end_of_zeros(position)
        if stop - position < 2 * BLOCK and stop < self._num_bytes:
            return self._damaged(position, "damaged_header", "512 zero bytes where a header should be")
        if self._search.inside(self._data_from, position) is not None:
            return self._damaged(position)
        pieces = self._stray_extension(position)
        if stop - position < 2 * BLOCK:
            detail = "a single zero block where the end marker has two: cut, or written so"
            return [*pieces, *self._damage(position, stop, "odd_end", detail)]
        num_zeros, following = stop - position, self._search.after(stop)
        records = [record for record in _RECORD_BYTES if self._num_bytes % record == 0]
        if stop < self._num_bytes:
            detail = "zero bytes as at the end, then bytes without a header"
            if following < self._num_bytes:
                detail = "zero bytes, then more members: archives joined together, or a wiped stretch"
            return [*pieces, *self._damage(position, following, "data_after_end", detail)]
        if num_zeros >= max([10_240, *records]) + 2 * BLOCK:
            detail = f"{num_zeros:,} zero bytes at the end: a file created in full length, then not filled"
            return [*pieces, *self._damage(position, stop, "cut_short", detail)]
        if num_zeros % BLOCK:
            detail = f"{num_zeros:,} zero bytes at the end, which is not a multiple of 512"
            return [*pieces, *self._damage(position, stop, "odd_end", detail)]
        self._ended = True
        return [*pieces, *self._release(), Filler(position, stop)]

    def _damaged(self, position: int, kind: str = "damaged_header", detail: str = "") -> list[Piece]:
        """Find where the archive continues; everything up to there is one piece of damage."""
        early = self._search.inside(self._data_from, position)
        end = self._search.after(position + 1) if early is None else early
        if not self._has_header and end == self._num_bytes:
            kind, detail = "not_a_tar", "no tar header anywhere in it"
            for magic, name in _OTHER_MAGIC.items():
                if self._window.at(0, BLOCK).startswith(magic):
                    detail = f"{name} data: shards must be plain tar, so that their bytes can be addressed"
        elif early is not None or ((end - position) % BLOCK and end < self._num_bytes):
            kind, detail = "shifted_bytes", f"the next header is at byte {end:,}, {_off_by(end - position)}"
        start = self._start(position)
        self._extensions.clear()
        if not detail:
            block, detail = self._window.peek(position, BLOCK), "no header where one should be"
            if tar_headers.resembles_header(block):  # a name that is still legible is a hint, not more
                text = block[:100].partition(b"\x00")[0].decode("utf-8", "backslashreplace")
                detail = f"a header with a wrong checksum; its name looks like {text!a}"
        return self._damage(start, end, kind, detail)

    def _damage(self, start: int, end: int, kind: str, detail: str) -> list[Piece]:
        """Make a piece of damage, after the member before it or, if that is not intact, including it."""
        self._resume(end)
        held, self._held = self._held, None
        if held is None:
            return [Damage(start, end, kind, detail)]
        if not self._search.is_intact(held.offset, held.size, end):
            return [self._torn(held, end)]
        held = held._replace(end=min(held.end, end))
        return [held, Damage(held.end, end, kind, detail)]

    def _torn(self, member: Member, end: int) -> Damage:
        found = f"the next header is {_off_by(end - member.end)}: bytes were lost or added before it"
        if end == self._num_bytes:
            found = "its data do not end there, and no header follows"
        detail = f"a member of {member.size:,} bytes should end at byte {member.end:,}, but {found}"
        return Damage(member.start, end, "shifted_bytes", detail, member.name, member.offset, member.size)

    def _resume(self, end: int) -> None:
        """Continue at a header that was found by searching, or note that nothing follows."""
        self._resumed_at = end
        self._ended = end == self._num_bytes

    def _tail(self, position: int) -> Iterator[Piece]:
        """Account for the rest: less than a block, a missing end marker, or nothing."""
        start = self._start(position)
        if self._num_bytes == 0:
            yield Damage(0, 0, "not_a_tar", "the file is empty")
        elif start < self._num_bytes:
            detail = f"the file ends inside a header, {self._num_bytes - position:,} bytes into its 512"
            kind = "cut_short" if self._has_header else "not_a_tar"
            if start < position:
                detail = "the file ends after an extended header, before its member"
            elif not self._window.at(position, BLOCK).strip(b"\x00"):
                kind, detail = "odd_end", "the file ends inside the two zero blocks of its end marker"
            yield from self._damage(start, self._num_bytes, kind, detail)
        else:
            yield from self._release()
            if not self._ended:
                detail = "no end marker: cut at a member boundary, or written without the two zero blocks"
                yield Damage(self._num_bytes, self._num_bytes, "odd_end", detail)


def _off_by(distance: int) -> str:
    return f"{abs(distance):,} bytes {'after' if distance > 0 else 'before'} its place"
