"""A run from its config to its summary: check, start or resume, train, publish.

summary = train(config)                # resumes the run if it was interrupted
foretell(config)                       # only says what it will take
"""

import hashlib
import shlex
import sys
from dataclasses import asdict, dataclass

import fsspec

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import describe
from pencil_scale.config.settings import Config
from pencil_scale.labels.manifest import Manifest, sweep_run
from pencil_scale.labels.pins import read_pins
from pencil_scale.labels.published import require_same_rows
from pencil_scale.labels.report import LabelStudy
from pencil_scale.labels.run_record import RunRecord, find_record, write_record
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.method.outlook import label_scale
from pencil_scale.storage.errors import PencilError, new_id
from pencil_scale.storage.lease import Lease, LeaseLostError
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of, is_local, without_passwords
from pencil_scale.stream.stream import StreamSpec
from pencil_scale.subset.files import fingerprint
from pencil_scale.tracking.narrator import Narrator
from pencil_scale.tracking.tracker import Tracker, plan_tracking
from pencil_scale.train.checkpoints import CheckpointStore, Origin
from pencil_scale.train.control import start_control
from pencil_scale.train.driver import drive
from pencil_scale.train.estimate import Estimate, count, estimate, run_trial
from pencil_scale.train.local_ray import ensure_ray, require_room, what_is_missing
from pencil_scale.train.preflight import Checked, check_clean, check_run
from pencil_scale.train.summary import Summary, publish
from pencil_scale.train.worker import Job

STOPPED = 143  # the exit code that a shell reports for a command ended by SIGTERM


@dataclass(frozen=True)
class Start:
    """What a run starts from if it continues earlier work, as a night does."""

    run: str  # the id of the new run
    catalogue_version: int
    labels: Manifest | None  # None: every row starts with its given class


def train(
    config: Config, start: Start | None = None, alias: str | None = "current", hold: bool = True
) -> Summary:
    """Train to the end, publish the model and the labels, and return the summary.

    Without a `start`, a new run has a new id and the newest catalogue, and every row starts with its given
    class. `alias` is the MLflow alias of the registered model; None leaves that decision for later. Labels
    that look wrong are held; without `hold` they are published, and the caller decides by the reasons in the
    summary.
    """
    config = with_absolute_storage(config)
    name = config.run.name
    with Lease.hold(config.run.storage, f"runs/{name}/lease", what=f"run {name} is being trained") as lease:
        return _train(config, start, alias, hold, lease)


def _train(config: Config, start: Start | None, alias: str | None, hold: bool, lease: Lease) -> Summary:
    storage = config.run.storage
    config, record, checked, clean = _start_or_resume(config, start, lease)
    tracker = Tracker(plan_tracking(config, record.catalogue_version, record.id))
    record = write_record(storage, record, lease, status="running", tracking=tracker.state())
    narrator = Narrator(checked.schedule.epochs, checked.class_names, tracker, say=_say)
    job = _job(config, record, checked, clean, lease.attempt)
    try:
        outcome = drive(job, narrator.hear, lease)
    except LeaseLostError:
        raise  # the run has not failed: another command continues it, also in MLflow
    except BaseException:
        tracker.finish("FAILED", wait_s=5)
        raise
    if not outcome.finished:
        write_record(storage, record, lease, status="stopped", tracking=tracker.state())
        tracker.finish("KILLED")
        main = getattr(sys.modules["__main__"], "__spec__", None)
        module = main.name.removesuffix(".__main__") if main else "pencil_scale.train"
        saved = "stopped and saved; to resume:"
        if config.workers.in_process:
            saved = "stopped; a run with workers.in_process saves nothing; to start it again:"
        _say(f"{saved} python -m {module} {shlex.join(sys.argv[1:])}")
        raise SystemExit(STOPPED)
    summary = publish(config, checked, record, outcome, narrator.warnings, tracker, lease, alias, hold)
    tracker.finish()
    status, reasons = summary.facts["status"], summary.facts["held_because"] if summary.held else ()
    write_record(storage, record, lease, status=status, held_because=reasons, tracking=tracker.state())
    _say(summary.table())
    _tidy(config, record)
    for line in summary.ending():
        _say(line)
    return summary


def foretell(config: Config) -> Estimate:
    """Say what a run will take, and write nothing."""
    config = with_absolute_storage(config)
    checked = check_run(config)
    _say("\n".join(checked.lines))
    ensure_ray()
    if missing := what_is_missing(config.workers):
        _say(f"workers: {missing}; the estimate is for a cluster that has them")
    expected = estimate(config, checked, run_trial(config, checked))
    _say(expected.table())
    return expected


def with_absolute_storage(config: Config) -> Config:
    """Make the path of a local storage absolute, because workers run in other folders."""
    filesystem, path = filesystem_of(config.run.storage)
    if not is_local(filesystem):
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"storage": path})})


def _start_or_resume(
    config: Config, start: Start | None, lease: Lease
) -> tuple[Config, RunRecord, Checked, dict[str, StreamSpec]]:
    """Check the run, start Ray, and find the record of the run, or make one."""
    record = find_record(config.run.storage, config.run.name, _settings(config))
    version = record.catalogue_version if record else start.catalogue_version if start else None
    if record is not None:
        config = _with_weights(config, record.weights)
    checked = check_run(config, version)
    clean = check_clean(config, record.clean if record else _clean_versions(config), checked.class_names)
    _say("\n".join(checked.lines))
    ensure_ray()
    require_room(config.workers)
    if record is None:
        record = _new_record(config, checked, start, lease)
        config = _with_weights(config, record.weights)
    else:
        _say(f"run {record.name} resumes, on catalogue version {record.catalogue_version}")
    return config, record, checked, clean


def _new_record(config: Config, checked: Checked, start: Start | None, lease: Lease) -> RunRecord:
    """Make the labels that a new run starts with, then record everything it starts with."""
    storage, name = Storage(config.run.storage), config.run.name
    _say(f"run {name} starts, on catalogue version {checked.catalogue.version}")
    run = start.run if start else new_id()
    labels = start.labels if start else None
    if labels is None:
        scale = label_scale(config.stages.pencil, len(checked.class_names))
        pins = read_pins(storage.url).resolve(checked.class_names, config.nightly.remap)
        if warning := pins.void_warning():
            _say(f"WARNING: {warning}")
        labels = start_labels(checked.catalogue, storage.url, scale, pins, run)
    labels.require_whole()
    lease.put(storage.run(name, "labels.json"), labels.encode())
    record = RunRecord(
        name=name,
        id=run,
        settings=_settings(config),
        catalogue_version=checked.catalogue.version,
        class_names=checked.class_names,
        clean=_clean_versions(config),
        labels=storage.path(storage.run(name, "labels.json")),
        weights=_own_weights(config),
        estimate=asdict(count(config, checked)),
    )
    return write_record(config.run.storage, record, lease)


def _own_weights(config: Config) -> str | None:
    """Copy the starting weights into the run's folder, under their hash: the original may change or go."""
    weights, storage = config.model.weights, Storage(config.run.storage)
    if weights is None or weights.startswith(storage.path("")):
        return weights
    with fsspec.open(weights, "rb") as file:
        data = file.read()
    name = storage.run(config.run.name, f"weights-{hashlib.sha256(data).hexdigest()[:16]}.pt")
    storage.put(name, data)
    return storage.path(name)


def _with_weights(config: Config, weights: str | None) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"weights": weights})})


def _settings(config: Config) -> dict[str, str]:
    """Everything a run starts with, and a hash of its subset, which may be redrawn under the same name."""
    drawn = {} if config.data.subset is None else {"data.subset members": fingerprint(config.data.subset)}
    return describe(config) | drawn


def _clean_versions(config: Config) -> dict[str, int]:
    """The newest catalogue versions of the clean sets that a config names."""
    given = {"validation": config.data.validation, "test": config.data.test}
    parts = [part for part, shards in given.items() if shards]
    return {part: Catalogue.open(config.run.storage, clean_set=part).version for part in parts}


def _job(
    config: Config, record: RunRecord, checked: Checked, clean: dict[str, StreamSpec], attempt: int
) -> Job:
    """Put together what the workers are given; checkpoints that are not needed any more are removed."""
    storage, version = config.run.storage, record.catalogue_version
    checkpoints = CheckpointStore(storage, record.name, record.id)
    newest = checkpoints.newest()
    checkpoints.remove(before=newest[0] if newest else attempt)
    labels = Manifest.load(record.labels)
    require_same_rows(labels, checked.catalogue)
    return Job(
        config=config,
        origin=Origin(
            run=record.id,
            attempt=attempt,
            settings=record.fingerprint,
            catalogue_version=version,
            class_names=record.class_names,
            clean=record.clean,
        ),
        resume=newest[1] if newest else None,
        labels=labels,
        stream=StreamSpec.from_config(config, version, subset=checked.subset),
        clean=clean,
        study=LabelStudy(
            storage,
            version,
            record.id,
            members=checked.subset,
            history=config.checkpoint.history,
            max_class_loss=config.stages.pencil.max_class_loss,
        ),
        control=start_control(),
    )


def _tidy(config: Config, record: RunRecord) -> None:
    """Remove the checkpoints of a finished run and the label parts that only they named; never fail."""
    try:
        CheckpointStore(config.run.storage, record.name, record.id).remove()
        swept = sweep_run(config.run.storage, record.id)
    except (PencilError, OSError) as error:
        _say(f"checkpoints or label parts that are not needed any more were left: {error}")
    else:
        if swept:
            _say(f"{len(swept):,} label parts removed that are not needed any more")


def _say(text: str) -> None:
    """Print without the credentials of URLs, which a command line or an error may contain."""
    print(without_passwords(text), flush=True)
