"""Reads a tar into pieces, samples and damage, and checks that the pieces cover it."""

from pencil_scale.catalogue.shards import Sample, ShardReader
from pencil_scale.catalogue.tar_walk import Damage, Piece, TarWalk
from pencil_scale.storage.urls import MemorySource, Window


def pieces(data: bytes) -> list[Piece]:
    """All pieces, after checking that they cover the archive without gaps."""
    found = list(TarWalk(Window(MemorySource(data))).pieces())
    position = 0
    for piece in found:
        assert piece.start == position
        position = piece.end
    assert position == len(data)
    return found


def read(data: bytes) -> tuple[list[Sample], list[Damage]]:
    pieces(data)
    found = list(ShardReader(MemorySource(data)).read())
    samples = [each for each in found if isinstance(each, Sample)]
    return samples, [each for each in found if isinstance(each, Damage)]


def kinds(data: bytes) -> list[str]:
    return [damage.kind for damage in read(data)[1]]


def details(data: bytes) -> list[str]:
    """What was found, where several findings share a kind."""
    return [damage.detail for damage in read(data)[1]]


def keys(data: bytes) -> list[str]:
    return [sample.key for sample in read(data)[0]]
