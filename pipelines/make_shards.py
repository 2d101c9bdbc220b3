"""Make WebDataset shards from class folders, a table, the Clothing1M download or the digits.

    python -m pipelines.make_shards folder photos/by-class shards/
    python -m pipelines.make_shards table 'cifar10/train-*.parquet' s3://lake/cifar10 --noise symmetric:0.5
    python -m pipelines.make_shards clothing1m /data/clothing1m shards/ --split noisy

Image bytes are copied bit for bit. The same source gives the same shards, bit for bit, on any machine.
After an interruption, run the same command again: finished shards are kept, the others are written.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pencil_scale.catalogue.ranges import Members, shard_bytes
from pencil_scale.config.command import exit_code, refuse_lost
from pencil_scale.images.inspect import format_of
from pencil_scale.method.noise import (
    CIFAR10_FLIPS,
    NoisyLabels,
    asymmetric_noise,
    next_class_flips,
    symmetric_noise,
)
from pencil_scale.storage.errors import PencilError, many
from pencil_scale.storage.folder import BESIDE, Folder
from pencil_scale.storage.urls import filesystem_of, without_passwords
from pipelines.shard_making.options import NoiseSpec, ShardJob, jobs_of, parse_arguments
from pipelines.shard_making.samples import IMAGE_SUFFIXES, Classes, Piece, RawSample, Source
from pipelines.tasks import all_of, is_in_memory, print_table

MOST_CLASSES = 50  # in the summary table
SUFFIX_OF = {"jpeg": "jpg", "tiff": "tif", "jpeg2000": "jp2"}


@dataclass(frozen=True)
class Summary:
    """The shards in the folder, and what this run did."""

    out: str
    source: Source
    noise: NoisyLabels | None
    num_shards: int
    num_written: int  # by this run; the others existed before
    num_bytes: int
    num_unrecognised: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes."""
    arguments = parse_arguments(argv)

    def work() -> None:
        refuse_lost("OUT", arguments.out)
        for job in jobs_of(arguments):
            print_summary(run(job))

    return exit_code(work)


def run(job: ShardJob) -> Summary:
    """Make one set of shards, or the part of it that is missing."""
    source, noise = add_noise(job.read(per_shard=job.per_shard), job.noise)
    finished = claim(job, source)
    shards = shards_of(job, source)
    missing = [shard for shard in shards if shard[0] not in finished]
    shared = (source.classes, job.key_prefix, job.out)
    unrecognised = all_of("writing shards", write_shard, missing, shared, is_in_memory(job.out))
    store = Folder(job.out)
    for name in store.names(""):  # remove what killed writers of these shards left behind
        if name.startswith(f"/{job.prefix}-") and name.endswith(BESIDE):
            store.delete(name.removeprefix("/"))
    sizes = file_sizes(job.out)
    lost = [name for name, *_ in shards if name not in sizes]
    if lost:
        raise PencilError(
            f"{job.out}: {many(len(lost), 'shard')}, such as {lost[0]}, were not written where this "
            "machine can see them; on a cluster OUT must be a shared folder or a URL"
        )
    num_bytes = sum(sizes[name] for name, *_ in shards)
    return Summary(job.out, source, noise, len(shards), len(missing), num_bytes, sum(unrecognised))


def add_noise(source: Source, spec: NoiseSpec | None) -> tuple[Source, NoisyLabels | None]:
    """Add noise to the labels; the labels as they were become the true classes."""
    if spec is None:
        return source, None
    if source.true_class is not None:
        raise PencilError("--noise: the source already has true labels beside the given ones; leave it out")
    num_classes = len(source.classes)
    if spec.flips == "cifar10" and num_classes != 10:
        raise PencilError(f"--flips cifar10 needs the ten classes of CIFAR-10; {num_classes} were found")
    if spec.kind == "symmetric":
        noise = symmetric_noise(source.given_class, spec.rate, num_classes, spec.seed)
    else:
        flips = CIFAR10_FLIPS if spec.flips == "cifar10" else next_class_flips(num_classes)
        noise = asymmetric_noise(source.given_class, spec.rate, flips, spec.seed)
    return replace(source, given_class=noise.noisy_class, true_class=source.given_class), noise


def shards_of(job: ShardJob, source: Source) -> list[tuple[str, Piece, Classes, Classes | None]]:
    """Name every shard, and say which samples it has, and their labels."""
    shards = []
    for number, piece in enumerate(source.pieces):
        rows = slice(number * job.per_shard, (number + 1) * job.per_shard)
        true = None if source.true_class is None else source.true_class[rows]
        shards.append((f"{job.prefix}-{number:06d}.tar", piece, source.given_class[rows], true))
    return shards


def claim(job: ShardJob, source: Source) -> set[str]:
    """Return the names of finished shards, after checking that they belong to this job.

    The arguments of the job are kept beside the shards as PREFIX.make_shards.json. Other arguments, or a
    source that has changed, would mix two datasets under one name.
    """
    store, file = Folder(job.out), f"{job.prefix}.make_shards.json"
    finished = {
        name for name in file_sizes(job.out) if name.startswith(f"{job.prefix}-") and name.endswith(".tar")
    }
    made_with = job.arguments | {
        "number of samples": len(source.given_class),
        "hash of the names": source.fingerprint,
        "hash of the labels": hashlib.blake2b(source.given_class.tobytes(), digest_size=16).hexdigest(),
    }
    before = store.read_json(file)
    if before is not None:
        changed = [name for name in made_with if before.get(name) != made_with[name]]
        if changed:
            was, now = before.get(changed[0]), made_with[changed[0]]
            raise PencilError(
                f"{job.out}: its shards were made with {changed[0]} {was}, now {now}; repeat the first "
                "arguments on the same source to resume, or add shards with another --prefix"
            )
    elif finished:
        raise PencilError(
            f"{job.out}: {min(finished)} was made by something else; use another folder or --prefix"
        )
    _write_classes(store, source.classes)
    if before is None:
        store.put_json(file, made_with)
    return finished


def file_sizes(folder: str) -> dict[str, int]:
    """List the finished files of a folder, with their sizes."""
    filesystem, root = filesystem_of(folder.rstrip("/"))
    filesystem.invalidate_cache()
    if not filesystem.exists(root):
        return {}
    files = [entry for entry in filesystem.ls(root, detail=True) if entry["type"] == "file"]
    sizes = {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in files}
    return {name: size for name, size in sizes.items() if not name.startswith(".") and BESIDE not in name}


def _write_classes(store: Folder, classes: Sequence[str]) -> None:
    if any("\n" in name or not name for name in classes):
        raise PencilError(
            "a class name is empty or has a line break in it; name the classes with --label-names"
        )
    text = "".join(f"{name}\n" for name in classes).encode()
    before = store.find("classes.txt")
    if before is None:
        store.put("classes.txt", text)
    elif before != text:
        raise PencilError(
            f"{store.path('classes.txt')}: has other classes than this source; use another folder, or give "
            "this file as --label-names to add shards here"
        )


def write_shard(
    shared: tuple[Sequence[str], str, str], name: str, piece: Piece, given: Classes, true: Classes | None
) -> int:
    """Write one shard: each image bit for bit, its class number, and what is known about it as JSON.

    A shard is complete, or absent; its bytes depend only on its samples. Returns the number of images of an
    unknown format, which are copied all the same.
    """
    classes, key_prefix, out = shared
    formats: Counter[str] = Counter()

    def samples() -> Iterator[tuple[str, Members]]:
        for number, sample in enumerate(piece()):
            kind, key = format_of(sample.image), key_prefix + sample.key
            formats[kind] += 1
            true_class = -1 if true is None else int(true[number])
            members = describe(sample, kind, classes, int(given[number]), true_class)
            yield key, [(f"{key}.{suffix}", data) for suffix, data in members.items()]

    data = shard_bytes(samples())
    if formats.total() != len(given):
        raise PencilError(
            f"shard {name}: {many(formats.total(), 'sample')} found, {len(given):,} expected; the source "
            "changed while it was read: run again when it no longer changes"
        )
    Folder(out).put(name, data)
    return formats["unknown"]


def describe(sample: RawSample, kind: str, classes: Sequence[str], given: int, true: int) -> dict[str, bytes]:
    """Make the members of a sample: the image, `cls` in WebDataset's convention, `json` with the rest."""
    about = {"label": classes[given], "source": sample.source, "index": sample.row}
    if true >= 0:
        about |= {"true_class": true, "true_label": classes[true]}
    suffix = SUFFIX_OF.get(kind, kind)
    if kind == "unknown":
        named = Path(sample.source).suffix.lower()
        suffix = named[1:] if named in IMAGE_SUFFIXES else "jpg"
    text = json.dumps(about, sort_keys=True)
    return {suffix: sample.image, "cls": str(given).encode(), "json": text.encode()}


def print_summary(summary: Summary) -> None:
    """Print the summary table."""
    source, num_kept = summary.source, summary.num_shards - summary.num_written
    rows = {
        "samples": f"{len(source.given_class):,}",
        "shards": f"{summary.num_shards:,} ({summary.num_written:,} written now, {num_kept:,} from before)",
        "bytes": f"{summary.num_bytes:,}",
    }
    if summary.noise:
        made, asked = f"{summary.noise.rate_made:.4f} of the labels changed", summary.noise.rate_asked
        rows["noise"] = f"{made} (requested rate {asked})"
    elif source.true_class is not None:
        rows["noise"] = f"{many(num_differing(source), 'given label')} not the true class"
    if summary.num_unrecognised:
        rows["unknown format"] = f"{many(summary.num_unrecognised, 'image')}, copied unchanged"
    if source.ignored:
        rows["ignored, not images"] = f"{many(len(source.ignored), 'file')}, such as {source.ignored[0]}"
    if source.empty_folders:
        num = many(len(source.empty_folders), "folder")
        rows["no class, as without images"] = f"{num}, such as {source.empty_folders[0]}"
    counts = np.bincount(source.given_class, minlength=len(source.classes)).tolist()
    first = list(zip(source.classes, counts, strict=True))[:MOST_CLASSES]
    rows |= {f"class {name}": f"{count:,}" for name, count in first}
    if len(counts) > MOST_CLASSES:
        rows[f"{len(counts) - MOST_CLASSES:,} more classes"] = f"{sum(counts[MOST_CLASSES:]):,}"
    print_table(f"shards in {without_passwords(summary.out)}", rows)


def num_differing(source: Source) -> int:
    """Count the given classes that differ from the true one, where that is known."""
    true = source.given_class if source.true_class is None else source.true_class
    return int(np.sum((true >= 0) & (true != source.given_class)))


if __name__ == "__main__":
    sys.exit(main())
