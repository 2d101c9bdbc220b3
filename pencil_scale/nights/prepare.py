"""Prepare: all that a night's training starts with, made once and found again after a kill.

    prepared = prepare(config, nights, night)        # what is new, labels carried over, rows, weights
    train(night_config(config, night, prepared), labels=prepared.labels)

Labels are carried over from the night before. Every known row keeps its logits bit for bit, whatever shard it
is in now. New rows start as given; rows whose given class has changed start again; pins that people made
since then come last. A row pinned to a class that has left the list gets the class that the catalogue gives.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import difference
from pencil_scale.catalogue.rules import newly_excluded
from pencil_scale.config.settings import Config
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import Pinned, read_pins
from pencil_scale.labels.published import require_same_rows
from pencil_scale.labels.report import START, history_file, study_labels
from pencil_scale.labels.start_labels import grow, pin, regive, release, remap
from pencil_scale.nights.crawl import Classes, Crawl, class_mapping, find_crawl, old_rows
from pencil_scale.nights.record import CARRIED, Night, NightFiles
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.stream.plan import mixed_key
from pencil_scale.subset.files import SubsetWords, read_table, read_words, write_subset

ROWS, WEIGHTS = "rows", "start.pt"


@dataclass(frozen=True)
class Prepared:
    """What a night starts with that has a parent."""

    parent: Night
    before: Catalogue  # the parent's
    catalogue: Catalogue
    mapping: Classes  # what each class is made of, in the parent's classes
    crawl: Crawl
    labels: Manifest
    rows: npt.NDArray[np.int64]  # to train on, in ascending order
    subset: str  # the same rows, as the trainer takes them
    weights: str

    @property
    def same_classes(self) -> bool:
        return self.parent.class_names == self.catalogue.class_names


def prepare(config: Config, nights: NightFiles, night: Night) -> Prepared | None:
    """Make what a night starts with; None for a first night, which starts from nothing."""
    if night.parent is None:
        return None
    parent, storage = nights.must_find(night.parent), Storage(nights.storage)
    after = Catalogue.open(storage.url, night.catalogue_version)
    before = Catalogue.open(storage.url, parent.catalogue_version)
    old = Manifest.load(parent.labels)
    if old.class_names != before.class_names:
        raise PencilError(
            f"{parent.labels}: its class list {difference(old.class_names, before.class_names)}, compared "
            f"with catalogue version {before.version} of {parent.name}; promote another night"
        )
    mapping = class_mapping(old.class_names, after.class_names, config.nightly.remap)
    crawl = find_crawl(before, after, mapping)
    if storage.find(storage.night(night.name, CARRIED)) is None:
        require_same_rows(old, after)
        pins = read_pins(storage.url).resolve(after.class_names, config.nightly.remap)
        if warning := pins.void_warning():
            print(f"WARNING: {warning}", flush=True)
        carried = carry_over(old, crawl, after, mapping, pins, night.id)
        if config.checkpoint.history:
            # Every label as it was before the night: its history shows only its own changes.
            with history_file(f"{storage.path(storage.history(night.id))}/{START}") as writer:
                study_labels(carried, after, history=writer)
        carried.require_whole()
        nights.put(storage.night(night.name, CARRIED), carried.encode())
    subset = nights.path(night.name, ROWS)
    rows = _rows(config, night, crawl, after, subset)
    rows = np.setdiff1d(rows, newly_excluded(after, config.data.exclude))  # excluded since it started
    weights = _weights(parent, mapping, Folder(nights.path(night.name)))
    labels = Manifest.load(nights.path(night.name, CARRIED))
    return Prepared(parent, before, after, mapping, crawl, labels, rows, subset, weights)


def night_config(config: Config, night: Night, prepared: Prepared | None) -> Config:
    """The config that a night trains with: its own name, rows and weights."""
    run = config.run.model_copy(update={"name": night.name})
    experiment = config.tracking.experiment or config.run.name
    tracking = config.tracking.model_copy(update={"experiment": experiment})
    changed: dict[str, Any] = {"run": run, "tracking": tracking}
    if prepared is None:
        stages, epochs = config.stages, config.nightly.first_epochs or ()
        first = {
            name: getattr(stages, name).model_copy(update={"epochs": num})
            for name, num in zip(("backbone", "pencil", "finetune"), epochs, strict=True)
        }
        changed["stages"] = stages.model_copy(update=first)
    else:
        changed["data"] = config.data.model_copy(update={"subset": prepared.subset})
        changed["model"] = config.model.model_copy(update={"weights": prepared.weights})
    return config.model_copy(update=changed)


def _rows(config: Config, night: Night, crawl: Crawl, after: Catalogue, folder: str) -> npt.NDArray[np.int64]:
    """Draw the rows to train on, and keep them as a subset; no row if nothing is new."""
    words = read_words(folder)
    if words is not None:
        return np.sort(read_table(folder, words)["row"].to_numpy())
    num_old = round(config.nightly.old_per_new * len(crawl.fresh))
    drawn = old_rows(after, crawl, num_old, mixed_key(config.run.seed, night.number))
    members = pa.concat_tables([crawl.fresh, drawn]).sort_by("row")
    counts = np.bincount(members["class"].to_numpy(), minlength=after.num_classes).tolist()
    how = {"seed": config.run.seed, "night": night.number, "new": len(crawl.fresh), "old": len(drawn)}
    words = SubsetWords(
        config.run.storage, after.id, after.version, len(members), after.class_names, tuple(counts), how
    )
    write_subset(folder, words, members)
    rows: npt.NDArray[np.int64] = members["row"].to_numpy()
    return rows


def _weights(parent: Night, mapping: Classes, folder: Folder) -> str:
    """The parent's network; if the class list has changed, with a last layer to match."""
    num_old = len(parent.class_names)
    if [list(olds) for olds in mapping] == [[number] for number in range(num_old)]:
        return parent.model
    if folder.find(WEIGHTS) is None:
        home, _, name = parent.model.rpartition("/")
        found = torch.load(io.BytesIO(Folder(home).get(name)), map_location="cpu", weights_only=True)
        sink = io.BytesIO()
        torch.save(remapped_head(found, mapping, num_old), sink)
        folder.put(WEIGHTS, sink.getvalue())
    return folder.path(WEIGHTS)


def remapped_head(weights: Mapping[str, Tensor], mapping: Classes, num_old: int) -> dict[str, Tensor]:
    """Give the last layer the new classes: a merged class is the mean of its parts, a new one is zeros."""
    head = list(weights)[-1].rpartition(".")[0] + "."
    moved = dict(weights)
    for name, tensor in weights.items():
        if name.startswith(head) and tensor.ndim and len(tensor) == num_old:
            blank = torch.zeros_like(tensor[0])
            rows = [tensor[list(olds)].mean(0) if olds else blank for olds in mapping]
            moved[name] = torch.stack(rows)
    return moved


# --- carrying labels over ---------------------------------------------------------------------------


def carry_over(
    parent: Manifest,
    crawl: Crawl,
    after: Catalogue,
    mapping: Classes,
    pins: Pinned,
    run: str,
) -> Manifest:
    """Make the labels that a night starts with, in the parent's store, under the id of the night's run."""
    if parent.layout.num_rows != crawl.first_row:
        raise PencilError(
            f"labels over {parent.layout.num_rows:,} rows, the catalogue of their night has "
            f"{crawl.first_row:,}; promote another night"
        )
    labels = parent.for_new_run(run)
    if labels.class_names != after.class_names:
        labels, freed = remap(labels, mapping, after.class_names)
        labels = regive(labels, freed, _given(after, freed))
    labels = grow(labels, after)
    labels = regive(labels, crawl.regiven["row"].to_numpy(), crawl.regiven["class"].to_numpy())
    void = np.sort(pins.void["row"].to_numpy())
    return release(pin(labels, pins), void, _given(after, void))


def _given(catalogue: Catalogue, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The classes that the catalogue gives some rows; -1 if it gives none."""
    found = [catalogue.read(row, row + 1, ["noisy_class"])["noisy_class"][0].as_py() for row in rows.tolist()]
    return np.array([-1 if number is None else number for number in found], np.int32)
