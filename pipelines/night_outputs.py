"""What a night shows of its labels: an export for other tools, and a page for people.

night = shown_again(config, nights, night)        # re-creates an export or a page that is gone
"""

from dataclasses import replace

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import Config
from pencil_scale.export.files import ExportError, read_manifest
from pencil_scale.nights.record import Night, NightFiles
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of
from pipelines import export_labels, review_report


def export_night(config: Config, name: str) -> str:
    """Export the labels of a night; return the folder."""
    job = config.export.model_copy(update={"labels": name, "folder": None})
    return export_labels.run(config.model_copy(update={"export": job})).folder


def report_night(config: Config, name: str, since: str | None) -> str | None:
    """Render the page of a night, with what changed since the one before; return where it is."""
    job = config.report.model_copy(update={"labels": name, "since": since, "page": None, "judged": None})
    return review_report.run(config.model_copy(update={"report": job})).page


def shown_again(config: Config, nights: NightFiles, night: Night) -> Night:
    """Make sure that all a night names is there: a removed export or page is made again, or refuse.

    Those made before ids were taken down are made again too.
    """
    for what in (night.labels, night.model):
        if not _is_there(what):
            raise PencilError(
                f"{night.name}: {what} is gone, so this night cannot be used; choose another one"
            )
    if not night.number:
        return night  # a training run that nights follow; it made no export itself
    overlay = Catalogue.open(nights.storage).manifest["overlay"]
    is_exported = night.export is not None and _holds_export(night.export, night)
    if is_exported and night.report is not None and _is_there(night.report) and night.overlay == overlay:
        return night
    print(f"{night.name}: its export or page is gone or outdated, and is made again", flush=True)
    export, report = export_night(config, night.name), report_night(config, night.name, None)
    return nights.save(replace(night, export=export, report=report, overlay=overlay))


def _holds_export(folder: str, night: Night) -> bool:
    try:
        found = read_manifest(folder)
    except ExportError:
        return False
    return found is not None and found.labels == night.labels


def _is_there(url: str) -> bool:
    filesystem, path = filesystem_of(url)
    filesystem.invalidate_cache()
    return bool(filesystem.exists(path))
