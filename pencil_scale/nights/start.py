"""How a night starts: from the night in use, from a finished training run, or where a killed job left it.

    parent = nights.current() or adopt(nights, named=None)       # None: nothing was trained here yet
    night = resumable(nights, settings, class_names) or nights.start(...)
    prepared = prepare(config, nights, night)        # what is new, labels carried over, rows, weights
    train(night_config(config, night, prepared), labels=prepared.labels)

Labels and rows are made once, and found again after a kill.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import difference
from pencil_scale.catalogue.rules import newly_excluded
from pencil_scale.config.command import say
from pencil_scale.config.settings import Config
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import now, read_pins
from pencil_scale.labels.published import require_same_rows
from pencil_scale.labels.report import START, history_file, study_labels
from pencil_scale.labels.roles import choose_roles
from pencil_scale.labels.run_record import FREE, read_record, why_held
from pencil_scale.method.automatic import filled
from pencil_scale.nights.crawl import (
    Crawl,
    carry_over,
    class_mapping,
    find_crawl,
    first_classes,
    members_of,
    old_rows,
    without,
)
from pencil_scale.nights.record import CARRIED, UNDECIDED, Night, NightFiles, remove_made
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import versions_of
from pencil_scale.stream.plan import mixed_key
from pencil_scale.subset.files import SubsetWords, read_table, read_words, write_subset

ROWS, WEIGHTS = "rows", "start.pt"
NO_ROWS = np.zeros(0, np.int64)


def adopt(nights: NightFiles, named: str | None) -> Night | None:
    """Make a finished training run the parent of the first night; None if no run is finished.

    A held run is not finished: a person must promote it before nights start from it.
    """
    storage = Storage(nights.storage)
    names = [PurePosixPath(name).name for name in storage.names("runs")]
    runs = {name: run for name in names if (run := read_record(storage.url, name))}
    of_nights = {night.name for night in nights.records() if night.number}
    finished = [name for name, run in runs.items() if run.status == "finished" and name not in of_nights]
    known = f"finished are {', '.join(finished)}" if finished else "none is finished"
    if named in runs and runs[named].status == "held":
        reason = why_held(storage.url, runs[named])
        raise PencilError(f"nightly.start_from: {named} is held: {reason}")
    if named is not None and named not in finished:
        raise PencilError(f"nightly.start_from: {named} is not a finished run of {storage.url}; {known}")
    if named is None and len(finished) > 1:
        raise PencilError(f"nightly.start_from: which run? {known}")
    if not finished:
        return None
    run = runs[named or finished[0]]
    catalogue = Catalogue.open(storage.url, run.catalogue_version)
    night = Night(
        name=run.name,
        number=0,
        parent=None,
        catalogue_version=run.catalogue_version,
        status="passed",
        closed=True,
        class_names=catalogue.class_names,
        labels=storage.path(storage.published(run.name)),
        model=storage.path(storage.model(run.name)),
        trained_by=run.name,
        figures=clean_accuracy(run_facts(storage.url, run.name)),
        clean=clean_set(storage.url, run.clean),
        overlay=catalogue.manifest["overlay"],
        finished=now(),
    )
    nights.move_current(nights.save(night), expected=None)
    return night


# --- after a kill ------------------------------------------------------------------------------------


def resumable(nights: NightFiles, settings: Mapping[str, str], class_names: Sequence[str]) -> Night | None:
    """Find the night that was started and not closed; one that can no longer be finished is abandoned."""
    night = nights.unclosed()
    if night is None:
        return None
    if reason := _outdated(nights, night, settings, class_names):
        abandon(nights, night, reason)
        return None
    say(f"{night.name} resumes")
    return night


def abandon(nights: NightFiles, night: Night, reason: str) -> None:
    """Give up a night that was not finished, and remove all it made; its number is not given again."""
    say(f"{night.name} was not finished, and is abandoned: {reason}")
    remove_made(nights, night)
    nights.save(night, status="abandoned", closed=True)


def _outdated(
    nights: NightFiles, night: Night, settings: Mapping[str, str], class_names: Sequence[str]
) -> str:
    if night.is_made:  # only its last step is missing
        return ""
    current = nights.current()
    name = None if current is None else current.name
    if name != night.parent:
        return f"it started from {night.parent}, and CURRENT is {name} now"
    changed = {key for key, _ in settings.items() ^ night.settings.items() if not key.startswith(FREE)}
    if changed:
        return f"{min(changed)} has changed"
    catalogue = Catalogue.open(nights.storage, night.catalogue_version)
    if differs := difference(class_names, catalogue.class_names):
        return f"the class list has changed: it {differs}"
    # The offsets of a catalogue version are useless for a shard that was written again.
    entries = [entry for entry in catalogue.shards if entry.state == "indexed"]
    for entry, version in zip(entries, versions_of([entry.url for entry in entries]), strict=True):
        if version != entry.version:
            return f"{entry.url} changed since it was indexed"
    return ""


# --- figures of a training run -----------------------------------------------------------------------


def run_facts(storage: str, name: str) -> dict[str, Any]:
    """The summary of a finished run."""
    store, file = Storage(storage), Storage(storage).run(name, "summary.json")
    facts: dict[str, Any] | None = store.read_json(file)
    if facts is None:
        raise DamagedError(f"{store.path(file)}: missing; restore it")
    return facts


def clean_accuracy(facts: Mapping[str, Any]) -> dict[str, float]:
    """The accuracy on the validation set, else on the test set; empty if there is neither."""
    known = [facts[name] for name in ("validation_accuracy", "test_accuracy") if name in facts]
    return {"clean_accuracy": float(known[0])} if known else {}


def clean_set(storage: str, versions: Mapping[str, int]) -> str:
    """Name the clean set of a run by its content, so that nights are compared on the same one.

    `versions` are the catalogue versions of the clean sets that the run was evaluated on.
    """
    for name in ("validation", "test"):
        if name in versions:
            # Not by its version: a takedown from the training shards gives the clean set a new version too,
            # and that night would not be compared. The segments hold all that is known of the rows.
            files = "\n".join(one.file for one in Catalogue.open(storage, versions[name], name).segments)
            return f"{name} {sha256(files.encode()).hexdigest()[:16]}"
    return ""


# --- what a night starts with ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """What a night starts with that has a parent."""

    parent: Night
    crawl: Crawl
    labels: Manifest
    rows: npt.NDArray[np.int64]  # to train on, in ascending order
    undecided: npt.NDArray[np.int64]  # old rows whose labels earlier nights left as given
    subset: str  # the same rows, as the trainer takes them
    weights: str

    @property
    def same_classes(self) -> bool:
        return self.parent.class_names == self.crawl.after.class_names

    @property
    def only_learns(self) -> bool:
        """Whether no label may change, because the network has to learn a class first."""
        return bool(first_classes(self.crawl))

    @property
    def to_decide(self) -> npt.NDArray[np.int64]:
        """The rows that are new or start again, and those that earlier nights left undecided."""
        return np.union1d(self.crawl.fresh["row"].to_numpy(), self.undecided)


def prepare(config: Config, nights: NightFiles, night: Night) -> Prepared | None:
    """Make what a night starts with; None for a first night, which starts from nothing."""
    if night.parent is None:
        return None
    parent = nights.must_find(night.parent)
    before, after = (Catalogue.open(nights.storage, one.catalogue_version) for one in (parent, night))
    old = Manifest.load(parent.labels)
    if (old.layout.num_rows, old.class_names) != (before.num_rows, before.class_names):
        raise PencilError(
            f"{parent.labels}: labels of {old.layout.num_rows:,} rows and {len(old.class_names)} classes; "
            f"catalogue version {before.version} of {parent.name} has {before.num_rows:,} rows and "
            f"{before.num_classes} classes, or other class names; promote another night"
        )
    mapping = class_mapping(old.class_names, after.class_names, config.nightly.remap)
    crawl = find_crawl(before, after, mapping)
    labels = Manifest.find(nights.path(night.name, CARRIED)) or _carry(config, nights, night, old, crawl)
    subset = nights.path(night.name, ROWS)
    undecided = _undecided(nights, parent)
    rows = _rows(config, night, crawl, labels, undecided, subset)
    rows = np.setdiff1d(rows, newly_excluded(after, config.data.exclude))  # excluded since it started
    weights = _weights(parent, crawl, Folder(nights.path(night.name)))
    return Prepared(parent, crawl, labels, rows, undecided, subset, weights)


def inherited(storage: str, prepared: Prepared | None) -> dict[str, Any]:
    """The automatic settings of the network that a night continues, which it hands on to the next night."""
    record = read_record(storage, prepared.parent.trained_by) if prepared is not None else None
    known = record.automatic.items() if record else ()
    return {key: value for key, value in known if key.startswith(("model.", "images."))}


def _undecided(nights: NightFiles, parent: Night) -> npt.NDArray[np.int64]:
    home, _, name = nights.path(parent.name, UNDECIDED).rpartition("/")
    found = Folder(home).find(name)
    rows: npt.NDArray[np.int64] = NO_ROWS if found is None else np.load(io.BytesIO(found))
    return rows


def keep_undecided(nights: NightFiles, night: Night, prepared: Prepared) -> None:
    """Keep which rows a night left as given, for the next night."""
    file = io.BytesIO()
    np.save(file, prepared.to_decide)
    nights.put(Storage(nights.storage).night(night.name, UNDECIDED), file.getvalue())


def night_config(config: Config, night: Night, prepared: Prepared | None) -> Config:
    """The config that a night trains with: its own name, rows and weights, and its parent's network."""
    changes: dict[str, dict[str, Any]] = {"run": {"name": night.name}}
    if prepared is not None:
        config = filled(config, inherited(config.run.storage, prepared) | {"stages.backbone.epochs": 0})
        if prepared.only_learns:
            pencil, finetune = config.stages.pencil, config.stages.finetune
            both = None if None in (pencil.epochs, finetune.epochs) else pencil.epochs + finetune.epochs
            changes["stages"] = {
                "pencil": pencil.model_copy(update={"epochs": 0}),
                "finetune": finetune.model_copy(update={"epochs": both}),
            }
    if prepared is None:
        stages, epochs = ("backbone", "pencil", "finetune"), config.nightly.first_epochs or ()
        changes["stages"] = {
            name: getattr(config.stages, name).model_copy(update={"epochs": num})
            for name, num in zip(stages, epochs, strict=True)
        }
    else:
        changes |= {"data": {"subset": prepared.subset}, "model": {"weights": prepared.weights}}
    sections = {name: getattr(config, name).model_copy(update=some) for name, some in changes.items()}
    return config.model_copy(update=sections)


def _rows(
    config: Config,
    night: Night,
    crawl: Crawl,
    labels: Manifest,
    undecided: npt.NDArray[np.int64],
    folder: str,
) -> npt.NDArray[np.int64]:
    """Draw the rows to train on, and keep them as a subset; none if nothing is new but watched samples."""
    words, after = read_words(folder), crawl.after
    if words is None:
        pins = read_pins(config.run.storage).resolve(after.class_names, config.nightly.remap)
        roles = choose_roles(after, NO_ROWS, pins.rows, config.evidence, config.run.seed, labels)
        left = without(members_of(after, undecided), crawl.fresh["row"].to_numpy())
        fresh = without(pa.concat_tables([crawl.fresh, left]), roles.watched)
        num_old = round(config.nightly.old_per_new * len(fresh))
        others = np.concatenate([roles.watched, undecided])
        drawn = old_rows(crawl, num_old, mixed_key(config.run.seed, night.number), others)
        members = pa.concat_tables([fresh, drawn]).sort_by("row")
        counts = np.bincount(members["class"].to_numpy(), minlength=after.num_classes).tolist()
        how = {"seed": config.run.seed, "night": night.number, "new": len(fresh), "old": len(drawn)}
        drawn_from = config.run.storage, after.id, after.version
        words = SubsetWords(*drawn_from, len(members), after.class_names, tuple(counts), how)
        words = write_subset(folder, words, members)
    rows: npt.NDArray[np.int64] = read_table(folder, words)["row"].to_numpy()
    return rows


def _weights(parent: Night, crawl: Crawl, folder: Folder) -> str:
    """The parent's network; if the class list has changed, with a last layer to match."""
    if parent.class_names == crawl.after.class_names:
        return parent.model
    import torch  # takes seconds to import

    home, _, name = parent.model.rpartition("/")
    found = torch.load(io.BytesIO(Folder(home).get(name)), map_location="cpu", weights_only=True)
    sink = io.BytesIO()
    torch.save(remapped_head(found, crawl.mapping, len(parent.class_names)), sink)
    folder.put(WEIGHTS, sink.getvalue())
    return folder.path(WEIGHTS)


def remapped_head(
    weights: Mapping[str, Any], mapping: Sequence[Sequence[int]], num_old: int
) -> dict[str, Any]:
    """Give the last layer the new classes: a merged class is the mean of the old ones, a new one is zeros."""
    head = list(weights)[-1].rpartition(".")[0] + "."
    moved = dict(weights)
    for name, old in weights.items():
        if name.startswith(head) and old.ndim and len(old) == num_old:
            moved[name] = old.new_zeros(len(mapping), *old.shape[1:])
            for number, olds in enumerate(mapping):
                if olds:
                    moved[name][number] = old[list(olds)].mean(0)
    return moved


def _carry(config: Config, nights: NightFiles, night: Night, old: Manifest, crawl: Crawl) -> Manifest:
    """Carry the parent's labels over, and keep them; the manifest is written last."""
    storage, after = Storage(nights.storage), crawl.after
    require_same_rows(old, after)
    pins = read_pins(storage.url).resolve(after.class_names, config.nightly.remap)
    if warning := pins.void_warning():
        say(f"WARNING: {warning}")
    carried = carry_over(old, crawl, pins, night.id)
    if config.checkpoint.history:
        # Every label as it was before the night: its history shows only its own changes.
        with history_file(f"{storage.path(storage.history(night.id))}/{START}") as writer:
            study_labels(carried, after, history=writer)
    nights.put(storage.night(night.name, CARRIED), carried.encode())
    return carried
