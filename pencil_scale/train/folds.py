"""Folds: further trainings of a run, each of which watches another part of the samples.

A small dataset has too few samples to watch. So the run trains several times, and each training leaves out
another part: in the end every sample was predicted by a network that was never trained on it, and these
predictions judge the labels (`labels.assessment`).

    folds = train_folds(plan, record, lease)     # before the run itself trains; None: a stop was requested
    remove_folds(storage, record)                # when its labels are published

A fold starts from the labels and weights that the run starts from. It writes under an id of its own, derived
from the run's, and leaves `runs/NAME/fold-1-labels.json`; a fold that did is not trained again. Its figures
are printed and kept in `fold-1-epochs.json`, but not reported to MLflow, where they would mix with the run's.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pencil_scale.config.command import say
from pencil_scale.labels.assessment import given_classes
from pencil_scale.labels.manifest import Manifest, fold_id
from pencil_scale.labels.roles import Roles
from pencil_scale.labels.run_record import RunRecord
from pencil_scale.labels.start_labels import regive, set_roles
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pencil_scale.stream.window_reader import LeftOut
from pencil_scale.tracking.narrator import Narrator, Untracked
from pencil_scale.train.checkpoints import CheckpointStore, fetch_checkpoint
from pencil_scale.train.driver import drive, make_job
from pencil_scale.train.plan import RunPlan


@dataclass(frozen=True)
class Fold:
    """What a further training left."""

    labels: Manifest  # with its predictions of the samples that it watched
    figures: list[dict[str, Any]]  # of every epoch


def train_folds(plan: RunPlan, record: RunRecord, lease: Lease) -> list[Fold] | None:
    """Train the folds that are not done yet; return all of them, or None after a stop request."""
    found, num = list[Fold](), plan.roles.trainings
    for nth, (number, roles) in enumerate(plan.roles.folds(), 1):
        fold = _find_fold(plan.config.run.storage, record, number)
        if fold is None:
            say(f"fold {nth} of {num}: {len(roles.watched):,} samples are watched")
            fold = _train_fold(plan, roles, record, number, lease, later=num - nth)
        if fold is None:
            return None
        found.append(fold)
    if found:
        say(f"fold {num} of {num}: {len(plan.roles.watched):,} samples are watched; its network is kept")
    return found


def _train_fold(
    plan: RunPlan, roles: Roles, record: RunRecord, number: int, lease: Lease, later: int
) -> Fold | None:
    """Train one fold, from its last checkpoint if it has one."""
    labels = _start_labels(plan, roles, record, number)
    checkpoint = plan.config.checkpoint.model_copy(update={"history": False})
    fold_plan = replace(
        plan,
        config=plan.config.model_copy(update={"checkpoint": checkpoint}),
        roles=roles,
        stream=replace(plan.stream, left_out=LeftOut(roles.watched, roles.watched_bytes)),
        clean={},
    )
    job = make_job(fold_plan, replace(record, id=labels.run), labels)
    narrator = Narrator(plan.schedule.epochs, plan.class_names, Untracked(), say=say, later=later)
    ended = drive(job, narrator.hear, lease)
    if ended is None:
        return None
    saved = fetch_checkpoint(ended.as_directory, labels.run)
    fold = Fold(saved.best.labels if saved.best else saved.labels, saved.figures)
    fold.labels.require_whole()
    manifest, epochs = _names(record, number)
    lease.put(epochs, json.dumps(fold.figures).encode())
    lease.put(manifest, fold.labels.encode())  # last: where it is, the fold is done
    return fold


def _start_labels(plan: RunPlan, roles: Roles, record: RunRecord, number: int) -> Manifest:
    """The labels that the run starts from, with other roles."""
    labels = replace(Manifest.load(record.labels), run=fold_id(record.id, number))
    planted = plan.roles.planted
    labels = regive(labels, planted, given_classes(plan.catalogue, planted))
    return set_roles(labels, (roles.planted, roles.planted_class), roles.watched)


def _find_fold(storage: str, record: RunRecord, number: int) -> Fold | None:
    """What a fold of this run left, if it is done; one of an earlier run of this name does not count."""
    files, (manifest, epochs) = Storage(storage), _names(record, number)
    labels = Manifest.find(files.path(manifest))
    if labels is None or labels.run != fold_id(record.id, number):
        return None
    return Fold(labels, files.read_json(epochs) or [])


def are_saved(storage: str, record: RunRecord) -> bool:
    """Whether any fold is done, or has a checkpoint from which it can resume."""
    return any(
        _find_fold(storage, record, number) or store.newest() for number, store in _stores(storage, record)
    )


def remove_folds(storage: str, record: RunRecord) -> None:
    """Remove the checkpoints and manifests of the folds; their label parts are then swept with the run's."""
    for number, store in _stores(storage, record):
        store.remove()
        Storage(storage).delete(_names(record, number)[0])


def _stores(storage: str, record: RunRecord) -> Iterator[tuple[int, CheckpointStore]]:
    """The checkpoints of each fold that the run may have."""
    folds = record.settings.get("evidence.folds", "")
    for number in range(1, int(folds) if folds.isdigit() else 1):
        yield number, CheckpointStore(storage, record.name, fold_id(record.id, number))


def _names(record: RunRecord, number: int) -> tuple[str, str]:
    """The names of a fold's label manifest and of its figures."""
    return f"runs/{record.name}/fold-{number}-labels.json", f"runs/{record.name}/fold-{number}-epochs.json"
