"""Export tasks: the independent pieces of an export. Each file is complete, or absent.

written = write_stretch(job, rows)                                 # one file of the table
sidecars = write_sidecars(job, {42: [written.file]})               # {42: a file}
file, rewritten = write_corrected(job, 42, sidecars[42])
"""

import hashlib
import io
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.duplicates import contains, hashes_of
from pencil_scale.catalogue.schema import from_stored, shard_stem
from pencil_scale.export.files import first_row, same_content
from pencil_scale.export.rows import Source, export_tables
from pencil_scale.export.table import (
    SCHEMA,
    SIMILAR,
    alias_table,
    digest,
    most_doubtful,
    parquet_bytes,
    with_similar,
    without,
)
from pencil_scale.export.tar_rewrite import LabelMember, NewLabel, Rewritten, rewrite_shard
from pencil_scale.features.similar import Results
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import filesystem_of, open_source

REWRITE = 2  # the version of how shards are corrected: a new one writes them again


class Job(NamedTuple):
    """What every task needs."""

    source: Source
    folder: str
    export: str  # id of this export, part of the names of new files
    known: Mapping[str, str]  # files of the last manifest, by their content
    label: str  # data.label of the config
    table: tuple[str, ...] = ()  # files of the table, in the order of their rows
    similar: Results | None = None  # of find_similar, for this catalogue version

    @property
    def schema(self) -> pa.Schema:
        """The columns of this export."""
        return SCHEMA if self.similar is None else pa.schema([*SCHEMA, *SIMILAR])

    def name(self, kind: str, content: str, rest: str) -> str:
        """Name the file with this content: the last export may have one."""
        file = f"{kind}/{content}-{self.export}{rest}"
        return self.known.get(same_content(file), file)

    def put_table(self, kind: str, content: str, rest: str, table: pa.Table) -> str:
        """Write a table and return its file, unless the last export has a file with the same content."""
        file = self.name(kind, content, rest)
        if self.export in file:
            Folder(self.folder).put(file, parquet_bytes(table, self.source.words.class_names))
        return file


class Written(NamedTuple):
    """One file of the table."""

    file: str
    num_samples: int
    num_issues: int
    predicted_by: Counter[str]
    shards: list[int]
    doubts: pa.Table


def write_stretch(job: Job, rows: range) -> Written:
    """Write one file of the table, unless the last export has a file with the same labels."""
    table = pa.concat_tables(export_tables(job.source, rows)).combine_chunks()
    if job.similar is not None:
        table = with_similar(table, job.similar.read(rows, ["row", *SIMILAR.names]))
    file = job.put_table("table", f"{rows.start:010d}-{digest(table)}", ".parquet", table)
    numbers = {url: number for number, url in enumerate(job.source.words.shard_urls)}
    return Written(
        file,
        len(table),
        pc.sum(table["is_label_issue"]).as_py() or 0,
        Counter(table["predicted_by"].fill_null("none").to_pylist()),
        sorted(numbers[url] for url in pc.unique(without(table, "vanished")["shard"]).to_pylist()),
        most_doubtful(table),
    )


def write_sidecars(job: Job, files: dict[int, list[str]]) -> dict[int, str]:
    """Write the sidecars of some shards, unless the last export has files with the same labels."""
    aliases = _aliases_of(job, sorted(files))
    written = {}
    for shard, named in files.items():
        url = job.source.words.shard_urls[shard]
        own = [_read(job, file, pc.field("shard") == url) for file in named]
        table = pa.concat_tables([*own, aliases.filter(pc.equal(aliases["shard"], url))])
        table = without(table, "vanished").sort_by([("key", "ascending"), ("row", "ascending")])
        if len(table):
            name = f"/{shard_stem(url)}.labels.parquet"
            written[shard] = job.put_table("sidecars", digest(table), name, table)
    return written


def _aliases_of(job: Job, shards: list[int]) -> pa.Table:
    """The duplicates in these shards, with the labels of the samples they repeat."""
    found = [job.schema.empty_table()]
    starts = np.array([first_row(file) for file in job.table])
    for aliases in job.source.catalogue.small_tables("alias_tables"):
        here = pc.is_in(aliases["shard"], pa.array(shards, pa.int32()))
        aliases = without(aliases.filter(here), "excluded")
        excluded = contains(job.source.excluded, hashes_of(aliases["sample_key"]))
        aliases = aliases.filter(pa.array(~excluded))
        if len(aliases):
            rows = pc.unique(aliases["row"])
            needed = np.unique(np.searchsorted(starts, rows.to_numpy(), side="right") - 1)
            labels = [_read(job, job.table[number], pc.field("row").isin(rows)) for number in needed]
            found.append(alias_table(aliases, pa.concat_tables(labels), job.source.words))
    return pa.concat_tables(found)


def _read(job: Job, file: str, wanted: Any = None) -> pa.Table:
    """Read a file of this export, or only the wanted rows."""
    filesystem, path = filesystem_of(f"{job.folder}/{file}")
    return pq.read_table(path, filesystem=filesystem, filters=wanted, partitioning=None).cast(job.schema)


def write_corrected(job: Job, shard: int, sidecar: str) -> tuple[str, Rewritten | None]:
    """Write a copy of one shard with the labels of its sidecar, unless the last export has the same."""
    entry, where = job.source.catalogue.shards[shard], LabelMember.of(job.label)
    words = f"{REWRITE} {same_content(sidecar)} {entry.num_bytes} {entry.tag} {job.label}"
    content = hashlib.sha256(words.encode()).hexdigest()[:16]
    file = job.name("shards", content, f"/{shard_stem(entry.url)}.tar")
    if job.export not in file:
        return file, None
    entry.verify()
    # A new label only where it differs, or for every sample if labels are added.
    columns = ("key", "is_label_issue", "predicted_label", "predicted_class", "given_label")
    labels: dict[str, NewLabel | None] = {}
    for key, issue, *label in zip(*_read(job, sidecar).select(columns).to_pydict().values(), strict=True):
        wanted = label[0] is not None and (issue or where.add)
        labels[from_stored(key)] = NewLabel(*label) if wanted else None
    sink = io.BytesIO()
    with open_source(entry.url) as source:
        rewritten = rewrite_shard(source, sink, labels, where)
    Folder(job.folder).put(file, sink.getvalue())
    return file, rewritten
