"""Retention: what old nights left is removed; what is in use, and what it came from, never is.

Only what a night made is removed, recognised by the night's id: a run, a model or labels that somebody else
called `night-0007` stay, and so does whatever else is in the folder of an export.

    removed = remove_old(nights, keep=14)          # CURRENT, its parent, and the newest 14 stay
    remove_taken_down(nights, overlay)             # what still shows ids that must vanish
"""

from pathlib import PurePosixPath

from pencil_scale.export.files import remove_export
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import published_url
from pencil_scale.labels.report import history_folder
from pencil_scale.labels.run_record import read_record, run_folder
from pencil_scale.labels.snapshot import sweep_run
from pencil_scale.nights.record import NIGHT, NightFiles, Plan
from pencil_scale.storage.errors import DamagedError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import filesystem_of


def remove_old(nights: NightFiles, keep: int) -> list[str]:
    """Remove the nights that need not be kept, abandoned ones too; return their names."""
    current = nights.current()
    in_use = {current.name, current.parent} if current else set()
    old = [plan for plan in nights.plans()[:-keep] if plan.name not in in_use]
    for plan in old:
        remove_made(nights, plan)
        remove(nights.folder(plan.name))
    return [plan.name for plan in old]


def remove_made(nights: NightFiles, plan: Plan) -> None:
    """Remove all that a night made but its plan, by which an interrupted removal is found again.

    The manifest goes first, for what it names must be there; label parts last, when nothing names them any
    more.
    """
    storage, name = nights.storage, plan.name
    remove(f"{nights.folder(name)}/{NIGHT}")
    remove_shown(storage, name)
    record = read_record(storage, name)
    published = published_run(storage, name)
    if published == plan.id or (published is None and record is not None and record.id == plan.id):
        remove(published_url(storage, name))
        remove(f"{storage}/models/{name}.pt")
    for folder in Folder(storage).names(f"checkpoints/{name}"):
        if PurePosixPath(folder).name.startswith(f"{plan.id}-"):
            remove(f"{storage}/{folder}")
    if record is not None and record.id == plan.id:
        remove(run_folder(storage, name))
    remove(history_folder(storage, plan.id))
    remove(nights.carried(name))
    sweep_run(storage, plan.id)


def published_run(storage: str, name: str) -> str | None:
    """The id of the run whose labels are published under a name; None where there are none."""
    try:
        return Manifest.load(published_url(storage, name)).run
    except DamagedError:
        return None


def remove_shown(storage: str, name: str) -> bool:
    """Remove the export and the page of a night; return whether there were any."""
    exported = remove_export(f"{storage}/exports/{name}")
    return remove(f"{storage}/reports/{name}.html") or exported


def remove(url: str) -> bool:
    """Remove a file or folder that a night made; return whether it was there."""
    filesystem, path = filesystem_of(url)
    filesystem.invalidate_cache()
    if not filesystem.exists(path):
        return False
    filesystem.rm(path, recursive=True)
    return True


def remove_taken_down(nights: NightFiles, overlay: str) -> list[str]:
    """Remove exports and pages made before ids were taken down, or put back; return of which nights."""
    current = nights.current()
    others = [night for night in nights.nights() if current is None or night.name != current.name]
    outdated = [night.name for night in others if night.number and night.overlay != overlay]
    return [name for name in outdated if remove_shown(nights.storage, name)]
