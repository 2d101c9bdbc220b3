"""The story of one sample: all that a storage knows about it, from the bytes in its shard to the last export.

    for line in tell(Storage("runs/demo"), "digit-0555", exclude=None, export_folders=["runs/demo/export"]):
        print(line)

Runs and nights that published labels come oldest first. Epochs count from 1, as on the console while a run
trains; in files they count from 0.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import contains
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.export.files import ExportManifest, first_row, read_manifest
from pencil_scale.labels.pins import read_pins
from pencil_scale.labels.published import (
    Published,
    PublishedLabels,
    find_published,
    held_names,
    published_names,
)
from pencil_scale.labels.report import read_traces
from pencil_scale.labels.roles import ROLES, Roles
from pencil_scale.labels.run_record import RunRecord, read_record
from pencil_scale.method.calibration import Calibration
from pencil_scale.method.decisions import UNLABELLED
from pencil_scale.nights.record import NightFiles
from pencil_scale.review.thumbnails import make_thumbnails
from pencil_scale.storage.errors import PencilError, many, sample_key
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
    """Yield the lines of a sample's story; for an excluded one, only that it is excluded.

    Passwords in URLs are masked. Control characters, which a shard may contain, are escaped: they could
    move the cursor of a terminal.
    """
    for line in _lines(storage, sample_id, exclude, export_folders):
        shown = without_passwords(line)
        yield "".join(char if char.isprintable() else repr(char)[1:-1] for char in shown)


def _lines(storage: Storage, sample_id: str, exclude: str | None, folders: Sequence[str]) -> Iterator[str]:
    catalogue = Catalogue.open(storage.url)
    number = find_row(catalogue, sample_id)
    row = catalogue.read(number, number + 1).to_pylist()[0]
    yield f"sample {row['sample_id']}"
    is_listed = contains(make_overlay(exclude).excluded, np.array([row["sample_key"]], "S16"))[0]
    if is_listed or row["status"] == "excluded":
        yield "  listed in data.exclude: not used for training, and not in any output made since"
        return
    yield from _catalogue_lines(storage, catalogue, row)
    urls = dict.fromkeys(Folder(one).url for one in (*map(storage.path, storage.names("exports")), *folders))
    exported = {url: manifest for url in urls if (manifest := read_manifest(url)) is not None}
    given = None if row["noisy_class"] is None else catalogue.class_names[row["noisy_class"]]
    labels = [*_label_lines(storage, number, given, exported.values())]
    yield from labels or ["labels       none published for this sample yet; train first"]
    pins = read_pins(storage.url).table
    pinned = pins.filter(pc.equal(pins["sample_key"], row["sample_key"])).to_pylist()
    for pin in pinned:  # at most one
        note = f" ({pin['note']})" if pin["note"] else ""
        yield f"pin          {pin['class']}, by {pin['by']}, at {pin['at']}{note}"
    if not pinned:
        yield "pin          none: the label may change"
    shard = catalogue.shards[row["shard"]].url
    exports = [line for url, one in exported.items() for line in _export_lines(url, one, number, shard)]
    yield from exports or ["exports      none yet"]


def find_row(catalogue: Catalogue, sample_id: str) -> int:
    """Find the row of an id, as it is in the shard or as our tables escape it."""
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


def _catalogue_lines(storage: Storage, catalogue: Catalogue, row: dict[str, Any]) -> Iterator[str]:
    start, end, names = row["image_offset"], row["image_offset"] + row["image_bytes"], catalogue.class_names
    given, true = row["noisy_class"], row["true_class"]
    yield f"  row        {row['row']:,} of the catalogue"
    yield f"  shard      {catalogue.shards[row['shard']].url}"
    yield f"  key        {row['key']}"
    yield f"  image      {row['format']}, bytes {start:,} to {end:,} ({row['image_bytes']:,})"
    yield f"  thumbnail  {_thumbnail(storage, catalogue, row)}"
    yield f"  status     {row['status']}"
    yield f"  given      {'no class' if given is None else names[given]}"
    if true is not None:
        yield f"  true class {names[true]}, used for evaluation and never for training"
    for aliases in catalogue.small_tables("alias_tables"):
        for alias in aliases.filter(pc.equal(aliases["row"], row["row"])).to_pylist():
            yield f"  duplicate  {catalogue.shards[alias['shard']].url}, key {alias['key']}"


def _thumbnail(storage: Storage, catalogue: Catalogue, row: dict[str, Any]) -> str:
    """Store a small picture that a person can open; return its path, or why there is none."""
    found = make_thumbnails(catalogue, np.array([row["row"]]), SIDE)
    for problem in found.problems.values():
        return f"none: {problem}"
    kind, picture = found.pictures[row["row"]]
    name = f"{storage.thumbnails}/{row['sample_key'].hex()}.{kind}"
    storage.put(name, picture)
    return storage.path(name)


def _label_lines(
    storage: Storage, row: int, given: str | None, exports: Iterable[ExportManifest]
) -> Iterator[str]:
    """The labels of a row in every run that includes it, then in every night, oldest first.

    Probabilities are recalibrated as in the exports of a run.
    """
    calibrated = {one.run: one.calibration for one in exports if one.calibration}
    files = NightFiles(storage.url)
    nights, current = {night.name: night for night in files.nights()}, files.current()
    names = [*published_names(storage.url), *held_names(storage.url)]
    order = {name: number for number, name in enumerate(nights)}
    found = [find_published(storage.url, name, held=True) for name in names]
    found.sort(key=lambda one: (order.get(one.name, -1), one.manifest.newest_epoch, one.name))
    for published in found:
        if row >= published.manifest.layout.num_rows:
            continue
        name, night = published.name, nights.get(published.name)
        run = read_record(storage.url, night.trained_by if night else name)
        status = "in use" if current and current.name == name else night.status if night else ""
        status = "held" if published.held else status
        version = night.catalogue_version if night else run.catalogue_version if run else None
        with_version = "" if version is None else f", catalogue version {version}"
        yield f"{name}{f' ({status})' if status else ''}{with_version}"
        model = night.model if night else storage.path(storage.model(name))
        filesystem, path = filesystem_of(model)
        yield f"  model      {model if filesystem.exists(path) else 'not kept'}"
        if night and night.trained_by != name:
            yield f"  trained by {night.trained_by}"
        settings = run.settings if run else {}
        config = " ".join(f"{key}={settings[key]}" for key in SETTINGS if key in settings)
        yield from wrap(f"  config     {config or 'not recorded'}", WIDTH, subsequent_indent=" " * 13)
        if run is not None:
            yield from _planted(storage, run, row)
        yield from _given_then(published, row, given)
        yield from _result(published, row, calibrated.get(published.manifest.run))


def _given_then(published: Published, row: int, given: str | None) -> Iterator[str]:
    """Name the class that the row was given when these labels were made, if it has changed since."""
    (number,) = PublishedLabels(published.manifest).rows(range(row, row + 1)).noisy_class.tolist()
    then = None if number == UNLABELLED else published.manifest.class_names[number]
    if then != given:
        yield f"  given      {then or 'no class'}, at that time"


def _planted(storage: Storage, run: RunRecord, row: int) -> Iterator[str]:
    """Say that the run gave the row a wrong class on purpose; its history shows that class."""
    stored = storage.find(storage.run(run.name, ROLES))
    roles = Roles.none() if stored is None else Roles.decode(stored)
    for number in roles.planted_class[roles.planted == row].tolist():
        name = run.class_names[number]
        yield f"  planted    {name}: wrong on purpose while the run trained, then taken back"


def _result(published: Published, row: int, calibration: Calibration | None) -> Iterator[str]:
    labels, here = PublishedLabels(published.manifest), range(row, row + 1)
    label, names = labels.rows(here), published.manifest.class_names
    found, is_visited, is_pinned = label.decide(), label.last_epoch[0] > 0, label.pinned[0]
    if not is_visited and not is_pinned and label.noisy_class[0] == UNLABELLED:
        # The logits of such a row are all equal, and do not say anything about its class.
        yield "  result     no class: none was given, and no run trained on the sample"
        return
    if label.is_undecided[0]:
        yield f"  result     {names[label.noisy_class[0]]}, as given: no night has decided it yet"
        return
    traces = read_traces(published, np.array([row]))
    steps = zip(traces.epochs, traces.classes[0].tolist(), traces.confidence[0].tolist(), strict=True)
    for number, some in groupby(steps, key=lambda step: step[1]):
        group = list(some)
        (first, _, first_share), (last, _, last_share) = group[0], group[-1]
        to = "" if first == last else f" to {last + 1}"
        yield f"  epochs     {first + 1}{to}: {names[number]}, share {first_share:.2f} to {last_share:.2f}"
    if not traces.epochs:
        yield "  epochs     no history was kept"
    how, by = f"with {found.confidence[0]:.2f} of the label", ""
    if calibration is not None:
        found = calibration.applied(found, np.ones(1, np.bool_))
        by = f" (by {many(calibration.num_judged, 'judgement')} of an audit)"
    if is_pinned:
        how = "pinned"
    elif label.has_evidence[0] or (calibration is not None and is_visited):
        how = f"right with a probability of {found.confidence[0]:.2f}{by}"
        how += ": watched, predicted by a network that was never trained on it" if label.is_unseen[0] else ""
        likely = int(label.predicted_class[0, 0])
        if found.confidence[0] < 0.5 and likely != found.corrected_class[0]:
            how += f"; {names[likely]} is more likely, but no more labels change than are surely wrong"
    elif not is_visited:
        how = "as given: no run trained on the sample"
    yield f"  result     {names[found.corrected_class[0]]}, {how}"


def _export_lines(folder: str, manifest: ExportManifest, row: int, shard: str) -> list[str]:
    """What an export says about a row."""
    files, found = [file for file in manifest.table if first_row(file) <= row], []
    if files:
        filesystem, path = filesystem_of(f"{folder}/{files[-1]}")
        wanted = pc.field("row") == row
        found = pq.read_table(path, filesystem=filesystem, filters=wanted, partitioning=None).to_pylist()
    if not found:
        return [f"export       {folder}: does not contain the sample"]
    entry = found[0]
    issue = "label issue" if entry["is_label_issue"] else "no label issue"
    score = "" if entry["label_score"] is None else f", score {entry['label_score']:.3f}"
    name, by = entry["predicted_class"] or "no class", entry["predicted_by"] or "none"
    label = f"{name}, predicted by: {by}; {issue}{score}; labels of {entry['model_version']}"
    sidecar = [f"  sidecar    {folder}/{manifest.sidecars[shard]}"] if shard in manifest.sidecars else []
    return [f"export       {folder}", f"  label      {label}", *sidecar]
