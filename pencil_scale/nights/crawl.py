"""Crawl: what is new since the night before, in samples and in classes, and which rows a night trains on.

Rows that the catalogue gained are new; so are known rows whose given class has changed, or is usable for the
first time. All others keep their labels. Besides the new rows a night trains on some old ones, in proportion,
so that its cost grows with the crawl and not with the archive.

    crawl = find_crawl(before, after, mapping)            # two versions of the catalogue
    rows = crawl.fresh["row"], old_rows(after, crawl, num=5000, key=mixed_key(seed, night))

A mapping lists the old classes of each new one. Classes are matched by name, so a list may be reordered. A
class that left the list must be accounted for: a mistyped name must not cost its samples their labels.

    mapping = class_mapping(("ant", "bee", "wasp"), ("bee", "ant"), {"wasp": "bee"})      # [[1, 2], [0]]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.schema import CHUNK_ROWS
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import hashes
from pencil_scale.stream.plan import shuffled
from pencil_scale.subset.files import MEMBERS

Classes = Sequence[Sequence[int]]
Int64s = npt.NDArray[np.int64]
COLUMNS = ["row", "sample_key", "noisy_class", "status"]
REGIVEN = pa.schema([("row", pa.int64()), ("class", pa.int32())])
SPREAD = 4  # old rows are drawn out of this many times more: neighbouring rows are too similar

# A sample whose label cannot be used, as after a crawler has renamed a class.
WITHOUT_LABEL = (
    "unlabelled",
    "several_labels",
    "unknown_class",
    "label_not_a_number",
    "label_out_of_range",
    "label_unreadable",
)


def class_mapping(old: Sequence[str], new: Sequence[str], moved: Mapping[str, str | None]) -> list[list[int]]:
    """List the old classes of each new class; refuse an old class that is not accounted for.

    `moved` is ignored for classes that are still listed, so it may stay in the config of later nights.
    """
    lost = [name for name in old if name not in new and name not in moved]
    if lost:
        raise PencilError(
            f"data.classes: {', '.join(map(repr, lost[:5]))} left the class list since the last night; set "
            f"what it became, as in nightly.remap={{{lost[0]}: {new[0]}}} (null: dropped), or put it back"
        )
    became = {name: name if name in new else moved[name] for name in old}
    odd = [(name, to) for name, to in became.items() if to is not None and to not in new]
    if odd:
        name, to = odd[0]
        raise PencilError(f"nightly.remap: {name!r} became {to!r}, which data.classes does not name")
    return [[number for number, name in enumerate(old) if became[name] == to] for to in new]


def new_numbers(mapping: Classes, num_old: int) -> list[int]:
    """The new number of every old class, -1 if it was dropped; the last entry is for rows without a class."""
    found = [-1] * (num_old + 1)
    for number, olds in enumerate(mapping):
        for old in olds:
            found[old] = number
    return found


@dataclass(frozen=True)
class Crawl:
    """What is new since a version of the catalogue."""

    first_row: int  # rows from here on are new
    fresh: pa.Table  # row, sample_key, class of every ok row that is new or starts again, ascending
    regiven: pa.Table  # row, class of known rows that start again; -1: no usable label any more
    given_counts: Int64s  # [C + 1]: new and regiven samples per given class; last: without a label
    num_new: int
    num_vanished: int
    num_returned: int

    def is_fresh(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Which of these rows are new or start again tonight."""
        return np.isin(rows, self.fresh["row"].to_numpy())


def find_crawl(before: Catalogue, after: Catalogue, mapping: Classes) -> Crawl:
    """Compare two versions; `mapping` lists the old classes of each new one."""
    renamed = np.array(new_numbers(mapping, before.num_classes))
    fresh: list[pa.Table] = []  # changed rows that start again, then all new ones
    regiven = [REGIVEN.empty_table()]
    num_vanished = num_returned = 0
    for rows in after.rewritten_rows(before):  # one segment at a time
        was, now = (one.read(rows.start, rows.stop, COLUMNS) for one in (before, after))
        gone, was_gone = _has(now, "vanished"), _has(was, "vanished")
        num_vanished += int((gone & ~was_gone).sum())
        num_returned += int((was_gone & ~gone).sum())
        differs = (_classes(now) != renamed[_classes(was)]) & ~gone
        usable_now = _has(now, "ok") & ~(_has(was, "ok") | was_gone)
        fresh.append(now.filter(pa.array(differs | usable_now)))
        some = now.filter(pa.array(differs))
        regiven.append(pa.table([some["row"], pa.array(_classes(some), pa.int32())], schema=REGIVEN))
    step = 64 * CHUNK_ROWS
    for first in range(before.num_rows, after.num_rows, step):
        fresh.append(after.read(first, min(first + step, after.num_rows), COLUMNS))
    counts = np.zeros(after.num_classes + 1, np.int64)
    for table in fresh:
        counts += np.bincount(_classes(table)[_has(table, "ok")], minlength=len(counts))
        counts[-1] += _has(table, *WITHOUT_LABEL).sum()
    return Crawl(
        first_row=before.num_rows,
        fresh=pa.concat_tables([MEMBERS.empty_table(), *map(_members, fresh)]).combine_chunks(),
        regiven=pa.concat_tables(regiven).combine_chunks(),
        given_counts=counts,
        num_new=after.num_rows - before.num_rows,
        num_vanished=num_vanished,
        num_returned=num_returned,
    )


def archive_counts(before: Catalogue, mapping: Classes) -> Int64s:
    """Samples per given class before, in the new classes; last: without a usable label."""
    old = np.array(before.manifest["class_counts"], np.int64)
    statuses = before.manifest["status"]
    without = sum(statuses.get(status, 0) for status in WITHOUT_LABEL)
    return np.array([*(int(old[list(olds)].sum()) for olds in mapping), without], np.int64)


def old_rows(after: Catalogue, crawl: Crawl, num: int, key: int) -> pa.Table:
    """Draw ok rows that were known before, different ones for each key, from as few chunks as possible."""
    chunks = np.arange(-(-crawl.first_row // CHUNK_ROWS))
    num_ok = after.chunks().num_ok[: len(chunks)]
    order = chunks[np.argsort(hashes(chunks, ~key), kind="stable")]
    enough = int(np.searchsorted(np.cumsum(num_ok[order]), SPREAD * num)) + 1
    found = [MEMBERS.empty_table()]
    for chunk in sorted(order[:enough].tolist() if num else []):
        stop = min((chunk + 1) * CHUNK_ROWS, crawl.first_row)
        found.append(_members(after.read(chunk * CHUNK_ROWS, stop, COLUMNS)))
    table = pa.concat_tables(found).combine_chunks()
    table = table.filter(pa.array(~crawl.is_fresh(table["row"].to_numpy())))
    drawn = np.sort(shuffled(table["row"].to_numpy(), key)[:num])
    return table.filter(pc.is_in(table["row"], pa.array(drawn)))


def _members(table: pa.Table) -> pa.Table:
    """The rows to train on, in the columns of a subset."""
    ok = table.filter(pc.equal(table["status"], "ok"))
    return ok.select(["row", "sample_key", "noisy_class"]).rename_columns(MEMBERS.names).cast(MEMBERS)


def _classes(table: pa.Table) -> npt.NDArray[np.int32]:
    found: npt.NDArray[np.int32] = table["noisy_class"].fill_null(-1).to_numpy()
    return found


def _has(table: pa.Table, *statuses: str) -> npt.NDArray[np.bool_]:
    found = pc.is_in(table["status"], pa.array(statuses))
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)
