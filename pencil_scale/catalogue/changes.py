"""Catalogue changes: which shards a run must read, by comparing what is listed with what is indexed.

A shard is read when it is new, when its size or ETag differs, or when the rules of reading do. A shard
that left the list but still stands unchanged in its store keeps its rows; one that is gone loses them to
whoever holds the same ids, or to the status `vanished`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pencil_scale.catalogue.catalogue import Catalogue, ShardEntry
from pencil_scale.catalogue.schema import DAMAGED_STATUSES, UNCLEAR_IMAGE, extensions_line
from pencil_scale.catalogue.shard_urls import Listing, Shard
from pencil_scale.catalogue.staging import NAMED_DAMAGED, ShardReport
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import versions_of

_REMEDY = "mend this, or raise data.max_damaged_share; nothing was published"


@dataclass(frozen=True)
class Changes:
    """What is new since the catalogue was published."""

    new: tuple[Shard, ...]
    changed: tuple[Shard, ...]
    reread: tuple[Shard, ...]  # unchanged, but to be read by other rules
    gone: tuple[int, ...]
    unlisted: tuple[int, ...]

    @property
    def to_read(self) -> tuple[Shard, ...]:
        return (*self.new, *self.changed, *self.reread)


def compare(listing: Listing, old: Catalogue | None, rules_name: str) -> Changes:
    """Compare the listed shards with those the catalogue knows."""
    entries = {entry.url: entry for entry in old.shards} if old else {}
    known = [shard for shard in listing.shards if _is_indexed(entries, shard.url)]
    changed = [shard for shard in known if entries[shard.url].version != shard.version]
    same = [shard for shard in known if entries[shard.url].version == shard.version]
    reread = [shard for shard in same if entries[shard.url].rules != rules_name]
    new = [shard for shard in listing.shards if not _is_indexed(entries, shard.url)]
    gone, unlisted = _not_listed(listing, old)
    others = [old.shards[number] for number in unlisted] if old else []
    reread += [Shard(entry.url, entry.version) for entry in others if entry.rules != rules_name]
    return Changes(tuple(new), tuple(changed), tuple(reread), gone, unlisted)


def _is_indexed(entries: dict[str, ShardEntry], url: str) -> bool:
    return url in entries and entries[url].state == "indexed"


def _not_listed(listing: Listing, old: Catalogue | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    listed = {shard.url for shard in listing.shards} | set(listing.waiting)
    entries = list(enumerate(old.shards)) if old else []
    absent = [(number, entry) for number, entry in entries if entry.url not in listed]
    absent = [(number, entry) for number, entry in absent if entry.state == "indexed"]
    versions = versions_of([entry.url for _, entry in absent])
    pairs = list(zip(absent, versions, strict=True))
    unlisted = tuple(number for (number, entry), version in pairs if version == entry.version)
    gone = tuple(number for (number, entry), version in pairs if version != entry.version)
    return gone, unlisted


def damaged_share(shards: Sequence[Shard], reports: Sequence[ShardReport], num_missing: int) -> float:
    """Estimate which share of the samples just read is damaged."""
    total = sum(report.num_samples for report in reports)
    seen, unseen = _damaged(shards, reports, num_missing)
    return (seen + unseen) / (total + unseen) if total else float(unseen > 0)


def check_early(
    shards: Sequence[Shard], reports: Sequence[ShardReport], total_bytes: int, limit: float
) -> None:
    """Stop a long run as soon as its damage is too much even if all that is still to come is sound.

    How many samples will come is guessed from the bytes of those that came.
    """
    seen, unseen = _damaged(shards, reports, 0)
    read_bytes = sum(shard.version.num_bytes for shard in shards)
    if read_bytes and read_bytes < total_bytes:
        expected = sum(report.num_samples for report in reports) * total_bytes / read_bytes
        if expected and seen + unseen > limit * expected:
            share = (seen + unseen) / expected
            raise PencilError(
                f"data.max_damaged_share: after {len(shards):,} of the shards damage is {share:.2%} of all "
                f"samples expected, {limit:.2%} are allowed; {_worst(shards, reports, ())}; {_REMEDY}"
                f"{_named(reports)}"
            )


def _damaged(
    shards: Sequence[Shard], reports: Sequence[ShardReport], num_missing: int
) -> tuple[float, float]:
    """Count damaged samples: those seen, by status or in the damage table, and those only inferred.

    Bytes that could not be read at all stand for so many mean samples, a shard that gave nothing for a
    mean shard.
    """
    full = [(shard, report) for shard, report in zip(shards, reports, strict=True) if report.num_samples]
    empty = [report for report in reports if report.num_samples == 0 and "no_samples" not in report.findings]
    num_bad_shards = len(empty) + num_missing
    total = sum(report.num_samples for _, report in full)
    if total == 0:
        return 0.0, float(num_bad_shards)
    mean_bytes = sum(shard.version.num_bytes for shard, _ in full) / total
    lost = sum(report.lost_bytes for _, report in full) / mean_bytes
    short = sum(max(0, (shard.num_expected or 0) - report.num_samples) for shard, report in full)
    return sum(_num_damaged(report) for _, report in full), num_bad_shards * total / len(full) + lost + short


def check_damage(
    shards: Sequence[Shard], reports: Sequence[ShardReport], missing: Sequence[str], limit: float
) -> float:
    """Refuse to publish when too much is damaged, naming the worst shard; else give the share."""
    share = damaged_share(shards, reports, len(missing))
    if share <= limit:
        return share
    raise PencilError(
        f"data.max_damaged_share: {share:.2%} of the samples are damaged, {limit:.2%} are allowed; "
        f"{_worst(shards, reports, missing)}; {_REMEDY}{_named(reports)}"
    )


def _num_damaged(report: ShardReport) -> int:
    statuses = sum(count for status, count in report.statuses.items() if status in DAMAGED_STATUSES)
    return statuses + report.num_lost


def _named(reports: Sequence[ShardReport]) -> str:
    """Name the first damaged samples, a line each; all of them are named once the catalogue is published."""
    lines = [f"damaged: {line}" for report in reports for line in report.first_damaged][:NAMED_DAMAGED]
    unclear = [report for report in reports if any(report.statuses.get(one) for one in UNCLEAR_IMAGE)]
    if unclear:
        suffixes = sum((Counter(report.suffixes) for report in unclear), Counter[str]())
        lines.append(extensions_line(suffixes))
    return "".join(f"\n{line}" for line in lines)


def _worst(shards: Sequence[Shard], reports: Sequence[ShardReport], missing: Sequence[str]) -> str:
    if missing:
        others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        return (
            f"{missing[0]}{others}: listed but not there; fetch what is missing, or take it off data.shards"
        )
    pairs = list(zip(shards, reports, strict=True))
    shard, report = max(pairs, key=lambda pair: (pair[1].num_samples == 0, _num_damaged(pair[1])))
    kinds = {status: count for status, count in report.statuses.items() if status in DAMAGED_STATUSES}
    words = [f"{count:,} {kind}" for kind, count in {**kinds, **report.findings}.items()]
    first = f"; {report.first_finding}" if report.first_finding else ""
    return f"the worst shard is {shard.url} ({', '.join(words)}){first}"
