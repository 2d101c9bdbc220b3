"""Catalogue update: staged shards merged into the rows that exist, and published by one manifest.

New ids get new rows. A known id whose bytes still stand makes an alias; one whose shard changed or
vanished keeps its row and moves to where the id was found; found nowhere, it stays as `vanished`. All
files are written under new names first; until the manifest is replaced the old catalogue is whole.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
    contains,
    decide,
)
from pencil_scale.catalogue.files import ChangesWriter, RowsWriter, TableWriter, as_rows
from pencil_scale.catalogue.schema import DAMAGE, ROW
from pencil_scale.catalogue.staging import staged_findings, staged_records
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.objects import open_objects


@dataclass(frozen=True)
class StagedShard:
    """A shard that was read in this run: its number in the catalogue and where its records wait."""

    number: int
    name: str
    num_records: int


@dataclass(frozen=True)
class Overlay:
    """Ids that have another status than their shard gives them, as sorted hashes; `name` tells two apart."""

    excluded: Keys
    held_out: Keys
    name: str
    num_listed: int = 0  # ids on the list of those to exclude, as people count them

    @property
    def exclude(self) -> str:
        """Tell two lists of ids to exclude apart."""
        return hashlib.sha256(self.excluded.tobytes()).hexdigest()[:32]

    def statuses(self, found: Any, keys: Any) -> pa.Array:
        """Lay the two lists over what the shards said."""
        hashes = hashes_of(keys)
        found = pc.if_else(pa.array(contains(self.held_out, hashes)), "held_out", found)
        return pc.if_else(pa.array(contains(self.excluded, hashes)), "excluded", found)


@dataclass(frozen=True)
class Written:
    """The files of an update, before a manifest names them."""

    num_rows: int
    num_new: int
    num_moved: int
    num_vanished: int
    segments: tuple[Segment, ...]
    alias_tables: tuple[str, ...]
    damage_tables: tuple[str, ...]


class CatalogueUpdate:
    """One merge of staged shards into the catalogue that was there, if any."""

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
        # Shards whose bytes are no longer what was indexed: read again in this run, or gone.
        self._affected = np.array(sorted({shard.number for shard in staged} | set(gone)), np.int32)
        self._overlay = overlay
        self._aliases = TableWriter(store, "aliases")
        self._changes = ChangesWriter(store)
        self._moved: list[Rows] = []
        self._num_vanished = 0

    def write(self, damage: Sequence[pa.Table] = ()) -> Written:
        """Write all files of the new catalogue; `damage` comes in addition to what the shards gave."""
        num_records = sum(shard.num_records for shard in self._staged)
        decisions = decide(num_records, self._staged_keys, self._known_rows)
        first_row = self._old.num_rows if self._old else 0
        rows = RowsWriter(self._store, first_row)
        self._place_records(decisions, rows)
        self._keep_aliases(decisions)
        self._reword_rows(decisions)
        old_segments = [Segment(**entry) for entry in self._old.manifest["segments"]] if self._old else []
        return Written(
            rows.next_row,
            rows.next_row - first_row,
            sum(len(moved) for moved in self._moved),
            self._num_vanished,
            (*old_segments, *rows.segments(), *self._changes.finish()),
            tuple(self._aliases.finish()),
            tuple(self._write_damage(damage)),
        )

    # -- what comes in ------------------------------------------------------------------------------

    def _staged_keys(self) -> Iterator[Keys]:
        for shard in self._staged:
            for table in staged_records(self._store, shard.name, ["sample_key"]):
                yield hashes_of(table["sample_key"])

    def _known_rows(self) -> Iterator[KnownRows]:
        if self._old is None:
            return
        for table in self._old.batches(["row", "sample_key", "shard", "status"]):
            vanished = pc.equal(table["status"], "vanished").to_numpy()
            stands = ~np.isin(table["shard"].to_numpy(), self._affected) & ~vanished
            yield KnownRows(table["row"].to_numpy(), hashes_of(table["sample_key"]), stands)

    # -- records to rows ----------------------------------------------------------------------------

    def _place_records(self, decisions: Decisions, rows: RowsWriter) -> None:
        number = 0
        first_row = rows.first_row
        for shard in self._staged:
            for table in staged_records(self._store, shard.name):
                kinds = decisions.kind[number : number + len(table)]
                new = np.flatnonzero(kinds == NEW)
                rows.add(self._rows(table.take(new), rows.next_row + np.arange(len(new)), shard.number))
                for kind in (ALIAS, MOVED):
                    chosen = np.flatnonzero(kinds == kind)
                    if len(chosen) == 0:
                        continue
                    targets = decisions.target_rows(number + chosen, first_row)
                    placed = self._rows(table.take(chosen), targets, shard.number)
                    if kind == ALIAS:
                        self._aliases.add(placed)
                    else:
                        self._changes.add(placed)
                        self._moved.append(targets)
                number += len(table)

    def _rows(self, records: pa.Table, rows: Rows, shard: int) -> pa.Table:
        status = self._overlay.statuses(records["found_status"], records["sample_key"])
        return as_rows(records, rows, shard, status)

    def _keep_aliases(self, decisions: Decisions) -> None:
        """Carry over the aliases that still stand; the first one of an orphaned row takes it over."""
        orphans = decisions.orphans
        for table in self._old.small_tables("alias_tables") if self._old else ():
            table = table.take(np.flatnonzero(~np.isin(table["shard"].to_numpy(), self._affected)))
            rows = table["row"].to_numpy()
            first = np.zeros(len(rows), np.bool_)
            first[np.unique(rows, return_index=True)[1]] = True
            taken = first & np.isin(rows, orphans)
            status = self._overlay.statuses(table["found_status"], table["sample_key"])
            table = table.set_column(table.schema.get_field_index("status"), ROW.field("status"), status)
            self._changes.add(table.take(np.flatnonzero(taken)))
            self._moved.append(rows[taken])
            orphans = np.setdiff1d(orphans, rows[taken])
            self._aliases.add(table.take(np.flatnonzero(~taken)))
        decisions.orphans = orphans

    # -- new words on old rows ----------------------------------------------------------------------

    def _reword_rows(self, decisions: Decisions) -> None:
        """Write the rows whose status changed although their place did not: vanished, excluded, held out."""
        if self._old is None:
            return
        if len(decisions.orphans) == 0 and self._old.manifest["overlay"] == self._overlay.name:
            return
        moved = np.sort(np.concatenate([np.empty(0, np.int64), *self._moved]))
        for table in self._old.batches():
            rows = table["row"].to_numpy()
            gone = pa.array(np.isin(rows, decisions.orphans))
            status = self._overlay.statuses(table["found_status"], table["sample_key"])
            status = pc.if_else(pc.or_(gone, pc.equal(table["status"], "vanished")), "vanished", status)
            differs = pc.not_equal(status, table["status"]).to_numpy() & ~np.isin(rows, moved)
            self._num_vanished += int(np.count_nonzero(differs & gone.to_numpy(zero_copy_only=False)))
            place = table.schema.get_field_index("status")
            table = table.set_column(place, ROW.field("status"), status)
            self._changes.add(table.take(np.flatnonzero(differs)))

    def _write_damage(self, more: Sequence[pa.Table]) -> list[str]:
        writer = TableWriter(self._store, "damage")
        for table in self._old.small_tables("damage_tables") if self._old else ():
            # Number -1: the shard was never there, and this run has looked again.
            shards = table["shard"].to_numpy()
            writer.add(table.take(np.flatnonzero(~np.isin(shards, self._affected) & (shards >= 0))))
        for shard in self._staged:
            found = staged_findings(self._store, shard.name)
            numbers = pa.array(np.full(len(found), shard.number, np.int32))
            writer.add(pa.table([numbers, *found.columns], schema=DAMAGE))
        for table in more:
            writer.add(table)
        return writer.finish()


def publish(store: Folder, manifest: dict[str, Any], old_version: int) -> None:
    """Write the manifest: once under its version for good, then as the newest.

    A version number is given once, and the newest manifest moves by compare-and-swap, so of two jobs one
    publishes. A job that dies between the two puts leaves the rest to `finish_publish`.
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
    """Make a version the newest if the job that wrote its manifest died then; all its files are there."""
    objects = open_objects(store.url)
    while True:
        etag = objects.etag(manifest_name())
        newest = read_manifest(store.url)
        following = objects.read(manifest_name(int(newest["version"]) + 1 if newest else 1))
        if following is None:
            return
        objects.replace(manifest_name(), following[0], etag)


def merged_entries(
    old: Catalogue | None, read: Sequence[ShardEntry], gone: Sequence[int]
) -> tuple[list[ShardEntry], dict[str, int]]:
    """Number the shards: known URLs keep their number, new ones follow; what is gone stays, marked."""
    entries = list(old.shards) if old else []
    numbers = {entry.url: number for number, entry in enumerate(entries)}
    for number in gone:
        entries[number] = ShardEntry(**{**asdict(entries[number]), "state": "vanished"})
    for entry in read:
        number = numbers.setdefault(entry.url, len(entries))
        entries[number : number + 1] = [entry]
    return entries, numbers


def hashes_of(keys: Any) -> Keys:
    """See a column of 16-byte hashes as an array."""
    array = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if len(array) == 0:
        return np.empty(0, "S16")
    start = array.offset * 16
    return np.frombuffer(array.buffers()[1], np.uint8)[start : start + len(array) * 16].view("S16")
