"""A run from its config to its summary: check, start or resume, train, publish.

summary = train(config)                # resumes the run if it was interrupted
dry_run(config)                        # only says what it will take
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import ray

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.command import say
from pencil_scale.config.loader import describe
from pencil_scale.config.settings import Config
from pencil_scale.features.manifest import VECTORS, FeatureManifest
from pencil_scale.images.decode import decoders
from pencil_scale.labels.manifest import Manifest, sweep_run
from pencil_scale.labels.pins import read_pins
from pencil_scale.labels.roles import ROLES
from pencil_scale.labels.run_record import RunRecord, find_record, read_record, write_record
from pencil_scale.labels.start_labels import set_roles, start_labels
from pencil_scale.method.automatic import filled
from pencil_scale.method.backbones import find_weights
from pencil_scale.method.outlook import label_scale
from pencil_scale.storage.cleanup import clean_up
from pencil_scale.storage.errors import PencilError, many, new_id
from pencil_scale.storage.lease import Lease, LeaseLostError, command_line
from pencil_scale.storage.retries import limited_to
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of, is_local, open_url
from pencil_scale.subset.files import fingerprint
from pencil_scale.tracking.narrator import Narrator
from pencil_scale.tracking.receiver import RESUMABLE
from pencil_scale.tracking.tracker import Tracker
from pencil_scale.train.checkpoints import CheckpointStore
from pencil_scale.train.checks import Problems, check_settings, require_agreement
from pencil_scale.train.driver import drive, make_job
from pencil_scale.train.extract import compute_features, estimate_features, on_named_features, prepare
from pencil_scale.train.folds import are_saved, remove_folds, train_folds
from pencil_scale.train.local_ray import ensure_ray, require_room, what_is_missing
from pencil_scale.train.plan import RunPlan, count, estimate, make_plan, run_trial, table
from pencil_scale.train.summary import Summary, publish

LAST_WORD_S = 15.0  # how long a command that is over waits for a store
STOPPED = 143  # the exit code that a shell reports for a command ended by SIGTERM


@dataclass(frozen=True)
class Start:
    """What a run starts from if it continues earlier work, as a night does."""

    run: str  # the id of the new run
    catalogue_version: int
    labels: Manifest | None  # None: every row starts with its given class
    inherited: Mapping[str, Any] = field(default_factory=dict)  # automatic settings of the earlier work


def train(
    config: Config, start: Start | None = None, alias: str | None = "current", hold: bool = True
) -> Summary:
    """Train to the end, publish the model and the labels, and return the summary.

    Without a `start`, a new run has a new id and the newest catalogue, and every row starts with its given
    class. `alias` is the MLflow alias of the registered model; None leaves that decision for later. Labels
    that look wrong are held; without `hold` they are published, and the caller decides by the reasons in the
    summary.

    On SIGTERM or Ctrl-C the workers save, and SystemExit(143) is raised, or KeyboardInterrupt if they have
    not begun to train: a caller that must not end with the command has to catch both.
    """
    config = with_absolute_storage(config)
    checked, was_there = _check(config, start), ray.is_initialized()
    storage, name = Storage(config.run.storage), config.run.name
    what = f"run {name} is being trained"
    with Lease.hold(storage.url, storage.run(name, "lease"), what=what) as lease:
        plan, record = _start_or_resume(config, start, lease, checked)
        config = plan.config
        tracker = _track(plan, record)
        record = write_record(storage.url, record, lease, status="running", tracking=tracker.state())
        narrator = Narrator(plan.schedule.epochs, plan.class_names, tracker, say=say)
        try:
            folds, checkpoint = train_folds(plan, record, lease), None
            if folds is not None:
                checkpoint = drive(make_job(plan, record, Manifest.load(record.labels)), narrator.hear, lease)
                narrator.draw()
        except LeaseLostError:
            raise  # the run has not failed: another command continues it, also in MLflow
        except BaseException as error:
            failed = isinstance(error, Exception)  # a repeated Ctrl-C is not: the run can be resumed
            tracker.describe(f"failed: {error}" if failed else "stopped without saving")
            tracker.finish("FAILED" if failed else RESUMABLE, wait_s=5)
            with suppress(PencilError, OSError), limited_to(LAST_WORD_S):
                status = "failed" if failed else "stopped"
                write_record(storage.url, record, lease, status=status, tracking=tracker.state())
            raise
        if folds is None or checkpoint is None:
            write_record(storage.url, record, lease, status="stopped", tracking=tracker.state())
            saved = "stopped and saved; to resume:"
            if config.workers.in_process:
                saved = "stopped; a run with workers.in_process saves nothing; to start it again:"
            tracker.describe(f"{saved} {command_line()}")
            tracker.finish(RESUMABLE)
            say(f"{saved} {command_line()}")
            raise SystemExit(STOPPED)
        if not was_there:
            ray.shutdown()  # it ends a process whose node died, which would break off what follows
        summary = publish(plan, record, checkpoint, folds, narrator.warnings, tracker, lease, alias, hold)
        tracker.describe(*summary.last_lines(), f"```\n{summary.table()}\n```")
        tracker.finish()
        status, reasons = summary.facts["status"], summary.facts["held_because"] if summary.held else ()
        write_record(
            storage.url, record, lease, status=status, held_because=reasons, tracking=tracker.state()
        )
        say(summary.table())
        _tidy(storage.url, record)
        for line in summary.last_lines():
            say(line)
        return summary


def dry_run(config: Config) -> dict[str, Any]:
    """Say what a run will take, and write nothing."""
    config = with_absolute_storage(config)
    plan = _check(config, resumes=False).plan
    if plan is None:
        expected = estimate_features(config)
        say(table(expected))
        say("then the head is trained on these features, which takes minutes")
        return expected
    config = plan.config
    say("\n".join(plan.lines))
    ensure_ray()
    one_short = what_is_missing(config.workers.model_copy(update={"count": (1, 1)}))
    if one_short and not os.environ.get("RAY_ADDRESS"):
        say(f"workers: {one_short}; the speed of a worker cannot be measured on this machine")
        say(table(expected := count(plan)))
        return expected
    if missing := what_is_missing(config.workers):
        say(f"workers: {missing}; the estimate is for a cluster that has them")
    if one_short:
        say("waiting until the cluster has room for one worker, to measure its speed")
    expected = estimate(plan, run_trial(plan))
    say(table(expected))
    return expected


def with_absolute_storage(config: Config) -> Config:
    """Make the path of a local storage absolute, because workers run in other folders."""
    filesystem, path = filesystem_of(config.run.storage)
    if not is_local(filesystem):
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"storage": path})})


class Checked(NamedTuple):
    """A run that was checked before it started: its record, if it resumes, and its plan, if it has one."""

    record: RunRecord | None = None
    plan: RunPlan | None = None


def _check(config: Config, start: Start | None = None, resumes: bool = True) -> Checked:
    """Report all problems of a config at once, before anything is written; return the plan of the run.

    If features have to be computed first, there is no plan yet.
    """
    problems = Problems()
    check_settings(config, problems)
    if start is None:
        with problems.noted():
            require_agreement(config)
    record, plan = None, None
    with problems.noted():
        config, record = _resumed(config, start) if resumes else (config, None)
        to_compute = None
        if config.model.head is not None and record is None:
            if config.features.name is None:
                _, to_compute = prepare(config, Catalogue.open(config.run.storage))
            else:
                config = on_named_features(config)
        plan = make_plan(config, *_origin(start, record), problems, to_compute)
        plan = plan if to_compute is None else None
    problems.require_none()
    return Checked(record, plan)


def _resumed(config: Config, start: Start | None) -> tuple[Config, RunRecord | None]:
    """Find the record of a run that resumes; with a head, it has the features that it started with."""
    if config.model.head is None:
        return config, _find_record(config, start)
    name = config.features.name or _computed_before(config)
    if name is None:
        return config, None
    features = config.features.model_copy(update={"name": name})
    named = on_named_features(config.model_copy(update={"features": features}), computed_before=True)
    record = _find_record(named, start)
    return (config, None) if record is None else (named, record)


def _computed_before(config: Config) -> str | None:
    """The key of the features that an earlier command of this run computed, if they are still there."""
    earlier = read_record(config.run.storage, config.run.name)
    key = earlier.settings.get("features.name") if earlier else None
    found = FeatureManifest.find(Storage(config.run.storage), key) if key else None
    return key if found is not None and "imported" not in found.made_by else None


def _find_record(config: Config, start: Start | None) -> RunRecord | None:
    """Find the record of a run that resumes; None if it starts, or starts again."""
    storage, name = config.run.storage, config.run.name
    earlier = read_record(storage, name)
    settings = _settings(filled(config, earlier.automatic if earlier else {}))
    is_saved = partial(_is_saved, storage)
    record = find_record(storage, name, settings, is_saved)
    if record and not is_saved(record):  # nothing depends on the catalogue and decoders it started with
        is_newer = not start and Catalogue.open(storage).version != record.catalogue_version
        record = None if is_newer or record.decoders != decoders() else record
    if record and record.decoders != decoders():
        raise PencilError(
            f"run {name} was started with {record.decoders}, which decode images, and here are {decoders()}; "
            "other versions may give other pixels: install the same to resume, or choose another run.name"
        )
    return record


def _origin(
    start: Start | None, record: RunRecord | None
) -> tuple[int | None, RunRecord | None, Manifest | None]:
    """What `make_plan` needs to know about the start of a run."""
    return (start.catalogue_version, record, start.labels) if start else (None, record, None)


def _start_or_resume(
    config: Config, start: Start | None, lease: Lease, checked: Checked | None = None
) -> tuple[RunPlan, RunRecord]:
    """Start Ray, and find the record of the run, or make one."""
    storage, name = config.run.storage, config.run.name
    earlier, (config, record) = read_record(storage, name), _resumed(config, start)
    if record is None:
        config = with_features(config)
        record = _find_record(config, start)
    checked = checked or Checked()
    plan = checked.plan
    if plan is None or record != checked.record:  # another command trained it while this one waited
        plan = make_plan(config, *_origin(start, record))
    say("\n".join(plan.lines))
    ensure_ray()
    require_room(config.workers)
    how = "resumes" if record else "starts again: it had not saved anything" if earlier else "starts"
    say(f"run {name} {how}, on catalogue version {plan.catalogue.version}")
    if record is None:
        record = _new_record(plan, start, lease)
        if earlier is not None and earlier.id != record.id:
            sweep_run(storage, earlier.id)
    return plan, record


def with_features(config: Config) -> Config:
    """Compute the features that a head is trained on, as far as there are none, and name them."""
    if config.model.head is None:
        return config
    if config.features.name is not None:
        return on_named_features(config)
    ensure_ray()
    found = compute_features(config)
    say(
        f"features: {found.num_computed:,} computed now, {found.manifest.counts['ready']:,} in {found.folder}"
    )
    features = config.features.model_copy(update={"name": found.manifest.key})
    return config.model_copy(update={"features": features})


def _track(plan: RunPlan, record: RunRecord) -> Tracker:
    """Report to MLflow what the run is, and which data it reads."""
    storage = plan.config.run.storage
    tracker = Tracker(plan.config, record.catalogue_version, record.id)
    tracker.about = [*plan.lines, f"storage: {storage}"]
    tracker.describe()
    tracker.log_dataset("training", plan.catalogue)
    for clean_set, spec in plan.clean.items():
        tracker.log_dataset(clean_set, Catalogue.open(storage, spec.version, clean_set))
    return tracker


def _is_saved(storage: str, record: RunRecord) -> bool:
    """Whether a run has a checkpoint from which it can resume, or one of its folds has."""
    store = CheckpointStore(storage, record.name, record.id)
    return store.newest() is not None or are_saved(storage, record)


def _settings(config: Config) -> dict[str, str]:
    """The settings of a run as text, with a hash of its subset: it may be redrawn under the same name."""
    subset, found = config.data.subset, describe(config)
    if config.model.head is None:
        del found["features.name"]
    else:
        made_by = FeatureManifest.choose(Storage(config.run.storage), config.features.name).made_by
        found |= {"features.name vectors": made_by[VECTORS]} if VECTORS in made_by else {}
    members = {} if subset is None else {"data.subset members": fingerprint(subset)}
    return found | members


def _new_record(plan: RunPlan, start: Start | None, lease: Lease) -> RunRecord:
    """Make the labels that a new run starts with, then record everything it starts with."""
    config, storage = plan.config, Storage(plan.config.run.storage)
    run, labels = (start.run, start.labels) if start else (new_id(), None)
    if labels is None:
        scale = label_scale(config.stages.pencil, len(plan.class_names))
        pins = read_pins(storage.url).resolve(plan.class_names, config.nightly.remap)
        if warning := pins.void_warning():
            say(f"WARNING: {warning}")
        labels = start_labels(
            plan.catalogue,
            storage.url,
            scale,
            pins,
            run,
            planted=(plan.roles.planted, plan.roles.planted_class),
            watched=plan.roles.watched,
        )
    else:  # the roles of its parent do not hold any more
        labels = set_roles(labels, (plan.roles.planted, plan.roles.planted_class), plan.roles.watched)
    labels.require_whole()
    lease.put(storage.run(config.run.name, ROLES), plan.roles.encode())
    name = storage.run(config.run.name, "labels.json")
    lease.put(name, labels.encode())
    record = RunRecord(
        name=config.run.name,
        id=run,
        settings=_settings(config),
        catalogue_version=plan.catalogue.version,
        class_names=plan.class_names,
        clean={clean_set: spec.version for clean_set, spec in plan.clean.items()},
        labels=storage.path(name),
        weights=_copy_weights(config),
        automatic={**(start.inherited if start else {}), **plan.automatic},
        decoders=decoders(),
        estimate=count(plan),
    )
    return write_record(storage.url, record, lease)


def _copy_weights(config: Config) -> str | None:
    """Copy the starting weights into the run's folder, under their hash: the original may change or go."""
    weights, storage = config.model.weights, Storage(config.run.storage)
    if weights is None or weights.startswith(storage.path("")):
        return weights
    weights = find_weights(config.model.backbone, weights)
    with open_url(weights) as file:
        data = file.read()
    name = storage.run(config.run.name, f"weights-{hashlib.sha256(data).hexdigest()[:16]}.pt")
    storage.put(name, data)
    return storage.path(name)


def _tidy(storage: str, record: RunRecord) -> None:
    """Remove the checkpoints of a finished run and the label parts that only they named; never fail."""

    def remove() -> None:
        CheckpointStore(storage, record.name, record.id).remove()
        remove_folds(storage, record)
        if swept := sweep_run(storage, record.id):
            say(f"{many(len(swept), 'label part')} removed, no longer needed")

    clean_up("checkpoints and label parts that are not needed any more", remove)
