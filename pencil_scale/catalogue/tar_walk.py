"""Tar walk: splits an archive into members, filler and damage, without losing a byte.

The pieces come in order and cover the archive from its first byte to its last. Damage does not end the walk:
it resumes at the next header that is certain (`TarSearch`), even if lost or added bytes have moved it, and
everything up to there is one piece of damage. A member whose data cannot be trusted, because no header
follows where they end, is part of the damage.

    for piece in TarWalk(Window(source)).pieces():
        ...                                  # Member | Filler | Damage
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pencil_scale.catalogue import tar_headers
from pencil_scale.catalogue.tar_headers import BLOCK, ZERO_BLOCK, Header, TarSearch, padded, parse_header
from pencil_scale.storage.urls import Window

_KINDS = {"1": "link", "2": "link", "5": "directory"}  # by type; all others that are not files are "other"

# A larger name, link or set of pax records is an attack or damage: 10,000 characters still fit.
_MAX_EXTENDED_BYTES = 1 << 20

# Larger members than this are skipped unread, so their data are not checked for headers.
_LOOK_BYTES = 1 << 21


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
    """Walks the headers of one archive."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._search = TarSearch(window)
        self._num_bytes = window.source.num_bytes
        self._globals: dict[bytes, bytes] = {}  # pax records for all members that follow
        # The latest member, until what follows it is seen: only then are its data certain to be its own.
        self._latest: Member | None = None
        self._data_from = 0  # where the data of the latest header start; 0 before the first one
        self._resumed_at = -1

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces in order; the last one shows whether the archive ended as it should."""
        position = 0
        while position < self._num_bytes:
            member = self._plain_member(position)
            for piece in self._step(position) if member is None else (member,):
                if self._latest is not None:
                    yield self._latest
                self._latest = piece if isinstance(piece, Member) else None
                if self._latest is None:
                    yield piece
                position = piece.end
        if self._latest is not None:
            yield self._latest
            detail = "no end marker: cut at a member boundary, or written without the two zero blocks"
            yield Damage(position, position, "odd_end", detail)
        if self._num_bytes == 0:
            yield Damage(0, 0, "not_a_tar", "the file is empty")

    def _plain_member(self, position: int) -> Member | None:
        """Read the header that nearly all members have, fast; None for anything else."""
        offset = position + BLOCK
        if self._globals or position == self._resumed_at or offset > self._num_bytes:
            return None
        header = tar_headers.plain_header(*self._window.holding(position, BLOCK))
        if header is None:
            return None
        name, size, typeflag = header
        end = offset + ((size + 511) & ~511)
        if end > self._num_bytes or typeflag != 48 or name[-1:] == b"/":  # 48: "0", a regular file
            return None
        if size > BLOCK and self._holds_header(offset, size):
            return None
        self._data_from = offset
        return Member(position, end, name.decode("utf-8", "surrogateescape"), "file", offset, size)

    def _holds_header(self, offset: int, size: int) -> bool:
        """Decide whether there is a header among data that are read in any case."""
        if size <= BLOCK or size > _LOOK_BYTES:
            return False
        data, begin = self._window.holding(offset, size)
        return tar_headers.holds_header(data, begin, begin + size)

    def _step(self, start: int) -> list[Piece]:
        """Read anything but a plain member: extended headers and their member, the end marker, or damage."""
        position, types, fault = start, set[int](), ""
        overrides: dict[bytes, bytes] = {}
        while position + BLOCK <= self._num_bytes:
            block = self._window.at(position, BLOCK)
            header = parse_header(block)
            if header is None:
                return self._zeros(start, position) if block == ZERO_BLOCK else self._damaged(start, position)
            self._data_from = position + BLOCK
            if header.typeflag not in tar_headers.EXTENDED_TYPES:
                if not types and position == self._resumed_at and (block[99] or b"?" in block[:99]):
                    # Writers shorten a name like this after giving it in full in an extended header.
                    fault = "the header with its full name is damaged"
                return [self._member(start, header, block, {**self._globals, **overrides}, fault)]
            end = self._data_from + padded(header.size)
            if end > self._num_bytes:
                detail = (
                    f"an extended header of {header.size:,} bytes, which would end past the end of the file"
                )
                return self._damaged(start, position, detail, "cut_short")
            if header.typeflag in types:  # a second one of a type is for another member
                return [_stray(start, position)]
            fault = self._extend(header, overrides) or fault
            if chr(header.typeflag) == "g" and not types and not fault:
                return [Filler(position, end)]
            types.add(header.typeflag)
            position = end
        return self._tail(start, position)

    def _extend(self, header: Header, overrides: dict[bytes, bytes]) -> str:
        """Add what an extended header says of the next member; returns why it makes the name uncertain."""
        if header.size > _MAX_EXTENDED_BYTES:
            return f"its extended header has {header.size:,} bytes, an attack or a writer's error"
        data, kind = self._window.at(self._data_from, header.size), chr(header.typeflag)
        if kind == "L":
            overrides[b"path"] = data.partition(b"\x00")[0]
        elif kind != "K":
            found = tar_headers.parse_pax(data)
            if found is None:
                return "its pax header is broken"
            (self._globals if kind == "g" else overrides).update(found)
        return ""

    def _member(
        self, start: int, header: Header, block: bytes, overrides: Mapping[bytes, bytes], fault: str
    ) -> Piece:
        name = overrides.get(b"GNU.sparse.name") or overrides.get(b"path", header.name)
        size = min(int(overrides.get(b"size", header.size)), tar_headers.MAX_SIZE)
        is_sparse = any(key.startswith(b"GNU.sparse.") for key in overrides)
        offset = self._data_from
        if header.typeflag == tar_headers.GNU_SPARSE:
            is_sparse = True
            # Skip the blocks that continue an old GNU sparse header (flagged by byte 482, then 504).
            more = block[482]
            while more and offset + BLOCK <= self._num_bytes:
                more = self._window.at(offset, BLOCK)[504]
                offset += BLOCK
        size = self._search.stored_size(header.typeflag, offset, size)
        text = name.decode("utf-8", "surrogateescape")
        end = min(offset + padded(size), self._num_bytes)
        if offset + size > self._num_bytes:
            detail = f"a member of {size:,} bytes, of which {max(0, self._num_bytes - offset):,} are there"
            self._resumed_at = self._search.after(self._data_from)
            return Damage(start, self._resumed_at, "cut_short", detail, text, offset, size)
        if fault:
            detail = f"a member of {size:,} bytes whose name is uncertain: {fault}"
            return Damage(start, end, "damaged_header", detail)
        if self._holds_header(offset, size):
            early = self._search.inside(offset, end, strict=True)
            if early is not None:
                return self._torn(Member(start, end, text, "file", offset, size), early)
        kind = _KINDS.get(chr(header.typeflag), "other")
        if header.typeflag in tar_headers.REGULAR:
            kind = "directory" if name.endswith(b"/") else "file"
        return Member(start, end, text, "sparse" if is_sparse else kind, offset, size)

    # -- damage -------------------------------------------------------------------------------------

    def _zeros(self, start: int, position: int) -> list[Piece]:
        """Distinguish an end marker from a zeroed header: two zero blocks with nothing certain after them."""
        stop = self._search.end_of_zeros(position)
        num_zeros, is_last = stop - position, stop == self._num_bytes
        if num_zeros < 2 * BLOCK and not is_last:
            return self._damaged(start, position, "512 zero bytes where a header should be")
        if self._search.inside(self._data_from, position) is not None:
            return self._damaged(start, position)
        # Writers fill the last record: 10,240 bytes by default, and powers of two up to 1 MiB are in use.
        longest_fill = max(10_240, min(self._num_bytes & -self._num_bytes, 1 << 20))
        end, kind = stop, "odd_end"
        if not is_last:
            end, kind = self._search.after(stop), "data_after_end"
            detail = "zero bytes as at the end, then bytes without a header"
            if end < self._num_bytes:
                detail = "zero bytes, then more members: archives joined together, or a wiped stretch"
        elif num_zeros < 2 * BLOCK:
            detail = "a single zero block where the end marker has two: cut, or written so"
        elif num_zeros >= longest_fill + 2 * BLOCK:
            kind = "cut_short"
            detail = f"{num_zeros:,} zero bytes at the end: a file created in full length, then not filled"
        elif num_zeros % BLOCK:
            detail = f"{num_zeros:,} zero bytes at the end, which is not a multiple of 512"
        else:
            detail = ""
        found: list[Piece] = [Filler(position, stop)]
        if detail:
            found = self._damage(position, end, kind, detail)
        return [_stray(start, position), *found] if start < position else found

    def _damaged(
        self, start: int, position: int, detail: str = "", kind: str = "damaged_header"
    ) -> list[Piece]:
        """Find where the archive continues; everything up to there is one piece of damage."""
        early = self._search.inside(self._data_from, position)
        end = self._search.after(position + 1) if early is None else early
        if self._data_from == 0 and end == self._num_bytes:
            kind = "not_a_tar"
            detail = "no tar header anywhere in it; shards must be plain tar, not gzip data or a web page"
        elif early is not None or ((end - position) % BLOCK and end < self._num_bytes):
            kind, detail = "shifted_bytes", f"the next header is at byte {end:,}, {_off_by(end - position)}"
        if not detail:
            block, detail = self._window.peek(position, BLOCK), "no header where one should be"
            if tar_headers.resembles_header(block):  # a name that is still legible is a hint, not more
                text = block[:100].partition(b"\x00")[0].decode("utf-8", "backslashreplace")
                detail = f"a header with a wrong checksum; its name looks like {text!a}"
        return self._damage(start, end, kind, detail)

    def _damage(self, start: int, end: int, kind: str, detail: str) -> list[Piece]:
        """Make a piece of damage, after the member before it or, if that is not intact, including it."""
        self._resumed_at = end
        member = self._latest
        if member is None or member.end != start:
            return [Damage(start, end, kind, detail)]
        self._latest = None
        if not self._search.is_intact(member.offset, member.size, end):
            return [self._torn(member, end)]
        member = member._replace(end=min(member.end, end))
        return [member, Damage(member.end, end, kind, detail)]

    def _torn(self, member: Member, end: int) -> Damage:
        self._resumed_at = end
        found = f"the next header is {_off_by(end - member.end)}: bytes were lost or added before it"
        if end == self._num_bytes:
            found = "its data do not end there, and no header follows"
        detail = f"a member of {member.size:,} bytes should end at byte {member.end:,}, but {found}"
        return Damage(member.start, end, "shifted_bytes", detail, member.name, member.offset, member.size)

    def _tail(self, start: int, position: int) -> list[Piece]:
        """Account for less than a block, or for extended headers right before the end."""
        detail = f"the file ends inside a header, {self._num_bytes - position:,} bytes into its 512"
        kind = "cut_short" if self._data_from else "not_a_tar"
        if start < position:
            detail = "the file ends after an extended header, before its member"
        elif not self._window.at(position, BLOCK).strip(b"\x00"):
            kind, detail = "odd_end", "the file ends inside the two zero blocks of its end marker"
        return self._damage(start, self._num_bytes, kind, detail)


def _stray(start: int, end: int) -> Damage:
    return Damage(start, end, "damaged_header", "an extended header without its member")


def _off_by(distance: int) -> str:
    return f"{abs(distance):,} bytes {'after' if distance > 0 else 'before'} its place"
