"""Draw a subset with the same number of samples from each class, and publish it for `data.subset`.

    python -m pipelines.balance_subset configs/clothing1m.yaml
    python -m pipelines.balance_subset CONFIG subset.per_class=500 subset.by=corrected subset.shards=always

The seed puts all samples into an order, and each class takes its first ones. So the same seed on a larger
catalogue keeps as many members as possible. If nothing has changed, a second run draws nothing.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import ClassOrder
from pencil_scale.catalogue.ranges import locate_samples, read_samples, shard_bytes, thinness
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.config.command import run_job, say
from pencil_scale.config.settings import Config, SubsetJob
from pencil_scale.labels.published import Published, find_published, require_same_rows
from pencil_scale.nights.record import labels_in_use
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.subset.choice import (
    Counts,
    Rule,
    allocate,
    candidates,
    count,
    merge_picks,
    position_limits,
    row_ranges,
)
from pencil_scale.subset.files import SubsetWords, read_table, read_words, write_subset
from pipelines.tasks import all_of, each, is_in_memory, print_table

MOST_CLASSES = 30  # in a printed table


@dataclass(frozen=True)
class Summary:
    """The subset as it is published, and what this run did."""

    folder: str
    words: SubsetWords
    available: Counts  # samples of each class to choose from
    drawn: bool  # False: drawn by an earlier run
    num_shards_written: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.balance_subset", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Count, allocate, pick, publish; then copy the members into their own shards, if that is wanted."""
    options, storage = config.subset, Storage(config.run.storage)
    folder = storage.path(storage.subset(options.name))
    catalogue = Catalogue.open(storage.url)
    published = None
    if options.by != "noisy" or options.min_confidence > 0:
        published = find_published(storage.url, options.labels or labels_in_use(storage.url, config.run.name))
    rule = _rule(config, catalogue, published)
    here = is_in_memory(storage.url)
    available = _count(rule, here)
    quotas = _allocate(options, available, catalogue.class_names)
    words, drawn_with = read_words(folder), _drawn_with(config, rule, published)
    drawn = words is None or words.drawn_with != drawn_with
    if drawn or words is None:
        members = _pick(rule, quotas, available, here)
        counts = tuple(np.bincount(members["class"].to_numpy(), minlength=catalogue.num_classes).tolist())
        source = (storage.url, catalogue.id, catalogue.version)
        words = SubsetWords(*source, len(members), catalogue.class_names, counts, drawn_with)
    else:
        members = read_table(folder, words)
    shards, num_written = _copy_shards(options, catalogue, folder, members, words.shards)
    if drawn or shards != words.shards:
        words = write_subset(folder, replace(words, shards=shards), members)
    summary = Summary(folder, words, available, drawn, num_written)
    print_summary(summary)
    return summary


def _rule(config: Config, catalogue: Catalogue, published: Published | None) -> Rule:
    options = config.subset
    excluded = [make_overlay(url).excluded for url in (options.exclude, config.data.exclude)]
    manifest = None
    if published is not None:
        manifest, what = published.manifest, f"subset.labels: {published.name}"
        ClassOrder.between(manifest.class_names, catalogue.class_names, what)
        require_same_rows(manifest, catalogue)
    keys, by_corrected = np.unique(np.concatenate(excluded)), options.by == "corrected"
    return Rule(catalogue, config.run.seed, manifest, by_corrected, options.min_confidence, keys)


def _drawn_with(config: Config, rule: Rule, published: Published | None) -> dict[str, Any]:
    """Everything that decides which samples are members."""
    chosen = config.subset.model_dump(include={"per_class", "total", "by", "on_shortage", "min_confidence"})
    labels = published and f"{published.name} {_short_hash(published.manifest.encode())}"
    excluded = _short_hash(rule.excluded.tobytes())
    source = {"catalogue": f"{rule.catalogue.id} {rule.catalogue.version}", "seed": config.run.seed}
    return chosen | source | {"labels": labels, "excluded": excluded}


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _count(rule: Rule, here: bool) -> Counts:
    if rule.labels is None and not len(rule.excluded):  # the catalogue has counted these
        return np.array(rule.catalogue.manifest["class_counts"], np.int64)
    total = np.zeros(rule.catalogue.num_classes, np.int64)
    for _, found in each("counting", count, [(rows,) for rows in row_ranges(rule)], rule, here=here):
        total += found
    return total


def _allocate(options: SubsetJob, available: Counts, names: Sequence[str]) -> Counts:
    """Say how many samples each class gives, and print it before anything is read."""
    wanted = options.model_dump(include={"per_class", "total", "on_shortage"})
    quotas = allocate(available, names, **wanted)
    rows = {name: f"{quotas[c]:,} of {available[c]:,}" for c, name in enumerate(names[:MOST_CLASSES])}
    if len(names) > MOST_CLASSES:
        taken, others = (int(counts[MOST_CLASSES:].sum()) for counts in (quotas, available))
        rows[f"{len(names) - MOST_CLASSES:,} more classes"] = f"{taken:,} of {others:,}"
    print_table(f"allocation: {int(quotas.sum()):,} samples", rows)
    return quotas


def _pick(rule: Rule, quotas: Counts, available: Counts, here: bool) -> pa.Table:
    """Pick from every range of rows; picks are merged as they arrive, to keep memory small."""
    wanted, limits = int(quotas.sum()), position_limits(quotas, available)
    pieces = [(rows, quotas, limits) for rows in row_ranges(rule)]
    picks: list[pa.Table] = []
    for _, found in each("picking", candidates, pieces, rule, here=here):
        picks.append(found)
        if sum(map(len, picks)) > 2 * wanted + (1 << 20):
            picks = [merge_picks(picks, quotas, rule.seed)]
    members = merge_picks(picks, quotas, rule.seed)
    if len(members) != wanted:
        raise PencilError(
            f"{len(members):,} samples were found, {wanted:,} were expected; set another run.seed"
        )
    return members


def _copy_shards(
    options: SubsetJob, catalogue: Catalogue, folder: str, members: pa.Table, before: str | None
) -> tuple[str | None, int]:
    """Copy the members into new shards if that is wanted; return their folder and the number written."""
    if options.shards == "never" or len(members) == 0:
        return before, 0
    places = locate_samples(catalogue, members["row"].to_numpy())
    share = thinness(catalogue, places)
    if options.shards == "thin" and share >= options.thin_share:
        return before, 0
    print(f"members are {share:.1%} of the bytes of their shards: copying them into their own shards")
    size = options.samples_per_shard
    words = [catalogue.version, size, hashlib.sha256(members["row"].to_numpy().tobytes()).hexdigest()]
    target = f"{folder}/shards-{_short_hash(json.dumps(words).encode())[:12]}"
    names = [f"{number:06d}.tar" for number in range(-(-len(places) // size))]
    finished = {name.rpartition("/")[2] for name in Folder(target).names("")}
    pieces = [(name, number * size, size) for number, name in enumerate(names) if name not in finished]
    all_of("copying shards", _copy_shard, pieces, (catalogue, places, target), is_in_memory(folder))
    return target, len(pieces)


def _copy_shard(shared: tuple[Catalogue, pa.Table, str], name: str, first: int, num: int) -> None:
    catalogue, all_places, folder = shared
    places = all_places.slice(first, num)
    Folder(folder).put(name, shard_bytes(read_samples(catalogue, places)))


def print_summary(summary: Summary) -> None:
    """Print the summary table."""
    words, counts = summary.words, summary.words.class_counts
    rows = {
        "samples": f"{words.num_members:,} of {int(summary.available.sum()):,}",
        "classes": f"{len(counts):,}, with {min(counts):,} to {max(counts):,} samples",
        "catalogue version": str(words.catalogue_version),
        "drawn": "now" if summary.drawn else "by an earlier run; nothing has changed",
    }
    if words.shards:
        rows["shards written now"] = f"{summary.num_shards_written:,}"
    print_table("subset", rows)
    if words.shards:  # a table would cut a long path
        say(f"shards with only these samples: {words.shards}")
    say(f"to train on it: data.subset={summary.folder}")


if __name__ == "__main__":
    sys.exit(main())
