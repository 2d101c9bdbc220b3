"""What a night shows of its labels: an export for other tools, a page for people, and its verdict in MLflow.

    night = shown_again(config, nights, night)        # re-creates an export or a page that is gone
    track_night(config, night, "held")
    track_current(config, night, before)              # also moves the registered model's alias
    track_released(config, run)                       # of a held training run that a person promotes

Records for MLflow wait in the run's journal while its server is unreachable, so CURRENT never waits for it.
"""

from contextlib import suppress
from dataclasses import asdict

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import Config
from pencil_scale.export.files import read_manifest
from pencil_scale.labels.pins import now, read_pins
from pencil_scale.labels.run_record import RunRecord, read_record, write_record
from pencil_scale.nights.record import Night, NightFiles
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of
from pencil_scale.tracking.tracker import Tracker
from pipelines import export_labels, review_report

ALIAS = "current"


def show_night(config: Config, name: str, since: str | None = None) -> dict[str, str | None]:
    """Export the labels of a night and render its page, with what changed since; return where they are."""
    export = config.export.model_copy(update={"labels": name, "folder": None, "judged": None})
    page = config.report.model_copy(update={"labels": name, "since": since, "page": None, "judged": None})
    config = config.model_copy(update={"export": export, "report": page})
    return {"export": export_labels.run(config).folder, "report": review_report.run(config).page}


def shown_again(config: Config, nights: NightFiles, night: Night) -> Night:
    """Make an export or a page again that was removed, or made before ids were excluded or labels pinned.

    A night whose labels or model are gone is refused.
    """
    for what in (night.labels, night.model):
        if not _is_there(what):
            raise PencilError(
                f"{night.name}: {what} is gone, so this night cannot be used; choose another one"
            )
    if not night.number:
        return night  # a training run that nights follow; it made no export itself
    overlay = Catalogue.open(nights.storage).manifest["overlay"]
    last_pin = max(read_pins(nights.storage).table["at"].to_pylist(), default="")
    is_newest = night.overlay == overlay and night.finished >= last_pin
    is_exported = night.export is not None and holds_export(night.export, night)
    if is_newest and is_exported and night.report is not None and _is_there(night.report):
        return night
    print(f"{night.name}: its export or page is gone or outdated, and is made again", flush=True)
    return nights.save(night, finished=now(), **show_night(config, night.name), overlay=overlay)


def holds_export(folder: str, night: Night) -> bool:
    """Whether a folder has an export of this night's labels; other files there are no reason to fail."""
    with suppress(PencilError):
        found = read_manifest(folder)
        return found is not None and found.labels == night.labels
    return False


def _is_there(url: str) -> bool:
    filesystem, path = filesystem_of(url)
    filesystem.invalidate_cache()
    return bool(filesystem.exists(path))


def track_current(config: Config, night: Night, before: Night | None) -> None:
    """Report that a night is in use now, and that the night before it no longer is."""
    track_night(config, night, ALIAS)
    if before is not None and before.trained_by != night.trained_by:
        track_night(config, before, "former")


def track_night(config: Config, night: Night, status: str) -> None:
    """Tag the MLflow run that made a night's model; a night that is in use gets the alias."""
    run = read_record(config.run.storage, night.trained_by)
    if run is None or not run.tracking:
        return  # adopted from elsewhere: MLflow has no run of it
    tracker = _tracker(config, run)
    tracker.set_tag("night", status)
    tracker.set_tag("night.name", night.name)
    tracker.set_tag("night.parent", night.parent or "")
    if night.reasons:
        tracker.set_tag("night.reasons", "; ".join(night.reasons))
    tracker.log_json("night", asdict(night))
    if status == ALIAS:
        tracker.move_alias(ALIAS)
    tracker.finish()
    write_record(config.run.storage, run, tracking=tracker.state())


def track_released(config: Config, run: RunRecord) -> RunRecord:
    """Tag the MLflow run of a held run that is released, and give its model the alias; return its record."""
    if not run.tracking:
        return run
    tracker = _tracker(config, run)
    tracker.set_tag("labels", "released")
    tracker.move_alias(ALIAS)
    tracker.finish()
    return write_record(config.run.storage, run, tracking=tracker.state())


def _tracker(config: Config, run: RunRecord) -> Tracker:
    """Track the same MLflow run again, with what was known of it when it was trained."""
    tracking = config.tracking.model_copy(update={"experiment": run.tracking["experiment"]})
    named = config.run.model_copy(update={"name": run.name})
    config = config.model_copy(update={"run": named, "tracking": tracking})
    params = {name: text for name, text in run.settings.items() if " " not in name}
    return Tracker(config, run.catalogue_version, run.id, params)
