"""How a night starts: from the night in use, from a finished training run, or where a killed job left it.

    parent = nights.current() or adopt(nights, named=None)       # None: nothing was trained here yet
    night = resumable(nights, settings, class_names, say) or nights.start(...)

And how it is removed: never the night in use, nor its parent. Only what a night itself made is removed, which
its id shows: a run, a model or labels that somebody else called `night-0007` stay, and so do other files in
the folder of its export.

    removed = remove_old(nights, keep=14)          # CURRENT, its parent, and the newest 14 stay
    remove_taken_down(nights, overlay)             # exports and pages that still show excluded ids
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import difference
from pencil_scale.config.loader import describe
from pencil_scale.config.settings import Config
from pencil_scale.export.files import remove_export
from pencil_scale.labels.manifest import Manifest, sweep_run
from pencil_scale.labels.run_record import FREE, RunRecord, read_record, why_held
from pencil_scale.nights.record import CARRIED, CURRENT, LEASE, Night, NightFiles, now
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of, versions_of

Say = Callable[[str], None]


def decisive_settings(config: Config) -> dict[str, str]:
    """The settings that decide what a night computes: a night is not resumed with others."""
    return {name: text for name, text in describe(config).items() if not name.startswith(FREE)}


def adopt(nights: NightFiles, named: str | None) -> Night | None:
    """Make a finished training run the night before the first; None if no run is finished.

    A held run is not finished: a person must promote it before nights start from it.
    """
    storage = Storage(nights.storage)
    names = [PurePosixPath(name).name for name in storage.names("runs")]
    runs = [run for name in names if (run := read_record(storage.url, name)) is not None]
    numbers = {night.name: night.number for night in nights.records()}
    finished = {run.name: run for run in runs if run.status == "finished" and not numbers.get(run.name)}
    known = f"finished are {', '.join(sorted(finished))}" if finished else "none is finished"
    if named is not None and named not in finished:
        held = next((run for run in runs if run.name == named and run.status == "held"), None)
        if held is not None:
            raise PencilError(f"nightly.start_from: {named} is held: {why_held(named, held.held_because)}")
        raise PencilError(f"nightly.start_from: {named} is no finished run of {storage.url}; {known}")
    if named is None and len(finished) > 1:
        raise PencilError(f"nightly.start_from: which run? {known}")
    if not finished:
        return None
    run = finished[named or next(iter(finished))]
    if run.name in (CURRENT, LEASE):
        raise PencilError(f"nightly.start_from: a run called {run.name} cannot be followed by nights")
    night = nights.save(_as_night(storage, run))
    nights.move_current(night, expected=None)
    return night


def _as_night(storage: Storage, run: RunRecord) -> Night:
    catalogue = Catalogue.open(storage.url, run.catalogue_version)
    return Night(
        name=run.name,
        number=0,
        parent=None,
        catalogue_version=run.catalogue_version,
        status="passed",
        closed=True,
        class_names=catalogue.class_names,
        labels=storage.path(storage.published(run.name)),
        model=storage.path(storage.model(run.name)),
        trained_by=run.name,
        figures=clean_accuracy(run_facts(storage.url, run.name)),
        clean=clean_set(storage.url, run.clean),
        overlay=catalogue.manifest["overlay"],
        finished=now(),
    )


# --- after a kill ------------------------------------------------------------------------------------


def resumable(
    nights: NightFiles, settings: Mapping[str, str], class_names: Sequence[str], say: Say
) -> Night | None:
    """Find the night that was started and not closed; one that can no longer be finished is abandoned."""
    night = nights.unclosed()
    if night is None:
        return None
    if reason := _outdated(nights, night, settings, class_names):
        abandon(nights, night, reason, say)
        return None
    say(f"{night.name} resumes")
    return night


def abandon(nights: NightFiles, night: Night, reason: str, say: Say) -> None:
    """Give up a night that was not finished, and remove all it made; its number is not given again."""
    say(f"{night.name} was not finished, and is abandoned: {reason}")
    remove_made(nights, night)
    nights.save(night, status="abandoned", closed=True)


def _outdated(
    nights: NightFiles, night: Night, settings: Mapping[str, str], class_names: Sequence[str]
) -> str:
    if night.is_made:  # only its last step is missing
        return ""
    current = nights.current()
    name = None if current is None else current.name
    if name != night.parent:
        return f"it started from {night.parent}, and CURRENT is {name} now"
    changed = [key for key in {**night.settings, **settings} if night.settings.get(key) != settings.get(key)]
    if changed:
        return f"{sorted(changed)[0]} has changed"
    catalogue = Catalogue.open(nights.storage, night.catalogue_version)
    if differs := difference(class_names, catalogue.class_names):
        return f"the class list has changed: it {differs}"
    # The offsets of a catalogue version are useless for a shard that was written again.
    entries = [entry for entry in catalogue.shards if entry.state == "indexed"]
    for entry, version in zip(entries, versions_of([entry.url for entry in entries]), strict=True):
        if version != entry.version:
            return f"{entry.url} changed since it was indexed"
    return ""


# --- figures of a training run -----------------------------------------------------------------------


def run_facts(storage: str, name: str) -> dict[str, Any]:
    """The summary of a finished run."""
    store = Storage(storage)
    facts: dict[str, Any] | None = store.read_json(store.run(name, "summary.json"))
    if facts is None:
        raise DamagedError(f"{store.path(store.run(name, 'summary.json'))}: missing; restore it")
    return facts


def clean_accuracy(facts: Mapping[str, Any]) -> dict[str, float]:
    """The accuracy on the validation set, else on the test set; empty if there is neither."""
    known = [facts[name] for name in ("validation_accuracy", "test_accuracy") if name in facts]
    return {"clean_accuracy": float(known[0])} if known else {}


def clean_set(storage: str, versions: Mapping[str, int]) -> str:
    """Name the clean set of a run by its content, so that nights are compared on the same one.

    `versions` are the catalogue versions of the clean sets that the run was evaluated on.
    """
    part = next((part for part in ("validation", "test") if part in versions), "")
    if not part:
        return ""
    # Not by its version: a takedown from the training shards gives the clean set a new version too, and that
    # night would not be compared. The segments hold all that is known of the rows.
    segments = Catalogue.open(storage, versions[part], part).manifest["segments"]
    files = "\n".join(segment["file"] for segment in segments)
    return f"{part} {sha256(files.encode()).hexdigest()[:16]}"


# --- removing ----------------------------------------------------------------------------------------


def remove_old(nights: NightFiles, keep: int) -> list[str]:
    """Remove the nights that need not be kept, also abandoned ones; return their names."""
    current = nights.current()
    in_use = {current.name, current.parent} if current else set()
    started = [night for night in nights.records() if night.number]
    old = [night for night in started[:-keep] if night.name not in in_use]
    for night in old:
        # First the status, for what a finished night names must be there; its record goes last, so that an
        # interrupted removal is repeated.
        nights.save(night, status="abandoned", closed=True)
        remove_made(nights, night)
        _remove(nights.path(night.name))
    return [night.name for night in old]


def remove_made(nights: NightFiles, night: Night) -> None:
    """Remove all that a night made but its record; label parts last, when nothing names them any more."""
    storage, name = Storage(nights.storage), night.name
    remove_shown(storage, name)
    run = read_record(storage.url, name)
    is_its_run = run is not None and run.id == night.id
    try:
        is_its_labels = Manifest.load(storage.path(storage.published(name))).run == night.id
    except DamagedError:  # there are none, perhaps because an earlier removal was interrupted
        is_its_labels = is_its_run
    if is_its_labels:
        _remove(storage.path(storage.published(name)))
        _remove(storage.path(storage.model(name)))
    for folder in storage.names(storage.checkpoints(name)):
        if PurePosixPath(folder).name.startswith(f"{night.id}-"):
            _remove(storage.path(folder))
    if is_its_run:
        _remove(storage.path(storage.run(name)))
    _remove(storage.path(storage.history(night.id)))
    _remove(nights.path(name, CARRIED))
    sweep_run(storage.url, night.id)


def remove_taken_down(nights: NightFiles, overlay: str) -> list[str]:
    """Remove exports and pages made before ids were excluded or included again; return of which nights."""
    current, storage = nights.current(), Storage(nights.storage)
    others = [night for night in nights.nights() if current is None or night.name != current.name]
    outdated = [night.name for night in others if night.number and night.overlay != overlay]
    return [name for name in outdated if remove_shown(storage, name)]


def remove_shown(storage: Storage, name: str) -> bool:
    """Remove the export and the page of a night; return whether there were any."""
    exported = remove_export(storage.path(storage.export(name)))
    return _remove(storage.path(storage.report(name))) or exported


def _remove(url: str) -> bool:
    """Remove a file or folder; return whether it was there."""
    filesystem, path = filesystem_of(url)
    filesystem.invalidate_cache()
    if not filesystem.exists(path):
        return False
    filesystem.rm(path, recursive=True)
    return True
