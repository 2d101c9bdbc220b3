"""Samples on their way into shards: what a source promises, and the small parts all sources share.

A source is read twice. `labels` reads every label and no image, on the driver; `pieces` then says, a
shard at a time, where that shard's images lie, and whoever writes the shard reads them there.

    labels = source.labels()                  # classes, one class number a sample
    for piece in source.pieces(per_shard=1000):
        for sample in piece.samples(): ...    # key, image bytes, where they came from
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import fsspec
import numpy as np
import numpy.typing as npt

from pencil_scale.storage.errors import PencilError

Classes = npt.NDArray[np.int64]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2")


class SourceError(PencilError):
    """A source of samples that cannot be turned into shards as it stands."""


class RawSample(NamedTuple):
    """One image as it was found; `source` and `row` tell where."""

    key: str
    image: bytes
    source: str
    row: int


class Piece(Protocol):
    """One shard's samples, small enough to send to whoever writes the shard."""

    def samples(self) -> Iterator[RawSample]: ...


@dataclass(frozen=True)
class Labels:
    """Every label of a source, in the order of its samples; `true_class` where the source knows better."""

    classes: tuple[str, ...]
    given_class: Classes
    true_class: Classes | None = None
    fingerprint: str = ""  # of names and order: tells whether a source changed between two runs
    ignored: tuple[str, ...] = ()  # files that are no samples, for the end table


class Source(Protocol):
    """What `make_shards` asks of a source."""

    def labels(self) -> Labels: ...

    def pieces(self, per_shard: int) -> Iterator[Piece]: ...


class Item(NamedTuple):
    """One image file: its key in the shard, its path under the source's root, its place in the order."""

    key: str
    path: str
    row: int


@dataclass(frozen=True)
class FilePiece:
    """Image files under one root."""

    root: str
    items: list[Item]

    def samples(self) -> Iterator[RawSample]:
        filesystem, base = open_root(self.root)
        for item in self.items:
            yield RawSample(item.key, read_image(filesystem, base, item.path), item.path, item.row)


@dataclass(frozen=True)
class BytesPiece:
    """Images already in memory, for sources so small that reading them elsewhere makes no sense."""

    held: list[RawSample]

    def samples(self) -> Iterator[RawSample]:
        return iter(self.held)


def open_root(url: str) -> tuple[Any, str]:
    """Open the filesystem of a folder's URL (a path, `s3://...`, `tar://::photos.tar`) and its path there."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(f"{url}: cannot be opened ({error})") from error
    return filesystem, path.rstrip("/")


def absolute_url(url: str) -> str:
    """Make a local path absolute, also at the end of a chain: a worker's folder is not the caller's."""
    chain, link, last = url.rpartition("::")
    return url if "://" in last else chain + link + str(Path(last).expanduser().absolute())


def join_path(base: str, path: str) -> str:
    """Join a path inside a filesystem; the root of an archive is the empty path."""
    return f"{base}/{path}" if base else path


def read_image(filesystem: Any, base: str, path: str) -> bytes:
    """Read one image file whole, or say which one is missing."""
    try:
        data: bytes = filesystem.cat_file(join_path(base, path))
    except FileNotFoundError:
        raise SourceError(
            f"{path}: no such image file under {base or 'the archive'}; the source names it"
        ) from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error})") from error
    return data


def clean_key(name: str) -> str:
    """Make a sample's key of a path: without its image suffix, and with no dot left in its last part.

    WebDataset ends a key at the first dot of the file name, so `a.b.jpg` would become the key `a`.
    """
    path = PurePosixPath(name)
    stem = path.stem if path.suffix.lower() in IMAGE_SUFFIXES else path.name
    key = str(path.with_name(stem.replace(".", "_"))) if stem else ""
    if not key or key.startswith("/") or ".." in path.parts or any(ord(letter) < 32 for letter in key):
        raise SourceError(f"{name[:200]!r}: cannot name a sample; expected a relative path in plain letters")
    return key


def as_items(paths: Sequence[str]) -> list[Item]:
    """Give every path its key and place; two paths that make one key are refused."""
    items = [Item(clean_key(path), path, row) for row, path in enumerate(paths)]
    seen: dict[str, str] = {}
    for item in items:
        other = seen.setdefault(item.key, item.path)
        if other is not item.path:
            raise SourceError(f"key {item.key!r} repeats: {other} and {item.path}; rename one of them")
    return items


def file_pieces(root: str, items: Sequence[Item], per_shard: int) -> Iterator[Piece]:
    """Cut a list of files into shards."""
    for start in range(0, len(items), per_shard):
        yield FilePiece(root, list(items[start : start + per_shard]))


def fingerprint_of(names: Iterable[str]) -> str:
    """Hash names in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()
