"""What MLflow is told of a night after its training: the verdict, and which model is in use from now on.

Words wait on disk like all others while the server is away, so CURRENT never waits for it.

    tell(config, night, "held")
    tell_current(config, night, before)        # also moves the registered model's alias
    tell_released(config, record)              # of a held training run that a person promotes: likewise
"""

from dataclasses import asdict, replace
from typing import Any

from pencil_scale.config.settings import Config
from pencil_scale.labels.run_record import RunRecord, read_record, write_record
from pencil_scale.nights.record import Night
from pencil_scale.tracking.tracked_run import TrackedRun, plan_tracking
from pencil_scale.tracking.tracker import Tracker
from pencil_scale.train.run import outbox_folder

ALIAS = "current"


def tell_current(config: Config, night: Night, before: Night | None) -> None:
    """Say that a night is in use now, and that the one before no longer is."""
    tell(config, night, ALIAS)
    if before is not None and before.trained_by != night.trained_by:
        tell(config, before, "former")


def tell(config: Config, night: Night, word: str) -> None:
    """Tag the MLflow run that made a night's model; a night that is in use gets the alias."""
    storage = config.run.storage
    record = read_record(storage, night.trained_by)
    if record is None or not record.tracking:
        return  # taken over from elsewhere: no run to speak of
    tracker = _tracker(config, record)
    tracker.set_tag("night", word)
    tracker.set_tag("night.name", night.name)
    tracker.set_tag("night.parent", night.parent or "")
    if night.reasons:
        tracker.set_tag("night.reasons", "; ".join(night.reasons))
    tracker.log_json("night", asdict(night))
    if word == ALIAS:
        tracker.move_alias(ALIAS)
    tracker.finish()
    write_record(storage, record, tracking=tracker.state())


def tell_released(config: Config, record: RunRecord) -> RunRecord:
    """Tag the MLflow run of a held run that is released, give its model the alias, and update the record."""
    if not record.tracking:
        return record
    tracker = _tracker(config, record)
    tracker.set_tag("labels", "released")
    tracker.move_alias(ALIAS)
    tracker.finish()
    return write_record(config.run.storage, record, tracking=tracker.state())


def _tracker(config: Config, record: RunRecord) -> Tracker:
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": record.name})})
    return Tracker(_plan(named, record), outbox_folder(named, record.id))


def _plan(config: Config, record: RunRecord) -> TrackedRun:
    """The same MLflow run as before, with what was known of it then."""
    settings: dict[str, Any] = dict(record.settings)
    params = {name: text for name, text in settings.items() if " " not in name}
    version = str(record.catalogue_version)
    plan = plan_tracking(config, catalogue_version=version, run_id=record.id, state=record.tracking)
    named = settings.get("tracking.experiment")
    experiment = record.name if named in (None, "None") else named
    return replace(plan, experiment=experiment, params=params)
