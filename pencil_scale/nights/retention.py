"""Retention: what old nights leave behind is removed; what is in use, and what it came from, never is.

removed = remove_old(nights, keep=14)          # CURRENT, its parent, and the newest 14 stay
swept = sweep_labels(storage)                  # label parts that nothing names any more
"""

from pathlib import PurePosixPath

from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.part_store import PartStore
from pencil_scale.labels.snapshot import sweep
from pencil_scale.labels.start_labels import label_store
from pencil_scale.nights.night_files import CARRIED, NIGHT, NightFiles
from pencil_scale.reading.byte_source import filesystem_of
from pencil_scale.running.run_record import read_record

# All that bears a night's name, below its storage.
EXPORT, PAGE, CHECKPOINTS, RUN, NIGHTS = (
    "exports/{}",
    "reports/{}.html",
    "checkpoints/{}",
    "runs/{}",
    "nights/{}",
)
MADE = (
    EXPORT,
    PAGE,
    "labels/published/{}.json",
    "labels/history/{}",
    "models/{}.pt",
    CHECKPOINTS,
    RUN,
    NIGHTS,
)


def remove_old(nights: NightFiles, keep: int) -> list[str]:
    """Remove the nights that need not be kept, those that were abandoned too; say which."""
    current = nights.current()
    in_use = {current.name, current.parent} if current else set()
    plans = sorted(
        (plan for name in nights.names() if (plan := nights.plan(name))), key=lambda plan: plan.number
    )
    old = [plan.name for plan in plans[:-keep] if plan.name not in in_use]
    for name in old:
        remove_made(nights.storage, name)
    return old


def remove_made(storage: str, name: str, kept: tuple[str, ...] = ()) -> None:
    """Remove all that bears a night's name, but what is kept.

    The manifest goes first, for what it names must be there; the plan last: a removal that was interrupted
    is found again by it.
    """
    for pattern in (f"nights/{{}}/{NIGHT}", *(pattern for pattern in MADE if pattern not in kept)):
        remove(storage, pattern, name)


def remove(storage: str, pattern: str, name: str) -> bool:
    """Remove one of the things a night made; say whether it was there."""
    filesystem, path = filesystem_of(f"{storage}/{pattern.format(name)}")
    filesystem.invalidate_cache()
    if not filesystem.exists(path):
        return False
    filesystem.rm(path, recursive=True)
    return True


def remove_taken_down(nights: NightFiles, overlay: str) -> list[str]:
    """Remove exports and pages made before ids were taken down, or put back; say of which nights."""
    current = nights.current()
    others = [night for night in nights.nights() if current is None or night.name != current.name]
    outdated = [night.name for night in others if night.number and night.overlay != overlay]
    gone = [(name, remove(nights.storage, what, name)) for name in outdated for what in (EXPORT, PAGE)]
    return sorted({name for name, was_there in gone if was_there})


def sweep_labels(storage: str) -> list[str] | None:
    """Remove label parts that no manifest names; None, and nothing removed, while a run is unfinished.

    The newest labels of an unfinished run are named in its checkpoints alone.
    """
    runs = [PurePosixPath(name).name for name in PartStore(storage).names("runs")]
    records = [record for name in runs if (record := read_record(storage, name))]
    if any(record.status != "finished" for record in records):
        return None
    urls = [f"{label_store(storage)}/{name}" for name in PartStore(label_store(storage)).names("published")]
    urls += [record.labels for record in records]
    urls += [f"{folder}/{CARRIED}" for folder in _night_folders(storage)]
    urls = [url for url in urls if _is_there(url)]
    return sweep(label_store(storage), [Manifest.load(url) for url in urls]) if urls else []


def _night_folders(storage: str) -> list[str]:
    nights = NightFiles(storage)
    return [nights.folder(name) for name in nights.names()]


def _is_there(url: str) -> bool:
    filesystem, path = filesystem_of(url)
    return bool(filesystem.exists(path))
