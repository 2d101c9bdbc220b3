"""Catalogue update: merge the samples of the shards that were read into the known rows.

New ids get new rows. A known id whose bytes are unchanged becomes an alias of its row. If its shard changed
or vanished, the row stays and moves to where the id was found; if it was found nowhere, its status becomes
`vanished`. All files are written under names that were never used before; the old catalogue is complete until
`publish` replaces the manifest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from pencil_scale.catalogue.catalogue import Catalogue, Segment, Shard
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
from pencil_scale.catalogue.schema import CHUNK_ROWS, DAMAGE, ROW, damage_line, put_table
from pencil_scale.catalogue.staging import staged_damage, staged_samples
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import filesystem_of

SEGMENT_ROWS = 64 * CHUNK_ROWS
_STATUS = ROW.get_field_index("status")


class TableWriter:
    """Takes rows in order and writes them as segments of at most `SEGMENT_ROWS` rows."""

    def __init__(self, store: Folder, folder: str, first_row: int = 0) -> None:
        self.next_row = first_row
        self._store = store
        self._folder = folder
        self._written: list[Segment] = []
        self._waiting: list[pa.Table] = []
        self._first_waiting = first_row

    def add(self, table: pa.Table) -> None:
        """Append some rows."""
        self._waiting.append(table)
        self.next_row += len(table)
        while self.next_row - self._first_waiting >= SEGMENT_ROWS:
            self._write()

    def finish(self) -> list[Segment]:
        """Write the remaining rows and return all segments."""
        if self.next_row > self._first_waiting:
            self._write()
        return self._written

    def _write(self) -> None:
        table = pa.concat_tables(self._waiting).combine_chunks()
        file = put_table(self._store, self._folder, table.slice(0, SEGMENT_ROWS))
        self._waiting = [table.slice(SEGMENT_ROWS)]
        self._written.append(Segment(file, self._first_waiting, min(len(table), SEGMENT_ROWS)))
        self._first_waiting = self._written[-1].stop


class CatalogueUpdate:
    """Merges the shards that this run read into the existing catalogue, if any.

    Known shards keep their number, new ones follow, and vanished ones stay, marked. `gone` and the shards
    that were read are `affected`: the bytes that were indexed for them are no longer valid.
    """

    def __init__(
        self,
        store: Folder,
        old: Catalogue | None,
        read: Sequence[Shard],
        gone: Sequence[int],
        overlay: Overlay,
    ) -> None:
        self._store = store
        self._old = old
        self._overlay = overlay
        self.shards = list(old.shards) if old else []
        for number in gone:
            self.shards[number] = replace(self.shards[number], state="vanished")
        numbers = {shard.url: number for number, shard in enumerate(self.shards)}
        self._read: list[tuple[int, Shard]] = []  # in the order of the list
        for shard in read:
            number = numbers.setdefault(shard.url, len(self.shards))
            self.shards[number : number + 1] = [shard]
            self._read.append((number, shard))
        self._affected = np.array(sorted({number for number, _ in self._read} | set(gone)), np.int32)
        self._aliases = TableWriter(store, "aliases")
        self._moved = TableWriter(store, "staging")  # newer versions of known rows, in any order

    def write(self, missing: Sequence[str] = ()) -> dict[str, Any]:
        """Write all files of the new catalogue, and return what the manifest says of them."""
        rows = TableWriter(self._store, "segments", self._old.num_rows if self._old else 0)
        decisions = self.decisions()
        self._place_records(decisions, rows)
        orphans = self._keep_aliases(decisions.orphans)
        segments = [*self._updated_segments(orphans), *rows.finish()]
        return {
            "num_rows": rows.next_row,
            "num_duplicates": self._aliases.next_row,
            "missing": list(missing),
            "shards": [vars(shard) for shard in self.shards],
            "segments": [asdict(segment) for segment in segments],
            "alias_tables": [table.file for table in self._aliases.finish()],
            "damage_tables": [table.file for table in self._write_damage(missing)],
        }

    def decisions(self) -> Decisions:
        """Decide for every sample that was read whether it is new."""
        num_with_id = sum(shard.num_with_id for _, shard in self._read)
        first_row = self._old.num_rows if self._old else 0
        return decide(num_with_id, self._new_keys, self._known_rows, first_row)

    def _new_keys(self) -> Iterator[tuple[Keys, Rows]]:
        number = 0
        for _, shard in self._read:
            for table in staged_samples(self._store, shard, ["sample_key"]):
                yield hashes_of(table["sample_key"]), number + np.arange(len(table))
                number += len(table)

    def _known_rows(self) -> Iterator[KnownRows]:
        for table in self._old.batches(["row", "sample_key", "shard", "status"]) if self._old else ():
            vanished = pc.equal(table["status"], "vanished").to_numpy()
            valid = ~np.isin(table["shard"].to_numpy(), self._affected) & ~vanished
            yield KnownRows(table["row"].to_numpy(), hashes_of(table["sample_key"]), valid)

    def _place_records(self, decisions: Decisions, rows: TableWriter) -> None:
        """Write new samples as new rows; set aside those that are aliases or move a known row."""
        number = 0
        for shard_number, shard in self._read:
            for table in staged_samples(self._store, shard):
                kinds = decisions.kind[number : number + len(table)]
                new = np.flatnonzero(kinds == NEW)
                rows.add(self._rows(table.take(new), rows.next_row + np.arange(len(new)), shard_number))
                for kind, target in ((ALIAS, self._aliases), (MOVED, self._moved)):
                    chosen = np.flatnonzero(kinds == kind)
                    if len(chosen):
                        known = decisions.target_rows(number + chosen)
                        target.add(self._rows(table.take(chosen), known, shard_number))
                number += len(table)

    def _rows(self, samples: pa.Table, rows: Rows, shard: int) -> pa.Table:
        """Turn samples into rows of the catalogue."""
        shards = pa.array(np.full(len(samples), shard, np.int32))
        status = self._overlay.statuses(samples)
        return pa.table([pa.array(rows, pa.int64()), shards, status, *samples.columns], schema=ROW)

    def _keep_aliases(self, orphans: Rows) -> Rows:
        """Carry over valid aliases; the first of an orphaned row takes it over. Returns the other orphans."""
        for table in self._old.small_tables("alias_tables") if self._old else ():
            table = table.take(np.flatnonzero(~np.isin(table["shard"].to_numpy(), self._affected)))
            table = table.set_column(_STATUS, ROW.field("status"), self._overlay.statuses(table))
            rows = table["row"].to_numpy()
            first = np.zeros(len(rows), np.bool_)
            first[np.unique(rows, return_index=True)[1]] = True
            taken = first & np.isin(rows, orphans)
            self._moved.add(table.take(np.flatnonzero(taken)))
            self._aliases.add(table.take(np.flatnonzero(~taken)))
            orphans = np.setdiff1d(orphans, rows[taken])
        return orphans

    def _updated_segments(self, orphans: Rows) -> Iterator[Segment]:
        """Copy the segments in which a row changed: moved, vanished, excluded or held out."""
        filesystem, root = filesystem_of(self._store.url)
        files = [f"{root}/{segment.file}" for segment in self._moved.finish()]
        moved_rows = pyarrow.dataset.dataset(files, schema=ROW, filesystem=filesystem)
        for segment in self._old.segments if self._old else ():
            first, stop = segment.first_row, segment.stop
            moved = moved_rows.to_table(filter=(pc.field("row") >= first) & (pc.field("row") < stop))
            orphans_here = orphans[slice(*np.searchsorted(orphans, [first, stop]))] - first
            yield self._updated(segment, moved, orphans_here)

    def _updated(self, segment: Segment, moved: pa.Table, orphans: Rows) -> Segment:
        assert self._old is not None
        if not len(moved) and not len(orphans) and self._old.manifest["overlay"] == self._overlay.name:
            return segment
        table = self._old.read(segment.first_row, segment.stop)
        gone = pc.equal(table["status"], "vanished").to_numpy()
        gone[orphans] = True
        status = pc.if_else(pa.array(gone), "vanished", self._overlay.statuses(table))
        if not len(moved) and status.equals(table["status"]):
            return segment
        order = np.arange(len(table))
        order[moved["row"].to_numpy() - segment.first_row] = len(table) + np.arange(len(moved))
        table = pa.concat_tables([table.set_column(_STATUS, ROW.field("status"), status), moved])
        return replace(segment, file=put_table(self._store, "segments", table.take(order)))

    def _write_damage(self, missing: Sequence[str]) -> list[Segment]:
        writer = TableWriter(self._store, "damage")
        for table in self._old.small_tables("damage_tables") if self._old else ():
            # Number -1: the shard was missing, and this run has looked for it again.
            shards = table["shard"].to_numpy()
            writer.add(table.take(np.flatnonzero(~np.isin(shards, self._affected) & (shards >= 0))))
        for number, shard in self._read:
            found = staged_damage(self._store, shard)
            numbers = pa.array(np.full(len(found), number, np.int32))
            writer.add(found.set_column(0, DAMAGE.field("shard"), numbers))
        lines = [damage_line(url, 0, "shard_missing", "listed, but missing") for url in missing]
        rows = [(-1, 0, 0, "shard_missing", None, 0, line) for line in lines]
        writer.add(
            pa.Table.from_pylist([dict(zip(DAMAGE.names, row, strict=True)) for row in rows], schema=DAMAGE)
        )
        return writer.finish()
