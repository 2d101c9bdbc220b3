"""Make WebDataset shards of a class-folder tree, a table, the Clothing1M download or the digits.

    python -m pipelines.make_shards folder photos/by-class shards/
    python -m pipelines.make_shards table 'cifar10/train-*.parquet' s3://lake/cifar10 --noise symmetric:0.5
    python -m pipelines.make_shards clothing1m /data/clothing1m shards/ --split noisy

Image bytes are copied bit for bit. The same source gives the same shards, bit for bit, on any machine.
Run again after any interruption: finished shards are kept, the others are written.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import ray
from ray.exceptions import RayTaskError
from rich.console import Console
from rich.table import Table

from pencil_scale.config.command import exit_code, refuse_lost
from pencil_scale.method.noise import (
    CIFAR10_FLIPS,
    NoisyLabels,
    asymmetric_noise,
    next_class_flips,
    symmetric_noise,
)
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import without_passwords
from pencil_scale.stream.ray_tasks import num_processors
from pencil_scale.train.local_ray import ensure_ray
from pipelines.progress import Progress
from pipelines.shard_making.shard_options import NoiseSpec, ShardJob, jobs_of, parse_arguments
from pipelines.shard_making.shard_samples import Labels, SourceError
from pipelines.shard_making.shard_writing import OutFolder, ShardPlan, ShardResult, write_shard

MOST_CLASSES = 50  # in the end table


@dataclass(frozen=True)
class Summary:
    """What stands in the folder now."""

    out: str
    num_samples: int
    num_shards: int
    num_written: int  # in this run; the others were there already
    num_bytes: int
    num_unrecognised: int
    class_counts: dict[str, int]
    noise: NoisyLabels | None
    num_differing: int | None  # given class unlike the true one, where the truth is known
    ignored: tuple[str, ...]


def run(job: ShardJob) -> Summary:
    """Make one set of shards, or what is missing of it."""
    labels, noise = add_noise(job.source.labels(), job.noise)
    out = OutFolder(job.out)
    there = claim(out, job, labels)
    names = shard_names(job.prefix, len(labels.given_class), job.per_shard)
    missing = [name for name in names if name not in there]
    results = list(write_missing(job, labels, names, set(missing))) if missing else []
    out.sweep(job.prefix)
    sizes = out.files()
    _refuse_lost(job.out, [name for name in names if name not in sizes])
    return Summary(
        out=job.out,
        num_samples=len(labels.given_class),
        num_shards=len(names),
        num_written=len(results),
        num_bytes=sum(sizes[name] for name in names),
        num_unrecognised=sum(result.num_unrecognised for result in results),
        class_counts=dict(zip(labels.classes, _counts(labels), strict=True)),
        noise=noise,
        num_differing=_num_differing(labels),
        ignored=labels.ignored,
    )


def _refuse_lost(out: str, lost: Sequence[str]) -> None:
    if lost:
        raise PencilError(
            f"{out}: {len(lost):,} shards such as {lost[0]} were written where this machine cannot see "
            "them; on a cluster OUT must be a shared folder or a URL"
        )


def add_noise(labels: Labels, spec: NoiseSpec | None) -> tuple[Labels, NoisyLabels | None]:
    """Make the noise that was asked for; the labels as they were become the truth."""
    if spec is None:
        return labels, None
    if labels.true_class is not None:
        raise SourceError("--noise: the source already tells given labels from true ones; leave it out")
    num_classes = len(labels.classes)
    if spec.flips == "cifar10" and num_classes != 10:
        raise SourceError(f"--flips cifar10 is for the ten classes of CIFAR-10; {num_classes} were found")
    if spec.kind == "symmetric":
        noise = symmetric_noise(labels.given_class, spec.rate, num_classes, spec.seed)
    else:
        flips = CIFAR10_FLIPS if spec.flips == "cifar10" else next_class_flips(num_classes)
        noise = asymmetric_noise(labels.given_class, spec.rate, flips, spec.seed)
    return replace(labels, given_class=noise.noisy_class, true_class=labels.given_class), noise


def shard_names(prefix: str, num_samples: int, per_shard: int) -> list[str]:
    """Name the shards, in order."""
    return [f"{prefix}-{number:06d}.tar" for number in range(-(-num_samples // per_shard))]


def claim(out: OutFolder, job: ShardJob, labels: Labels) -> dict[str, int]:
    """Give the shards that are finished already, after making sure that they are shards of this job.

    What was asked for is kept beside the shards as PREFIX.make_shards.json; a run that asks for
    something else, or whose source has changed, would mix two datasets under one name.
    """
    files, record_name = out.files(), f"{job.prefix}.make_shards.json"
    there = {
        name: size
        for name, size in files.items()
        if name.startswith(f"{job.prefix}-") and name.endswith(".tar")
    }
    labelled = hashlib.blake2b(labels.given_class.tobytes(), digest_size=16).hexdigest()
    record = job.arguments | {
        "samples": len(labels.given_class),
        "source": labels.fingerprint,
        "labels": labelled,
    }
    if record_name in files:
        _refuse_other(out, record_name, record)
    elif there:
        raise PencilError(
            f"{out.url}: holds {min(there)}, made by something else; use another folder or --prefix"
        )
    _write_classes(out, files, labels.classes)
    if record_name not in files:
        out.write_text(record_name, json.dumps(record, indent=1, sort_keys=True) + "\n")
    return there


def _refuse_other(out: OutFolder, record_name: str, record: dict[str, object]) -> None:
    try:
        before = json.loads(out.read_text(record_name))
    except ValueError:
        raise PencilError(
            f"{out.url}/{record_name}: damaged; delete it with its shards, and run again"
        ) from None
    changed = [name for name in record if before.get(name) != json.loads(json.dumps(record[name]))]
    asked = [name for name in changed if name not in ("samples", "source", "labels")]
    if asked:
        said = ", ".join(_said(name, before.get(name), record[name]) for name in asked)
        raise PencilError(
            f"{out.url}: its shards were made with {said}; repeat the first arguments to go on, "
            "or use another folder"
        )
    if changed:
        raise PencilError(
            f"{out.url}: its shards were made when the source had {_differs(changed, before, record)}; "
            "bring it back to go on, or use another folder"
        )


def _said(name: str, before: object, now: object) -> str:
    """One argument as it was and is, as people write it."""
    if name == "shuffle":
        return "a shuffle, now --no-shuffle" if before else "--no-shuffle, now a shuffle"
    if name == "key_prefix":
        return f"keys that do not begin with the prefix, now {now}"
    spelt = name.upper() if name in ("kind", "src") else f"--{name.replace('_', '-')}"
    was, is_now = ("none" if value is None else value for value in (before, now))
    return f"{spelt} {was}, now {is_now}"


def _differs(changed: Sequence[str], before: dict[str, object], now: dict[str, object]) -> str:
    """What is another in a source, the plainest first: where samples came or went, all else follows."""
    if "samples" in changed:
        return f"{before.get('samples')} samples, now {now['samples']}"
    return "other files, or in another order" if "source" in changed else "other labels"


def _write_classes(out: OutFolder, files: dict[str, int], classes: Sequence[str]) -> None:
    text = "".join(f"{name}\n" for name in classes)
    if any("\n" in name or not name for name in classes):
        raise SourceError("a class has an empty name or a line break in it; name classes with --label-names")
    if "classes.txt" not in files:
        out.write_text("classes.txt", text)
    elif out.read_text("classes.txt") != text:
        raise PencilError(f"{out.url}/classes.txt: lists other classes than this source; use another folder")


def write_missing(
    job: ShardJob, labels: Labels, names: Sequence[str], missing: set[str]
) -> Iterator[ShardResult]:
    """Write shards on Ray, a few more at a time than there are processors, and give them as they finish."""
    ensure_ray()
    task = ray.remote(write_shard)
    classes: ray.ObjectRef[Sequence[str]] = ray.put(labels.classes)
    most = 2 * num_processors()
    waiting: list[ray.ObjectRef[ShardResult]] = []
    with Progress("shards", len(names), done=len(names) - len(missing)) as progress:
        for plan in _plans(job, labels, names):
            if plan.name in missing:
                waiting.append(task.remote(plan, classes, job.out))
            while len(waiting) >= most:
                yield _next_result(waiting, progress)
        while waiting:
            yield _next_result(waiting, progress)


def _plans(job: ShardJob, labels: Labels, names: Sequence[str]) -> Iterator[ShardPlan]:
    for number, (name, piece) in enumerate(zip(names, job.source.pieces(job.per_shard), strict=True)):
        rows = slice(number * job.per_shard, (number + 1) * job.per_shard)
        true = None if labels.true_class is None else labels.true_class[rows]
        yield ShardPlan(name, piece, labels.given_class[rows], true, job.key_prefix)


def _next_result(waiting: "list[ray.ObjectRef[ShardResult]]", progress: Progress) -> ShardResult:
    (ready, *_), waiting[:] = ray.wait(waiting)
    try:
        result: ShardResult = ray.get(ready)
    except RayTaskError as error:
        if isinstance(error.cause, PencilError):
            raise error.cause from None
        raise
    progress.advance()
    return result


def _counts(labels: Labels) -> list[int]:
    counts: list[int] = np.bincount(labels.given_class, minlength=len(labels.classes)).tolist()
    return counts


def _num_differing(labels: Labels) -> int | None:
    if labels.true_class is None:
        return None
    return int(np.sum((labels.true_class >= 0) & (labels.true_class != labels.given_class)))


def print_summary(summary: Summary) -> None:
    """Print the end table."""
    table = Table(title=f"shards in {without_passwords(summary.out)}", show_header=False)
    kept = summary.num_shards - summary.num_written
    table.add_row("samples", f"{summary.num_samples:,}")
    table.add_row(
        "shards", f"{summary.num_shards:,} ({summary.num_written:,} written now, {kept:,} there before)"
    )
    table.add_row("bytes", f"{summary.num_bytes:,}")
    if summary.noise:
        made = f"{summary.noise.rate_made:.4f} of the labels changed"
        table.add_row("noise", f"{made} (asked for a rate of {summary.noise.rate_asked})")
    elif summary.num_differing is not None:
        table.add_row("differ", f"{summary.num_differing:,} given labels differ from the true class")
    if summary.num_unrecognised:
        table.add_row("no known image", f"{summary.num_unrecognised:,} copied as they are")
    if summary.ignored:
        table.add_row(
            "left out", f"{len(summary.ignored):,} files that are no images: {summary.ignored[0]} ..."
        )
    table.add_section()
    counts = list(summary.class_counts.items())
    for name, count in counts[:MOST_CLASSES]:
        table.add_row(name, f"{count:,}")
    if len(counts) > MOST_CLASSES:
        rest = sum(count for _, count in counts[MOST_CLASSES:])
        table.add_row(f"{len(counts) - MOST_CLASSES:,} classes more", f"{rest:,}")
    Console(markup=False, highlight=False).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = parse_arguments(argv)

    def work() -> None:
        refuse_lost("OUT", arguments.out)
        for job in jobs_of(arguments):
            print_summary(run(job))

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
