"""The story of one sample: all that a storage knows about it, from the bytes in its shard to the last export.

    for line in tell(Storage("runs/demo"), "digit-0555", exclude=None, export_folders=["runs/demo/export"]):
        print(line)

Runs and nights that published labels come oldest first. Epochs count from 1, as on the console while a run
trains; in files they count from 0.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import fill
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import contains
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.export.files import first_row, read_manifest
from pencil_scale.export.rows import IMAGE_COLUMNS, read_images
from pencil_scale.images.decode import UndecodableError
from pencil_scale.labels.pins import read_pins
from pencil_scale.labels.published import (
    Published,
    PublishedLabels,
    find_published,
    held_names,
    published_names,
)
from pencil_scale.labels.report import read_traces
from pencil_scale.labels.run_record import read_record
from pencil_scale.method.decisions import UNLABELLED, decide
from pencil_scale.nights.record import Night, NightFiles
from pencil_scale.review.thumbnails import thumbnail
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of, without_passwords

SHOWN = 3  # similar ids
SIDE = 256  # pixels of the thumbnail
WIDTH = 100
SETTINGS = (
    "model.backbone",
    "run.seed",
    "stages.backbone.epochs",
    "stages.pencil.epochs",
    "stages.finetune.epochs",
    "stages.pencil.alpha",
    "stages.pencil.lambda",
)


def tell(
    storage: Storage, sample_id: str, exclude: str | None, export_folders: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of a sample's story; for an excluded one, only that it is excluded."""
    catalogue = Catalogue.open(storage.url)
    number = find_row(catalogue, sample_id)
    row = catalogue.read(number, number + 1).to_pylist()[0]
    yield f"sample {_plain(row['sample_id'])}"
    is_listed = contains(make_overlay(exclude).excluded, np.array([row["sample_key"]], "S16"))[0]
    if is_listed or row["status"] == "excluded":
        yield "  listed in data.exclude: not used for training, and not in any output made since"
        return
    yield from _place(storage, catalogue, row)
    yield from list(_labels(storage, number)) or [
        "labels       none published for this sample yet; train first"
    ]
    yield _pin(storage, row)
    shard = catalogue.shards[row["shard"]].url
    folders = [storage.path(name) for name in storage.names("exports")]
    folders = list(dict.fromkeys(Folder(folder).url for folder in [*folders, *export_folders]))
    exports = [line for folder in folders for line in _export(folder, number, shard)]
    yield from exports or ["exports      none yet"]


# --- the catalogue -----------------------------------------------------------------------------------


def find_row(catalogue: Catalogue, sample_id: str) -> int:
    """Find the row of an id, spelled as it is or as in our tables."""
    keys = pa.array([sample_key(sample_id), sample_key(from_stored(sample_id))], pa.binary(16))
    for table in catalogue.batches(["row", "sample_key"]):
        found = table.filter(pc.is_in(table["sample_key"], keys))
        if len(found):
            return int(found["row"][0].as_py())
    similar: list[str] = []  # ids that contain the text, or have it as their key
    for table in catalogue.batches(["sample_id", "key"]):
        near = pc.or_(pc.equal(table["key"], sample_id), pc.match_substring(table["sample_id"], sample_id))
        similar += table.filter(near)["sample_id"].slice(0, SHOWN).to_pylist()
        if len(similar) >= SHOWN:
            break
    advice = "index again if it is new"
    if similar:
        advice = f"did you mean {', '.join(map(repr, similar[:SHOWN]))}?"
    raise PencilError(f"{sample_id!r}: no sample with this id in {catalogue.folder}; {advice}")


def _place(storage: Storage, catalogue: Catalogue, row: dict[str, Any]) -> Iterator[str]:
    start, end = row["image_offset"], row["image_offset"] + row["image_bytes"]
    given, true = (_name(catalogue.class_names, row[kind]) for kind in ("noisy_class", "true_class"))
    yield f"  row        {row['row']:,} of the catalogue"
    yield f"  shard      {without_passwords(catalogue.shards[row['shard']].url)}"
    yield f"  key        {_plain(row['key'])}"
    yield f"  image      {row['format']}, bytes {start:,} to {end:,} ({row['image_bytes']:,})"
    yield f"  thumbnail  {_thumbnail(storage, catalogue, row)}"
    yield f"  status     {row['status']}"
    yield f"  given      {_plain(given or 'no class')}"
    if true is not None:
        yield f"  true class {_plain(true)}, used for evaluation and never for training"
    for aliases in catalogue.small_tables("alias_tables"):
        for alias in aliases.filter(pc.equal(aliases["row"], row["row"])).to_pylist():
            url = without_passwords(catalogue.shards[alias["shard"]].url)
            yield f"  duplicate  {_plain(url)}, key {_plain(alias['key'])}"


def _thumbnail(storage: Storage, catalogue: Catalogue, row: dict[str, Any]) -> str:
    """Store a small picture that a person can open; return its path, or why there is none."""
    try:
        (data,) = read_images(catalogue, catalogue.read(row["row"], row["row"] + 1, IMAGE_COLUMNS))
        kind, picture = thumbnail(data, SIDE)
    except (PencilError, UndecodableError) as error:
        return f"none: {error}"
    name = f"{storage.thumbnails}/{row['sample_key'].hex()}.{kind}"
    storage.put(name, picture)
    return storage.path(name)


# --- runs and nights ---------------------------------------------------------------------------------


def _labels(storage: Storage, row: int) -> Iterator[str]:
    """The labels of a row in every run that includes it, then in every night, oldest first."""
    files = NightFiles(storage.url)
    nights, current = {night.name: night for night in files.nights()}, files.current()
    names = [*published_names(storage.url), *held_names(storage.url)]
    found = [find_published(storage.url, name, held=True) for name in names]
    order = {name: place for place, name in enumerate(nights)}
    found.sort(key=lambda one: (order.get(one.name, -1), one.manifest.newest_epoch, one.name))
    for published in found:
        if row < published.manifest.layout.num_rows:
            is_current = current is not None and current.name == published.name
            yield from _source(storage, published, nights.get(published.name), is_current)
            yield from _result(published, row)


def _source(storage: Storage, published: Published, night: Night | None, is_current: bool) -> Iterator[str]:
    """The run or night that made some labels."""
    record = read_record(storage.url, night.trained_by if night else published.name)
    standing = "in use" if is_current else night.status if night else ""
    standing = "held" if published.held else standing
    version = night.catalogue_version if night else record.catalogue_version if record else None
    with_version = "" if version is None else f", catalogue version {version}"
    yield f"{published.name}{f' ({standing})' if standing else ''}{with_version}"
    model = night.model if night else storage.path(storage.model(published.name))
    filesystem, path = filesystem_of(model)
    yield f"  model      {without_passwords(model) if filesystem.exists(path) else 'not kept'}"
    if night and night.trained_by != night.name:
        yield f"  trained by {night.trained_by}"
    settings = record.settings if record else {}
    config = " ".join(f"{key}={settings[key]}" for key in SETTINGS if key in settings)
    yield fill(f"  config     {config or 'not recorded'}", WIDTH, subsequent_indent=" " * 13)


def _result(published: Published, row: int) -> Iterator[str]:
    labels, here = PublishedLabels(published.manifest), range(row, row + 1)
    label = labels.rows(here)
    found = decide(label.logits, label.noisy_class)
    is_visited, is_pinned = labels.last_epoch(here)[0] > 0, label.pinned[0]
    if not is_visited and not is_pinned and label.noisy_class[0] == UNLABELLED:
        # The logits of such a row are all equal, and do not say anything about its class.
        yield "  result     no class: none was given, and no run trained on the sample"
        return
    names = published.manifest.class_names
    traces = read_traces(published, np.array([row]))
    steps = zip(traces.epochs, traces.classes[0].tolist(), traces.confidence[0].tolist(), strict=True)
    for number, some in groupby(steps, key=lambda step: step[1]):
        group = list(some)
        (first, _, first_share), (last, _, last_share) = group[0], group[-1]
        to = "" if first == last else f" to {last + 1}"
        name = _plain(_name(names, number) or "")
        yield f"  epochs     {first + 1}{to}: {name}, share {first_share:.2f} to {last_share:.2f}"
    if not traces.epochs:
        yield "  epochs     no history was kept"
    name = _plain(_name(names, int(found.corrected_class[0])) or "")
    if is_pinned:
        yield f"  result     {name}, pinned"
    elif not is_visited:
        yield f"  result     {name}, as given: no run trained on the sample"
    else:
        yield f"  result     {name}, with {found.confidence[0]:.2f} of the label"


# --- pins and exports --------------------------------------------------------------------------------


def _pin(storage: Storage, row: dict[str, Any]) -> str:
    pins = read_pins(storage.url).table
    found = pins.filter(pc.equal(pins["sample_key"], row["sample_key"])).to_pylist()
    if not found:
        return "pin          none: the label may change"
    pin = found[0]
    by, note = _plain(pin["by"] or "an unnamed person"), f" ({_plain(pin['note'])})" if pin["note"] else ""
    return f"pin          {_plain(pin['class'])}, by {by}, at {pin['at']}{note}"


def _export(folder: str, row: int, shard: str) -> Iterator[str]:
    """What an export says about a row; nothing if the folder has no export."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    place = int(np.searchsorted([first_row(file) for file in manifest.table], row, side="right")) - 1
    found = []
    if place >= 0:
        filesystem, path = filesystem_of(f"{folder}/{manifest.table[place]}")
        wanted = pc.field("row") == row
        found = pq.read_table(path, filesystem=filesystem, filters=wanted, partitioning=None).to_pylist()
    if not found:
        yield f"export       {without_passwords(folder)}: does not contain the sample"
        return
    entry = found[0]
    issue = "label issue" if entry["is_label_issue"] else "no label issue"
    score = "" if entry["label_score"] is None else f", score {entry['label_score']:.3f}"
    name, by = _plain(entry["predicted_class"] or "no class"), entry["predicted_by"] or "none"
    yield f"export       {without_passwords(folder)}"
    yield f"  label      {name}, predicted by: {by}; {issue}{score}; labels of {entry['model_version']}"
    if shard in manifest.sidecars:
        yield f"  sidecar    {without_passwords(folder)}/{manifest.sidecars[shard]}"


def _name(names: Sequence[str], number: int | None) -> str | None:
    if number is None or number < 0:
        return None
    return names[number] if number < len(names) else f"class {number}"


def _plain(text: str) -> str:
    """Make text from a shard safe for a terminal: control characters are escaped."""
    return text if text.isprintable() else json.dumps(text)
