"""Sources made of image files: class folders, the Clothing1M download, and digits that need no download.

source = FolderSource("s3://photos/by-class", shuffle_seed=1)
labels = source.labels()
pieces = source.pieces(per_shard=1000)
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from PIL import Image

from pencil_scale.storage.errors import PencilError
from pipelines.shard_making.samples import (
    IMAGE_SUFFIXES,
    FilePiece,
    Item,
    Labels,
    Piece,
    RawSample,
    as_items,
    fingerprint_of,
    join_path,
    label_array,
    number_classes,
    open_root,
)

CLOTHING1M_SPLITS = ("noisy", "clean_train", "clean_val", "clean_test")


class FileSource:
    """A source whose samples are image files under one root."""

    root: str
    _items: list[Item]

    def pieces(self, per_shard: int) -> Iterator[Piece]:
        for start in range(0, len(self._items), per_shard):
            yield FilePiece(self.root, self._items[start : start + per_shard])


@dataclass
class FolderSource(FileSource):
    """A tree in which each top-level folder is a class; files at any depth below belong to that class."""

    root: str
    label_names: Sequence[str] | None = None
    shuffle_seed: int | None = None
    _items: list[Item] = field(default_factory=list)

    def labels(self) -> Labels:
        filesystem, base = open_root(self.root)
        if not filesystem.isdir(base):
            raise PencilError(f"{self.root}: no such folder")
        paths = sorted(path.removeprefix(base).lstrip("/") for path in filesystem.find(base))
        images = [path for path in paths if "/" in path and path.lower().endswith(IMAGE_SUFFIXES)]
        if not images:
            raise PencilError(
                f"{self.root}: no image in any class folder among {len(paths):,} files; "
                "expected CLASS/NAME.jpg, .png, .webp ..."
            )
        images = _shuffled(images, self.shuffle_seed)
        self._items = as_items(images)
        names = label_array(pa.array([path.split("/", 1)[0] for path in images]))
        classes, (given,) = number_classes([[names]], self.label_names, self.root)
        ignored = tuple(sorted(set(paths) - set(images)))
        return Labels(classes, given, None, fingerprint_of(images), ignored)


@dataclass
class Clothing1MSource(FileSource):
    """The Clothing1M download as its authors ship it; `split` is noisy or one of the clean ones.

    Some noisy samples also have a clean label, which becomes their true class.
    """

    root: str
    split: str
    shuffle_seed: int | None = None
    _items: list[Item] = field(default_factory=list)

    def labels(self) -> Labels:
        is_noisy = self.split == "noisy"
        list_name = f"{'noisy_train' if is_noisy else self.split}_key_list.txt"
        paths = _shuffled(self._lines(list_name), self.shuffle_seed)
        if not paths:
            raise PencilError(f"{self.root}/{list_name}: empty; one image path per line was expected")
        self._items = as_items(paths)
        classes = tuple(self._lines("category_names_eng.txt"))
        clean = self._label_kv("clean_label_kv.txt", len(classes))
        known = self._label_kv("noisy_label_kv.txt", len(classes)) if is_noisy else clean
        missing = [path for path in paths if path not in known]
        if missing:
            raise PencilError(
                f"{missing[0]}: listed in {list_name}, but has no label in "
                f"{'noisy' if is_noisy else 'clean'}_label_kv.txt"
            )
        given = np.array([known[path] for path in paths], np.int64)
        true = np.array([clean.get(path, -1) for path in paths], np.int64) if is_noisy else None
        return Labels(classes, given, true, fingerprint_of(paths))

    def _label_kv(self, name: str, num_classes: int) -> dict[str, int]:
        known: dict[str, int] = {}
        for number, line in enumerate(self._lines(name), start=1):
            path, _, label = line.rpartition(" ")
            if not path or not label.isdecimal() or int(label) >= num_classes:
                raise PencilError(
                    f"{self.root}/{name} line {number}: found {line[:80]!r}, "
                    f"expected an image path and a class from 0 to {num_classes - 1}"
                )
            known[path] = int(label)
        return known

    def _lines(self, name: str) -> list[str]:
        filesystem, base = open_root(self.root)
        try:
            text = filesystem.cat_file(join_path(base, name)).decode("utf-8")
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise PencilError(
                f"{self.root}/{name}: cannot be read ({error}); SRC must be the unpacked download"
            ) from None
        return [line.strip() for line in text.splitlines() if line.strip()]


@dataclass(frozen=True)
class BytesPiece:
    """Images that are already in memory, for a source too small to be read by tasks."""

    held: list[RawSample]

    def samples(self) -> Iterator[RawSample]:
        return iter(self.held)


@dataclass
class DigitsSource:
    """The 1,797 handwritten digits of scikit-learn as 8x8 grey PNGs, split 1,437 to 360 by a fixed seed."""

    split: str
    _held: list[RawSample] = field(default_factory=list)

    def labels(self) -> Labels:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise PencilError("digits: scikit-learn is not installed; pip install scikit-learn") from None
        images, classes = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(images))
        rows = order[:1437] if self.split == "train" else order[1437:]
        self._held = []
        for row in rows.tolist():
            target = io.BytesIO()
            grey = np.asarray(images[row] * 15, np.uint8).reshape(8, 8)  # 0 to 16 becomes 0 to 240
            Image.fromarray(grey).save(target, "PNG")
            source = "sklearn.datasets.load_digits"
            self._held.append(RawSample(f"digit-{row:04d}", target.getvalue(), source, row))
        names = tuple(str(digit) for digit in range(10))
        fingerprint = fingerprint_of(sample.key for sample in self._held)
        return Labels(names, classes[rows].astype(np.int64), None, fingerprint)

    def pieces(self, per_shard: int) -> Iterator[Piece]:
        for start in range(0, len(self._held), per_shard):
            yield BytesPiece(self._held[start : start + per_shard])


def _shuffled(paths: list[str], seed: int | None) -> list[str]:
    """Mix the classes over the shards: training shuffles windows of shards, never all of them at once."""
    if seed is None:
        return paths
    return [paths[place] for place in np.random.default_rng(seed).permutation(len(paths))]
