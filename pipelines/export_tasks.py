"""Export tasks: the independent pieces of an export. Each file is complete, or absent.

written = write_stretch(job, rows)                        # one file of the table
sidecars = write_sidecars(job, {42: [written.file]}, [written.file])
corrected = write_corrected(job, 42, sidecars[0].file)
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.duplicates import contains, hashes_of
from pencil_scale.catalogue.schema import from_stored, shard_stem
from pencil_scale.export.files import ExportManifest, file_name, first_row, same_content
from pencil_scale.export.rows import ExportRows, Source
from pencil_scale.export.table import SCHEMA, alias_table, digest, parquet_bytes, without
from pencil_scale.export.tar_rewrite import LabelMember, NewLabel, Rewritten, rewrite_shard
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import filesystem_of, open_source
from pipelines.shard_making.writing import new_file


class Job(NamedTuple):
    """What every task needs."""

    source: Source
    folder: str
    export: str  # id of this export, part of the names of new files
    known: Mapping[str, str]  # files of the last manifest, reused if kind and digest are equal
    label: str  # data.label of the config

    def file(self, kind: str, content: str, rest: str) -> tuple[str, bool]:
        """Name the file with this content; and say whether it must be written."""
        file = file_name(kind, content, rest, self.export)
        existing = self.known.get(same_content(file))
        return existing or file, existing is None


def known_files(manifest: ExportManifest | None) -> dict[str, str]:
    """Index the files of an export by their content."""
    return {same_content(file): file for file in (manifest.files() if manifest else ())}


class Written(NamedTuple):
    """One file of the table."""

    file: str
    is_new: bool
    num_samples: int
    num_issues: int
    predicted_by: dict[str, int]
    shards: list[int]


class Sidecar(NamedTuple):
    """The file of one shard."""

    shard: int
    file: str
    is_new: bool


class Corrected(NamedTuple):
    """A shard with repaired labels."""

    shard: int
    file: str
    rewritten: Rewritten | None  # None: written by an earlier export


def write_stretch(job: Job, rows: range) -> Written:
    """Write one file of the table, unless the last export has a file with the same labels."""
    table = pa.concat_tables(ExportRows(job.source).tables(rows)).combine_chunks()
    file, is_new = job.file("table", f"{rows.start:010d}-{digest(table)}", ".parquet")
    if is_new:
        Folder(job.folder).put(file, parquet_bytes(table, job.source.words.class_names))
    present = without(table, ("vanished",))
    numbers = {url: number for number, url in enumerate(job.source.words.shard_urls)}
    counts = pc.value_counts(table["predicted_by"].fill_null("none")).to_pylist()
    return Written(
        file,
        is_new,
        len(table),
        pc.sum(table["is_label_issue"]).as_py() or 0,
        {entry["values"]: entry["counts"] for entry in counts},
        sorted(numbers[url] for url in pc.unique(present["shard"]).to_pylist()),
    )


def write_sidecars(job: Job, files: dict[int, list[str]], all_files: list[str]) -> list[Sidecar]:
    """Write the sidecars of some shards, unless the last export has files with the same labels."""
    aliases = _aliases_of(job, sorted(files), all_files)
    written = []
    for shard, named in files.items():
        url = job.source.words.shard_urls[shard]
        own = [_read(job, file, pc.field("shard") == url) for file in named]
        table = pa.concat_tables([*own, aliases.filter(pc.equal(aliases["shard"], url))])
        table = without(table, ("vanished",)).sort_by([("key", "ascending"), ("row", "ascending")])
        if len(table) == 0:
            continue
        file, is_new = job.file("sidecars", digest(table), f"/{shard_stem(url)}.labels.parquet")
        if is_new:
            Folder(job.folder).put(file, parquet_bytes(table, job.source.words.class_names))
        written.append(Sidecar(shard, file, is_new))
    return written


def _aliases_of(job: Job, shards: list[int], all_files: list[str]) -> pa.Table:
    """The duplicates in these shards, with the labels of the samples they repeat."""
    found = [SCHEMA.empty_table()]
    for aliases in job.source.catalogue.small_tables("alias_tables"):
        here = pc.is_in(aliases["shard"], pa.array(shards, pa.int32()))
        aliases = without(aliases.filter(here), ("excluded",))
        excluded = contains(job.source.excluded, hashes_of(aliases["sample_key"]))
        aliases = aliases.filter(pa.array(~excluded))
        if len(aliases):
            rows = pc.unique(aliases["row"])
            starts = np.array([first_row(file) for file in all_files])
            needed = np.unique(np.searchsorted(starts, rows.to_numpy(), side="right") - 1)
            labels = [_read(job, all_files[place], pc.field("row").isin(rows)) for place in needed]
            found.append(alias_table(aliases, pa.concat_tables(labels), job.source.words))
    return pa.concat_tables(found)


def _read(job: Job, file: str, wanted: Any = None) -> pa.Table:
    """Read a file of this export, or only the wanted rows."""
    filesystem, path = filesystem_of(f"{job.folder}/{file}")
    return pq.read_table(path, filesystem=filesystem, filters=wanted, partitioning=None).cast(SCHEMA)


def write_corrected(job: Job, shard: int, sidecar: str) -> Corrected:
    """Write a copy of one shard with the labels of its sidecar."""
    entry, (file, _) = job.source.catalogue.shards[shard], corrected_file(job, shard, sidecar)
    entry.verify()
    where, table = LabelMember.of(job.label), _read(job, sidecar)
    # A new label only where it differs, or for every sample if labels are added.
    columns = ("key", "is_label_issue", "predicted_label", "predicted_class")
    labels: dict[str, NewLabel | None] = {}
    for key, issue, number, name in zip(*(table[column].to_pylist() for column in columns), strict=True):
        wanted = number is not None and (issue or where.add)
        labels[from_stored(key)] = NewLabel(number, name) if wanted else None
    folder, _, name = file.rpartition("/")
    with open_source(entry.url) as source, new_file(f"{job.folder}/{folder}", name) as sink:
        rewritten = rewrite_shard(source, sink, labels, where)
    return Corrected(shard, file, rewritten)


def corrected_file(job: Job, shard: int, sidecar: str) -> tuple[str, bool]:
    """Name a corrected shard by its labels and its original; and say whether it must be written."""
    entry = job.source.catalogue.shards[shard]
    words = f"{same_content(sidecar)} {entry.num_bytes} {entry.tag} {job.label}"
    content = hashlib.sha256(words.encode()).hexdigest()[:16]
    return job.file("shards", content, f"/{shard_stem(entry.url)}.tar")
