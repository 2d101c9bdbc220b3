"""Catalogue update: find the shards that changed, merge their records into the known rows, and publish.

A shard is read when it is new, when its size or ETag changed, or when the rules for reading it changed. A
shard that left the list but is unchanged in its store keeps its rows.

New ids get new rows. A known id whose bytes are unchanged becomes an alias of its row. If its shard changed
or vanished, the row stays and moves to where the id was found; if it was found nowhere, its status becomes
`vanished`. All files are written under new names first; the old catalogue is complete until the manifest is
replaced.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue, Segment, ShardEntry, manifest_name, read_manifest
from pencil_scale.catalogue.duplicates import (
    ALIAS,
    MOVED,
    NEW,
    Decisions,
    Keys,
    KnownRows,
    Rows,
    decide,
    hashes_of,
)
from pencil_scale.catalogue.files import ChangedRows, RowsWriter, TableWriter, put_table
from pencil_scale.catalogue.rules import Overlay
from pencil_scale.catalogue.schema import DAMAGE, ROW
from pencil_scale.catalogue.shard_urls import Listing, Shard
from pencil_scale.catalogue.staging import staged_findings, staged_records
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.objects import open_objects
from pencil_scale.storage.urls import versions_of

_STATUS = ROW.get_field_index("status")


@dataclass(frozen=True)
class Changes:
    """What changed since the catalogue was published; numbers are those of known shards."""

    new: tuple[Shard, ...]
    changed: tuple[Shard, ...]
    reread: tuple[Shard, ...]  # unchanged, but the rules for reading them changed
    gone: tuple[int, ...]
    unlisted: tuple[int, ...]

    @property
    def to_read(self) -> tuple[Shard, ...]:
        return (*self.new, *self.changed, *self.reread)


def compare(listing: Listing, old: Catalogue | None, rules_name: str) -> Changes:
    """Compare the listed shards with those in the catalogue."""
    known = {entry.url: (number, entry) for number, entry in enumerate(old.shards if old else ())}
    known = {url: found for url, found in known.items() if found[1].state == "indexed"}
    new = [shard for shard in listing.shards if shard.url not in known]
    listed = [(shard, known[shard.url][1]) for shard in listing.shards if shard.url in known]
    changed = [shard for shard, entry in listed if entry.version != shard.version]
    same = [(shard, entry) for shard, entry in listed if entry.version == shard.version]
    away = known.keys() - {shard.url for shard in listing.shards} - set(listing.waiting)
    absent = [found for url, found in known.items() if url in away]
    versions = versions_of([entry.url for _, entry in absent])
    kept = [found for found, version in zip(absent, versions, strict=True) if version == found[1].version]
    gone = [found for found, version in zip(absent, versions, strict=True) if version != found[1].version]
    same += [(Shard(entry.url, entry.version), entry) for _, entry in kept]
    reread = [shard for shard, entry in same if entry.rules != rules_name]
    numbers = [tuple(number for number, _ in found) for found in (gone, kept)]
    return Changes(tuple(new), tuple(changed), tuple(reread), *numbers)


@dataclass(frozen=True)
class StagedShard:
    """A shard that this run read: its number in the catalogue and the name of its staged records."""

    number: int
    name: str
    num_records: int


@dataclass(frozen=True)
class Written:
    """The files of an update, before a manifest names them."""

    num_rows: int
    segments: tuple[Segment, ...]
    alias_tables: tuple[str, ...]
    damage_tables: tuple[str, ...]


class CatalogueUpdate:
    """Merges staged shards into the existing catalogue, if any."""

    def __init__(
        self,
        store: Folder,
        old: Catalogue | None,
        staged: Sequence[StagedShard],
        gone: Sequence[int],
        overlay: Overlay,
    ) -> None:
        self._store = store
        self._old = old
        self._staged = staged
        # Shards whose indexed bytes are no longer valid: read again in this run, or gone.
        self._affected = np.array(sorted({shard.number for shard in staged} | set(gone)), np.int32)
        self._overlay = overlay
        self._aliases = TableWriter(store, "aliases")
        self._moved = ChangedRows(store)

    def write(self, damage: Sequence[pa.Table] = ()) -> Written:
        """Write all files of the new catalogue; `damage` is added to what was found in the shards."""
        first_row = self._old.num_rows if self._old else 0
        num_records = sum(shard.num_records for shard in self._staged)
        decisions = decide(num_records, self._staged_keys, self._known_rows, first_row)
        rows = RowsWriter(self._store, first_row)
        self._place_records(decisions, rows)
        orphans = self._keep_aliases(decisions.orphans)
        segments = [self._updated(segment, orphans) for segment in (self._old.segments if self._old else ())]
        return Written(
            rows.next_row,
            (*segments, *rows.segments()),
            tuple(self._aliases.finish()),
            tuple(self._write_damage(damage)),
        )

    def _staged_keys(self) -> Iterator[tuple[Keys, Rows]]:
        number = 0
        for shard in self._staged:
            for table in staged_records(self._store, shard.name, ["sample_key"]):
                yield hashes_of(table["sample_key"]), number + np.arange(len(table))
                number += len(table)

    def _known_rows(self) -> Iterator[KnownRows]:
        for table in self._old.batches(["row", "sample_key", "shard", "status"]) if self._old else ():
            vanished = pc.equal(table["status"], "vanished").to_numpy()
            valid = ~np.isin(table["shard"].to_numpy(), self._affected) & ~vanished
            yield KnownRows(table["row"].to_numpy(), hashes_of(table["sample_key"]), valid)

    def _place_records(self, decisions: Decisions, rows: RowsWriter) -> None:
        """Write new records as new rows; set aside those that are aliases or move a known row."""
        number = 0
        for shard in self._staged:
            for table in staged_records(self._store, shard.name):
                kinds = decisions.kind[number : number + len(table)]
                new = np.flatnonzero(kinds == NEW)
                rows.add(self._rows(table.take(new), rows.next_row + np.arange(len(new)), shard.number))
                for kind, target in ((ALIAS, self._aliases), (MOVED, self._moved)):
                    chosen = np.flatnonzero(kinds == kind)
                    if len(chosen):
                        known = decisions.target_rows(number + chosen)
                        target.add(self._rows(table.take(chosen), known, shard.number))
                number += len(table)

    def _rows(self, records: pa.Table, rows: Rows, shard: int) -> pa.Table:
        """Turn records into rows of the catalogue."""
        shards = pa.array(np.full(len(records), shard, np.int32))
        status = self._overlay.statuses(records["found_status"], records["sample_key"])
        return pa.table([pa.array(rows, pa.int64()), shards, status, *records.columns], schema=ROW)

    def _keep_aliases(self, orphans: Rows) -> Rows:
        """Carry over the aliases that are still valid; the first alias of an orphaned row takes it over.

        Returns the rows that are still orphans.
        """
        for table in self._old.small_tables("alias_tables") if self._old else ():
            table = table.take(np.flatnonzero(~np.isin(table["shard"].to_numpy(), self._affected)))
            status = self._overlay.statuses(table["found_status"], table["sample_key"])
            table = table.set_column(_STATUS, ROW.field("status"), status)
            rows = table["row"].to_numpy()
            first = np.zeros(len(rows), np.bool_)
            first[np.unique(rows, return_index=True)[1]] = True
            taken = first & np.isin(rows, orphans)
            self._moved.add(table.take(np.flatnonzero(taken)))
            self._aliases.add(table.take(np.flatnonzero(~taken)))
            orphans = np.setdiff1d(orphans, rows[taken])
        return orphans

    def _updated(self, segment: Segment, orphans: Rows) -> Segment:
        """Copy a segment if one of its rows changed: moved, vanished, excluded or held out."""
        assert self._old is not None
        first, stop = segment.first_row, segment.stop
        moved = self._moved.between(first, stop)
        orphans = orphans[slice(*np.searchsorted(orphans, [first, stop]))] - first
        if not len(moved) and not len(orphans) and self._old.manifest["overlay"] == self._overlay.name:
            return segment
        table = self._old.read(first, stop)
        gone = pc.equal(table["status"], "vanished").to_numpy()
        gone[orphans] = True
        status = self._overlay.statuses(table["found_status"], table["sample_key"])
        status = pc.if_else(pa.array(gone), "vanished", status)
        if not len(moved) and status.equals(table["status"]):
            return segment
        places = np.arange(len(table))
        places[moved["row"].to_numpy() - first] = len(table) + np.arange(len(moved))
        table = pa.concat_tables([table.set_column(_STATUS, ROW.field("status"), status), moved])
        return replace(segment, file=put_table(self._store, "segments", table.take(places)))

    def _write_damage(self, more: Sequence[pa.Table]) -> list[str]:
        writer = TableWriter(self._store, "damage")
        for table in self._old.small_tables("damage_tables") if self._old else ():
            # Number -1: the shard was missing, and this run has looked for it again.
            shards = table["shard"].to_numpy()
            writer.add(table.take(np.flatnonzero(~np.isin(shards, self._affected) & (shards >= 0))))
        for shard in self._staged:
            found = staged_findings(self._store, shard.name)
            numbers = pa.array(np.full(len(found), shard.number, np.int32))
            writer.add(pa.table([numbers, *found.columns], schema=DAMAGE))
        for table in more:
            writer.add(table)
        return writer.finish()


def merged_entries(
    old: Catalogue | None, read: Sequence[ShardEntry], gone: Sequence[int]
) -> tuple[list[ShardEntry], dict[str, int]]:
    """Number the shards: known URLs keep their number, new ones follow, and vanished ones stay, marked."""
    entries = list(old.shards) if old else []
    numbers = {entry.url: number for number, entry in enumerate(entries)}
    for number in gone:
        entries[number] = replace(entries[number], state="vanished")
    for entry in read:
        number = numbers.setdefault(entry.url, len(entries))
        entries[number : number + 1] = [entry]
    return entries, numbers


def publish(store: Folder, manifest: dict[str, Any], old_version: int) -> None:
    """Write the manifest: first under its version number, permanently, then as the newest.

    A version number is used once, and the newest manifest is replaced by compare-and-swap, so of two jobs
    one publishes. If a job dies between the two puts, `finish_publish` does the second.
    """
    objects = open_objects(store.url)
    etag = objects.etag(manifest_name())
    newest = read_manifest(store.url)
    found = int(newest["version"]) if newest else 0
    data, version = json.dumps(manifest, indent=1).encode(), int(manifest["version"])
    if (
        found != old_version
        or not objects.create(manifest_name(version), data)
        or not objects.replace(manifest_name(), data, etag)
    ):
        raise PencilError(
            f"{store.url}: another job published version {max(found, version)} while this one worked on "
            f"{old_version}; run this one again"
        )


def finish_publish(store: Folder) -> None:
    """Make a version the newest if its job died right after writing its manifest; its files are complete."""
    objects = open_objects(store.url)
    while True:
        etag = objects.etag(manifest_name())
        newest = read_manifest(store.url)
        following = objects.read(manifest_name(int(newest["version"]) + 1 if newest else 1))
        if following is None:
            return
        objects.replace(manifest_name(), following[0], etag)
