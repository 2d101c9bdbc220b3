"""Sources made of files: class folders, the Clothing1M download, and digits that need no download.

source = FolderSource("s3://photos/by-class", shuffle_seed=1)
labels = source.labels()
pieces = source.pieces(per_shard=1000)
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from pipelines.shard_making.raw_labels import RawLabels, number_classes
from pipelines.shard_making.shard_samples import (
    IMAGE_SUFFIXES,
    BytesPiece,
    Classes,
    Item,
    Labels,
    Piece,
    RawSample,
    SourceError,
    as_items,
    file_pieces,
    fingerprint_of,
    join_path,
    open_root,
)


@dataclass
class FolderSource:
    """A tree whose first level of folders names the classes; what lies deeper belongs to that class."""

    root: str
    label_names: Sequence[str] | None = None
    shuffle_seed: int | None = None
    _items: list[Item] = field(default_factory=list)

    def labels(self) -> Labels:
        paths = _files_below(self.root)
        images = [path for path in paths if "/" in path and path.lower().endswith(IMAGE_SUFFIXES)]
        if not images:
            raise SourceError(
                f"{self.root}: no image in any class folder among {len(paths):,} files; "
                "expected CLASS/NAME.jpg, .png, .webp ..."
            )
        images = _shuffled(images, self.shuffle_seed)
        self._items = as_items(images)
        names = [path.split("/", 1)[0] for path in images]
        classes, (given,) = number_classes([RawLabels.of_words(names)], self.label_names, self.root)
        ignored = tuple(sorted(set(paths) - set(images)))
        return Labels(classes, given, None, fingerprint_of(images), ignored)

    def pieces(self, per_shard: int) -> Iterator[Piece]:
        return file_pieces(self.root, self._items, per_shard)


CLOTHING1M_SPLITS = ("noisy", "clean_train", "clean_val", "clean_test")


@dataclass
class Clothing1MSource:
    """The Clothing1M download as its authors ship it; `split` is noisy or one of the clean ones.

    Some noisy samples also have a clean label; it travels along as their true class.
    """

    root: str
    split: str
    shuffle_seed: int | None = None
    _items: list[Item] = field(default_factory=list)

    def labels(self) -> Labels:
        list_name = "noisy_train" if self.split == "noisy" else self.split
        paths = self._lines(f"{list_name}_key_list.txt")
        if not paths:
            raise SourceError(
                f"{self.root}/{list_name}_key_list.txt: empty; one image path a line was expected"
            )
        classes = tuple(self._lines("category_names_eng.txt"))
        paths = _shuffled(paths, self.shuffle_seed)
        self._items = as_items(paths)
        kv_name = "noisy_label_kv.txt" if self.split == "noisy" else "clean_label_kv.txt"
        given = self._classes_of(paths, self._label_kv(kv_name, len(classes)), kv_name)
        return Labels(classes, given, self._truth(paths, len(classes)), fingerprint_of(paths))

    def pieces(self, per_shard: int) -> Iterator[Piece]:
        return file_pieces(self.root, self._items, per_shard)

    def _truth(self, paths: Sequence[str], num_classes: int) -> Classes | None:
        if self.split != "noisy":
            return None
        clean = self._label_kv("clean_label_kv.txt", num_classes)
        return np.array([clean.get(path, -1) for path in paths], np.int64)

    def _classes_of(self, paths: Sequence[str], known: Mapping[str, int], kv_name: str) -> Classes:
        for path in paths:
            if path not in known:
                raise SourceError(f"{path}: in the list of {self.split}, but without a label in {kv_name}")
        return np.array([known[path] for path in paths], np.int64)

    def _label_kv(self, name: str, num_classes: int) -> dict[str, int]:
        known: dict[str, int] = {}
        for number, line in enumerate(self._lines(name), start=1):
            path, _, label = line.rpartition(" ")
            if not path or not label.isdecimal() or int(label) >= num_classes:
                raise SourceError(
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
            raise SourceError(
                f"{self.root}/{name}: cannot be read ({error}); SRC is the unpacked download"
            ) from None
        return [line.strip() for line in text.splitlines() if line.strip()]


@dataclass
class DigitsSource:
    """scikit-learn's 1,797 handwritten digits as 8x8 grey PNGs, split 1,437 to 360 by a fixed seed."""

    split: str
    _held: list[RawSample] = field(default_factory=list)

    def labels(self) -> Labels:
        images, classes = _load_digits()
        order = np.random.default_rng(0).permutation(len(images))
        rows = order[:1437] if self.split == "train" else order[1437:]
        self._held = [
            RawSample(f"digit-{row:04d}", _grey_png(images[row]), "sklearn.datasets.load_digits", int(row))
            for row in rows
        ]
        names = tuple(str(digit) for digit in range(10))
        return Labels(names, classes[rows].astype(np.int64), None, fingerprint_of(s.key for s in self._held))

    def pieces(self, per_shard: int) -> Iterator[Piece]:
        for start in range(0, len(self._held), per_shard):
            yield BytesPiece(self._held[start : start + per_shard])


def _files_below(root: str) -> list[str]:
    """List all files under a folder as paths relative to it, in order of name."""
    filesystem, base = open_root(root)
    if not filesystem.isdir(base):
        raise SourceError(f"{root}: no such folder")
    found = (path.removeprefix(base).lstrip("/") for path in filesystem.find(base))
    return sorted(found)


def _shuffled(paths: list[str], seed: int | None) -> list[str]:
    """Mix the classes over the shards: training shuffles windows of shards, never all of them at once."""
    if seed is None:
        return paths
    return [paths[place] for place in np.random.default_rng(seed).permutation(len(paths))]


def _load_digits() -> tuple[Any, Any]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SourceError("digits: scikit-learn is not installed; pip install scikit-learn") from None
    images, classes = load_digits(return_X_y=True)
    return images, classes


def _grey_png(pixels: Any) -> bytes:
    """Write 64 values of 0 to 16 as an 8x8 PNG; times 15 they use the full range."""
    grey = np.asarray(pixels * 15, np.uint8).reshape(8, 8)
    target = io.BytesIO()
    Image.fromarray(grey).save(target, "PNG")
    return target.getvalue()
