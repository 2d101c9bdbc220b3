"""Tar extensions: what extended headers say of the member behind them, kept until it comes.

Pax records and GNU long names overrule the name and size of a member's own header; global pax records hold
for all members that follow. An extended header that cannot be understood makes its member's name uncertain.

    extensions.take(header, position, data)             # for each extended header
    name, size, is_sparse = extensions.overrule(header) # at the member's own header
    extensions.clear()
"""

from pencil_scale.catalogue import tar_headers
from pencil_scale.catalogue.tar_headers import Header

# pax for what follows and for one member, in two spellings; GNU's long name and long link
EXTENDED_TYPES = frozenset(b"gxXLK")


class Extensions:
    """What is known of the next member. `start` is where its first extended header stands, None without."""

    def __init__(self) -> None:
        self._globals: dict[bytes, bytes] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all that was meant for one member only."""
        self._pax: dict[bytes, bytes] = {}
        self._long_name: bytes | None = None
        self._types: set[int] = set()
        self.start: int | None = None
        self.fault: str | None = None
        self.is_silent = not self._globals  # a member's own header has the only word on it

    def has(self, header: Header) -> bool:
        """Whether such a header came already: a second one is for another member, and the first lost its."""
        return header.typeflag in self._types

    def take(self, header: Header, position: int, data: bytes) -> bool:
        """Take in an extended header; tells whether a member must follow, as behind all but a global one."""
        self.is_silent = False
        if header.size > tar_headers.MAX_EXTENDED_BYTES:
            self.fault = "oversized_extended_header"
        elif header.typeflag == tar_headers.GNU_LONG_NAME:
            self._long_name = tar_headers.long_name(data)
        elif header.typeflag != tar_headers.GNU_LONG_LINK:
            self._take_records(header.typeflag, data)
        if header.typeflag == tar_headers.PAX_GLOBAL and self.start is None and self.fault is None:
            return False
        self._types.add(header.typeflag)
        self.start = position if self.start is None else self.start
        return True

    def _take_records(self, typeflag: int, data: bytes) -> None:
        records = tar_headers.parse_pax(data)
        size = b"0" if records is None else records.get(b"size", b"0")
        if records is None or not size.isdigit() or len(size) > 20:
            self.fault = "bad_pax_header"
            return
        # Times and owners are of no use here, and a hostile archive may have millions.
        kept = {name: value for name, value in records.items() if tar_headers.is_wanted(name)}
        (self._globals if typeflag == tar_headers.PAX_GLOBAL else self._pax).update(kept)

    def overrule(self, header: Header) -> tuple[bytes, int, bool]:
        """Give a member's name, its size, and whether it is sparse."""
        name = header.name if self._long_name is None else self._long_name
        size, sparse = header.size, header.typeflag == tar_headers.GNU_SPARSE
        if self._pax or self._globals:
            records = {**self._globals, **self._pax}
            name = records.get(b"GNU.sparse.name") or records.get(b"path", name)
            size = min(int(records.get(b"size", size)), tar_headers.MAX_SIZE)
            sparse = sparse or any(record.startswith(b"GNU.sparse.") for record in records)
        return name, size, sparse
