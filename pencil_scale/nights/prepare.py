"""Preparing: all that a night's training begins with, made once and found again after a kill.

prepared = prepare(config, nights, plan)            # what is new, labels carried over, rows, weights
train(night_config(config, plan, prepared), labels=prepared.labels)
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import difference
from pencil_scale.catalogue.rules import newly_excluded
from pencil_scale.config.settings import Config, Stages
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import read_pins
from pencil_scale.labels.published import require_same_rows
from pencil_scale.labels.report import history_folder
from pencil_scale.nights.carry_over import carry_over, write_start
from pencil_scale.nights.crawl import Classes, Crawl, class_mapping, find_crawl, is_same, old_rows
from pencil_scale.nights.record import CARRIED, Night, NightFiles, Plan
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import filesystem_of
from pencil_scale.stream.plan import mixed_key
from pencil_scale.subset.files import SubsetWords, read_table, read_words, write_subset

ROWS, WEIGHTS = "rows", "start.pt"


@dataclass(frozen=True)
class Prepared:
    """What a night begins with that has a night before it."""

    parent: Night
    before: Catalogue  # the parent's
    catalogue: Catalogue
    mapping: Classes  # what each class is made of, in the parent's classes
    crawl: Crawl
    labels: Manifest
    rows: npt.NDArray[np.int64]  # to train on, rising
    subset: str  # the same rows, as the trainer takes them
    weights: str

    @property
    def num_fresh(self) -> int:
        return len(self.crawl.fresh)

    @property
    def same_classes(self) -> bool:
        return self.parent.class_names == self.catalogue.class_names


def prepare(config: Config, nights: NightFiles, plan: Plan) -> Prepared | None:
    """Make what a night begins with; None for a first night, which begins from nothing."""
    if plan.parent is None:
        return None
    parent, storage = nights.must_find(plan.parent), nights.storage
    after = Catalogue.open(storage, plan.catalogue_version)
    before = Catalogue.open(storage, parent.catalogue_version)
    old = Manifest.load(parent.labels)
    if old.class_names != before.class_names:
        raise PencilError(
            f"{parent.labels}: its class list {difference(old.class_names, before.class_names)}, compared "
            f"with catalogue version {before.version} of {parent.name}; promote another night"
        )
    mapping = class_mapping(old.class_names, after.class_names, config.nightly.remap)
    crawl = find_crawl(before, after, mapping)
    folder = nights.folder(plan.name)
    if not _is_there(folder, CARRIED):
        require_same_rows(old, after)
        pins = read_pins(storage).resolve(after.class_names, config.nightly.remap)
        if warning := pins.void_warning():
            print(f"WARNING: {warning}", flush=True)
        carried = carry_over(old, crawl, after, mapping, pins, plan.id, config.workers.scratch)
        if config.checkpoint.history:
            write_start(carried, after, history_folder(storage, plan.id))
        carried.require_whole()
        nights.put(f"nights/{plan.name}/{CARRIED}", carried.encode())
    rows = _rows(config, plan, crawl, after, f"{folder}/{ROWS}")
    rows = np.setdiff1d(rows, newly_excluded(after, config.data.exclude))  # taken down since it started
    weights = _weights(parent, mapping, folder)
    labels = Manifest.load(nights.carried(plan.name))
    return Prepared(parent, before, after, mapping, crawl, labels, rows, f"{folder}/{ROWS}", weights)


def night_config(config: Config, plan: Plan, prepared: Prepared | None) -> Config:
    """The config that a night trains with: its own name, rows and weights."""
    run = config.run.model_copy(update={"name": plan.name})
    experiment = config.tracking.experiment or config.run.name
    tracking = config.tracking.model_copy(update={"experiment": experiment})
    night = config.model_copy(update={"run": run, "tracking": tracking})
    if prepared is None:
        return night.model_copy(update={"stages": _first_stages(config)})
    data = config.data.model_copy(update={"subset": prepared.subset})
    model = config.model.model_copy(update={"weights": prepared.weights})
    return night.model_copy(update={"data": data, "model": model})


def _first_stages(config: Config) -> Stages:
    epochs = dict(zip(("backbone", "pencil", "finetune"), config.nightly.first_epochs or (), strict=True))
    stages = {
        name: getattr(config.stages, name).model_copy(update={"epochs": num}) for name, num in epochs.items()
    }
    return config.stages.model_copy(update=stages)


def _rows(config: Config, plan: Plan, crawl: Crawl, after: Catalogue, folder: str) -> npt.NDArray[np.int64]:
    """Draw the rows to train on, and keep them as a subset; no row where nothing is new."""
    words = read_words(folder)
    if words is not None:
        return np.sort(read_table(folder, words)["row"].to_numpy())
    num_old = round(config.nightly.old_per_new * len(crawl.fresh))
    drawn = old_rows(after, crawl, num_old, mixed_key(config.run.seed, plan.number))
    members = pa.concat_tables([crawl.fresh, drawn]).sort_by("row")
    counts = np.bincount(members["class"].to_numpy(), minlength=after.num_classes).tolist()
    how = {"seed": config.run.seed, "night": plan.number, "new": len(crawl.fresh), "old": len(drawn)}
    words = SubsetWords(
        config.run.storage, after.id, after.version, len(members), after.class_names, tuple(counts), how
    )
    write_subset(folder, words, members)
    rows: npt.NDArray[np.int64] = members["row"].to_numpy()
    return rows


def _weights(parent: Night, mapping: Classes, folder: str) -> str:
    """The parent's network; under another class list with a last layer to match."""
    num_old = len(parent.class_names)
    if is_same(mapping, num_old):
        return parent.model
    if not _is_there(folder, WEIGHTS):
        home, _, name = parent.model.rpartition("/")
        found = torch.load(io.BytesIO(Folder(home).get(name)), map_location="cpu", weights_only=True)
        sink = io.BytesIO()
        torch.save(remapped_head(found, mapping, num_old), sink)
        Folder(folder).put(WEIGHTS, sink.getvalue())
    return f"{folder}/{WEIGHTS}"


def _is_there(folder: str, name: str) -> bool:
    filesystem, path = filesystem_of(f"{folder}/{name}")
    return bool(filesystem.exists(path))


def remapped_head(weights: Mapping[str, Tensor], mapping: Classes, num_old: int) -> dict[str, Tensor]:
    """Give a network's last layer the new classes: a merged one is the mean of its parts, a new one zeros."""
    head = list(weights)[-1].rpartition(".")[0] + "."
    moved = dict(weights)
    for name, tensor in weights.items():
        if name.startswith(head) and tensor.ndim and len(tensor) == num_old:
            blank = torch.zeros_like(tensor[0])
            rows = [tensor[list(olds)].mean(0) if olds else blank for olds in mapping]
            moved[name] = torch.stack(rows)
    return moved
