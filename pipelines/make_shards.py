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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pencil_scale.config.command import exit_code, refuse_lost
from pencil_scale.method.noise import (
    CIFAR10_FLIPS,
    NoisyLabels,
    asymmetric_noise,
    next_class_flips,
    symmetric_noise,
)
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import BESIDE, Folder
from pencil_scale.storage.urls import without_passwords
from pipelines.shard_making.options import NoiseSpec, ShardJob, jobs_of, parse_arguments
from pipelines.shard_making.samples import Labels
from pipelines.shard_making.writing import ShardPlan, ShardResult, file_sizes, write_shard
from pipelines.tasks import each, is_in_memory, print_table

MOST_CLASSES = 50  # in the summary table


@dataclass(frozen=True)
class Summary:
    """The shards in the folder, and what this run did."""

    out: str
    num_samples: int
    num_shards: int
    num_written: int  # by this run; the others existed before
    num_bytes: int
    num_unrecognised: int
    class_counts: dict[str, int]
    noise: NoisyLabels | None
    num_differing: int | None  # given classes that differ from the true one, where that is known
    ignored: tuple[str, ...]


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
    labels, noise = add_noise(job.source.labels(), job.noise)
    finished = claim(job, labels)
    names = shard_names(job.prefix, len(labels.given_class), job.per_shard)
    missing = {name for name in names if name not in finished}
    results = list(write_missing(job, labels, names, missing)) if missing else []
    store = Folder(job.out)
    for name in store.names(""):  # remove what killed writers of these shards left behind
        if name.startswith(f"/{job.prefix}-") and name.endswith(BESIDE):
            store.delete(name.removeprefix("/"))
    sizes = file_sizes(job.out)
    lost = [name for name in names if name not in sizes]
    if lost:
        raise PencilError(
            f"{job.out}: {len(lost):,} shards such as {lost[0]} were written where this machine cannot see "
            "them; on a cluster OUT must be a shared folder or a URL"
        )
    counts = np.bincount(labels.given_class, minlength=len(labels.classes)).tolist()
    return Summary(
        out=job.out,
        num_samples=len(labels.given_class),
        num_shards=len(names),
        num_written=len(results),
        num_bytes=sum(sizes[name] for name in names),
        num_unrecognised=sum(result.num_unrecognised for result in results),
        class_counts=dict(zip(labels.classes, counts, strict=True)),
        noise=noise,
        num_differing=num_differing(labels),
        ignored=labels.ignored,
    )


def num_differing(labels: Labels) -> int | None:
    """Count the given classes that differ from the true one; None if the truth is not known."""
    if labels.true_class is None:
        return None
    return int(np.sum((labels.true_class >= 0) & (labels.true_class != labels.given_class)))


def add_noise(labels: Labels, spec: NoiseSpec | None) -> tuple[Labels, NoisyLabels | None]:
    """Add noise to the labels; the labels as they were become the true classes."""
    if spec is None:
        return labels, None
    if labels.true_class is not None:
        raise PencilError("--noise: the source already has true labels beside the given ones; leave it out")
    num_classes = len(labels.classes)
    if spec.flips == "cifar10" and num_classes != 10:
        raise PencilError(f"--flips cifar10 needs the ten classes of CIFAR-10; {num_classes} were found")
    if spec.kind == "symmetric":
        noise = symmetric_noise(labels.given_class, spec.rate, num_classes, spec.seed)
    else:
        flips = CIFAR10_FLIPS if spec.flips == "cifar10" else next_class_flips(num_classes)
        noise = asymmetric_noise(labels.given_class, spec.rate, flips, spec.seed)
    return replace(labels, given_class=noise.noisy_class, true_class=labels.given_class), noise


def shard_names(prefix: str, num_samples: int, per_shard: int) -> list[str]:
    """Name the shards, in order."""
    return [f"{prefix}-{number:06d}.tar" for number in range(-(-num_samples // per_shard))]


def claim(job: ShardJob, labels: Labels) -> set[str]:
    """Return the names of finished shards, after checking that they belong to this job.

    The arguments of the job are kept beside the shards as PREFIX.make_shards.json. Other arguments, or a
    source that has changed, would mix two datasets under one name.
    """
    store, record_name = Folder(job.out), f"{job.prefix}.make_shards.json"
    names = file_sizes(job.out)
    finished = {name for name in names if name.startswith(f"{job.prefix}-") and name.endswith(".tar")}
    record = job.arguments | {
        "samples": len(labels.given_class),
        "source": labels.fingerprint,
        "labels": hashlib.blake2b(labels.given_class.tobytes(), digest_size=16).hexdigest(),
    }
    before = store.read_json(record_name)
    if before is not None:
        _refuse_changes(job.out, before, json.loads(json.dumps(record)))
    elif finished:
        raise PencilError(
            f"{job.out}: {min(finished)} was made by something else; use another folder or --prefix"
        )
    _write_classes(store, labels.classes)
    if before is None:
        store.put(record_name, json.dumps(record, indent=1, sort_keys=True).encode() + b"\n")
    return finished


def _refuse_changes(out: str, before: dict[str, object], record: dict[str, object]) -> None:
    changed = [name for name in record if before.get(name) != record[name]]
    arguments = [name for name in changed if name not in ("samples", "source", "labels")]
    if arguments:
        said = ", ".join(_said(name, before.get(name), record[name]) for name in arguments)
        raise PencilError(
            f"{out}: its shards were made with {said}; repeat the first arguments to resume, or use another "
            "folder"
        )
    if changed:
        # If samples were added or removed, everything else differs too: name the simplest change.
        differs = "other files, or in another order" if "source" in changed else "other labels"
        if "samples" in changed:
            differs = f"{before.get('samples')} samples, now {record['samples']}"
        raise PencilError(
            f"{out}: its shards were made when the source had {differs}; restore the source to resume, or "
            "use another folder"
        )


def _said(name: str, before: object, now: object) -> str:
    """One argument before and now, as people write it."""
    if name == "shuffle":
        return "a shuffle, now --no-shuffle" if before else "--no-shuffle, now a shuffle"
    if name == "key_prefix":
        return f"keys that do not start with the prefix, now {now}"
    spelt = name.upper() if name in ("kind", "src") else f"--{name.replace('_', '-')}"
    was, is_now = ("none" if value is None else value for value in (before, now))
    return f"{spelt} {was}, now {is_now}"


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
            f"{store.path('classes.txt')}: has other classes than this source; use another folder"
        )


def write_missing(
    job: ShardJob, labels: Labels, names: Sequence[str], missing: set[str]
) -> Iterator[ShardResult]:
    """Write the missing shards in tasks, and yield the results as they finish."""
    pieces = ((plan,) for plan in shard_plans(job, labels, names) if plan.name in missing)
    shared, here = (labels.classes, job.out), is_in_memory(job.out)
    todo, done = len(missing), len(names) - len(missing)
    work = each("writing shards", _write, pieces, shared, here=here, num_pieces=todo, num_done=done)
    for _, result in work:
        yield result


def _write(shared: tuple[Sequence[str], str], plan: ShardPlan) -> ShardResult:
    return write_shard(plan, *shared)


def shard_plans(job: ShardJob, labels: Labels, names: Sequence[str]) -> Iterator[ShardPlan]:
    """Say for each shard which samples it has, and their labels."""
    for number, (name, piece) in enumerate(zip(names, job.source.pieces(job.per_shard), strict=True)):
        rows = slice(number * job.per_shard, (number + 1) * job.per_shard)
        true = None if labels.true_class is None else labels.true_class[rows]
        yield ShardPlan(name, piece, labels.given_class[rows], true, job.key_prefix)


def print_summary(summary: Summary) -> None:
    """Print the summary table."""
    num_kept = summary.num_shards - summary.num_written
    rows = {
        "samples": f"{summary.num_samples:,}",
        "shards": f"{summary.num_shards:,} ({summary.num_written:,} written now, {num_kept:,} from before)",
        "bytes": f"{summary.num_bytes:,}",
    }
    if summary.noise:
        made, asked = f"{summary.noise.rate_made:.4f} of the labels changed", summary.noise.rate_asked
        rows["noise"] = f"{made} (requested rate {asked})"
    elif summary.num_differing is not None:
        rows["noise"] = f"{summary.num_differing:,} given labels differ from the true class"
    if summary.num_unrecognised:
        rows["unknown format"] = f"{summary.num_unrecognised:,} images, copied unchanged"
    if summary.ignored:
        rows["ignored"] = f"{len(summary.ignored):,} files that are not images: {summary.ignored[0]} ..."
    counts = list(summary.class_counts.items())
    rows |= {f"class {name}": f"{count:,}" for name, count in counts[:MOST_CLASSES]}
    if len(counts) > MOST_CLASSES:
        rest = sum(count for _, count in counts[MOST_CLASSES:])
        rows[f"{len(counts) - MOST_CLASSES:,} more classes"] = f"{rest:,}"
    print_table(f"shards in {without_passwords(summary.out)}", rows)


if __name__ == "__main__":
    sys.exit(main())
