"""Write the repaired labels for other tools: a Parquet file for each shard, and a table of the whole dataset.

    python -m pipelines.export_labels configs/demo.yaml
    python -m pipelines.export_labels CONFIG export.labels=night-0012 export.corrected_shards=true
    python -m pipelines.export_labels CONFIG export.judged=decisions.json     # recalibrated by an audit
    python -m pipelines.export_labels CONFIG --force          # also labels that are held

The labels that are least likely right as given, changed or kept, are also in a file of their own, ranked.
Labels that have not changed since the last export are not written again; the manifest is written last. Shards
and labels are never modified. Ids in data.exclude never appear, even before the catalogue is indexed again.
After find_similar, the tables also have is_outlier, outlier_score and duplicate_group.
Held labels are refused; with --force they are exported, and the manifest says why they are held.

With export.judged, label_score and confidence are recalibrated: people's judgements of random samples, which
the audit of the review page saved, say how often labels are right.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.class_names import difference, read_class_names
from pencil_scale.config.command import refuse_lost, run_job, say
from pencil_scale.config.settings import FEATURES, Config
from pencil_scale.export.files import (
    LEASE,
    MANIFEST,
    ExportManifest,
    exported_files,
    read_manifest,
    refuse_strangers,
    same_content,
)
from pencil_scale.export.rows import Source, find_source, predict, stretches
from pencil_scale.export.table import digest, most_doubtful
from pencil_scale.export.tar_rewrite import Rewritten
from pencil_scale.features.similar import find_results
from pencil_scale.labels.published import find_published
from pencil_scale.labels.run_record import read_record
from pencil_scale.method.automatic import filled
from pencil_scale.nights.record import NightFiles, labels_in_use
from pencil_scale.review.network import network_notes
from pencil_scale.review.recalibration import recalibration
from pencil_scale.storage.cleanup import clean_up
from pencil_scale.storage.errors import PencilError, many, new_id
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of
from pipelines.export_tasks import Job, Written, write_corrected, write_sidecars, write_stretch
from pipelines.tasks import all_of, is_in_memory, print_table

SHARDS_PER_TASK = 16


@dataclass(frozen=True)
class Summary:
    """The export as it is published, and what this run did."""

    folder: str
    labels: str  # name of the run or night that they are of
    export: str  # id of this run, part of the names of the files it wrote
    manifest: ExportManifest
    removed: tuple[str, ...]
    predicted_by: dict[str, int]
    rewritten: tuple[Rewritten, ...]  # what was changed in the shards written now

    def num_written(self, kind: str) -> int:
        """How many files of the table, sidecars or shards this run wrote."""
        return sum(file.startswith(kind) and self.export in file for file in self.manifest.files())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(
        run,
        argv,
        module="pipelines.export_labels",
        what=__doc__ or "",
        flags={"force": "export labels that are held, which may be worse than the given ones"},
    )


def run(config: Config, force: bool = False) -> Summary:
    """Write the table, then the sidecars, then the shards if wanted; publish; remove what is outdated."""
    storage = Storage(config.run.storage)
    named = config.export.labels or labels_in_use(storage.url, config.run.name)
    model = None
    if config.export.predict:
        run = find_published(storage.url, named, held=force).name
        weights = storage.path(storage.model(run))
        filesystem, path = filesystem_of(weights)
        if not filesystem.exists(path):
            raise PencilError(
                f"export.predict: no model {weights} to classify unlabelled samples; set export.predict=false"
            )
        nights = NightFiles(storage.url)
        record, night = read_record(storage.url, run), nights.record(run)
        if record is None and night is not None:  # it had nothing to train on
            made_by = night if night.trained_by or night.parent is None else nights.must_find(night.parent)
            record = read_record(storage.url, made_by.trained_by)
        if record and record.settings.get("model.backbone", "").startswith(FEATURES):
            say(f"unlabelled samples are not predicted: the model of {run} takes features, not images")
        else:
            trained = filled(config, record.automatic if record else {})
            model = partial(predict, trained.model.backbone, weights, trained.images)
    source = find_source(
        storage.url, named, config.data.exclude, config.export.top_k, model, config.nightly.remap, held=force
    )
    if config.export.judged is not None:
        calibration = recalibration(config.export.judged, source)
        source = replace(source, words=replace(source.words, calibration=calibration))
    folder = config.export.folder or storage.path(storage.export(source.published.name))
    refuse_lost("export.folder", folder)
    folder = Folder(folder).url
    if differs := difference(read_class_names(config.data.classes), source.words.class_names):
        say(
            f"WARNING: {config.data.classes} {differs}, compared with the catalogue; the class numbers of "
            "this export are those of class_names in its manifest"
        )
    for reason in source.published.held_because:
        say(f"WARNING: HELD LABELS ARE EXPORTED (--force): {reason}")
    name = source.published.name
    known = storage.read_json(storage.run(name, "summary.json")) or {}
    for note in () if known.get("unmoved") else network_notes({**known, "held_because": ()}, name, ()):
        say(f"WARNING: {note}")  # what the run could not measure, or found worse
    if warning := source.pins.void_warning():
        print(f"WARNING: {warning}", flush=True)
    refuse_strangers(folder)  # before a lease is put there
    with Lease.hold(folder, LEASE, what=f"{folder} is being written") as lease:
        return _write(config, source, folder, lease, here=is_in_memory(storage.url) or is_in_memory(folder))


def _write(config: Config, source: Source, folder: str, lease: Lease, here: bool) -> Summary:
    export, earlier, before = new_id(), exported_files(folder), read_manifest(folder)
    known = {same_content(file): file for file in (before.files() if before else ())}
    similar = find_results(Storage(config.run.storage), source.catalogue, config.features.name)
    job = Job(source, folder, export, known, config.data.label, similar=similar)
    table = all_of("exporting rows", write_stretch, [(rows,) for rows in stretches(source)], job, here)
    sidecars = _sidecars(job._replace(table=tuple(written.file for written in table)), table, here)
    wanted = sidecars if config.export.corrected_shards else {}
    corrected = all_of("correcting shards", write_corrected, list(wanted.items()), job, here)
    shards = {number: file for number, (file, _) in zip(wanted, corrected, strict=True)}
    doubts = most_doubtful(pa.concat_tables(written.doubts for written in table))
    doubts_file = job.put_table("doubts", digest(doubts), ".parquet", doubts)
    manifest = _manifest(source, table, doubts_file, sidecars, shards)
    lease.put(MANIFEST, manifest.encode())
    removed = tuple(sorted(earlier - manifest.files()))
    clean_up(f"outdated files of {folder}", lambda: Folder(folder).delete_all(removed))
    predicted_by = sum((written.predicted_by for written in table), Counter[str]())
    rewritten = tuple(found for _, found in corrected if found is not None)
    name = source.published.name
    summary = Summary(folder, name, export, manifest, removed, dict(sorted(predicted_by.items())), rewritten)
    print_summary(summary)
    return summary


def _sidecars(job: Job, table: Sequence[Written], here: bool) -> dict[int, str]:
    """Write a sidecar for each shard with samples or duplicates; return the files by shard number."""
    files: dict[int, list[str]] = defaultdict(list)
    for written in table:
        for shard in written.shards:
            files[shard].append(written.file)
    for aliases in job.source.catalogue.small_tables("alias_tables"):
        for shard in pc.unique(aliases["shard"]).to_pylist():
            files.setdefault(shard, [])
    shards = [number for number in sorted(files) if job.source.catalogue.shards[number].state == "indexed"]
    pieces = [
        ({number: files[number] for number in shards[first : first + SHARDS_PER_TASK]},)
        for first in range(0, len(shards), SHARDS_PER_TASK)
    ]
    found = all_of("writing sidecars", write_sidecars, pieces, job, here)
    return {number: file for some in found for number, file in some.items()}


def _manifest(
    source: Source,
    table: Sequence[Written],
    doubts: str,
    sidecars: dict[int, str],
    shards: dict[int, str],
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
        doubts=doubts,
        sidecars={urls[number]: file for number, file in sidecars.items()},
        shards={urls[number]: file for number, file in shards.items()},
        held_because=source.published.held_because,
        calibration=source.words.calibration,
    )


def print_summary(summary: Summary) -> None:
    """Print the summary table."""
    manifest = summary.manifest
    rows = {"labels": summary.labels, "samples": f"{manifest.num_samples:,}"}
    rows["labels changed"] = f"{manifest.num_label_issues:,}"
    rows |= {f"  predicted by: {name}": f"{num:,}" for name, num in summary.predicted_by.items()}
    rows["table"] = f"{many(len(manifest.table), 'file')}, {summary.num_written('table'):,} written now"
    rows["most doubtful labels"] = manifest.doubts
    rows["sidecars"] = f"{len(manifest.sidecars):,}, {summary.num_written('sidecars'):,} written now"
    if manifest.shards:
        rows["corrected shards"] = f"{len(manifest.shards):,}, {summary.num_written('shards'):,} written now"
        rows["  labels replaced"] = f"{sum(one.num_replaced for one in summary.rewritten):,}"
        rows["  samples left out"] = f"{sum(one.num_left_out for one in summary.rewritten):,}"
        rows["  damaged byte ranges"] = f"{sum(one.num_damaged for one in summary.rewritten):,}"
    if (known := manifest.calibration) is not None:
        rows["recalibrated by"] = f"{many(known.num_judged, 'judgement')} of the audit"
        rows["  calibration error"] = f"{known.error_after:.3f}, was {known.error_before:.3f}"
    rows["outdated, removed"] = many(len(summary.removed), "file")
    num_lost = sum(name.startswith("shards/") for name in summary.removed)
    if num_lost and not manifest.shards:
        rows["  of corrected shards"] = f"{num_lost:,}; export.corrected_shards=true writes them again"
    print_table("export", rows)
    say(f"export: {summary.folder}")  # a table would cut a long path
    if manifest.held_because:
        say("WARNING: the labels of this export are HELD: use them only if you have checked them yourself")


if __name__ == "__main__":
    sys.exit(main())
