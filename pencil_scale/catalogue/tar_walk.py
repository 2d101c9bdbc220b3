"""Tar pieces: what an archive is made of; together they tile it from its first byte to its last.

Tar walk: every byte of an archive told as a member, as filler or as damage.

The pieces come in order and tile the archive from its first byte to its last, so that nothing can get
lost between them. Damage does not end the walk: it goes on at the next header that is certain
(`tar_search`), wherever bytes that were lost or added have moved it, and everything up to there is one piece
of damage. A member whose data cannot be trusted, because nothing stands where they end, goes with it.

    for piece in TarWalk(Window(source)).pieces():
        ...                                  # Member | Filler | Damage
"""

from collections.abc import Iterator
from typing import NamedTuple

from pencil_scale.catalogue import tar_headers
from pencil_scale.catalogue.tar_extensions import EXTENDED_TYPES, Extensions
from pencil_scale.catalogue.tar_headers import BLOCK, ZERO_BLOCK, Header, padded, parse_header
from pencil_scale.catalogue.tar_search import TarSearch
from pencil_scale.storage.urls import Window


class Member(NamedTuple):
    """One member: its name as text with surrogates, where its data lies, and the bytes it occupies."""

    start: int
    end: int
    name: str
    kind: str  # file, link, sparse, directory, other; cut is made by whoever reads damage
    offset: int
    size: int


class Filler(NamedTuple):
    """Bytes that carry no sample: the end marker, padding, global pax headers."""

    start: int
    end: int


class Damage(NamedTuple):
    """Bytes that could not be read as they should; `name` where a header still told one."""

    start: int
    end: int
    kind: str
    detail: str  # what was found; what to do about each kind is known to the catalogue
    name: str | None = None
    offset: int = 0
    size: int = 0
    num_samples: int = 0  # that are lost with certainty; mostly nobody can know


Piece = Member | Filler | Damage


# Larger members than this are jumped over where nobody asks for their bytes, and not looked through.
LOOK_BYTES = 1 << 21


class TarWalk:
    """Walks the headers of one archive. What extended headers said waits here for their member."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._search = TarSearch(window)
        self._num_bytes = window.source.num_bytes
        self._extensions = Extensions()
        self._after = 0  # where the latest extended header ends
        self._headers_seen = 0
        self._ended = False
        # A member waits until what stands behind it is seen: only then are its data certain to be its own.
        self._held: Member | None = None
        self._data_from = 0  # where the data of the latest header begin
        self._resumed_at = -1

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces in order; the last one says whether the archive ended as it should."""
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
        """Take whatever is no plain member; gives the pieces that are now certain, and where to go on."""
        block = self._window.at(position, BLOCK)
        header = parse_header(block)
        if header is None:
            found = self._zeros(position) if block == ZERO_BLOCK else self._damaged(position)
            return found, found[-1].end
        self._headers_seen += 1
        self._ended = False
        self._data_from = position + BLOCK
        before = self._release()
        if header.typeflag in EXTENDED_TYPES:
            found = self._extension(header, position)
            return [*before, *found], found[-1].end if self._extensions.start is None else self._after
        piece = self._member(header, position, block)
        if isinstance(piece, Member):
            self._held = piece
            return before, piece.end
        return [*before, piece], piece.end

    def _start(self, position: int) -> int:
        """Where the member whose own header is at this position begins, its extended headers included."""
        return position if self._extensions.start is None else self._extensions.start

    def _release(self) -> list[Piece]:
        held, self._held = self._held, None
        return [] if held is None else [held]

    def _plain_member(self, position: int) -> Member | None:
        """Read the header nearly all members have; None sends it the long way round."""
        data, begin = self._window.holding(position, BLOCK)
        plain = tar_headers.plain_file(data, begin)
        if plain is None or not self._extensions.is_silent or position == self._resumed_at:
            return None
        name, size = plain
        offset = position + BLOCK
        end = offset + ((size + 511) & ~511)
        if end > self._num_bytes or name[-1:] == b"/":
            return None
        if size > BLOCK and self._holds_header(offset, size):
            return None
        self._headers_seen += 1
        self._ended = False
        return Member(position, end, name.decode("utf-8", "surrogateescape"), "file", offset, size)

    def _holds_header(self, offset: int, size: int) -> bool:
        """Tell whether a header stands among data that are read in any case."""
        if size <= BLOCK or size > LOOK_BYTES:
            return False
        data, begin = self._window.holding(offset, size)
        return tar_headers.holds_header(data, begin, begin + size)

    def _extension(self, header: Header, position: int) -> list[Piece]:
        offset = position + BLOCK
        end = offset + padded(header.size)
        if end > self._num_bytes:
            return self._damaged(position, "cut_in_header", "an extended header runs past the end")
        stray = self._stray_extension(position) if self._extensions.has(header) else []
        data = self._window.at(offset, min(header.size, tar_headers.MAX_EXTENDED_BYTES))
        if self._extensions.take(header, position, data):
            self._after = end
            return stray
        return [*stray, Filler(position, end)]

    def _stray_extension(self, position: int) -> list[Piece]:
        """Tell of extended headers, if there are any, that ended here without the member they speak of."""
        start = self._start(position)
        self._extensions.clear()
        detail = "an extended header without its member"
        return [Damage(start, position, "stray_extended_header", detail)] if start < position else []

    # -- members ------------------------------------------------------------------------------------

    def _member(self, header: Header, position: int, block: bytes) -> Piece:
        start = self._start(position)
        name, size, sparse = self._extensions.overrule(header)
        offset = position + BLOCK
        if header.typeflag == tar_headers.GNU_SPARSE:
            offset = self._after_sparse_map(position)
        elif header.typeflag in tar_headers.WITHOUT_DATA and size and not self._has_data(offset, size):
            size = 0
        fault = self._extensions.fault
        if self._extensions.start is not None:
            self._extensions.clear()
        elif position == self._resumed_at and (block[99] or b"?" in block[:99]):
            fault = "lost_extended_header"  # this is how writers shorten a name that they give in full before
        text = tar_headers.name_text(name)
        end = min(offset + padded(size), self._num_bytes)
        if offset + size > self._num_bytes:
            return self._cut(start, position, text, offset, size)
        if fault:
            return Damage(start, end, fault, f"a member of {size:,} bytes whose name is not certain")
        if self._holds_header(offset, size):
            early = self._search.inside(offset, end, strict=True)
            if early is not None:
                self._resumed_at = early
                return self._torn(Member(start, end, text, "file", offset, size), early)
        return Member(start, end, text, tar_headers.member_kind(header, name, sparse), offset, size)

    def _cut(self, start: int, position: int, name: str, offset: int, size: int) -> Damage:
        detail = f"a member of {size:,} bytes, of which {max(0, self._num_bytes - offset):,} are there"
        end = self._search.after(position + BLOCK)
        self._resume(end)
        return Damage(start, end, "cut_in_data", detail, name, offset, size)

    def _after_sparse_map(self, position: int) -> int:
        """Step over the blocks in which old GNU sparse headers go on (byte 482, then 504, says so)."""
        more = self._window.at(position, BLOCK)[482]
        position += BLOCK
        while more and position + BLOCK <= self._num_bytes:
            more = self._window.at(position, BLOCK)[504]
            position += BLOCK
        return position

    def _has_data(self, offset: int, size: int) -> bool:
        """Tell whether a link or directory that gives a size is followed by so many bytes.

        Most writers give the size of what a link points to and store nothing; some store the data again.
        """
        block = self._window.at(offset, BLOCK)
        if len(block) < BLOCK or block == ZERO_BLOCK or parse_header(block) is not None:
            return False
        behind = self._window.at(offset + padded(size), BLOCK)
        return behind == ZERO_BLOCK or (len(behind) == BLOCK and parse_header(behind) is not None)

    # -- damage -------------------------------------------------------------------------------------

    def _zeros(self, position: int) -> list[Piece]:
        """Tell an end marker from a zeroed header: two zero blocks with nothing certain behind them."""
        stop = self._search.end_of_zeros(position)
        if stop - position < 2 * BLOCK and stop < self._num_bytes:
            return self._damaged(position, "zeroed_header", "512 zero bytes where a header belongs")
        if self._search.inside(self._data_from, position) is not None:
            return self._damaged(position)
        pieces = self._stray_extension(position)
        if stop - position < 2 * BLOCK:
            detail = "a lone zero block where the end marker has two: cut, or written so"
            return [*pieces, *self._told(position, stop, "no_end_marker", detail)]
        return [*pieces, *self._end_or_gap(position, stop)]

    def _end_or_gap(self, position: int, stop: int) -> list[Piece]:
        """Judge two zero blocks and more by what is behind them, and by how many they are."""
        following = self._search.after(stop)
        if following < self._num_bytes:
            detail = "zero bytes, then more members: archives joined together, or a stretch that was wiped"
            return self._told(position, following, "zeros_in_archive", detail)
        if stop < self._num_bytes:
            detail = "zero bytes as at the end, then bytes that hold no header"
            return self._told(position, self._num_bytes, "trailing_garbage", detail)
        if not tar_headers.is_padding(stop - position, self._num_bytes):
            detail = f"{stop - position:,} zero bytes at the end: a file made in full length, then not filled"
            return self._told(position, stop, "zero_tail", detail)
        if (stop - position) % BLOCK:
            detail = f"an end of {stop - position:,} zero bytes, which is no whole number of blocks of 512"
            return self._told(position, stop, "uneven_end", detail)
        self._ended = True
        return [*self._release(), Filler(position, stop)]

    def _damaged(self, position: int, kind: str = "garbled_header", detail: str = "") -> list[Piece]:
        """Find where the archive goes on; everything up to there is one piece of damage."""
        early = self._search.inside(self._data_from, position)
        end = self._search.after(position + 1) if early is None else early
        if self._headers_seen == 0 and end == self._num_bytes:
            kind, detail = "not_a_tar", tar_headers.what_else(self._window.at(0, BLOCK))
        elif early is not None or ((end - position) % BLOCK and end < self._num_bytes):
            kind, detail = "shifted_bytes", f"the next header is at byte {end:,}, {_off_by(end - position)}"
        elif kind == "garbled_header":
            detail = tar_headers.what_was(self._window.peek(position, BLOCK))
        start = self._start(position)
        self._extensions.clear()
        return self._told(start, end, kind, detail)

    def _told(self, start: int, end: int, kind: str, detail: str) -> list[Piece]:
        """Give a piece of damage, behind the member before it or, if that is not whole, together with it."""
        self._resume(end)
        held, self._held = self._held, None
        if held is None:
            return [Damage(start, end, kind, detail)]
        if not self._search.is_whole(held.offset, held.size, end):
            return [self._torn(held, end)]
        held = held._replace(end=min(held.end, end))
        return [held, Damage(held.end, end, kind, detail)]

    def _torn(self, member: Member, end: int) -> Damage:
        due = f"a member of {member.size:,} bytes should end at byte {member.end:,}"
        detail = (
            f"{due}, but the next header is {_off_by(end - member.end)}: bytes were lost or added before it"
        )
        if end == self._num_bytes:
            detail = f"{due}, but its data do not end there, and no header follows"
        return Damage(member.start, end, "shifted_bytes", detail, member.name, member.offset, member.size)

    def _resume(self, end: int) -> None:
        """Go on at a header that was found by searching, or know that nothing follows."""
        self._resumed_at = end
        self._ended = end == self._num_bytes

    def _tail(self, position: int) -> Iterator[Piece]:
        """Account for what is left: less than a block, a missing end marker, or nothing."""
        start = self._start(position)
        if self._num_bytes == 0:
            yield Damage(0, 0, "empty_file", "the file has no bytes")
        elif start < self._num_bytes:
            detail = f"the file ends inside a header, {self._num_bytes - position:,} bytes into its 512"
            kind = "cut_in_header" if self._headers_seen else "not_a_tar"
            if start < position:
                detail = "the file ends behind an extended header, before its member"
            elif not self._window.at(position, BLOCK).strip(b"\x00"):
                kind, detail = "no_end_marker", "the file ends inside the two zero blocks of its end marker"
            yield from self._told(start, self._num_bytes, kind, detail)
        else:
            yield from self._release()
            if not self._ended:
                detail = "cut at a member boundary, or written without the two zero blocks"
                yield Damage(self._num_bytes, self._num_bytes, "no_end_marker", detail)


def _off_by(distance: int) -> str:
    return f"{abs(distance):,} bytes {'behind' if distance > 0 else 'before'} its place"
