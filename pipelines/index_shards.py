"""Index the shards: read every tar once, check it strictly, and publish the catalogue.

    python -m pipelines.index_shards configs/demo.yaml
    python -m pipelines.index_shards CONFIG data.shards='s3://crawl/{000..099}.tar' data.check_images=decode

Writes <storage>/catalogue/, with an overview in summary.html. A second run reads only shards that are new or
have changed. Validation and test shards have their own catalogues (catalogue/validation, catalogue/test), and
training leaves out the ids in them. Only one such job at a time works on a storage: it holds catalogue/lease.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pencil_scale.catalogue.catalogue import Catalogue, Shard, finish_publish, publish, read_manifest
from pencil_scale.catalogue.class_names import difference
from pencil_scale.catalogue.manifest import describe
from pencil_scale.catalogue.report import alarms, summary_page, summary_text
from pencil_scale.catalogue.rules import Overlay, make_overlay, make_rules
from pencil_scale.catalogue.schema import shard_stem
from pencil_scale.catalogue.shard_index import IndexRules
from pencil_scale.catalogue.shard_urls import Changes, expand_urls, find_changes
from pencil_scale.catalogue.staging import check_damage, check_usable, stage_shard
from pencil_scale.catalogue.update import CatalogueUpdate
from pencil_scale.config.command import program, refuse_lost, run_job
from pencil_scale.config.settings import Config
from pencil_scale.storage.cleanup import clean_up
from pencil_scale.storage.errors import PencilError, TaskDiedError, many, new_id
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pipelines.tasks import each, is_in_memory

SMALL_BYTES = 64 << 20  # read in less time than a local Ray takes to start


@dataclass(frozen=True)
class Summary:
    """The catalogue as it is now, and what this run did to it."""

    catalogue: Catalogue
    num_shards_read: int
    published: bool


@dataclass(frozen=True)
class Target:
    """One catalogue to bring up to date: training, validation or test."""

    name: str
    folder: str
    shards: Sequence[str]
    rules: IndexRules
    overlay: Overlay
    img2dataset: bool
    max_damaged_share: float

    def say(self, words: str) -> None:
        """Print a line about this catalogue."""
        print(f"{self.name}: {words}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.index_shards", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Bring the catalogues of validation, test and training up to date, in this order."""
    storage, data, limit = Storage(config.run.storage), config.data, config.data.max_damaged_share
    decode = data.check_images == "decode"
    lease_name, what = f"{storage.catalogue()}/lease", f"the shards of {storage.url} are being indexed"
    with Lease.hold(storage.url, lease_name, what=what) as lease:
        held_out = []
        for name, urls in (("validation", data.validation), ("test", data.test)):
            if urls:
                label = data.clean_label or data.label
                rules = make_rules(data.identity, label, data.classes, data.aliases, None, decode)
                folder = storage.path(storage.catalogue(name))
                target = Target(name, folder, urls, rules, make_overlay(data.exclude), False, limit)
                held_out.append(index(target, lease).catalogue)
        rules = make_rules(data.identity, data.label, data.classes, data.aliases, data.truth, decode)
        overlay, folder = make_overlay(data.exclude, held_out), storage.path(storage.catalogue())
        before = read_manifest(folder)
        target = Target("training", folder, data.shards, rules, overlay, data.img2dataset, limit)
        summary = index(target, lease)
    _warn_about_excluded(overlay, before, summary.catalogue, held_out)
    return summary


def index(target: Target, lease: Lease) -> Summary:
    """Bring one catalogue up to date: list, read what changed, check the damage, merge, publish."""
    store = Folder(target.folder)
    finish_publish(store)
    manifest = read_manifest(target.folder)
    old = Catalogue(target.folder, manifest) if manifest else None
    _check_identity(old, target)
    # A catalogue refers to its shards permanently. (A file of patterns may be sent along with a job.)
    key = "data.shards" if target.name == "training" else f"data.{target.name}"
    refuse_lost(key, *(pattern for pattern in target.shards if not pattern.startswith("@")))
    changes = find_changes(target.shards, old, target.rules.name, target.img2dataset)
    _say_changes(target, changes, old)
    if old is not None and _is_current(old, target, changes):
        _sweep(store, lease)
        target.say(f"nothing changed: version {old.version}, {many(old.num_rows, 'row')}")
        summary = Summary(old, 0, published=False)
    else:
        read = _stage_all(target, store, changes.to_read)
        check_damage(store, read, changes.missing, target.max_damaged_share)
        known = {shard.url: shard for shard in (*(old.shards if old else ()), *read)}
        check_usable([*known.values()], target.rules, key)
        lease.check()
        summary = _publish(target, old, changes, read, lease)
    for alarm in alarms(summary.catalogue.manifest):
        target.say(f"WARNING: {alarm}")
    return summary


def _stage_all(target: Target, store: Folder, shards: Sequence[Shard]) -> list[Shard]:
    """Read the shards, one task each, and return them with their counts.

    Records go from the task to the store, and what an interrupted run staged is reused.
    """
    total_bytes = sum(shard.num_bytes for shard in shards)
    read: dict[int, Shard] = {}
    try:
        what, shared = f"indexing {target.name} shards", (store.url, target.rules)
        # A small job runs here: one core needs about a second. Images are always decoded in tasks, because
        # an image that crashes its decoder must not crash the job.
        # Importing Ray would take longer than that.
        ray = sys.modules.get("ray")
        has_cluster = "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())
        is_small = total_bytes <= SMALL_BYTES and not has_cluster and not target.rules.decode_images
        here = is_small or is_in_memory(store.url)
        pieces = [(shard,) for shard in shards]
        for number, shard in each(what, _stage, pieces, shared, here=here, isolated=True):
            read[number] = shard
            if len(read).bit_count() == 1:  # after 1, 2, 4, 8 ... shards
                found = [read[number] for number in sorted(read)]
                check_damage(store, found, (), target.max_damaged_share, total_bytes)
    except TaskDiedError as error:
        raise PencilError(
            f"shard {shards[error.number].url}: the process that read it died in every attempt "
            f"({error.kind}); remove it from data.shards, or index with data.check_images=header"
        ) from error
    return [read[number] for number in range(len(shards))]


def _stage(shared: tuple[str, IndexRules], shard: Shard) -> Shard:
    url, rules = shared
    return stage_shard(Folder(url), shard, rules)


def _publish(
    target: Target, old: Catalogue | None, changes: Changes, read: list[Shard], lease: Lease
) -> Summary:
    store = Folder(target.folder)
    written = CatalogueUpdate(store, old, read, changes.gone, target.overlay).write(changes.missing)
    version, catalogue_id = (old.version, old.id) if old else (0, new_id())
    manifest = describe(store, written, target.rules, target.overlay, version + 1, catalogue_id)
    catalogue = Catalogue(store.url, manifest)
    store.put("summary.html", summary_page(catalogue).encode("utf-8", "backslashreplace"))
    publish(store, manifest, version)
    _sweep(store, lease)
    print(summary_text(catalogue, target.name))
    return Summary(catalogue, len(read), published=True)


def _sweep(store: Folder, lease: Lease) -> None:
    """Remove what was staged; the published manifest does not need it."""

    def remove() -> None:
        lease.check()  # without the lease, it could be what another job stages
        store.delete_all(store.names("staging"))

    clean_up(f"{store.path('staging')}", remove)


def _is_current(old: Catalogue, target: Target, changes: Changes) -> bool:
    same_shards = not changes.to_read and not changes.gone
    same_missing = old.manifest["damage"].get("shard_missing", 0) == len(changes.missing)
    return same_shards and same_missing and old.manifest["overlay"] == target.overlay.name


def _check_identity(old: Catalogue | None, target: Target) -> None:
    if old is not None and old.manifest["identity"] != target.rules.identity:
        raise PencilError(
            f"data.identity: {old.folder} identifies samples by {old.manifest['identity']}, the config by "
            f"{target.rules.identity}; row numbers are permanent, so choose another run.storage"
        )
    if target.rules.identity == "shard_key":
        stems = Counter(shard_stem(url) for url in expand_urls(target.shards))
        twice = next((stem for stem, count in stems.items() if count > 1), None)
        if twice is not None:
            raise PencilError(
                f"data.identity: two shards are called {twice}.tar, so shard_key would mix their samples; "
                "rename one, or choose another identity"
            )


def _say_changes(target: Target, changes: Changes, old: Catalogue | None) -> None:
    gone = [old.shards[number].url for number in changes.gone] if old else []
    for what, urls in (
        ("changed since the last run, to read again", changes.changed),
        ("to read again, because labels, classes or checks changed", changes.reread),
        ("vanished; their samples are used where another shard has the same ids", gone),
        ("unfinished (no _stats.json), skipped for now", changes.waiting),
        ("listed but missing", changes.missing),
    ):
        if urls:
            target.say(f"{many(len(urls), 'shard')} {what}: {urls[0]}{' ...' if len(urls) > 1 else ''}")
    if old is not None and (differs := difference(target.rules.classes.names, old.class_names)):
        target.say(
            f"WARNING: data.classes has changed: the list {differs}, compared with version {old.version}; "
            "labels given as names keep their class, labels given as numbers change it"
        )
    if changes.unlisted:
        target.say(
            f"{many(len(changes.unlisted), 'shard')} no longer listed, but unchanged in the store: kept"
        )


def _warn_about_excluded(
    overlay: Overlay, before: dict[str, Any] | None, after: Catalogue, held_out: Sequence[Catalogue]
) -> None:
    """Warn about misspelt ids, and about a config without the list, which would undo a takedown."""
    was, now = ((found or {"status": {}})["status"].get("excluded", 0) for found in (before, after.manifest))
    found = now + sum(catalogue.manifest["status"].get("excluded", 0) for catalogue in held_out)
    if found < overlay.num_listed:
        print(
            f"WARNING: data.exclude lists {many(overlay.num_listed, 'id')}, of which {found:,} are in the "
            f"catalogue; the others match no sample: `{program('pipelines.why')}` shows how an id is spelled",
            file=sys.stderr,
        )
    if now < was:
        print(
            f"WARNING: data.exclude no longer lists {many(was - now, 'sample')} that it excluded before, so "
            "training uses them again; if that is not intended, set data.exclude and index again",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
