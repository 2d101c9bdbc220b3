"""Night record: what each night started with, what it made, and which night is in use.

    <storage>/nights/night-0012/night.json    its record; the status says how far it came
    <storage>/nights/CURRENT                  the night in use; written last
    <storage>/nights/lease                    held by the job that may change the nights

A record is written when a night starts, so a killed job finds it again, and once more when all it names is
there. A night names its parent, and CURRENT moves to it only from there, by compare-and-swap.

    nights = NightFiles("s3://lake/clothing1m")
    night = nights.current()                    # None before the first
    with nights.held() as nights:
        nights.move_current(night, expected=night.parent)
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Literal

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import BESIDE, Folder
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage

CURRENT, NIGHT, LEASE = "CURRENT", "night.json", "lease"
CARRIED = "carried.json"  # the labels a night starts with
FORMAT = 2


@dataclass(frozen=True)
class Night:
    """What a night started with and, once it has passed or is held, everything it made."""

    name: str
    number: int  # 0: a training run that the first night continues
    parent: str | None
    catalogue_version: int
    id: str = ""  # random; of its run, and of all label parts it writes
    settings: Mapping[str, str] = field(default_factory=dict)  # those that decide what it computes
    status: Literal["started", "refused", "passed", "held", "abandoned"] = "started"
    reasons: tuple[str, ...] = ()  # why it was refused, or is held
    closed: bool = False  # CURRENT has moved to it, or stays elsewhere for good; or it was abandoned
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

    @property
    def held(self) -> bool:
        return self.status == "held"


class NightFiles:
    """The nights of one storage; with a lease, nothing is written once another job has taken it over."""

    def __init__(self, storage: str, lease: Lease | None = None) -> None:
        self._store = Storage(storage)
        self.storage = self._store.url
        self._lease = lease

    @cached_property
    def _objects(self) -> Folder:
        return Folder(self._store.path(self._store.nights))

    @contextmanager
    def held(self) -> Iterator["NightFiles"]:
        """Hold the nights for a job that changes them, or refuse: there is one such job at a time."""
        what = f"the nights of {self.storage} are being changed"
        with Lease.hold(self.storage, f"{self._store.nights}/{LEASE}", what) as lease:
            yield NightFiles(self.storage, lease)

    def path(self, name: str, file: str = "") -> str:
        """The URL of a night's folder, or of a file in it."""
        return self._store.path(self._store.night(name, file))

    # -- records ------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Every night that was started, and the run that the first one continued."""
        found = [PurePosixPath(name).name for name in self._store.names(self._store.nights)]
        return [name for name in found if name not in (CURRENT, LEASE) and not name.endswith(BESIDE)]

    def records(self) -> list[Night]:
        """Every night that was started, in order."""
        found = [night for name in self.names() if (night := self.record(name))]
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

    def find(self, name: str) -> Night | None:
        """Read the record of a night that is made; None if it is not, or not there."""
        night = self.record(name)
        return night if night is not None and night.is_made else None

    def must_find(self, name: str) -> Night:
        """Read the record of a night that a person named."""
        night = self.find(name)
        if night is None:
            raise PencilError(f"{self.path(name)}: no finished night of this name; {self._known()}")
        return night

    def _known(self) -> str:
        names = [night.name for night in self.nights()]
        return f"kept are {', '.join(names)}" if names else "run reclean_nightly first"

    def start(self, night: Night) -> Night:
        """Write the record of a new night; if another job was first to take its number, take the next."""
        while True:
            if self._lease is not None:
                self._lease.check()
            if self._objects.create(f"{night.name}/{NIGHT}", _encoded(asdict(night))):
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
        newest = next(reversed(self.records()), None)
        return None if newest is None or newest.closed else newest

    def put(self, name: str, data: bytes) -> None:
        """Write an object of the storage, unless another job has taken over the nights."""
        (self._lease or self._store).put(name, data)

    # -- CURRENT ------------------------------------------------------------------------------------

    def current(self) -> Night | None:
        """The night in use; None before the first."""
        found = self._store.read_json(f"{self._store.nights}/{CURRENT}")
        if found is None:
            return None
        night = self.find(found["night"])
        if night is None:
            raise PencilError(f"{self.path(CURRENT)} names {found['night']}, which is gone; {self._known()}")
        return night

    def move_current(self, night: Night, expected: str | None) -> None:
        """Move CURRENT to a night, if it still points to the expected one."""
        before = self._objects.read(CURRENT)
        self._require_current(night, expected, before)
        if self._lease is not None:
            self._lease.check()  # between reading and replacing, as in Lease.put
        named = {name: getattr(night, name) for name in ("labels", "model", "export", "report")}
        moved = _encoded({"night": night.name, **named, "moved": now()})
        if not self._objects.replace(CURRENT, moved, before and before[1]):
            self._require_current(night, expected, self._objects.read(CURRENT))
            raise PencilError(f"{self.path(CURRENT)} was written by another job; run this again")

    def _require_current(self, night: Night, expected: str | None, read: tuple[bytes, str] | None) -> None:
        found = None if read is None else json.loads(read[0])["night"]
        if found not in (expected, night.name):
            raise PencilError(
                f"{self.path(CURRENT)} was moved to {found} while {night.name} was made from {expected}; it "
                f"stays there. Run reclean_nightly again, or promote {night.name}"
            )


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode()


def night_name(number: int) -> str:
    """The name of a night."""
    return f"night-{number:04d}"


def now() -> str:
    """The time, as files record it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
