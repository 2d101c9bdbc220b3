"""The command line of `make_shards`, and the job it describes.

jobs = jobs_of(parse_arguments(["folder", "photos", "shards", "--noise", "symmetric:0.5"]))
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pencil_scale.config.command import as_started, program
from pencil_scale.storage.errors import PencilError
from pipelines.shard_making.files import CLOTHING1M_SPLITS, read_clothing1m, read_digits, read_folder
from pipelines.shard_making.samples import Classes, Source, absolute_url
from pipelines.shard_making.tables import Columns, read_table

DESCRIPTION = """\
Make WebDataset shards: PREFIX-000000.tar, PREFIX-000001.tar ... and classes.txt in OUT.

Each sample has its image, copied bit for bit, its class number (.cls), and a .json with the name of the
label, the origin of the image and, if known, the true class. After an interruption, run the same command
again: finished shards are kept. The same source and options give the same shards, bit for bit."""

EXAMPLES = """\
examples:
  python -m pipelines.make_shards folder photos/by-class shards
  python -m pipelines.make_shards folder tar://photos::download.tar s3://lake/photos
  python -m pipelines.make_shards table 'cifar10/train-*.parquet' out --noise asymmetric:0.4 --flips cifar10
  python -m pipelines.make_shards table 'cifar10/train-*.parquet' shards --given-labels cifar10n.npz#random1
  python -m pipelines.make_shards table photos.csv shards --image-column path --label-column category
  python -m pipelines.make_shards clothing1m /data/clothing1m shards --split noisy
  python -m pipelines.make_shards digits shards --noise symmetric:0.4

SRC and OUT are local paths or any URL that fsspec opens (s3://, gs://, zip://::FILE, tar://DIR::FILE).
On a cluster: ray job submit --working-dir . -- python -m pipelines.make_shards ..."""


@dataclass(frozen=True)
class NoiseSpec:
    """The noise to add, as defined in the paper."""

    kind: str
    rate: float
    flips: str | None
    seed: int


@dataclass(frozen=True)
class ShardJob:
    """One set of shards to make; `arguments` must be the same when the job is resumed."""

    read: Callable[..., Source]  # called with per_shard
    out: str
    prefix: str
    per_shard: int = 1000
    noise: NoiseSpec | None = None
    key_prefix: str = ""  # starts every key, so that the keys of two sets differ
    arguments: dict[str, Any] = field(default_factory=dict)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; argparse prints one line and exits with code 2 if it is invalid."""
    parser = argparse.ArgumentParser(
        prog=program("pipelines.make_shards"),
        description=DESCRIPTION,
        epilog=as_started(EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="folder|table|clothing1m|digits")
    folder = kinds.add_parser("folder", help="a tree SRC/CLASS/**/IMAGE")
    table = kinds.add_parser("table", help="CSV or Parquet with labels, and with image bytes or paths")
    clothing1m = kinds.add_parser("clothing1m", help="the Clothing1M download, unpacked")
    digits = kinds.add_parser("digits", help="the digits of scikit-learn as PNG files, to try things out")
    folder.add_argument("src", metavar="SRC", help="folder with one folder per class")
    table.add_argument("src", metavar="SRC", help="a .csv or .parquet file, a glob, or a folder of them")
    clothing1m.add_argument("src", metavar="SRC", help="folder with images/, the key lists and label files")
    for kind in (folder, table, clothing1m, digits):
        _common_options(kind)
    start, also_keys = "start of the shards' names", "(train); any other prefix also starts the keys"
    folder.add_argument("--prefix", default="train", help=f"{start} {also_keys}, as in test-cat/0012")
    table.add_argument(
        "--prefix",
        default="train",
        help=f"{start} {also_keys}, as in test-000000012, unless --key-column is set",
    )
    clothing1m.add_argument("--prefix", help=f"{start} (the split)")
    for kind in (folder, table):
        kind.add_argument(
            "--label-names", metavar="FILE|A,B", help="class names in the order of their numbers"
        )
    for kind in (folder, clothing1m):
        kind.add_argument(
            "--no-shuffle",
            action="store_true",
            help="keep the order of the source (default: shuffle, so that every shard has all classes)",
        )
    _table_options(table)
    clothing1m.add_argument(
        "--split", choices=CLOTHING1M_SPLITS, required=True, help="list of samples to use"
    )
    arguments, others = parser.parse_known_args(argv)
    if others:
        words = " ".join(others)
        parser.error(f"unrecognized arguments: {words}; a pattern needs quotes, as in 'train-*.parquet'")
    return arguments


def _common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder or URL for the shards")
    parser.add_argument(
        "--samples-per-shard", type=int, default=1000, metavar="N", help="size of a shard (1000)"
    )
    parser.add_argument("--noise", metavar="KIND:RATE", help="symmetric:RATE or asymmetric:RATE")
    parser.add_argument(
        "--flips", choices=("cifar10", "next"), help="which classes asymmetric noise confuses"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the noise and the shuffle (1)")


def _table_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image-column", default="image", metavar="NAME", help="bytes or paths (image)")
    parser.add_argument("--label-column", default="label", metavar="NAME", help="names or numbers (label)")
    parser.add_argument("--true-column", metavar="NAME", help="true labels, if the table has them")
    parser.add_argument("--key-column", metavar="NAME", help="sample keys (default: the row number)")
    parser.add_argument("--image-root", metavar="URL", help="where paths start (default: the table's folder)")
    parser.add_argument(
        "--given-labels",
        metavar="FILE.npz#ARRAY",
        help="class numbers, one per row, to use as labels; the label column becomes the true class",
    )


def jobs_of(arguments: argparse.Namespace) -> list[ShardJob]:
    """Turn a command line into the sets of shards it asks for: two for digits, otherwise one."""
    if arguments.samples_per_shard < 1:
        raise PencilError(f"--samples-per-shard {arguments.samples_per_shard}: at least 1 was expected")
    noise, out, size = noise_of(arguments), absolute_url(arguments.out), arguments.samples_per_shard
    recorded = {name: value for name, value in vars(arguments).items() if name not in ("out", "prefix")}
    if arguments.kind == "digits":
        # The test labels stay clean: they measure the effect of training on noisy labels.
        noises = {"train": noise, "test": None}
        return [
            ShardJob(partial(read_digits, split), out, split, size, noises[split], "", recorded)
            for split in noises
        ]
    prefix = arguments.prefix or arguments.split
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", prefix):
        raise PencilError(f"--prefix {prefix!r}: letters, digits, - and _ were expected")
    # Row numbers and paths of a second set would repeat those of the first. A key column, and the lists of
    # Clothing1M, name samples across all sets.
    is_named = arguments.kind == "clothing1m" or getattr(arguments, "key_column", None) or prefix == "train"
    keys = "" if is_named else f"{prefix}-"
    return [ShardJob(_reader(arguments), out, prefix, size, noise, keys, recorded)]


def _reader(arguments: argparse.Namespace) -> Callable[..., Source]:
    """The function that reads the source that the command line names."""
    src = absolute_url(arguments.src)
    seed = None if getattr(arguments, "no_shuffle", True) else arguments.seed
    if arguments.kind == "clothing1m":
        return partial(read_clothing1m, src, arguments.split, seed)
    names = read_names(arguments.label_names) if arguments.label_names else None
    if arguments.kind == "folder":
        return partial(read_folder, src, names, seed)
    if arguments.given_labels and arguments.true_column:
        raise PencilError(
            "--given-labels makes the label column the true class; it cannot be combined with --true-column"
        )
    columns = Columns(
        arguments.image_column, arguments.label_column, arguments.true_column, arguments.key_column
    )
    given = read_given_labels(arguments.given_labels) if arguments.given_labels else None
    root = absolute_url(arguments.image_root) if arguments.image_root else None
    return partial(read_table, src, columns, names, root, given)


def noise_of(arguments: argparse.Namespace) -> NoiseSpec | None:
    """Read `symmetric:0.5` or `asymmetric:0.4`; labels that are already noisy are refused."""
    if arguments.noise is None:
        if arguments.flips:
            raise PencilError("--flips needs --noise asymmetric:RATE")
        return None
    if getattr(arguments, "given_labels", None) or getattr(arguments, "true_column", None):
        raise PencilError("--noise cannot be combined with --given-labels or --true-column")
    kind, _, rate = arguments.noise.partition(":")
    if kind not in ("symmetric", "asymmetric") or not re.fullmatch(r"0(\.\d+)?|1(\.0+)?|\.\d+", rate):
        raise PencilError(
            f"--noise {arguments.noise}: expected symmetric:RATE or asymmetric:RATE, with RATE from 0 to 1"
        )
    if (kind == "asymmetric") != bool(arguments.flips):
        raise PencilError(
            f"--noise {arguments.noise}: asymmetric noise needs --flips cifar10 or --flips next, and only "
            "asymmetric noise takes it"
        )
    return NoiseSpec(kind, float(rate), arguments.flips, arguments.seed)


def read_names(given: str) -> list[str]:
    """Read class names from a file (one per line, or a JSON list), or from a comma-separated list."""
    path = Path(given)
    if not path.is_file():
        if "," not in given:
            raise PencilError(f"--label-names {given}: no such file; expected a file, or a list like cat,dog")
        return [name.strip() for name in given.split(",")]
    text = path.read_text("utf-8")
    if text.lstrip().startswith("["):
        return [str(name) for name in json.loads(text)]
    return [line.strip() for line in text.splitlines() if line.strip()]


def read_given_labels(spec: str) -> Classes:
    """Read one array of class numbers from FILE.npz#ARRAY; nothing in the file is unpickled."""
    path, _, name = spec.partition("#")
    try:
        with np.load(Path(path), allow_pickle=False) as arrays:
            if name not in arrays:
                raise PencilError(f"--given-labels {spec}: no array {name!r}; found {', '.join(arrays)}")
            labels = arrays[name]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise PencilError(f"--given-labels {spec}: not a readable FILE.npz#ARRAY ({error})") from None
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise PencilError(
            f"--given-labels {spec}: found an array of {labels.dtype} with shape {labels.shape}; "
            "one class number per row was expected"
        )
    return np.asarray(labels, np.int64)
