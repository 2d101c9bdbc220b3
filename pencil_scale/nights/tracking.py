"""What MLflow is told of a night after its training: the verdict, and which model is in use from now on.

Words wait on disk like all others while the server is away, so CURRENT never waits for it.

    tell(config, night, "held")
    tell_current(config, night, before)        # also moves the registered model's alias
    tell_released(config, record)              # of a held training run that a person promotes: likewise
"""

from dataclasses import asdict, replace

from pencil_scale.config.settings import Config
from pencil_scale.labels.run_record import RunRecord, read_record, write_record
from pencil_scale.nights.record import Night
from pencil_scale.tracking.tracker import Tracker, plan_tracking

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
    """Track the same MLflow run again, with what was known of it when it was trained."""
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": record.name})})
    plan = plan_tracking(named, record.catalogue_version, record.id)
    experiment = record.settings.get("tracking.experiment", "None")
    return Tracker(
        replace(
            plan,
            experiment=record.name if experiment == "None" else experiment,
            params={name: text for name, text in record.settings.items() if " " not in name},
        )
    )
