"""Sample story: all that a storage knows of one sample, from the bytes in its shard to the last export.

story = tell(storage, "digit-0555", exclude=None, export_folders=["runs/demo/export"])
story.chapters                                        # one a run or night that published labels, oldest first
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import contains
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.catalogue.update import hashes_of
from pencil_scale.export.files import first_row, read_manifest
from pencil_scale.labels.history import read_traces
from pencil_scale.labels.pins import read_pins
from pencil_scale.labels.published import (
    Published,
    PublishedLabels,
    find_published,
    held_names,
    published_names,
)
from pencil_scale.labels.run_record import read_record
from pencil_scale.method.decisions import UNLABELLED, decide
from pencil_scale.nights.record import Night, NightFiles
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import filesystem_of

SHOWN = 3


@dataclass(frozen=True)
class Stay:
    """Some epochs in a row in which a label had one class."""

    first_epoch: int  # of the run, from 0
    last_epoch: int
    class_name: str
    first_share: float
    last_share: float


@dataclass(frozen=True)
class Chapter:
    """What one run, or one night, did with the label."""

    name: str
    standing: str  # of a night: in use, passed, held; of a run: held, or nothing
    catalogue_version: int | None
    model: str | None
    trained_by: str
    settings: dict[str, str]
    stays: tuple[Stay, ...]
    visited: bool
    class_name: str | None  # None: it was given none, and no run and no person gave it one
    share: float
    pinned: bool


@dataclass(frozen=True)
class Exported:
    """What an export says of the sample; no label where it leaves it out."""

    folder: str
    entry: dict[str, Any] | None
    sidecar: str | None


@dataclass(frozen=True)
class Story:
    """All of it."""

    row: dict[str, Any]  # as the catalogue has it, with `shard_url` and the names of its classes
    duplicates: tuple[str, ...]
    excluded: bool
    chapters: tuple[Chapter, ...] = ()
    pin: dict[str, Any] | None = None
    exports: tuple[Exported, ...] = field(default=())


def tell(storage: str, sample_id: str, exclude: str | None, export_folders: Sequence[str]) -> Story:
    """Find a sample by its id, and gather what is known of it; of an excluded one no more than that."""
    catalogue = Catalogue.open(storage)
    number = find_row(catalogue, sample_id)
    row = catalogue.read(number, number + 1).to_pylist()[0]
    names = tuple(catalogue.manifest["classes"])
    row["shard_url"] = catalogue.shards[row["shard"]].url
    row |= {f"{kind}_name": _named(names, row[kind]) for kind in ("noisy_class", "true_class")}
    listed = contains(make_overlay(exclude).excluded, np.array([row["sample_key"]], "S16"))[0]
    if listed or row["status"] == "excluded":
        return Story(row, (), excluded=True)
    duplicates = tuple(
        f"{catalogue.shards[alias['shard']].url}, key {alias['key']}"
        for aliases in catalogue.small_tables("alias_tables")
        for alias in aliases.filter(pc.equal(aliases["row"], number)).to_pylist()
    )
    pins = read_pins(storage).table
    pin = next(iter(pins.filter(pc.equal(pins["sample_key"], row["sample_key"])).to_pylist()), None)
    chapters = tuple(_chapters(storage, number))
    exports = tuple(_exports(storage, number, row["shard_url"], export_folders))
    return Story(row, duplicates, False, chapters, pin, exports)


def find_row(catalogue: Catalogue, sample_id: str) -> int:
    """Find the row of an id, written as it is or as our tables spell it."""
    keys = np.unique(np.array([sample_key(sample_id), sample_key(from_stored(sample_id))], "S16"))
    for table in catalogue.batches(["row", "sample_key"]):
        hits = np.flatnonzero(contains(keys, hashes_of(table["sample_key"])))
        if len(hits):
            return int(table["row"][int(hits[0])].as_py())
    raise PencilError(
        f"{sample_id!r}: no sample of this id in {catalogue.folder}; {_alike(catalogue, sample_id)}"
    )


def _alike(catalogue: Catalogue, text: str) -> str:
    """Ids of samples that have this text as their key, or that contain it."""
    found: list[str] = []
    for table in catalogue.batches(["sample_id", "key"]):
        near = pc.or_(pc.equal(table["key"], text), pc.match_substring(table["sample_id"], text))
        found += table.filter(near)["sample_id"].slice(0, SHOWN).to_pylist()
        if len(found) >= SHOWN:
            break
    return f"did you mean {', '.join(map(repr, found[:SHOWN]))}?" if found else "index again if it is new"


# --- runs and nights ---------------------------------------------------------------------------------


def _chapters(storage: str, row: int) -> Iterable[Chapter]:
    files = NightFiles(storage)
    nights = {night.name: night for night in files.nights()}
    current = files.current()
    stems = [*published_names(storage), *held_names(storage)]
    labels = [find_published(storage, stem, held=True) for stem in stems]
    order = {name: place for place, name in enumerate(nights)}
    labels.sort(key=lambda one: (order.get(one.name, -1), one.manifest.newest_epoch, one.name))
    for published in labels:
        if row < published.manifest.layout.num_rows:
            night = nights.get(published.name)
            standing = "in use" if current and current.name == published.name else ""
            standing = "held" if published.held else standing
            yield _chapter(storage, published, night, standing, row)


def _chapter(storage: str, published: Published, night: Night | None, standing: str, row: int) -> Chapter:
    names = published.manifest.class_names
    trained_by = night.trained_by if night else published.name
    record = read_record(storage, trained_by)
    model = night.model if night else f"{storage}/models/{published.name}.pt"
    filesystem, path = filesystem_of(model)
    label, share, pinned, visited = _label(published, row)
    return Chapter(
        name=published.name,
        standing=standing or (night.verdict if night else ""),
        catalogue_version=night.catalogue_version if night else record.catalogue_version if record else None,
        model=model if filesystem.exists(path) else None,
        trained_by=trained_by,
        settings=dict(record.settings) if record else {},
        stays=() if label is None else _stays(published, row, names),
        visited=visited,
        class_name=_named(names, label),
        share=share,
        pinned=pinned,
    )


def _label(published: Published, row: int) -> tuple[int | None, float, bool, bool]:
    """The class a row was left with, its share, whether it was pinned, and whether any run trained on it.

    The logits of a row without a class that nobody trained on are all alike: they speak for no class.
    """
    labels, here = PublishedLabels(published.manifest), range(row, row + 1)
    label = labels.rows(here)
    found = decide(label.logits, label.noisy_class)
    visited, pinned = bool(labels.last_epoch(here)[0] > 0), bool(label.pinned[0])
    known = visited or pinned or label.noisy_class[0] != UNLABELLED
    return int(found.corrected_class[0]) if known else None, float(found.confidence[0]), pinned, visited


def _stays(published: Published, row: int, names: tuple[str, ...]) -> tuple[Stay, ...]:
    traces = read_traces(published, np.array([row]))
    steps = zip(traces.epochs, traces.classes[0].tolist(), traces.confidence[0].tolist(), strict=True)
    stays = []
    for label, some in groupby(steps, key=lambda step: step[1]):
        group = list(some)
        (first, _, first_share), (last, _, last_share) = group[0], group[-1]
        stays.append(Stay(first, last, _named(names, label) or "", first_share, last_share))
    return tuple(stays)


def _named(names: Sequence[str], number: int | None) -> str | None:
    if number is None or number < 0:
        return None
    return names[number] if number < len(names) else f"class {number}"


# --- exports -----------------------------------------------------------------------------------------


def _exports(storage: str, row: int, shard: str, folders: Sequence[str]) -> Iterable[Exported]:
    found = [f"{storage}/{name}" for name in Folder(storage).names("exports")]
    for folder in dict.fromkeys(Folder(one).url for one in [*found, *folders]):
        manifest = read_manifest(folder)
        if manifest is None:
            continue
        starts = [first_row(file) for file in manifest.table]
        place = int(np.searchsorted(starts, row, side="right")) - 1
        entry = _entry(f"{folder}/{manifest.table[place]}", row) if place >= 0 else None
        sidecar = manifest.sidecars.get(shard)
        yield Exported(folder, entry, f"{folder}/{sidecar}" if sidecar and entry else None)


def _entry(url: str, row: int) -> dict[str, Any] | None:
    filesystem, path = filesystem_of(url)
    table = pq.read_table(path, filesystem=filesystem, filters=pc.field("row") == row, partitioning=None)
    entries: list[dict[str, Any]] = table.to_pylist()
    return entries[0] if entries else None
