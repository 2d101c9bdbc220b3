"""Tar walk: every byte of an archive told as a member, as filler or as damage.

The pieces come in order and tile the archive from its first byte to its last, so that nothing can get
lost between them. Damage does not end the walk: it goes on at the next header that is certain (aligned,
magic, checksum, sane numbers), and everything up to there is one piece of damage.

    for piece in TarWalk(Window(source)).pieces():
        ...                                  # Member | Filler | Damage
"""

from collections.abc import Iterator
from typing import NamedTuple

from pencil_scale.reading import tar_headers
from pencil_scale.reading.byte_source import Window
from pencil_scale.reading.tar_headers import BLOCK, ZERO_BLOCK, Header, padded, parse_header
from pencil_scale.reading.tar_search import end_of_zeros, next_header


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
    detail: str
    name: str | None = None
    offset: int = 0
    size: int = 0


Piece = Member | Filler | Damage


class TarWalk:
    """Walks the headers of one archive. What extended headers said waits here for their member."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._num_bytes = window.source.num_bytes
        self._globals: dict[bytes, bytes] = {}
        self._headers_seen = 0
        self._ended = False
        self._forget()

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces in order; the last one says whether the archive ended as it should."""
        position = 0
        while position + BLOCK <= self._num_bytes:
            member = self._plain_member(position)
            if member is not None:
                yield member
                position = member.end
                continue
            block = self._window.at(position, BLOCK)
            header = parse_header(block)
            if header is None:
                found = self._zeros(position) if block == ZERO_BLOCK else self._damaged(position)
            else:
                found = self._headed(header, position)
            for piece in found:
                yield piece
                position = piece.end
            if header is not None and not found:  # an extended header: its member follows
                position = self._after_extension
        yield from self._tail(position)

    def _plain_member(self, position: int) -> Member | None:
        """Read the header nearly all members have; None sends it the long way round."""
        data, begin = self._window.holding(position, BLOCK)
        plain = tar_headers.plain_file(data, begin)
        if plain is None or self._pending is not None or self._globals:
            return None
        name, size = plain
        offset = position + BLOCK
        end = offset + ((size + 511) & ~511)
        if end > self._num_bytes or name[-1:] == b"/":
            return None
        self._headers_seen += 1
        self._ended = False
        return Member(position, end, name.decode("utf-8", "surrogateescape"), "file", offset, size)

    def _headed(self, header: Header, position: int) -> list[Piece]:
        self._headers_seen += 1
        self._ended = False
        if chr(header.typeflag) in "gxXLK":
            return self._extension(header, position)
        return [self._member(header, position)]

    # -- extended headers ---------------------------------------------------------------------------

    def _forget(self) -> None:
        self._pax: dict[bytes, bytes] = {}
        self._long_name: bytes | None = None
        self._pending: int | None = None
        self._fault: str | None = None
        self._after_extension = 0

    def _extension(self, header: Header, position: int) -> list[Piece]:
        offset = position + BLOCK
        end = offset + padded(header.size)
        if end > self._num_bytes:
            return self._damaged(position, "cut_in_header", "an extended header runs past the end")
        if header.size > tar_headers.MAX_EXTENDED_BYTES:
            self._fault = "oversized_extended_header"
        else:
            self._take_extension(header.typeflag, self._window.at(offset, header.size))
        if header.typeflag == tar_headers.PAX_GLOBAL and self._pending is None and self._fault is None:
            return [Filler(position, end)]
        self._pending = position if self._pending is None else self._pending
        self._after_extension = end
        return []

    def _take_extension(self, typeflag: int, data: bytes) -> None:
        if typeflag == tar_headers.GNU_LONG_NAME:
            self._long_name = tar_headers.long_name(data)
        elif typeflag != tar_headers.GNU_LONG_LINK:
            records = tar_headers.parse_pax(data)
            size = b"0" if records is None else records.get(b"size", b"0")
            if records is None or not size.isdigit() or len(size) > 20:
                self._fault = "bad_pax_header"
            else:
                # Times and owners are of no use here, and a hostile archive may have millions.
                kept = {name: value for name, value in records.items() if tar_headers.is_wanted(name)}
                (self._globals if typeflag == tar_headers.PAX_GLOBAL else self._pax).update(kept)

    # -- members ------------------------------------------------------------------------------------

    def _member(self, header: Header, position: int) -> Piece:
        start = position if self._pending is None else self._pending
        records = {**self._globals, **self._pax} if self._pax or self._globals else self._pax
        name = header.name if self._long_name is None else self._long_name
        size, sparse = header.size, header.typeflag == tar_headers.GNU_SPARSE
        if records:
            name = records.get(b"GNU.sparse.name") or records.get(b"path", name)
            size = min(int(records.get(b"size", size)), tar_headers.MAX_SIZE)
            sparse = sparse or any(record.startswith(b"GNU.sparse.") for record in records)
        offset = position + BLOCK
        if header.typeflag == tar_headers.GNU_SPARSE:
            offset = self._after_sparse_map(position)
        elif header.typeflag in tar_headers.WITHOUT_DATA and size and not self._has_data(offset, size):
            size = 0
        fault = self._fault
        if self._pending is not None or fault:
            self._forget()
        text = tar_headers.name_text(name)
        end = min(offset + padded(size), self._num_bytes)
        if offset + size > self._num_bytes:
            return self._cut(start, position, text, offset, size)
        if fault:
            return Damage(start, end, fault, "the name of the member behind it is not certain")
        return Member(start, end, text, tar_headers.member_kind(header, name, sparse), offset, size)

    def _cut(self, start: int, position: int, name: str, offset: int, size: int) -> Damage:
        detail = f"a member of {size:,} bytes, of which {max(0, self._num_bytes - offset):,} are there"
        end = next_header(self._window, position + BLOCK)
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
        stop = end_of_zeros(self._window, position)
        if stop - position < 2 * BLOCK and stop < self._num_bytes:
            return self._damaged(position, "zeroed_header", "512 zero bytes where a header belongs")
        pieces: list[Piece] = []
        if self._pending is not None:
            detail = "an extended header without its member"
            pieces.append(Damage(self._pending, position, "stray_extended_header", detail))
            self._forget()
        if stop - position < 2 * BLOCK:
            self._ended = True  # the missing marker is told here
            detail = "a lone zero block where the end marker has two: cut, or written so"
            return [*pieces, Damage(position, stop, "no_end_marker", detail)]
        return [*pieces, self._end_or_gap(position, stop)]

    def _end_or_gap(self, position: int, stop: int) -> Piece:
        """Judge two zero blocks and more by what is behind them, and by how many they are."""
        following = next_header(self._window, stop)
        if following < self._num_bytes:
            detail = "zero bytes, then more members: archives joined together, or a stretch that was wiped"
            return Damage(position, following, "zeros_in_archive", detail)
        self._ended = True
        if stop < self._num_bytes:
            detail = "zero bytes as at the end, then bytes that hold no header"
            return Damage(position, self._num_bytes, "trailing_garbage", detail)
        if tar_headers.is_padding(stop - position, self._num_bytes):
            return Filler(position, stop)
        detail = f"{stop - position:,} zero bytes at the end: a file made in full length, then not filled"
        return Damage(position, stop, "zero_tail", detail)

    def _damaged(
        self, position: int, kind: str = "garbled_header", detail: str = "no header where one belongs"
    ) -> list[Piece]:
        start = position if self._pending is None else self._pending
        self._forget()
        end = next_header(self._window, position + BLOCK)
        if self._headers_seen == 0 and end == self._num_bytes:
            kind, detail = "not_a_tar", tar_headers.what_else(self._window.at(0, BLOCK))
            self._ended = True  # no use in missing an end marker, too
        return [Damage(start, end, kind, detail)]

    def _tail(self, position: int) -> Iterator[Piece]:
        """Account for what is left: less than a block, a missing end marker, or nothing."""
        if self._num_bytes == 0:
            yield Damage(0, 0, "empty_file", "the file has no bytes")
            return
        start = position if self._pending is None else self._pending
        if start < self._num_bytes:
            rest = self._window.at(position, BLOCK)
            if self._ended and not rest.strip(b"\x00"):
                yield Filler(start, self._num_bytes)
                return
            kind = "cut_in_header" if self._headers_seen else "not_a_tar"
            yield Damage(start, self._num_bytes, kind, "the file ends inside a header")
        elif not self._ended:
            detail = "cut at a member boundary, or written without the two zero blocks"
            yield Damage(self._num_bytes, self._num_bytes, "no_end_marker", detail)
