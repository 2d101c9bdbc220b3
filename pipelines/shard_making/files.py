"""Sources made of image files: class folders, the Clothing1M download, and digits that need no download.

source = read_folder("s3://photos/by-class", None, shuffle_seed=1, per_shard=1000)
"""

import io
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from PIL import Image

from pencil_scale.storage.errors import PencilError
from pipelines.shard_making.samples import (
    IMAGE_SUFFIXES,
    Item,
    Piece,
    RawSample,
    Source,
    clean_key,
    file_pieces,
    fingerprint_of,
    join_path,
    number_classes,
    open_root,
    refuse_repeats,
    shares_of,
)

CLOTHING1M_SPLITS = ("noisy", "clean_train", "clean_val", "clean_test")
SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev"}


def read_folder(
    root: str, label_names: Sequence[str] | None, shuffle_seed: int | None, per_shard: int
) -> Source:
    """Read a tree in which each top-level folder is a class; files at any depth below belong to it."""
    filesystem, base = open_root(root)
    if not filesystem.isdir(base):
        raise PencilError(f"{root}: no such folder")
    paths = sorted(path.removeprefix(base).lstrip("/") for path in filesystem.find(base))
    paths = [path for path in paths if path and not path.endswith("/")]  # placeholders of an object store
    images = [path for path in paths if "/" in path and path.lower().endswith(IMAGE_SUFFIXES)]
    if not images:
        raise PencilError(
            f"{root}: no image in any class folder among {len(paths):,} files; "
            "expected CLASS/NAME.jpg, .png, .webp ..."
        )
    folders = {path.split("/", 1)[0] for path in images}
    if folders <= SPLITS and all(path.count("/") > 1 for path in images):
        named = ", ".join(f"{root.rstrip('/')}/{name}" for name in sorted(folders))
        raise PencilError(f"{root}: has one folder per split, not per class; give one of {named}")
    images = _shuffled(images, shuffle_seed)
    names = pa.chunked_array([[path.split("/", 1)[0] for path in images]])
    classes, (given,) = number_classes({"class folders": names}, label_names, root)
    pieces, ignored = file_pieces(root, _items(images), per_shard), sorted(set(paths) - set(images))
    there = [entry for entry in filesystem.ls(base, detail=True) if entry["type"] == "directory"]
    empty = sorted({entry["name"].rstrip("/").rpartition("/")[2] for entry in there} - folders)
    return Source(
        classes, given, pieces, fingerprint_of(images), ignored=tuple(ignored), empty_folders=tuple(empty)
    )


def read_clothing1m(root: str, split: str, shuffle_seed: int | None, per_shard: int) -> Source:
    """Read the Clothing1M download as its authors ship it; `split` is noisy or one of the clean ones.

    Some noisy samples also have a clean label, which becomes their true class.
    """
    is_noisy = split == "noisy"
    list_name = f"{'noisy_train' if is_noisy else split}_key_list.txt"
    paths = _shuffled(_lines(root, list_name), shuffle_seed)
    if not paths:
        raise PencilError(f"{root}/{list_name}: empty; one image path per line was expected")
    classes = tuple(_lines(root, "category_names_eng.txt"))
    clean = _label_kv(root, "clean_label_kv.txt", len(classes))
    known = _label_kv(root, "noisy_label_kv.txt", len(classes)) if is_noisy else clean
    missing = [path for path in paths if path not in known]
    if missing:
        kind = "noisy" if is_noisy else "clean"
        raise PencilError(f"{missing[0]}: listed in {list_name}, but has no label in {kind}_label_kv.txt")
    given = np.array([known[path] for path in paths], np.int64)
    true = np.array([clean.get(path, -1) for path in paths], np.int64) if is_noisy else None
    return Source(classes, given, file_pieces(root, _items(paths), per_shard), fingerprint_of(paths), true)


def _label_kv(root: str, name: str, num_classes: int) -> dict[str, int]:
    known: dict[str, int] = {}
    for number, line in enumerate(_lines(root, name), start=1):
        path, _, label = line.rpartition(" ")
        if not path or not label.isdecimal() or int(label) >= num_classes:
            raise PencilError(
                f"{root}/{name} line {number}: found {line[:80]!r}, "
                f"expected an image path and a class from 0 to {num_classes - 1}"
            )
        known[path] = int(label)
    return known


def _lines(root: str, name: str) -> list[str]:
    filesystem, base = open_root(root)
    try:
        text = filesystem.cat_file(join_path(base, name)).decode("utf-8")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise PencilError(
            f"{root}/{name}: cannot be read ({error}); SRC must be the unpacked download"
        ) from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def read_digits(split: str, per_shard: int) -> Source:
    """Read scikit-learn's 1,797 handwritten digits as 8x8 grey PNGs, split 1,437 to 360 by a fixed seed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise PencilError("digits: scikit-learn is not installed; pip install scikit-learn") from None
    images, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    rows = order[:1437] if split == "train" else order[1437:]
    samples = []
    for row in rows.tolist():
        target = io.BytesIO()
        grey = np.asarray(images[row] * 15, np.uint8).reshape(8, 8)  # 0 to 16 becomes 0 to 240
        Image.fromarray(grey).save(target, "PNG")
        samples.append(RawSample(f"digit-{row:04d}", target.getvalue(), "sklearn.datasets.load_digits", row))
    names = tuple(str(digit) for digit in range(10))
    pieces: list[Piece] = [partial(list, some) for some in shares_of(samples, per_shard)]
    fingerprint = fingerprint_of(sample.key for sample in samples)
    return Source(names, classes[rows].astype(np.int64), pieces, fingerprint)


def _items(paths: Sequence[str]) -> list[Item]:
    items = [Item(clean_key(path), path, row) for row, path in enumerate(paths)]
    refuse_repeats([item.key for item in items], paths)
    return items


def _shuffled(paths: list[str], seed: int | None) -> list[str]:
    """Mix the classes over the shards: training shuffles windows of shards, never all of them at once."""
    if seed is None:
        return paths
    return [paths[number] for number in np.random.default_rng(seed).permutation(len(paths))]
