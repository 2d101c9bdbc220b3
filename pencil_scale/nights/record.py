"""Night files: what each night made, and which one is in use.

    <storage>/nights/night-0012/plan.json     what a night was begun with; how it is found again after a kill
    <storage>/nights/night-0012/night.json    its manifest: labels, model, export, figures, verdict; for good
    <storage>/nights/night-0012/refused       why it could not be finished: bad data, bad settings
    <storage>/nights/night-0012/closed        that it came to its end: CURRENT moved, or stayed on purpose
    <storage>/nights/CURRENT                  the night in use; the only file that changes, and the last one

    <storage>/nights/lease                    held by the one job that may change the nights

A night names its parent, and CURRENT moves to it only from there, by compare-and-swap.

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
from pathlib import PurePosixPath
from typing import Any, Literal

from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import BESIDE, Folder
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.objects import open_objects

CURRENT, PLAN, NIGHT, CLOSED, REFUSED = "CURRENT", "plan.json", "night.json", "closed", "refused"
LEASE = "lease"
CARRIED = "carried.json"  # the labels a night begins with
FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """What a night was begun with."""

    name: str
    id: str  # random; of its run, and of all label parts it writes
    number: int
    parent: str | None
    catalogue_version: int
    settings: Mapping[str, str]  # those that decide what it computes


@dataclass(frozen=True)
class Night:
    """What a night made: everything that CURRENT stands for."""

    name: str
    number: int  # 0: a training run that the first night went on from
    parent: str | None
    catalogue_version: int
    class_names: tuple[str, ...]
    labels: str
    model: str
    trained_by: str  # the run whose model it is: its own, or an older night's where nothing was to train
    export: str | None = None
    report: str | None = None
    verdict: Literal["passed", "held"] = "passed"
    reasons: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    clean: str = ""  # which clean set its accuracy was measured on
    overlay: str = ""  # which ids were left out of its export
    finished: str = ""
    format: int = FORMAT

    @property
    def held(self) -> bool:
        return self.verdict == "held"


class NightFiles:
    """The nights of one storage; with a lease, nothing is written once another job took it over."""

    def __init__(self, storage: str, lease: Lease | None = None) -> None:
        self.storage = Folder(storage).url
        self._store = Folder(f"{self.storage}/nights")
        self._lease = lease

    @contextmanager
    def held(self) -> Iterator["NightFiles"]:
        """Hold the nights for a job that changes them, or refuse: there is one such job at a time."""
        what = f"the nights of {self.storage} are being changed"
        with Lease.hold(self.storage, f"nights/{LEASE}", what) as lease:
            yield NightFiles(self.storage, lease)

    def folder(self, name: str) -> str:
        """Where a night keeps what is its own."""
        return self._store.path(name)

    # -- nights -------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Every night that was begun, or taken over."""
        found = [PurePosixPath(name).name for name in Folder(self.storage).names("nights")]
        return [name for name in found if name not in (CURRENT, LEASE) and not name.endswith(BESIDE)]

    def nights(self) -> list[Night]:
        """The finished nights that are kept, in their order."""
        found = [self.find(name) for name in self.names()]
        return sorted((night for night in found if night is not None), key=lambda night: night.number)

    def find(self, name: str) -> Night | None:
        """Read the manifest of a night; None while it is unfinished, or where there is none."""
        found = self._read(f"{name}/{NIGHT}")
        if found is None:
            return None
        if found.get("format") != FORMAT:
            raise PencilError(
                f"{self._store.path(name)}: a night of format {found.get('format')!r}; this program reads "
                f"format {FORMAT}: use the program that wrote it"
            )
        lists = {name: tuple(found[name]) for name in ("class_names", "reasons")}
        return Night(**{**found, **lists})

    def save(self, night: Night) -> Night:
        """Write a night's manifest; what it names must be there."""
        self._write(f"{night.name}/{NIGHT}", asdict(night))
        return night

    def carried(self, name: str) -> str:
        """Where a night keeps the manifest of the labels it starts with."""
        return f"{self.folder(name)}/{CARRIED}"

    # -- nights under way ---------------------------------------------------------------------------

    def plans(self) -> list[Plan]:
        """Every night that was started, in order."""
        found = [plan for name in self.names() if (plan := self.plan(name))]
        return sorted(found, key=lambda plan: plan.number)

    def next_number(self) -> int:
        """The number of the night to come; no number is given twice."""
        return max((plan.number for plan in self.plans()), default=0) + 1

    def plan(self, name: str) -> Plan | None:
        """Read what a night was begun with."""
        found = self._read(f"{name}/{PLAN}")
        return None if found is None else Plan(**found)

    def begin(self, plan: Plan) -> Plan:
        """Write the plan of a new night; if another job was first to take its number, take the next."""
        objects = open_objects(self._store.url)
        while True:
            if self._lease is not None:
                self._lease.check()
            if objects.create(f"{plan.name}/{PLAN}", _encoded(asdict(plan))):
                return plan
            plan = replace(plan, name=night_name(plan.number + 1), number=plan.number + 1)

    def unclosed(self) -> Plan | None:
        """The newest night that was begun, if it has not come to its end."""
        newest = next(reversed(self.plans()), None)
        return None if newest is None or self._read(f"{newest.name}/{CLOSED}") is not None else newest

    def refuse(self, name: str, reason: str) -> None:
        """Write down why a night could not be finished, so that it does not block the next."""
        self._write(f"{name}/{REFUSED}", {"reason": reason, "at": now()})

    def refusal(self, name: str) -> str | None:
        """Why a night could not be finished; None where it was merely interrupted."""
        found = self._read(f"{name}/{REFUSED}")
        return None if found is None else str(found["reason"])

    def close(self, name: str, verdict: str) -> None:
        """Write down that a night came to its end: passed, held or abandoned."""
        self._write(f"{name}/{CLOSED}", {"verdict": verdict, "at": now()})

    # -- CURRENT ------------------------------------------------------------------------------------

    def current(self) -> Night | None:
        """The night in use; None before the first."""
        found = self._read(CURRENT)
        if found is None:
            return None
        night = self.find(found["night"])
        if night is None:
            raise PencilError(
                f"{self._store.path(CURRENT)} names {found['night']}, which is not there; {self._known()}"
            )
        return night

    def move_current(self, night: Night, expected: str | None) -> None:
        """Move CURRENT to a night, if it still points where it is expected to."""
        objects = open_objects(self._store.url)
        before = objects.read(CURRENT)
        self._require_current(night, expected, before)
        if self._lease is not None:
            self._lease.check()  # between the look and the put, as in Lease.put
        named = {name: getattr(night, name) for name in ("labels", "model", "export", "report")}
        moved = _encoded({"night": night.name, **named, "moved": now()})
        if not objects.replace(CURRENT, moved, None if before is None else before[1]):
            self._require_current(night, expected, objects.read(CURRENT))
            raise PencilError(
                f"{self._store.path(CURRENT)} was written by another job meanwhile; run this again"
            )

    def _require_current(self, night: Night, expected: str | None, read: tuple[bytes, str] | None) -> None:
        found = None if read is None else self._parsed(CURRENT, read[0])["night"]
        if found not in (expected, night.name):
            raise PencilError(
                f"{self._store.path(CURRENT)} was moved to {found} while {night.name} was made from "
                f"{expected}; it stays there. Run reclean_nightly again, or promote {night.name}"
            )

    def must_find(self, name: str) -> Night:
        """Read the manifest of a night that a person named."""
        night = self.find(name)
        if night is None:
            raise PencilError(f"{self._store.path(name)}: no finished night of this name; {self._known()}")
        return night

    def _known(self) -> str:
        names = [night.name for night in self.nights()]
        return f"kept are {', '.join(names)}" if names else "run reclean_nightly first"

    # -- JSON ---------------------------------------------------------------------------------------

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            data = self._store.get(name)
        except DamagedError:
            return None
        return self._parsed(name, data)

    def _parsed(self, name: str, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError as error:
            raise PencilError(f"{self._store.path(name)}: damaged ({error}); restore it") from error
        if not isinstance(found, dict):
            raise PencilError(f"{self._store.path(name)}: damaged (no JSON object); restore it")
        return found

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        self.put(f"nights/{name}", _encoded(value))

    def put(self, name: str, data: bytes) -> None:
        """Write an object of the storage, unless another job took over the nights."""
        if self._lease is None:
            Folder(self.storage).put(name, data)
        else:
            self._lease.put(name, data)


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode()


def night_name(number: int) -> str:
    """What a night is called."""
    return f"night-{number:04d}"


def now() -> str:
    """The time, as files tell it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
