"""Samples on their way into shards: what is read from a source, and what all sources share.

Reading a source gives every label and no image. Its pieces, one per shard, say where the images are; the task
that writes a shard reads them.

    source = read_folder("photos/by-class", None, shuffle_seed=1, per_shard=1000)
    source.classes, source.given_class        # class names, and one class number per sample
    for sample in source.pieces[0](): ...     # key, image bytes, where they came from
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of

Classes = npt.NDArray[np.int64]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2")


class RawSample(NamedTuple):
    """One image as it was found; `source` and `row` say where."""

    key: str
    image: bytes
    source: str
    row: int


Piece = Callable[[], Iterable[RawSample]]  # reads the samples of one shard; small enough to send to a task


@dataclass(frozen=True)
class Source:
    """Every label of a source, in the order of its samples, and where to read them."""

    classes: tuple[str, ...]
    given_class: Classes
    pieces: Sequence[Piece]
    fingerprint: str  # of names and order: shows whether a source changed between two runs
    true_class: Classes | None = None  # -1 where it is not known
    ignored: tuple[str, ...] = ()  # files that are not samples
    empty_folders: tuple[str, ...] = ()  # without an image, which are no classes


class Item(NamedTuple):
    """One image file: its key in the shard, its path under the source's root, its number in the order."""

    key: str
    path: str
    row: int


def file_pieces(root: str, items: Sequence[Item], per_shard: int) -> list[Piece]:
    """Cut image files under one root into shards."""
    return [partial(_read_files, root, some) for some in shares_of(items, per_shard)]


def shares_of(samples: Sequence[Any], per_shard: int) -> list[Any]:
    """Cut samples into shards."""
    return [samples[first : first + per_shard] for first in range(0, len(samples), per_shard)]


def _read_files(root: str, items: Sequence[Item]) -> Iterator[RawSample]:
    filesystem, base = open_root(root)
    for item in items:
        yield RawSample(item.key, read_image(filesystem, base, item.path), item.path, item.row)


def refuse_repeats(keys: Sequence[str], origins: Sequence[object], what: str = "") -> None:
    """Refuse two samples with the same key; `origins` are the paths or rows where each is."""
    seen: dict[str, int] = {}
    for number, key in enumerate(keys):
        other = seen.setdefault(key, number)
        if other != number:
            both = f"{what}{origins[other]} and {what}{origins[number]}"
            raise PencilError(f"duplicate key {key!r}: {both}; rename one of them")


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
        filesystem, path = filesystem_of(url)
    except OSError as error:
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


def number_classes(
    columns: Mapping[str, pa.ChunkedArray], label_names: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], list[Classes]]:
    """Agree on one list of classes for all label columns of a source, and number each column by it.

    Labels are words or numbers. Without `label_names` the classes are the words found, in alphabetical order,
    or the numbers up to the largest. A label outside the names is an error.
    """
    found = {
        f"{where}, {name}": _labels(column, set(label_names or ()), f"{where}, {name}")
        for name, column in columns.items()
    }
    unique = [label for column in found.values() for label in pc.unique(column).to_pylist()]
    words = sorted({label for label in unique if isinstance(label, str)})
    largest = max((label for label in unique if isinstance(label, int)), default=-1)
    classes = tuple(label_names or words or (str(number) for number in range(largest + 1)))
    if len(set(classes)) != len(classes):
        raise PencilError(f"{where}: two classes have the same name among {', '.join(classes[:20])}")
    return classes, [_numbered(column, classes, name) for name, column in found.items()]


def _labels(column: pa.ChunkedArray, names: set[str], where: str) -> pa.ChunkedArray:
    """Check a column of labels; give it as text, or as int64."""
    if column.null_count:
        row = pc.index(pc.is_null(column), True).as_py()
        raise PencilError(f"{where}: row {row:,} has no label; add one, or drop the row")
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        words = pc.unique(column).to_pylist()
        # A text file has only words: "7" is a number, unless the names say otherwise.
        if names & set(words) or not all(word.isascii() and word.isdigit() for word in words):
            return column.cast(pa.string())
    elif not any(
        test(column.type) for test in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating)
    ):
        raise PencilError(f"{where}: labels have the type {column.type}; expected words or whole numbers")
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise PencilError(f"{where}: expected words or whole numbers as labels ({error})") from error


def _numbered(column: pa.ChunkedArray, classes: Sequence[str], where: str) -> Classes:
    if pa.types.is_string(column.type):
        unknown = [word for word in pc.unique(column).to_pylist() if word not in classes]
        if unknown:
            raise PencilError(f"{where}: unknown class {_some(unknown)}; the classes are {_some(classes)}")
        return np.asarray(pc.index_in(column, pa.array(classes)).to_numpy(), np.int64)
    numbers: Classes = column.to_numpy()
    bad = np.flatnonzero((numbers < 0) | (numbers >= len(classes)))
    if bad.size:
        raise PencilError(
            f"{where}: row {bad[0]:,} has the unknown class {numbers[bad[0]]}; "
            f"classes 0 to {len(classes) - 1} were expected ({_some(classes)})"
        )
    return numbers


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:12])
    return shown if len(names) <= 12 else f"{shown} and {len(names) - 12:,} more"
