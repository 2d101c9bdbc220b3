"""Samples on their way into shards: what a source provides, and the parts that all sources share.

A source is read twice. `labels` reads every label and no image, in the main process. `pieces` then says, for
one shard at a time, where the images are; the task that writes the shard reads them.

    labels = source.labels()                  # class names, and one class number per sample
    for piece in source.pieces(per_shard=1000):
        for sample in piece.samples(): ...    # key, image bytes, where they came from
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.storage.errors import PencilError

Classes = npt.NDArray[np.int64]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2")


class RawSample(NamedTuple):
    """One image as it was found; `source` and `row` say where."""

    key: str
    image: bytes
    source: str
    row: int


class Piece(Protocol):
    """The samples of one shard, small enough to send to the task that writes it."""

    def samples(self) -> Iterator[RawSample]: ...


@dataclass(frozen=True)
class Labels:
    """Every label of a source, in the order of its samples; -1 where the true class is not known."""

    classes: tuple[str, ...]
    given_class: Classes
    true_class: Classes | None = None
    fingerprint: str = ""  # of names and order: shows whether a source changed between two runs
    ignored: tuple[str, ...] = ()  # files that are not samples


class Source(Protocol):
    """What `make_shards` needs from a source."""

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


def as_items(paths: Sequence[str]) -> list[Item]:
    """Give every path its key and place; two paths with the same key are an error."""
    items = [Item(clean_key(path), path, row) for row, path in enumerate(paths)]
    seen: dict[str, str] = {}
    for item in items:
        other = seen.setdefault(item.key, item.path)
        if other is not item.path:
            raise PencilError(f"duplicate key {item.key!r}: {other} and {item.path}; rename one of them")
    return items


def clean_key(name: str) -> str:
    """Make a sample's key from a path: drop the image suffix, and replace dots in the last component.

    WebDataset ends a key at the first dot of the file name, so `a.b.jpg` would become the key `a`.
    """
    path = PurePosixPath(name)
    stem = path.stem if path.suffix.lower() in IMAGE_SUFFIXES else path.name
    key = str(path.with_name(stem.replace(".", "_"))) if stem else ""
    if not key or key.startswith("/") or ".." in path.parts or any(ord(letter) < 32 for letter in key):
        raise PencilError(f"{name[:200]!r}: not a usable sample key; expected a relative path")
    return key


def fingerprint_of(names: Iterable[str]) -> str:
    """Hash names in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def open_root(url: str) -> tuple[Any, str]:
    """Open the filesystem of a folder's URL (a path, `s3://...`, `tar://::photos.tar`) and its path there."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (OSError, ValueError, ImportError) as error:
        raise PencilError(f"{url}: cannot be opened ({error})") from error
    return filesystem, path.rstrip("/")


def absolute_url(url: str) -> str:
    """Make a local path absolute, also at the end of a chain: a worker has a different current folder."""
    chain, link, last = url.rpartition("::")
    return url if "://" in last else chain + link + str(Path(last).expanduser().absolute())


def join_path(base: str, path: str) -> str:
    """Join a path inside a filesystem; the root of an archive is the empty path."""
    return f"{base}/{path}" if base else path


def read_image(filesystem: Any, base: str, path: str) -> bytes:
    """Read one image file, or name the one that cannot be read."""
    try:
        data: bytes = filesystem.cat_file(join_path(base, path))
    except FileNotFoundError:
        raise PencilError(
            f"{path}: no such image file under {base or 'the archive'}, although the source names it"
        ) from None
    except OSError as error:
        raise PencilError(f"{path}: cannot be read ({error})") from error
    return data


def label_array(column: Any, first_row: int = 0) -> pa.Array:
    """Check one batch of labels: int64 class numbers, or words, of which each is stored once."""
    if column.null_count:
        row = first_row + int(pc.index(pc.is_null(column), True).as_py())
        raise PencilError(f"row {row:,} has no label; add one, or drop the row")
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        return column.cast(pa.int64())
    if pa.types.is_floating(column.type):
        values = column.to_numpy(zero_copy_only=False)
        bad = np.flatnonzero(values != np.floor(values))
        if bad.size:
            raise PencilError(
                f"row {first_row + bad[0]:,} has the label {values[bad[0]]}; a whole number was expected"
            )
        return column.cast(pa.int64())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string()).dictionary_encode()
    raise PencilError(f"labels have the type {column.type}; words or whole numbers were expected")


def number_classes(
    columns: Sequence[Sequence[pa.Array]], label_names: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], list[Classes]]:
    """Agree on one list of classes for all label columns of a source, and number each column by it.

    A column is a list of batches from `label_array`. Without `label_names` the classes are the words found,
    in alphabetical order, or the numbers up to the largest. A label outside the names is an error.
    """
    found = [_codes(batches, set(label_names or ()), where) for batches in columns]
    words = sorted({word for _, known in found for word in known})
    largest = max((int(codes.max(initial=-1)) for codes, _ in found), default=-1)
    classes = tuple(label_names or words or (str(number) for number in range(largest + 1)))
    if len(set(classes)) != len(classes):
        raise PencilError(f"{where}: two classes have the same name among {', '.join(classes[:20])}")
    places = {name: number for number, name in enumerate(classes)}
    return classes, [_numbered(codes, known, places, where) for codes, known in found]


def _codes(batches: Sequence[pa.Array], names: set[str], where: str) -> tuple[Classes, list[str]]:
    """Join the batches of a column: codes and the words they stand for, or class numbers and no words."""
    kinds = {str(batch.type) for batch in batches}
    if len(kinds) > 1:
        raise PencilError(f"{where}: labels are words in some places and numbers in others")
    joined = pa.chunked_array(batches).unify_dictionaries().combine_chunks()
    if not pa.types.is_dictionary(joined.type):
        return joined.to_numpy(), []
    codes, words = joined.indices.to_numpy().astype(np.int64), joined.dictionary.to_pylist()
    # A text file has only words: "7" is a number, unless the names say otherwise.
    if words and not names & set(words) and all(word.isdecimal() for word in words):
        return np.array([int(word) for word in words], np.int64)[codes], []
    return codes, words


def _numbered(codes: Classes, words: Sequence[str], places: Mapping[str, int], where: str) -> Classes:
    if words:
        unknown = [word for word in words if word not in places]
        if unknown:
            raise PencilError(
                f"{where}: unknown class {_some(unknown)}; the classes are {_some(list(places))}"
            )
        return np.array([places[word] for word in words], np.int64)[codes]
    bad = np.flatnonzero((codes < 0) | (codes >= len(places)))
    if bad.size:
        raise PencilError(
            f"{where}: row {bad[0]:,} has the unknown class {codes[bad[0]]}; "
            f"classes 0 to {len(places) - 1} were expected ({_some(list(places))})"
        )
    return codes


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:12])
    return shown if len(names) <= 12 else f"{shown} and {len(names) - 12:,} more"
