"""Night record: what each night started with, what it made, and which night is in use.

    <storage>/nights/night-0012/night.json    its record; the status says how far it came
    <storage>/nights/CURRENT                  the night in use; written last
    <storage>/nights/lease                    held by the job that may change the nights

A record is written when a night starts, so a killed job finds it again, and once more when all it names is
there. A night names its parent, and CURRENT moves to it only from there, by compare-and-swap.

The night in use and its parent are never removed. Only what a night itself made is removed, which its id
shows: a run, a model or labels that another job called `night-0007` stay, and so do other files in the folder
of its export.

    nights = NightFiles("s3://lake/clothing1m")
    night = nights.current()                    # None before the first
    with nights.leased() as nights:
        nights.move_current(night, expected=night.parent)
        remove_old(nights, keep=14)                  # CURRENT, its parent, and the newest 14 stay
        remove_taken_down(nights, overlay)           # exports and pages that still show excluded ids
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal

from pencil_scale.export.files import remove_export
from pencil_scale.labels.manifest import Manifest, sweep_run
from pencil_scale.labels.pins import now
from pencil_scale.labels.published import held_names, published_names
from pencil_scale.labels.run_record import read_record
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of

CURRENT, NIGHT, LEASE = "CURRENT", "night.json", "lease"
CARRIED = "carried.json"  # the labels a night starts with
UNDECIDED = "undecided.npy"  # rows whose labels a night left as given, for the next night to decide
FORMAT = 2


@dataclass(frozen=True)
class Night:
    """What a night started with and, once it has passed or is held, everything it made."""

    name: str
    number: int  # 0: a training run that the first night continues
    parent: str | None
    catalogue_version: int
    id: str = ""  # random; of its run, and of all label parts it writes
    settings: Mapping[str, str] = field(default_factory=dict)  # of its config
    status: Literal["started", "refused", "passed", "held", "abandoned"] = "started"
    reasons: tuple[str, ...] = ()  # why it was refused, or is held
    promoted: bool = False  # by a person
    closed: bool = False  # CURRENT has moved to it, or will never move to it; or it was abandoned
    class_names: tuple[str, ...] = ()
    labels: str = ""
    model: str = ""
    trained_by: str = ""  # the run that made its model: its own, or an older one if nothing was to train
    export: str | None = None
    report: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    clean: str = ""  # the clean set on which its accuracy was measured
    overlay: str = ""  # the ids that were left out of its export
    finished: str = ""
    format: int = FORMAT

    @property
    def is_made(self) -> bool:
        return self.status in ("passed", "held")


class NightFiles:
    """The nights of one storage; with a lease, nothing is written once another job has taken it over."""

    def __init__(self, storage: str, lease: Lease | None = None) -> None:
        self._store = Storage(storage)
        self.storage = self._store.url
        self._lease = lease

    @contextmanager
    def leased(self) -> Iterator["NightFiles"]:
        """Hold the nights for a job that changes them, or refuse: there is one such job at a time."""
        what = f"the nights of {self.storage} are being changed"
        with Lease.hold(self.storage, f"{self._store.nights}/{LEASE}", what) as lease:
            yield NightFiles(self.storage, lease)

    def path(self, name: str, file: str = "") -> str:
        """The URL of a night's folder, or of a file in it."""
        return self._store.path(self._store.night(name, file))

    def records(self) -> list[Night]:
        """Every night that was started, and the run that the first one continued, in order."""
        names = [PurePosixPath(name).name for name in self._store.names(self._store.nights)]
        found = [night for name in names if (night := self.record(name))]  # CURRENT and lease have none
        return sorted(found, key=lambda night: night.number)

    def nights(self) -> list[Night]:
        """The nights that are made and kept, in order."""
        return [night for night in self.records() if night.is_made]

    def record(self, name: str) -> Night | None:
        """Read the record of a night, whatever its status; None if there is none."""
        found = self._store.read_json(self._store.night(name, NIGHT))
        if found is None:
            return None
        written = found.get("format") if isinstance(found, dict) else None
        if written != FORMAT:
            raise PencilError(
                f"{self.path(name, NIGHT)}: a night of format {written!r}; this program reads format "
                f"{FORMAT}: use the program that wrote it"
            )
        lists = {name: tuple(found[name]) for name in ("class_names", "reasons")}
        return Night(**{**found, **lists})

    def must_find(self, name: str) -> Night:
        """Read the record of a night that a person or CURRENT names."""
        night = self.record(name)
        if night is None or not night.is_made:
            kept = ", ".join(night.name for night in self.nights())
            advice = f"kept are {kept}: promote one of them" if kept else "run reclean_nightly first"
            raise PencilError(f"{self.path(name)}: no finished night of this name; {advice}")
        return night

    def start(self, night: Night) -> Night:
        """Write the record of a new night; if another job was first to take its number, take the next."""
        while True:
            self._check_lease()
            if self._store.create(self._store.night(night.name, NIGHT), _encoded(asdict(night))):
                return night
            night = replace(night, name=night_name(night.number + 1), number=night.number + 1)

    def save(self, night: Night, **changes: Any) -> Night:
        """Write the record of a night, with some of it changed; what it names must be there."""
        night = replace(night, **changes)
        self.put(self._store.night(night.name, NIGHT), _encoded(asdict(night)))
        return night

    def next_number(self) -> int:
        """The number of the next night; no number is given twice."""
        return max((night.number for night in self.records()), default=0) + 1

    def unclosed(self) -> Night | None:
        """The newest night, if it has not come to its end."""
        return next((night for night in self.records()[-1:] if not night.closed), None)

    def put(self, name: str, data: bytes) -> None:
        """Write an object of the storage, unless another job has taken over the nights."""
        (self._lease or self._store).put(name, data)

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def current(self) -> Night | None:
        """The night in use; None before the first."""
        found = self._store.read_json(f"{self._store.nights}/{CURRENT}")
        return None if found is None else self.must_find(found["night"])

    def move_current(self, night: Night, expected: str | None) -> None:
        """Move CURRENT to a night, if it still points to the expected one."""
        file = f"{self._store.nights}/{CURRENT}"
        named = {name: getattr(night, name) for name in ("labels", "model", "export", "report")}
        moved = _encoded({"night": night.name, **named, "moved": now()})
        while True:
            before = self._store.read(file)
            found = None if before is None else json.loads(before[0])["night"]
            if found not in (expected, night.name):
                raise PencilError(
                    f"{self.path(CURRENT)} was moved to {found} while {night.name} was made from {expected}; "
                    f"it stays there. Run reclean_nightly again, or promote {night.name}"
                )
            self._check_lease()  # between reading and replacing, as in Lease.put
            if self._store.replace(file, moved, before and before[1]):
                return


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode()


def night_name(number: int) -> str:
    """The name of a night."""
    return f"night-{number:04d}"


def labels_in_use(storage: str, run: str) -> str:
    """The labels that a job uses by default: those of the current night if it continues the run."""
    nights = NightFiles(storage)
    current = nights.current()
    known, night = (*published_names(storage), *held_names(storage)), nights.record(run)
    is_followed = night is not None and night.number == 0
    return run if current is None or (run in known and not is_followed) else current.name


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
    run, labels = read_record(storage.url, name), Manifest.find(storage.path(storage.published(name)))
    run_id = None if run is None else run.id
    made = []
    if night.id == (
        run_id if labels is None else labels.run
    ):  # the labels show whose they are, so they go last
        made += [storage.model(name), storage.published(name)]
    checkpoints = storage.names(storage.checkpoints(name))
    made += [folder for folder in checkpoints if PurePosixPath(folder).name.startswith(f"{night.id}-")]
    if run_id == night.id:
        made.append(storage.run(name))
    for file in (*made, storage.history(night.id), storage.night(name, CARRIED)):
        _remove(storage.path(file))
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
