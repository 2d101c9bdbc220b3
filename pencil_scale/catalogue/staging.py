"""Staging: what one shard gave, kept until the catalogue is published.

A shard is staged under a name made of its URL, its version and the rules it was read by, so a job that is
run again after a crash takes up what is already there, and nothing that has changed since.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.files import parquet_bytes
from pencil_scale.catalogue.schema import (
    CHUNK_ROWS,
    DAMAGED_STATUSES,
    FINDING,
    RECORD,
    SUFFIXES_SHOWN,
    damage_line,
    status_line,
    to_stored,
)
from pencil_scale.catalogue.shard_index import IndexRules, ShardIndexer
from pencil_scale.catalogue.shard_urls import Shard
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import open_source, version_of

NAMED_DAMAGED = 5  # samples of a shard, should too much be damaged

# Kinds that take no samples with them, whatever bytes they span.
HARMLESS = frozenset(("odd_end", "no_samples", "no_key"))


@dataclass
class ShardReport:
    """What was found in one shard, in numbers."""

    staged_as: str
    num_samples: int = 0
    num_records: int = 0
    num_lost: int = 0  # samples that stand in the findings
    lost_bytes: int = 0  # bytes whose samples nobody can count
    statuses: dict[str, int] = field(default_factory=dict)
    findings: dict[str, int] = field(default_factory=dict)
    unknown_labels: dict[str, int] = field(default_factory=dict)
    oddities: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    suffixes: dict[str, int] = field(default_factory=dict)  # of members: the commonest
    first_finding: str | None = None  # where, what, and what to do
    first_damaged: list[str] = field(default_factory=list)  # a line each: key, reason, place, what to do


def staged_name(shard: Shard, rules_name: str) -> str:
    """Name what this shard, in this version, read by these rules, will give."""
    parts = [shard.url, str(shard.version.num_bytes), shard.version.tag, str(shard.num_expected), rules_name]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def stage_shard(store: Folder, shard: Shard, rules: IndexRules, name: str) -> ShardReport:
    """Index one shard into the store, unless that was done before; the report is written last."""
    finished = read_report(store, name)
    if finished is not None:
        return finished
    report = ShardReport(name)
    records: list[pa.RecordBatch] = []
    findings: list[pa.RecordBatch] = []
    with open_source(shard.url) as source:
        if source.num_bytes != shard.version.num_bytes:
            raise _changed(shard)
        indexer = ShardIndexer(source, rules)
        for batch in indexer.batches():
            records.append(batch.records)
            findings.append(batch.findings)
    if version_of(shard.url) != shard.version:
        raise _changed(shard)
    if shard.num_expected is not None and shard.num_expected != indexer.num_samples:
        findings.append(_mismatch(shard, indexer.num_samples))
    staged = pa.Table.from_batches(records, RECORD)
    found = pa.Table.from_batches(findings, FINDING)
    _count(report, indexer, staged, found)
    report.first_damaged = _name_damaged(shard.url, staged, found)
    store.put(f"staging/{name}.records.parquet", parquet_bytes(staged))
    store.put(f"staging/{name}.findings.parquet", parquet_bytes(found))
    store.put(f"staging/{name}.json", json.dumps(asdict(report)).encode())
    return report


def read_report(store: Folder, name: str) -> ShardReport | None:
    """Read the report of a shard that was staged before; None when it was not, or not to its end."""
    try:
        return ShardReport(**json.loads(store.get(f"staging/{name}.json")))
    except DamagedError:  # no such file
        return None


def staged_records(store: Folder, name: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Read staged records some row groups at a time."""
    file = pq.ParquetFile(io.BytesIO(store.get(f"staging/{name}.records.parquet")))
    for batch in file.iter_batches(batch_size=16 * CHUNK_ROWS, columns=columns):
        yield pa.Table.from_batches([batch])


def staged_findings(store: Folder, name: str) -> pa.Table:
    """Read the staged findings of a shard."""
    return pq.read_table(io.BytesIO(store.get(f"staging/{name}.findings.parquet")))


def _count(report: ShardReport, indexer: ShardIndexer, records: pa.Table, findings: pa.Table) -> None:
    report.num_samples = indexer.num_samples
    report.num_records = len(records)
    report.num_lost = pc.sum(findings["num_samples"]).as_py() or 0
    report.statuses = dict(Counter(records["found_status"].to_pylist()))
    report.findings = dict(Counter(findings["kind"].to_pylist()))
    report.unknown_labels = dict(indexer.unknown_labels)
    report.oddities = dict(indexer.oddities)
    report.skipped = dict(indexer.skipped)
    suffixes = indexer.suffixes.most_common(SUFFIXES_SHOWN + 1)
    report.suffixes = {to_stored(suffix): count for suffix, count in suffixes}
    report.first_finding = findings["detail"][0].as_py() if len(findings) else None
    for finding in findings.select(["start", "end", "kind", "num_samples"]).to_pylist():
        if finding["num_samples"] == 0 and finding["kind"] not in HARMLESS:
            report.lost_bytes += finding["end"] - finding["start"]


def _name_damaged(url: str, records: pa.Table, findings: pa.Table) -> list[str]:
    """Name the first samples that cannot be used: those with a row, then those that left none."""
    damaged = pc.is_in(records["found_status"], pa.array(list(DAMAGED_STATUSES)))
    rows = records.filter(damaged).slice(0, NAMED_DAMAGED).to_pylist()
    lost = findings.filter(pc.greater(findings["num_samples"], 0)).slice(0, NAMED_DAMAGED).to_pylist()
    named = [(row["key"], row["found_status"], row["image_offset"]) for row in rows]
    lines = [f"{key[:200]!a}, {status}: {status_line(url, place, status)}" for key, status, place in named]
    lines += [f"{(one['key'] or 'no key')[:200]!a}, {one['kind']}: {one['detail']}" for one in lost]
    return lines[:NAMED_DAMAGED]


def _mismatch(shard: Shard, num_samples: int) -> pa.RecordBatch:
    found = f"img2dataset counted {shard.num_expected:,} samples, {num_samples:,} were found"
    detail = damage_line(shard.url, shard.version.num_bytes, "cut_short", found)
    columns = [
        [shard.version.num_bytes],
        [shard.version.num_bytes],
        ["cut_short"],
        [None],
        [0],
        [detail],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, FINDING, strict=True)]
    return pa.record_batch(arrays, schema=FINDING)


def _changed(shard: Shard) -> PencilError:
    return PencilError(f"shard {shard.url}: it changed while it was read; run again when nobody writes it")
