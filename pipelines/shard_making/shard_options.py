"""The command line of `make_shards`, and the job it describes.

jobs = jobs_of(parse_arguments(["folder", "photos", "shards", "--noise", "symmetric:0.5"]))
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.shard_making.raw_labels import read_names
from pipelines.shard_making.shard_samples import Source, SourceError, absolute_url
from pipelines.shard_making.shard_sources import (
    CLOTHING1M_SPLITS,
    Clothing1MSource,
    DigitsSource,
    FolderSource,
)
from pipelines.shard_making.shard_tables import TableColumns, TableSource

DESCRIPTION = """\
Make WebDataset shards: PREFIX-000000.tar, PREFIX-000001.tar ... and classes.txt in OUT.

Each sample has its image, copied bit for bit, its class number (.cls) and a .json with the label's name,
where the image came from and, where it is known, the true class. Run it again after an interruption:
finished shards are kept. The same source and options give the same shards, bit for bit."""

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
    """The paper's noise, as asked for."""

    kind: str
    rate: float
    flips: str | None
    seed: int


@dataclass(frozen=True)
class ShardJob:
    """One set of shards to make; `arguments` is what a second run must repeat."""

    source: Source
    out: str
    prefix: str
    per_shard: int = 1000
    noise: NoiseSpec | None = None
    key_prefix: str = ""  # begins every key, so that keys of two sets differ
    arguments: dict[str, Any] = field(default_factory=dict)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; argparse itself ends with code 2 and one line where it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.make_shards",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="folder|table|clothing1m|digits")
    _folder_options(kinds.add_parser("folder", help="a tree SRC/CLASS/**/IMAGE"))
    _table_options(kinds.add_parser("table", help="CSV or Parquet with image bytes or paths, and labels"))
    _clothing1m_options(kinds.add_parser("clothing1m", help="the Clothing1M download, unpacked"))
    _common_options(kinds.add_parser("digits", help="scikit-learn's digits as PNG, for a first try"))
    arguments, others = parser.parse_known_args(argv)
    if others:
        words = " ".join(others)
        parser.error(f"unrecognized arguments: {words}; a pattern needs quotes, as in 'train-*.parquet'")
    return arguments


def _folder_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="folder whose folders name the classes")
    _common_options(parser)
    _prefix_option(parser, "train", "; another one begins the keys, too: test-cat/0012")
    parser.add_argument("--label-names", metavar="FILE|A,B", help="classes in the order of their numbers")
    _shuffle_option(parser)


def _table_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a .csv or .parquet file, a glob, or a folder of them")
    _common_options(parser)
    keys = "; another one begins the keys, too, unless --key-column gives them: test-000000012"
    _prefix_option(parser, "train", keys)
    parser.add_argument("--image-column", default="image", metavar="NAME", help="bytes or paths (image)")
    parser.add_argument("--label-column", default="label", metavar="NAME", help="names or numbers (label)")
    parser.add_argument("--true-column", metavar="NAME", help="true labels, where the table has them too")
    parser.add_argument("--key-column", metavar="NAME", help="sample keys (default: the row's number)")
    parser.add_argument("--label-names", metavar="FILE|A,B", help="classes in the order of their numbers")
    parser.add_argument("--image-root", metavar="URL", help="where paths start (default: the table's folder)")
    parser.add_argument(
        "--given-labels",
        metavar="FILE.npz#ARRAY",
        help="class numbers, one a row, that replace the label column; that one becomes the true class",
    )


def _clothing1m_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="folder with images/, the key lists and the label files")
    _common_options(parser)
    _prefix_option(parser, None)
    parser.add_argument("--split", choices=CLOTHING1M_SPLITS, required=True, help="which list of samples")
    _shuffle_option(parser)


def _shuffle_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-shuffle",
        dest="shuffle",
        action="store_false",
        help="keep the source's order (default: seeded shuffle, so that every shard holds all classes)",
    )


def _prefix_option(parser: argparse.ArgumentParser, default: str | None, keys: str = "") -> None:
    parser.add_argument(
        "--prefix", default=default, help=f"start of the shards' names ({default or 'the split'}){keys}"
    )
    parser.set_defaults(default_prefix=default)


def _common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder or URL for the shards")
    parser.add_argument("--samples-per-shard", type=int, default=1000, metavar="N", help="(1000)")
    parser.add_argument("--noise", metavar="KIND:RATE", help="symmetric:RATE or asymmetric:RATE")
    parser.add_argument(
        "--flips", choices=("cifar10", "next"), help="which classes asymmetric noise confuses"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the noise and the shuffle (1)")


def jobs_of(arguments: argparse.Namespace) -> list[ShardJob]:
    """Turn a command line into the sets of shards it asks for: two for digits, else one."""
    if arguments.samples_per_shard < 1:
        raise SourceError(f"--samples-per-shard {arguments.samples_per_shard}: at least 1 was expected")
    noise = noise_of(arguments)
    if arguments.kind == "digits":
        # The test labels stay clean: they measure what training on the noise did.
        return [
            _job(arguments, DigitsSource("train"), "train", noise),
            _job(arguments, DigitsSource("test"), "test", None),
        ]
    prefix = arguments.prefix or arguments.split
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", prefix):
        raise SourceError(f"--prefix {prefix!r}: letters, digits, - and _ were expected")
    return [_job(arguments, source_of(arguments), prefix, noise, key_prefix(arguments))]


def key_prefix(arguments: argparse.Namespace) -> str:
    """How every key begins: row numbers and paths of a second set would be those of the first again.

    A column of keys, and Clothing1M's lists, name samples across all sets, and stay as they are.
    """
    default = arguments.default_prefix
    named = default is None or getattr(arguments, "key_column", None)
    return "" if named or arguments.prefix == default else f"{arguments.prefix}-"


def _job(
    arguments: argparse.Namespace, source: Source, prefix: str, noise: NoiseSpec | None, keys: str = ""
) -> ShardJob:
    hidden = ("out", "prefix", "default_prefix")
    recorded = {name: value for name, value in vars(arguments).items() if name not in hidden}
    if keys:
        recorded["key_prefix"] = keys
    out = absolute_url(arguments.out)
    return ShardJob(source, out, prefix, arguments.samples_per_shard, noise, keys, recorded)


def source_of(arguments: argparse.Namespace) -> Source:
    """Make the source that the command line names."""
    seed = arguments.seed if getattr(arguments, "shuffle", False) else None
    if arguments.kind == "clothing1m":
        return Clothing1MSource(absolute_url(arguments.src), arguments.split, seed)
    names = read_names(arguments.label_names) if arguments.label_names else None
    if arguments.kind == "folder":
        return FolderSource(absolute_url(arguments.src), names, seed)
    if arguments.given_labels and arguments.true_column:
        raise SourceError("--given-labels keeps the label column as the truth: leave --true-column out")
    columns = TableColumns(
        arguments.image_column, arguments.label_column, arguments.true_column, arguments.key_column
    )
    given = read_given_labels(arguments.given_labels) if arguments.given_labels else None
    root = absolute_url(arguments.image_root) if arguments.image_root else None
    return TableSource(absolute_url(arguments.src), columns, names, root, given)


def noise_of(arguments: argparse.Namespace) -> NoiseSpec | None:
    """Read `symmetric:0.5` or `asymmetric:0.4`; noise on labels that are noisy already is refused."""
    if arguments.noise is None:
        if arguments.flips:
            raise SourceError("--flips belongs to --noise asymmetric:RATE, which was not given")
        return None
    if getattr(arguments, "given_labels", None) or getattr(arguments, "true_column", None):
        raise SourceError("--noise: the labels are noisy already; leave --given-labels or --true-column out")
    kind, _, rate = arguments.noise.partition(":")
    if kind not in ("symmetric", "asymmetric") or not re.fullmatch(r"0(\.\d+)?|1(\.0+)?|\.\d+", rate):
        raise SourceError(f"--noise {arguments.noise}: symmetric:RATE or asymmetric:RATE, RATE from 0 to 1")
    if (kind == "asymmetric") != bool(arguments.flips):
        raise SourceError(
            f"--noise {arguments.noise}: --flips cifar10 or next belongs to asymmetric, and only there"
        )
    return NoiseSpec(kind, float(rate), arguments.flips, arguments.seed)


def read_given_labels(spec: str) -> npt.NDArray[np.int64]:
    """Read one array of class numbers from FILE.npz#ARRAY; nothing in the file is unpickled."""
    path, _, name = spec.partition("#")
    try:
        with np.load(Path(path), allow_pickle=False) as arrays:
            if name not in arrays:
                raise SourceError(f"--given-labels {spec}: no array {name!r}; it has {', '.join(arrays)}")
            labels = arrays[name]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SourceError(f"--given-labels {spec}: not a readable FILE.npz#ARRAY ({error})") from None
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise SourceError(
            f"--given-labels {spec}: shape {labels.shape} of {labels.dtype}; "
            "one class number a row was expected"
        )
    return np.asarray(labels, np.int64)
