"""Catalogue update: find the shards that changed, and merge their records into the known rows.

A shard is read when it is new, when its size or ETag changed, or when the rules for reading it changed. A
shard that left the list but is unchanged in its store keeps its rows.

New ids get new rows. A known id whose bytes are unchanged becomes an alias of its row. If its shard changed
or vanished, the row stays and moves to where the id was found; if it was found nowhere, its status becomes
`vanished`. All files are written under names that were never used before; the old catalogue is complete until
`publish` replaces the manifest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Catalogue, Segment, ShardEntry
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
from pencil_scale.catalogue.rules import Overlay
from pencil_scale.catalogue.schema import CHUNK_ROWS, DAMAGE, ROW, put_table
from pencil_scale.catalogue.shard_urls import Listing, Shard
from pencil_scale.catalogue.staging import staged_findings, staged_records
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import filesystem_of, versions_of

SEGMENT_ROWS = 64 * CHUNK_ROWS
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


class TableWriter:
    """Takes tables in order and writes them as files of at most `SEGMENT_ROWS` rows."""

    def __init__(self, store: Folder, folder: str) -> None:
        self.num_rows = 0
        self._store = store
        self._folder = folder
        self._names: list[str] = []
        self._waiting: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        """Append some rows."""
        self._waiting.append(table)
        self.num_rows += len(table)
        while self.num_rows >= SEGMENT_ROWS * (len(self._names) + 1):
            self._write()

    def finish(self) -> list[str]:
        """Write the remaining rows and return the names of all files."""
        if self.num_rows > SEGMENT_ROWS * len(self._names):
            self._write()
        return self._names

    def _write(self) -> None:
        table = pa.concat_tables(self._waiting).combine_chunks()
        self._names.append(put_table(self._store, self._folder, table.slice(0, SEGMENT_ROWS)))
        self._waiting = [table.slice(SEGMENT_ROWS)]


class RowsWriter(TableWriter):
    """Takes new rows, numbered consecutively from `first_row`, and writes them as segments."""

    def __init__(self, store: Folder, first_row: int) -> None:
        super().__init__(store, "segments")
        self.first_row = first_row

    @property
    def next_row(self) -> int:
        return self.first_row + self.num_rows

    def segments(self) -> list[Segment]:
        """Write the remaining rows and return all segments."""
        firsts = range(self.first_row, self.next_row, SEGMENT_ROWS)
        pairs = zip(self.finish(), firsts, strict=True)
        return [Segment(name, first, min(SEGMENT_ROWS, self.next_row - first)) for name, first in pairs]


class ChangedRows:
    """Newer versions of known rows: added in any order, each row once, and read back by range.

    Memory holds one segment of them; the others are kept as sorted files in the staging folder.
    """

    def __init__(self, store: Folder) -> None:
        self._store = store
        self._files: dict[str, tuple[int, int]] = {}  # name -> first and last row
        self._waiting: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        """Take some rows."""
        self._waiting.append(table)
        if sum(map(len, self._waiting)) >= SEGMENT_ROWS:
            table = pa.concat_tables(self._waiting).sort_by("row")
            name = put_table(self._store, "staging", table)
            self._files[name] = (table["row"][0].as_py(), table["row"][-1].as_py())
            self._waiting = []

    def between(self, first: int, stop: int) -> pa.Table:
        """Read the rows from `first` to `stop` - 1, in any order."""
        filesystem, root = filesystem_of(self._store.url)
        wanted = (pc.field("row") >= first) & (pc.field("row") < stop)
        names = [name for name, (low, high) in self._files.items() if low < stop and high >= first]
        found = [pq.read_table(f"{root}/{name}", filesystem=filesystem, filters=wanted) for name in names]
        found += [table.filter(wanted) for table in self._waiting]
        return pa.concat_tables([ROW.empty_table(), *found])


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
        old_segments = self._old.segments if self._old else ()
        segments = [*(self._updated(segment, orphans) for segment in old_segments), *rows.segments()]
        aliases, damaged = self._aliases.finish(), self._write_damage(damage)
        return Written(rows.next_row, tuple(segments), tuple(aliases), tuple(damaged))

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
        """Carry over valid aliases; the first of an orphaned row takes it over. Returns the other orphans."""
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
