"""Write the repaired labels for other tools: a Parquet file for each shard, and a table of the whole dataset.

    python -m pipelines.export_labels configs/demo.yaml
    python -m pipelines.export_labels CONFIG export.labels=night-12 export.corrected_shards=true

Labels that have not changed since the last export are not written again; the manifest is written last. Shards
and labels are never modified. Ids in data.exclude never appear, even before the catalogue is indexed again.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from pencil_scale.catalogue.class_names import difference, read_class_names
from pencil_scale.config.command import refuse_lost, run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.export.files import LEASE, MANIFEST, ExportManifest, begin, refuse_strangers, tidy
from pencil_scale.export.rows import Model, Source, find_source, stretches
from pencil_scale.labels.published import find_published
from pencil_scale.storage.errors import PencilError, new_id
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of
from pipelines.export_tasks import (
    Corrected,
    Job,
    Sidecar,
    Written,
    corrected_file,
    known_files,
    write_corrected,
    write_sidecars,
    write_stretch,
)
from pipelines.tasks import all_of, is_in_memory, print_table

SHARDS_PER_TASK = 16


@dataclass(frozen=True)
class Summary:
    """The export as it is published, and which of its files this run wrote."""

    folder: str
    manifest: ExportManifest
    num_table_written: int
    num_sidecars_written: int
    num_shards_written: int
    swept: tuple[str, ...]
    predicted_by: dict[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.export_labels", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Write the table, then the sidecars, then the shards if wanted; publish; remove what is outdated."""
    storage = Storage(config.run.storage)
    named = config.export.labels or config.run.name
    model = None
    if config.export.predict:
        weights = storage.path(storage.model(find_published(storage.url, named).name))
        filesystem, path = filesystem_of(weights)
        if not filesystem.exists(path):
            raise PencilError(
                f"export.predict: no model {weights} to classify unlabelled samples; set export.predict=false"
            )
        model = Model(config.model.backbone, weights, config.images)
    source = find_source(
        storage.url, named, config.data.exclude, config.export.top_k, model, config.nightly.remap
    )
    folder = config.export.folder or storage.path(storage.export(source.published.name))
    refuse_lost("export.folder", folder)
    folder = Folder(folder).url
    if differs := difference(read_class_names(config.data.classes), source.words.class_names):
        say(
            f"WARNING: {config.data.classes} {differs}, compared with the catalogue; the class numbers of "
            "this export are those of class_names in its manifest"
        )
    if warning := source.pins.void_warning():
        print(f"WARNING: {warning}", flush=True)
    refuse_strangers(folder)  # before a lease is put there
    with Lease.hold(folder, LEASE, what=f"{folder} is being written") as lease:
        return _write(config, source, folder, lease, here=is_in_memory(storage.url) or is_in_memory(folder))


def _write(config: Config, source: Source, folder: str, lease: Lease, here: bool) -> Summary:
    export = new_id()
    before = begin(folder, export)
    job = Job(source, folder, export, known_files(before), config.data.label)
    table = all_of("exporting rows", write_stretch, [(rows,) for rows in stretches(source)], job, here)
    sidecars = _sidecars(job, table, here)
    shards: list[Corrected] = []
    if config.export.corrected_shards:  # those that the last export does not have are written
        named = [(found, *corrected_file(job, found.shard, found.file)) for found in sidecars]
        shards = [Corrected(found.shard, file, None) for found, file, is_new in named if not is_new]
        pieces = [(found.shard, found.file) for found, _, is_new in named if is_new]
        shards += all_of("correcting shards", write_corrected, pieces, job, here)
    manifest = _manifest(source, table, sidecars, shards)
    lease.put(MANIFEST, manifest.encode())
    swept = tidy(folder, before, manifest.files())
    predicted_by = sum((Counter(found.predicted_by) for found in table), Counter[str]())
    summary = Summary(
        folder,
        manifest,
        sum(found.is_new for found in table),
        sum(found.is_new for found in sidecars),
        sum(found.rewritten is not None for found in shards),
        tuple(swept),
        dict(sorted(predicted_by.items())),
    )
    print_summary(summary, shards)
    return summary


def _sidecars(job: Job, table: Sequence[Written], here: bool) -> list[Sidecar]:
    files: dict[int, list[str]] = defaultdict(list)
    for written in table:
        for shard in written.shards:
            files[shard].append(written.file)
    for aliases in job.source.catalogue.small_tables("alias_tables"):
        for shard in pc.unique(aliases["shard"]).to_pylist():
            files.setdefault(shard, [])
    shards = [number for number in sorted(files) if job.source.catalogue.shards[number].state == "indexed"]
    all_files = [written.file for written in table]
    pieces = [
        ({number: files[number] for number in shards[first : first + SHARDS_PER_TASK]}, all_files)
        for first in range(0, len(shards), SHARDS_PER_TASK)
    ]
    found = all_of("writing sidecars", write_sidecars, pieces, job, here)
    return [sidecar for some in found for sidecar in some]


def _manifest(
    source: Source, table: Sequence[Written], sidecars: Sequence[Sidecar], shards: Sequence[Corrected]
) -> ExportManifest:
    urls = source.words.shard_urls
    return ExportManifest(
        labels=source.published.url,
        run=source.published.manifest.run,
        catalogue_version=source.catalogue.version,
        model_version=source.words.model_version,
        class_names=source.words.class_names,
        num_samples=sum(written.num_samples for written in table),
        num_label_issues=sum(written.num_issues for written in table),
        table=tuple(written.file for written in table),
        sidecars={urls[found.shard]: found.file for found in sidecars},
        shards={urls[found.shard]: found.file for found in shards},
    )


def print_summary(summary: Summary, shards: Sequence[Corrected]) -> None:
    """Print the summary table."""
    manifest = summary.manifest
    rows = {"samples": f"{manifest.num_samples:,}", "label issues": f"{manifest.num_label_issues:,}"}
    rows |= {f"  predicted by: {name}": f"{num:,}" for name, num in summary.predicted_by.items()}
    rows["table"] = f"{len(manifest.table):,} files, {summary.num_table_written:,} written now"
    rows["sidecars"] = f"{len(manifest.sidecars):,}, {summary.num_sidecars_written:,} written now"
    if shards:
        done = [found.rewritten for found in shards if found.rewritten]
        rows["corrected shards"] = f"{len(shards):,}, {summary.num_shards_written:,} written now"
        rows["  labels replaced"] = f"{sum(one.num_replaced for one in done):,}"
        rows["  samples left out"] = f"{sum(one.num_left_out for one in done):,}"
        rows["  damaged byte ranges"] = f"{sum(one.num_damaged for one in done):,}"
    rows["outdated, removed"] = f"{len(summary.swept):,} files"
    lost = [name for name in summary.swept if name.startswith("shards/")]
    if lost and not shards:
        rows["  of corrected shards"] = f"{len(lost):,}; export.corrected_shards=true writes them again"
    print_table("export", rows)
    say(f"export: {summary.folder}")  # a table would cut a long path


if __name__ == "__main__":
    sys.exit(main())
