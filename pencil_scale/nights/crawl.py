"""Crawl: what changed since the parent night, in samples and in classes, and what a night makes of it.

Rows that the catalogue gained are new; so are known rows whose given class has changed, or is usable for the
first time. Besides these a night trains on some old rows, in proportion, so that its cost grows with the
crawl and not with the archive.

    crawl = find_crawl(before, after, mapping)            # two versions of the catalogue
    rows = crawl.fresh["row"], old_rows(crawl, num=5000, key=mixed_key(seed, night), others=watched)
    labels = carry_over(labels_of_the_parent, crawl, pins, run_id, scratch)

Labels are carried over: every known row keeps its logits bit for bit, whatever shard it is in now. New rows
start as given; rows whose given class has changed start again; pins that people made since then come last. A
row pinned to a class that has left the list gets the class that the catalogue gives.

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
from pencil_scale.catalogue.schema import CHUNK_ROWS, FOR_THE_MODEL
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import Pinned
from pencil_scale.labels.start_labels import forget, grow, pin, regive, release, remap
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import hashes
from pencil_scale.stream.plan import shuffled
from pencil_scale.subset.files import MEMBERS

Int64s = npt.NDArray[np.int64]
COLUMNS = ["row", "sample_key", "noisy_class", "status"]
SPREAD = 4  # old rows are drawn out of this many times more: neighbouring rows are too similar
# A sample whose label cannot be used, as after a crawler has renamed a class.
WITHOUT_LABEL = tuple(status for status in FOR_THE_MODEL if status != "held_out")


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
    for name, to in became.items():
        if to is not None and to not in new:
            raise PencilError(f"nightly.remap: {name!r} became {to!r}, which data.classes does not name")
    return [[number for number, name in enumerate(old) if became[name] == to] for to in new]


@dataclass(frozen=True)
class Crawl:
    """What changed between two versions of the catalogue."""

    before: Catalogue
    after: Catalogue
    mapping: Sequence[Sequence[int]]  # the old classes of each new one
    fresh: pa.Table  # row, sample_key, class of every ok row that is new or starts again, ascending
    regiven: pa.Table  # known rows that start again, with or without a class
    given_counts: Int64s  # [C + 1]: new and regiven samples per given class; last: without a label
    figures: Mapping[str, int]  # how many samples are new, regiven, vanished and returned


def find_crawl(before: Catalogue, after: Catalogue, mapping: Sequence[Sequence[int]]) -> Crawl:
    """Compare two versions; `mapping` lists the old classes of each new one."""
    new_class = np.full(before.num_classes + 1, -1)  # of each old one; last: of rows without a class
    for number, olds in enumerate(mapping):
        new_class[list(olds)] = number
    regiven, again = [after.read(0, 0, COLUMNS)], []
    figures = dict.fromkeys(["new_samples", "regiven_samples", "vanished_samples", "returned_samples"], 0)
    for rows in after.rewritten_rows(before):  # one segment at a time
        was, now = (one.read(rows.start, rows.stop, COLUMNS) for one in (before, after))
        gone, was_gone = _has(now, "vanished"), _has(was, "vanished")
        figures["vanished_samples"] += int((gone & ~was_gone).sum())
        figures["returned_samples"] += int((was_gone & ~gone).sum())
        was_class = given_classes(was)
        was_class = np.where(was_class < before.num_classes, was_class, -1)  # of an older, longer class list
        differs = (given_classes(now) != new_class[was_class]) & ~gone
        figures["regiven_samples"] += int(differs.sum())
        usable_now = _has(now, "ok") & ~(_has(was, "ok") | was_gone)
        regiven.append(now.filter(pa.array(differs)))
        again.append(now.filter(pa.array(differs | usable_now)))
    added = after.read(before.num_rows, after.num_rows, COLUMNS)
    figures["new_samples"] = int((~_has(added, "vanished")).sum())  # others came and went with a held night
    starting = pa.concat_tables([*again, added])
    ok_classes = given_classes(starting)[_has(starting, "ok")]
    counts = np.bincount(ok_classes, minlength=after.num_classes + 1)
    counts[-1] = _has(starting, *WITHOUT_LABEL).sum()
    fresh, known = _members(starting), pa.concat_tables(regiven)
    return Crawl(before, after, mapping, fresh, known, counts, figures)


def archive_counts(crawl: Crawl) -> npt.NDArray[np.float64]:
    """Samples per given class before, in the new classes, nan for an added one; last: without a label."""
    old, statuses = np.array(crawl.before.manifest["class_counts"]), crawl.before.manifest["status"]
    counts = [old[list(olds)].sum() if olds else np.nan for olds in crawl.mapping]
    return np.array([*counts, sum(statuses.get(status, 0) for status in WITHOUT_LABEL)])


def first_classes(crawl: Crawl) -> list[str]:
    """The classes of which the network has not seen a sample, and this crawl brings some."""
    first = (crawl.given_counts > 0) & ~(archive_counts(crawl) > 0)
    return [crawl.after.class_names[number] for number in np.flatnonzero(first[:-1]).tolist()]


def members_of(catalogue: Catalogue, rows: Int64s) -> pa.Table:
    """Those of these rows that are ok, in the columns of a subset."""
    tables = [MEMBERS.empty_table()]
    for first in (np.unique(rows // CHUNK_ROWS) * CHUNK_ROWS).tolist():
        some = catalogue.read(first, min(first + CHUNK_ROWS, catalogue.num_rows), COLUMNS)
        tables.append(_members(some.filter(pc.is_in(some["row"], pa.array(rows)))))
    return pa.concat_tables(tables)


def old_rows(crawl: Crawl, num: int, key: int, others: Int64s) -> pa.Table:
    """Draw ok rows that were known before, different ones for each key, from as few chunks as possible.

    Neither new nor other rows, such as watched ones, are drawn.
    """
    after, num_known = crawl.after, crawl.before.num_rows
    chunks = np.arange(-(-num_known // CHUNK_ROWS))
    num_ok = after.chunks().num_ok[: len(chunks)]
    order = chunks[np.argsort(hashes(chunks, ~key), kind="stable")]
    enough = int(np.searchsorted(np.cumsum(num_ok[order]), SPREAD * num)) + 1
    tables = [MEMBERS.empty_table()]
    for first in sorted((CHUNK_ROWS * order[:enough]).tolist() if num else []):
        tables.append(_members(after.read(first, min(first + CHUNK_ROWS, num_known), COLUMNS)))
    table = pa.concat_tables(tables)
    table = without(table, np.concatenate([crawl.fresh["row"].to_numpy(), others]))
    drawn = shuffled(table["row"].to_numpy(), key)[:num]
    return table.filter(pc.is_in(table["row"], pa.array(drawn)))


def without(table: pa.Table, rows: Int64s) -> pa.Table:
    """Leave out some rows."""
    return table.filter(pa.array(~np.isin(table["row"].to_numpy(), rows)))


def given_classes(table: pa.Table) -> npt.NDArray[np.int32]:
    """The given class of some rows of the catalogue; -1: no usable label."""
    found: npt.NDArray[np.int32] = table["noisy_class"].fill_null(-1).to_numpy()
    return found


def _members(table: pa.Table) -> pa.Table:
    """The rows to train on, in the columns of a subset."""
    ok = table.filter(pc.equal(table["status"], "ok"))
    return ok.select(["row", "sample_key", "noisy_class"]).rename_columns(MEMBERS.names).cast(MEMBERS)


def _has(table: pa.Table, *statuses: str) -> npt.NDArray[np.bool_]:
    found = pc.is_in(table["status"], pa.array(statuses))
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


def carry_over(parent: Manifest, crawl: Crawl, pins: Pinned, run: str) -> Manifest:
    """Make the labels that a night starts with, in the parent's store, under the id of the night's run."""
    labels, after = parent.for_new_run(run), crawl.after
    if labels.class_names != after.class_names:
        # The only step that reads every label: a new class list changes the width of all of them.
        labels, freed = remap(labels, crawl.mapping, after.class_names)
        labels = regive(labels, freed, _given(after, freed))
    regiven = crawl.regiven["row"].to_numpy()
    labels = forget(regive(grow(labels, after), regiven, given_classes(crawl.regiven)), regiven)
    void = np.sort(pins.void["row"].to_numpy())
    return release(pin(labels, pins), void, _given(after, void))


def _given(catalogue: Catalogue, rows: Int64s) -> npt.NDArray[np.int32]:
    """The classes that the catalogue gives some rows; -1 if it gives none."""
    found = [given_classes(catalogue.read(row, row + 1, ["noisy_class"]))[0] for row in rows.tolist()]
    return np.array(found, np.int32)
