"""Staging: what one shard contained, kept until the catalogue is published, unless too much is damaged.

The staged name of a shard is made of its URL, its version and the rules it was read by. A job that is run
again after a crash uses what is already staged, and reads again what has changed since.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.schema import (
    CHUNK_ROWS,
    DAMAGED_STATUSES,
    FINDING,
    RECORD,
    SUFFIXES_SHOWN,
    UNCLEAR_IMAGE,
    damage_line,
    extensions_line,
    parquet_bytes,
    status_line,
    to_stored,
)
from pencil_scale.catalogue.shard_index import IndexRules, ShardIndexer
from pencil_scale.catalogue.shard_urls import Shard
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import open_source, version_of

NAMED_DAMAGED = 5  # samples in an error message

# Kinds of damage that lose no samples, however many bytes they span.
HARMLESS = frozenset(("odd_end", "no_samples", "no_key"))


@dataclass
class ShardReport:
    """What was found in one shard, in numbers."""

    staged_as: str
    num_samples: int = 0
    num_records: int = 0
    num_lost: int = 0  # samples in the findings
    lost_bytes: int = 0  # bytes with an unknown number of samples
    statuses: dict[str, int] = field(default_factory=dict)
    findings: dict[str, int] = field(default_factory=dict)
    unknown_labels: dict[str, int] = field(default_factory=dict)
    oddities: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    suffixes: dict[str, int] = field(default_factory=dict)  # the most common ones of the members
    first_finding: str | None = None  # where, what, and what to do
    first_damaged: list[str] = field(default_factory=list)  # one line each: key, reason, place, what to do

    @property
    def damaged_statuses(self) -> dict[str, int]:
        return {status: count for status, count in self.statuses.items() if status in DAMAGED_STATUSES}

    @property
    def num_damaged(self) -> int:
        return sum(self.damaged_statuses.values()) + self.num_lost


def staged_name(shard: Shard, rules_name: str) -> str:
    """Name the result of reading this version of a shard by these rules."""
    parts = [shard.url, str(shard.version.num_bytes), shard.version.tag, str(shard.num_expected), rules_name]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def stage_shard(store: Folder, shard: Shard, rules: IndexRules, name: str) -> ShardReport:
    """Index one shard into the store, unless that was done before; the report is written last."""
    if (finished := store.read_json(f"staging/{name}.json")) is not None:
        return ShardReport(**finished)
    records: list[pa.RecordBatch] = []
    findings: list[pa.RecordBatch] = []
    with open_source(shard.url) as source:
        num_bytes = source.num_bytes
        indexer = ShardIndexer(source, rules)
        for batch in indexer.batches() if num_bytes == shard.version.num_bytes else ():
            records.append(batch.records)
            findings.append(batch.findings)
    if num_bytes != shard.version.num_bytes or version_of(shard.url) != shard.version:
        raise PencilError(f"shard {shard.url}: it changed while it was read; run again when it is complete")
    if shard.num_expected is not None and shard.num_expected != indexer.num_samples:
        found = f"img2dataset counted {shard.num_expected:,} samples, {indexer.num_samples:,} were found"
        detail = damage_line(shard.url, num_bytes, "count_mismatch", found)
        values = (num_bytes, num_bytes, "count_mismatch", None, 0, detail)
        mismatch = dict(zip(FINDING.names, values, strict=True))
        findings.append(pa.RecordBatch.from_pylist([mismatch], FINDING))
    tables = pa.Table.from_batches(records, RECORD), pa.Table.from_batches(findings, FINDING)
    report = _report(name, shard.url, indexer, *tables)
    for kind, table in zip(("records", "findings"), tables, strict=True):
        store.put(f"staging/{name}.{kind}.parquet", parquet_bytes(table))
    store.put_json(f"staging/{name}.json", asdict(report))
    return report


def staged_records(store: Folder, name: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Read staged records, some row groups at a time."""
    file = pq.ParquetFile(io.BytesIO(store.get(f"staging/{name}.records.parquet")))
    for batch in file.iter_batches(batch_size=16 * CHUNK_ROWS, columns=columns):
        yield pa.Table.from_batches([batch])


def staged_findings(store: Folder, name: str) -> pa.Table:
    """Read the staged findings of a shard."""
    return pq.read_table(io.BytesIO(store.get(f"staging/{name}.findings.parquet")))


def _report(name: str, url: str, indexer: ShardIndexer, records: pa.Table, findings: pa.Table) -> ShardReport:
    spans = findings.select(["start", "end", "kind", "num_samples"]).to_pylist()
    uncounted = [one for one in spans if one["num_samples"] == 0 and one["kind"] not in HARMLESS]
    suffixes = indexer.suffixes.most_common(SUFFIXES_SHOWN + 1)
    # The first samples that cannot be used: those with a row, then those without.
    damaged = pc.is_in(records["found_status"], pa.array(list(DAMAGED_STATUSES)))
    rows = records.filter(damaged).slice(0, NAMED_DAMAGED).to_pylist()
    lost = findings.filter(pc.greater(findings["num_samples"], 0)).slice(0, NAMED_DAMAGED).to_pylist()
    named = [(row["key"], row["found_status"], row["image_offset"]) for row in rows]
    lines = [f"{key[:200]!a}, {status}: {status_line(url, place, status)}" for key, status, place in named]
    lines += [f"{(one['key'] or 'no key')[:200]!a}, {one['kind']}: {one['detail']}" for one in lost]
    return ShardReport(
        staged_as=name,
        num_samples=indexer.num_samples,
        num_records=len(records),
        num_lost=sum(one["num_samples"] for one in spans),
        lost_bytes=sum(one["end"] - one["start"] for one in uncounted),
        statuses=dict(Counter(records["found_status"].to_pylist())),
        findings=dict(Counter(one["kind"] for one in spans)),
        unknown_labels=dict(indexer.unknown_labels),
        oddities=dict(indexer.oddities),
        skipped=dict(indexer.skipped),
        suffixes={to_stored(suffix): count for suffix, count in suffixes},
        first_finding=findings["detail"][0].as_py() if len(findings) else None,
        first_damaged=lines[:NAMED_DAMAGED],
    )


# -- how much damage is allowed -----------------------------------------------------------------------


def check_damage(
    shards: Sequence[Shard], reports: Sequence[ShardReport], missing: Sequence[str], limit: float
) -> None:
    """Refuse to publish if too many of the samples just read are damaged, naming the worst shard."""
    total = sum(report.num_samples for report in reports)
    seen, unseen = _damaged(shards, reports, len(missing))
    share = (seen + unseen) / (total + unseen) if total else float(unseen > 0)
    if share > limit:
        found = f"{share:.2%} of the samples are damaged"
        raise _too_much(found, shards, reports, missing, limit)


def check_early(
    shards: Sequence[Shard], reports: Sequence[ShardReport], total_bytes: int, limit: float
) -> None:
    """Stop a long run as soon as there is too much damage even if all remaining shards are intact."""
    damaged = sum(_damaged(shards, reports, 0))
    read_bytes = sum(shard.version.num_bytes for shard in shards)
    if read_bytes and read_bytes < total_bytes:
        # The number of remaining samples is estimated from their bytes.
        expected = sum(report.num_samples for report in reports) * total_bytes / read_bytes
        if expected and damaged > limit * expected:
            share = f"{damaged / expected:.2%} of all expected samples are damaged"
            raise _too_much(f"after {len(shards):,} of the shards, {share}", shards, reports, (), limit)


def _damaged(
    shards: Sequence[Shard], reports: Sequence[ShardReport], num_missing: int
) -> tuple[float, float]:
    """Count damaged samples: those seen, by status or in the damage table, and those only inferred.

    Unreadable bytes count as samples of mean size, and a shard without samples counts as a mean shard.
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
    return sum(report.num_damaged for _, report in full), num_bad_shards * total / len(full) + lost + short


def _too_much(
    found: str, shards: Sequence[Shard], reports: Sequence[ShardReport], missing: Sequence[str], limit: float
) -> PencilError:
    """Name what is missing or the worst shard, then the first damaged samples, one per line."""
    if missing:
        others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        worst = f"{missing[0]}{others}: listed but missing; fetch what is missing, or take it off data.shards"
    else:
        pairs = zip(shards, reports, strict=True)
        shard, report = max(pairs, key=lambda pair: (pair[1].num_samples == 0, pair[1].num_damaged))
        counts = {**report.damaged_statuses, **report.findings}
        words = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        first = f"; {report.first_finding}" if report.first_finding else ""
        worst = f"the worst shard is {shard.url} ({words}){first}"
    lines = [f"damaged: {line}" for report in reports for line in report.first_damaged][:NAMED_DAMAGED]
    unclear = [report for report in reports if any(report.statuses.get(one) for one in UNCLEAR_IMAGE)]
    if unclear:
        lines.append(extensions_line(sum((Counter(report.suffixes) for report in unclear), Counter[str]())))
    message = f"data.max_damaged_share: {found}, {limit:.2%} are allowed; {worst}; mend this, or raise "
    return PencilError("\n".join([f"{message}data.max_damaged_share; nothing was published", *lines]))
