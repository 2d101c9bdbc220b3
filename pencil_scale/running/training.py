"""A run from its config to its summary: check, begin or go on, train, publish."""

import hashlib
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from pencil_scale.catalogue import Catalogue
from pencil_scale.config import describe
from pencil_scale.labels.label_study import LabelStudy
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.labels.sweeping import sweep_storage
from pencil_scale.outlook import label_scale
from pencil_scale.reading.byte_source import filesystem_of, is_local
from pencil_scale.running.checks import Checked, check_run
from pencil_scale.running.control import start_control
from pencil_scale.running.driver import Outcome, drive
from pencil_scale.running.estimate import Estimate, count, estimate, run_trial, weight_bytes_of
from pencil_scale.running.local_ray import ensure_ray, require_room, what_is_missing
from pencil_scale.running.run_lock import alone, run_lock
from pencil_scale.running.run_record import RunRecord, find_record, run_folder, write_record
from pencil_scale.running.summary import Summary, publish
from pencil_scale.running.worker import Job
from pencil_scale.schema import PencilError
from pencil_scale.settings import Config
from pencil_scale.shapes import without_passwords
from pencil_scale.stream import StreamSpec
from pencil_scale.subset_files import fingerprint
from pencil_scale.telling.narrator import Narrator
from pencil_scale.telling.tracked_run import plan_tracking
from pencil_scale.telling.tracker import Tracker

STOPPED = 143  # what a shell reports of a command that SIGTERM ended


def train(config: Config, labels: Manifest | None = None, alias: str | None = "current") -> Summary:
    """Train to the end, publish the model and the labels, and say what came of it.

    `labels` are those a run begins with that goes on from another; without, every row begins as given.
    `alias` is what a registered model is called from then on; without, somebody decides later.
    """
    config = with_absolute_storage(config)
    checked = check_run(config)
    _say("\n".join(checked.lines))
    with run_lock(config.run.storage, config.run.name):
        return _train_locked(config, checked, labels, alias)


def _train_locked(config: Config, checked: Checked, labels: Manifest | None, alias: str | None) -> Summary:
    record = find_record(config.run.storage, config.run.name, _settings(config))
    ensure_ray()
    require_room(config.workers)
    control = start_control(config.run.storage, config.run.name)
    if record is None:
        record = _begin(config, checked, labels)
    else:
        print(f"run {record.name} goes on where it stopped, on catalogue version {record.catalogue_version}")
    tracker = Tracker(
        plan_tracking(config, catalogue_version=str(record.catalogue_version), state=record.tracking),
        outbox_folder(config),
    )
    record = write_record(config.run.storage, record, status="running", tracking=tracker.state())
    narrator = Narrator(checked.schedule.epochs, checked.class_names, tracker, say=_say)
    outcome = _train(config, record, checked, control, narrator, tracker)
    if not outcome.finished:
        write_record(config.run.storage, record, status="stopped", tracking=tracker.state())
        tracker.finish("KILLED")
        _say(f"stopped and saved; to go on: {_this_command()}")
        raise SystemExit(STOPPED)
    summary = publish(config, checked, record, outcome, narrator.warnings, tracker, alias)
    tracker.finish()
    write_record(config.run.storage, record, status="finished", tracking=tracker.state())
    _say(summary.table())
    _sweep(config)
    return summary


def _sweep(config: Config) -> None:
    """Remove the label parts that only checkpoints named that are gone; a finished run never fails by it."""
    try:
        with alone(config.run.storage, config.run.name) as is_alone:
            swept = sweep_storage(config.run.storage, is_alone)
    except (PencilError, OSError) as error:
        _say(f"label parts that nothing names any more were left: {error}")
    else:
        if swept:
            _say(f"{len(swept):,} label parts removed that nothing names any more")


def foretell(config: Config) -> Estimate:
    """Say what a run will take, and write nothing."""
    config = with_absolute_storage(config)
    checked = check_run(config)
    _say("\n".join(checked.lines))
    ensure_ray()
    missing = what_is_missing(config.workers)
    if missing:
        print(f"workers: {missing}; what follows is for a cluster that has them", flush=True)
    expected = estimate(config, checked, run_trial(config, checked))
    print(expected.table())
    return expected


def with_absolute_storage(config: Config) -> Config:
    """Spell a local storage from the root: workers stand in other folders."""
    filesystem, path = filesystem_of(config.run.storage)
    if not is_local(filesystem):
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"storage": path})})


def _begin(config: Config, checked: Checked, labels: Manifest | None) -> RunRecord:
    """Make the labels a new run starts with, then write down what it begins with."""
    print(f"run {config.run.name} begins, on catalogue version {checked.catalogue.version}", flush=True)
    scale = label_scale(config.stages.pencil, len(checked.class_names))
    if labels is None:
        labels = start_labels(checked.catalogue, config.run.storage, scale, config.workers.scratch)
    url = f"{run_folder(config.run.storage, config.run.name)}/labels.json"
    labels.save(url)
    counted = count(config, checked, weight_bytes_of(config.model.backbone, len(checked.class_names)))
    record = RunRecord(config.run.name, _settings(config), checked.catalogue.version, url)
    return write_record(config.run.storage, record, estimate=counted.facts())


def _settings(config: Config) -> dict[str, str]:
    """All a run is begun with: a subset drawn anew under the same name is another one."""
    drawn = {} if config.data.subset is None else {"data.subset members": fingerprint(config.data.subset)}
    return describe(config) | drawn


def _train(
    config: Config, record: RunRecord, checked: Checked, control: Any, narrator: Narrator, tracker: Tracker
) -> Outcome:
    version = record.catalogue_version
    study = LabelStudy(
        config.run.storage,
        version,
        config.run.name,
        members=checked.subset,
        history=config.checkpoint.history,
        max_class_loss=config.stages.pencil.max_class_loss,
    )
    job = Job(
        config=config,
        num_classes=len(checked.class_names),
        labels=Manifest.load(record.labels),
        stream=StreamSpec.from_config(config, version, subset=checked.subset),
        clean=_clean_specs(config),
        study=study,
        control=control,
    )
    try:
        return drive(job, narrator.hear)
    except BaseException:
        tracker.finish("FAILED", wait_s=5)
        raise


def _clean_specs(config: Config) -> dict[str, StreamSpec]:
    given: dict[Any, object] = {"validation": config.data.validation, "test": config.data.test}
    parts = [part for part, shards in given.items() if shards]
    catalogues = {part: Catalogue.open(config.run.storage, part=part) for part in parts}
    return {part: StreamSpec.from_config(config, catalogues[part].version, part) for part in parts}


def outbox_folder(config: Config) -> str:
    """Where word for MLflow waits until it is delivered: beside the run, or on this machine."""
    folder = run_folder(config.run.storage, config.run.name)
    if is_local(filesystem_of(folder)[0]):
        return f"{folder}/outbox"
    name = hashlib.blake2b(folder.encode(), digest_size=8).hexdigest()
    return str(Path(config.workers.scratch or tempfile.gettempdir()) / f"pencil_scale-outbox-{name}")


def _say(text: str) -> None:
    """Print what may name URLs, such as this command with its overrides, without their credentials."""
    print(without_passwords(text), flush=True)


def _this_command() -> str:
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {main.name if main else 'pencil_scale.train'} {shlex.join(sys.argv[1:])}"
