"""Retention: what old nights leave behind is removed; what is in use, and what it came from, never is.

removed = remove_old(nights, keep=14)          # CURRENT, its parent, and the newest 14 stay
remove_taken_down(nights, overlay)             # what still shows ids that must vanish
"""

from pencil_scale.nights.night_files import NIGHT, NightFiles
from pencil_scale.reading.byte_source import filesystem_of

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
