"""Index the shards: read every tar once, strictly, and publish the catalogue everything else trusts.

    python -m pipelines.index_shards configs/demo.yaml
    python -m pipelines.index_shards CONFIG data.shards='s3://crawl/{000..099}.tar' data.check_images=decode

Writes <storage>/catalogue/ with a page to look at, summary.html. Run again it reads only shards that are new
or changed. Validation and test shards get catalogues of their own (catalogue/validation, catalogue/test); ids
they share with training leave training. One such job at a time works on a storage: it holds catalogue/lease.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pencil_scale.catalogue.catalogue import Catalogue, ShardEntry, catalogue_folder, read_manifest
from pencil_scale.catalogue.class_names import difference
from pencil_scale.catalogue.manifest import describe, missing_damage
from pencil_scale.catalogue.report import held_out_alarm, many, summary_page, summary_text
from pencil_scale.catalogue.rules import Overlay, make_overlay, make_rules
from pencil_scale.catalogue.schema import shard_stem
from pencil_scale.catalogue.shard_index import IndexRules
from pencil_scale.catalogue.shard_urls import Listing, Shard, expand_urls, list_shards
from pencil_scale.catalogue.staging import ShardReport, check_damage
from pencil_scale.catalogue.update import (
    CatalogueUpdate,
    Changes,
    StagedShard,
    Written,
    compare,
    finish_publish,
    merged_entries,
    publish,
)
from pencil_scale.config.command import refuse_lost, run_job
from pencil_scale.config.settings import Config
from pencil_scale.storage.errors import PencilError, new_id
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.lease import Lease
from pipelines.shard_making.shard_tasks import stage_all

UNKNOWN_LABELS_KEPT = 100


@dataclass(frozen=True)
class Summary:
    """The catalogue as it now stands, and what this run did to it."""

    catalogue: Catalogue
    num_shards_read: int
    written: Written | None
    published: bool


@dataclass(frozen=True)
class Part:
    """One catalogue to bring up to date: training, validation or test."""

    name: str  # empty for training
    storage: str
    shards: Sequence[str]
    rules: IndexRules
    rules_name: str
    overlay: Overlay
    img2dataset: bool
    max_damaged_share: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.index_shards", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Bring the catalogues of validation, test and training up to date, in this order."""
    storage = Folder(config.run.storage).url
    with Lease.hold(storage, "catalogue/lease", what=f"the shards of {storage} are being indexed") as lease:
        return _run(config, lease)


def _run(config: Config, lease: Lease) -> Summary:
    data, storage, limit = config.data, config.run.storage, config.data.max_damaged_share
    decode = data.check_images == "decode"
    clean = {name: urls for name, urls in (("validation", data.validation), ("test", data.test)) if urls}
    held_out = []
    if clean:
        label = data.clean_label or data.label
        clean_rules = make_rules(data.identity, label, data.classes, data.aliases, None, decode)
        overlay = make_overlay(data.exclude)
        parts = [
            Part(name, storage, urls, *clean_rules, overlay, False, limit) for name, urls in clean.items()
        ]
        held_out = [index(part, lease).catalogue for part in parts]
    rules = make_rules(data.identity, data.label, data.classes, data.aliases, data.truth, decode)
    overlay = make_overlay(data.exclude, held_out)
    part = Part("", storage, data.shards, *rules, overlay, data.img2dataset, limit)
    before = read_manifest(catalogue_folder(storage))
    summary = index(part, lease)
    _say_excluded(overlay, [summary.catalogue, *held_out])
    _say_returned(before, summary.catalogue)
    return summary


def index(part: Part, lease: Lease) -> Summary:
    """Bring one catalogue up to date: list, read what changed, check the damage, merge, publish."""
    folder = catalogue_folder(part.storage, part.name)
    store = Folder(folder)
    finish_publish(store)
    manifest = read_manifest(folder)
    old = Catalogue(folder, manifest) if manifest else None
    _check_identity(old, part)
    # A catalogue names its shards for life. (A file of patterns may be sent along with a job.)
    refuse_lost(f"data.{part.name or 'shards'}", *(one for one in part.shards if not one.startswith("@")))
    listing = list_shards(part.shards, part.img2dataset)
    changes = compare(listing, old, part.rules_name)
    _say_changes(part, listing, changes, old)
    if old is not None and _is_current(old, part, changes, listing):
        _sweep(store, lease)
        _say(part, f"nothing changed: version {old.version}, {old.num_rows:,} rows")
        if alarm := held_out_alarm(old.manifest):
            _say(part, f"WARNING: {alarm}")
        return Summary(old, 0, None, published=False)
    shards = _in_listed_order(changes, listing)
    what = f"indexing {part.name or 'training'} shards"
    reports = stage_all(store, shards, part.rules, part.rules_name, part.max_damaged_share, what)
    check_damage(shards, reports, listing.missing, part.max_damaged_share)
    lease.check()
    return _publish(part, store, old, changes, listing, shards, reports, lease)


def _publish(
    part: Part,
    store: Folder,
    old: Catalogue | None,
    changes: Changes,
    listing: Listing,
    shards: Sequence[Shard],
    reports: Sequence[ShardReport],
    lease: Lease,
) -> Summary:
    read = list(zip(shards, reports, strict=True))
    fresh = [_entry(shard, report, part.rules_name) for shard, report in read]
    entries, numbers = merged_entries(old, fresh, changes.gone)
    staged = [StagedShard(numbers[shard.url], report.staged_as, report.num_records) for shard, report in read]
    update = CatalogueUpdate(store, old, staged, changes.gone, part.overlay)
    written = update.write([missing_damage(listing.missing)])
    version = old.version if old else 0
    catalogue_id = old.id if old else new_id()
    manifest = describe(store, written, entries, part.rules, part.overlay, version + 1, catalogue_id)
    catalogue = Catalogue(store.url, manifest)
    store.put("summary.html", summary_page(catalogue).encode("utf-8", "backslashreplace"))
    publish(store, manifest, version)
    _sweep(store, lease)
    print(summary_text(catalogue, part.name or "training"))
    return Summary(catalogue, len(shards), written, published=True)


def _sweep(store: Folder, lease: Lease) -> None:
    """Remove what was staged; the manifest that is now published has no need of it."""
    lease.check()  # else it would be what another job stages
    for name in store.names("staging"):
        store.delete(name)


def _entry(shard: Shard, report: ShardReport, rules_name: str) -> ShardEntry:
    unknown = Counter(report.unknown_labels).most_common(UNKNOWN_LABELS_KEPT)
    return ShardEntry(
        shard.url,
        shard.version.num_bytes,
        shard.version.tag,
        "indexed",
        report.num_samples,
        rules_name,
        report.oddities,
        report.skipped,
        dict(unknown),
        report.suffixes,
    )


def _is_current(old: Catalogue, part: Part, changes: Changes, listing: Listing) -> bool:
    same_shards = not changes.to_read and not changes.gone
    same_missing = old.manifest["damage"].get("shard_missing", 0) == len(listing.missing)
    return same_shards and same_missing and old.manifest["overlay"] == part.overlay.name


def _check_identity(old: Catalogue | None, part: Part) -> None:
    if old is not None and old.manifest["identity"] != part.rules.identity:
        raise PencilError(
            f"data.identity: {old.folder} names its samples by {old.manifest['identity']}, the config by "
            f"{part.rules.identity}; rows are for life, so choose another run.storage"
        )
    if part.rules.identity == "shard_key":
        stems = Counter(shard_stem(url) for url in expand_urls(part.shards))
        twice = next((stem for stem, count in stems.items() if count > 1), None)
        if twice is not None:
            raise PencilError(
                f"data.identity: two shards are called {twice}.tar, so shard_key would mix their samples; "
                "rename one, or choose another identity"
            )


def _in_listed_order(changes: Changes, listing: Listing) -> list[Shard]:
    """The first of two equal samples is the first in the list, whatever made its shard be read."""
    order = {shard.url: place for place, shard in enumerate(listing.shards)}
    return sorted(changes.to_read, key=lambda shard: order.get(shard.url, -1))


def _say_changes(part: Part, listing: Listing, changes: Changes, old: Catalogue | None) -> None:
    gone = [old.shards[number].url for number in changes.gone] if old else []
    waiting, missing = listing.waiting, listing.missing
    for what, urls in (
        ("changed since indexed, read again", [shard.url for shard in changes.changed]),
        (
            "to read again, because labels, classes or checks changed",
            [shard.url for shard in changes.reread],
        ),
        ("vanished; samples move to where the same ids are, or wait", gone),
        ("unfinished (no _stats.json), left for later", waiting),
        ("listed but not there", missing),
    ):
        if urls:
            _say(part, f"{many(len(urls), 'shard')} {what}: {urls[0]}{' ...' if len(urls) > 1 else ''}")
    if old is not None and (differs := difference(part.rules.classes.names, old.class_names)):
        _say(
            part,
            f"WARNING: data.classes has changed: the list {differs}, compared with version {old.version}; "
            "labels given as names keep their class, labels given as numbers change it",
        )
    if changes.unlisted:
        _say(part, f"{many(len(changes.unlisted), 'shard')} left the list but unchanged in the store: kept")


def _say_excluded(overlay: Overlay, catalogues: Sequence[Catalogue]) -> None:
    """A misspelt id takes nothing down, and nobody would know."""
    found = sum(catalogue.manifest["status"].get("excluded", 0) for catalogue in catalogues)
    if found < overlay.num_listed:
        print(
            f"WARNING: data.exclude lists {many(overlay.num_listed, 'id')}, of which {found:,} are in the "
            "catalogue; the others match no sample: see how pipelines.why spells an id",
            file=sys.stderr,
        )


def _say_returned(before: dict[str, Any] | None, after: Catalogue) -> None:
    """A takedown must not be undone by a config that merely lacks the list."""
    was, now = ((found or {"status": {}})["status"].get("excluded", 0) for found in (before, after.manifest))
    if now < was:
        print(
            f"WARNING: {many(was - now, 'sample')} that had been taken down are back, because data.exclude "
            "does not list them any more; if that is not intended, set data.exclude and index again",
            file=sys.stderr,
        )


def _say(part: Part, words: str) -> None:
    print(f"{part.name or 'training'}: {words}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
