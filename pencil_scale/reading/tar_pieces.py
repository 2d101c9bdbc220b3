"""Tar pieces: what an archive is made of; together they tile it from its first byte to its last."""

from typing import NamedTuple


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
