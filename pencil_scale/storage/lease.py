"""Lease: the right to write some part of a storage, held by one process at a time, on any storage.

A lease is a small JSON object. Its holder renews it four times in LEASE_S, by compare-and-swap. A process
that finds it held watches it: if it is renewed, its holder is alive and the process is refused; if it does
not change for LEASE_S, its holder is dead and the process takes over. Clocks of two machines are never
compared. On the holder's own machine the process table answers at once.

    with Lease.hold("s3://lake/clothing1m", "runs/demo/lease", what="run demo is being trained") as lease:
        lease.attempt                            # how often it was ever acquired: 1, 2, 3, ...
        lease.put("runs/demo/run.json", data)    # never over what a later holder wrote
        lease.check()                            # LeaseLostError if another process took over

A holder that was paused long enough to lose its lease learns this from `lost`, `check` and `put`. `attempt`
only rises: a released lease is kept, marked as free.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath

from pencil_scale.storage.errors import PencilError, StorageError
from pencil_scale.storage.objects import Objects, open_objects

LEASE_S = 60.0
LEASE_VARIABLE = "PENCIL_SCALE_LEASE_S"  # the environment variable with which tests shorten it
RENEWALS = 4  # in LEASE_S
LOOKS = 20  # in LEASE_S, while another holder is watched
PUT_ATTEMPTS = 20

_held_here: set[str] = set()  # tokens that this process holds


class LeaseHeldError(PencilError):
    """Another process holds the lease and is alive."""


class LeaseLostError(PencilError):
    """Another process took over the lease of this one."""


@dataclass(frozen=True)
class Holder:
    """A process. `machine` names the boot and the process namespace in which `pid` means something."""

    host: str
    pid: int
    command: str
    machine: str  # empty if the system does not report it
    born: str  # when the process started, in the machine's ticks, because process ids are reused

    def spelled(self) -> str:
        return f"{self.command}, process {self.pid} on {self.host}"


def this_process() -> Holder:
    """Describe this process. Its command has no arguments: they may hold passwords."""
    _, born = _state_and_birth(os.getpid())
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    command = main.name.removesuffix(".__main__") if main else PurePath(sys.argv[0] or "python").name
    return Holder(socket.gethostname(), os.getpid(), command, this_machine(), born)


def is_alive(holder: Holder) -> bool | None:
    """Whether a process of this machine is alive; None if it ran elsewhere or the system does not report it.

    A suspended process (SIGSTOP, a debugger) may or may not wake up, so it counts as one that ran elsewhere.
    """
    if not holder.machine or holder.machine != this_machine():
        return None
    state, born = _state_and_birth(holder.pid)
    if born != holder.born:
        return False
    return None if state in ("T", "t") else True


def this_machine() -> str:
    """Name this boot of this machine and this process namespace; each container has its own namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _state_and_birth(pid: int) -> tuple[str, str]:
    """The state of a process and when it started; empty if it has ended, even if it is still a zombie."""
    try:
        # The name in parentheses may hold anything; the 1st field after it is the state, the 20th the start.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return ("", "") if fields[0] in "ZX" else (fields[0], fields[19])


@dataclass(frozen=True)
class LeaseState:
    """The content of a lease's object."""

    token: str  # random, different for every holder
    attempt: int
    holder: Holder
    since: str  # by the holder's clock, for people
    lease_s: float
    renewed: int = 0  # changes with every heartbeat
    free: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, url: str) -> "LeaseState":
        """Read the object; a damaged one may have a living holder, so only a person may remove it."""
        try:
            found = json.loads(data)
            return cls(**{**found, "holder": Holder(**found["holder"])})
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{url}: not a lease ({error}); if no command is running there, remove it"
            ) from error


class Lease:
    """A lease that this process holds."""

    @classmethod
    @contextmanager
    def hold(cls, storage: str, name: str, what: str, lease_s: float | None = None) -> Iterator["Lease"]:
        """Acquire a lease, or refuse, because "`what` by another command"; release it at the end."""
        lease_s = lease_s or float(os.environ.get(LEASE_VARIABLE, LEASE_S))
        lease = cls(open_objects(storage), name, what, lease_s)
        try:
            lease._acquire()
            threading.Thread(target=lease._beat, name=f"lease {name}", daemon=True).start()
            yield lease
        finally:
            lease._release()

    def __init__(self, objects: Objects, name: str, what: str, lease_s: float) -> None:
        self.lost, self.attempt = False, 0
        self._objects, self._name, self._what, self._lease_s = objects, name, what, lease_s
        self._url = f"{objects.url}/{name}"
        self._token, self._pid = uuid.uuid4().hex, os.getpid()
        self._ended = threading.Event()

    def put(self, path: str, data: bytes) -> None:
        """Write an object of the storage, unless another process took over the lease.

        The lease is ours at step 2, so a later holder writes after step 2, and therefore after step 1. The
        etag of step 1 then no longer matches what it wrote, and step 3 fails. (On S3 an etag is a hash of the
        bytes: a later holder that wrote the same bytes as step 1 is not noticed.)
        """
        for _ in range(PUT_ATTEMPTS):
            etag = self._objects.etag(path)  # 1
            self.check()  # 2
            if self._objects.replace(path, data, etag):  # 3
                return
        raise StorageError(
            f"{self._objects.url}/{path}: changed by others in each of {PUT_ATTEMPTS} attempts to write it"
        )

    def check(self) -> None:
        """Renew the lease now; LeaseLostError if another process took it over."""
        if os.getpid() != self._pid:
            raise LeaseLostError(f"{self._url}: held by process {self._pid}, not by the processes it forks")
        while True:
            state, etag = self._read()
            if state is None or state.token != self._token or state.free:
                self.lost = True
                how = f"{state.holder.spelled()} took over the lease" if state else "the lease was removed"
                raise LeaseLostError(
                    f"{self._url}: {how} while this command was paused or cut off; it ends here"
                )
            # False if the object changed since we read it; reading it again shows who changed it.
            if self._replace(replace(state, renewed=state.renewed + 1), etag):
                return

    def _beat(self) -> None:
        """Renew until the end; an unreachable store does not end a holder, only another holder does."""
        while not self._ended.wait(self._lease_s / RENEWALS):
            try:
                self.check()
            except LeaseLostError:
                return
            except Exception as error:  # each storage library raises its own classes
                _report(f"WARNING: {self._url}: not renewed, trying again: {error}")

    # --- acquiring and releasing -----------------------------------------------------------------------

    def _acquire(self) -> None:
        while True:
            before, etag = self._read()
            if before is not None and not before.free:
                alive = is_alive(before.holder)
                # If this process is named but does not hold it, its release did not reach the store.
                if alive and (before.holder.pid != os.getpid() or before.token in _held_here):
                    raise self._refusal(before)
                if alive is None and not self._watch(before, etag):
                    continue
            ours = LeaseState(
                token=self._token,
                attempt=1 if before is None else before.attempt + 1,
                holder=this_process(),
                since=datetime.now(UTC).isoformat(timespec="seconds"),
                lease_s=self._lease_s,
            )
            if self._replace(ours, etag):
                self.attempt = ours.attempt
                _held_here.add(self._token)
                return

    def _watch(self, state: LeaseState, etag: str | None) -> bool:
        """Whether its holder is dead; refuse if the holder renews it. False: it was released meanwhile."""
        wait_s = max(self._lease_s, state.lease_s)
        _report(
            f"{self._url}: held by {state.holder.spelled()} since {state.since}; "
            f"watching for up to {wait_s:g} s whether it is still alive"
        )
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            time.sleep(wait_s / LOOKS)
            now, newer = self._read()
            if now is None or now.free:
                return False
            if newer != etag:
                raise self._refusal(now)
        return True

    def _release(self) -> None:
        """Mark the lease as free, if it is still ours; a failure must not hide the error of the work."""
        if os.getpid() != self._pid:
            return
        self._ended.set()
        _held_here.discard(self._token)
        try:
            while True:
                state, etag = self._read()
                if state is None or state.token != self._token or state.free:
                    return
                if self._replace(replace(state, free=True), etag):
                    return
        except Exception as error:
            _report(
                f"WARNING: {self._url}: not released: {error}; the next command on another machine waits up "
                f"to {self._lease_s:g} s"
            )

    # --- the object, and messages about it -------------------------------------------------------------

    def _read(self) -> tuple[LeaseState | None, str | None]:
        found = self._objects.read(self._name)
        return (None, None) if found is None else (LeaseState.decode(found[0], self._url), found[1])

    def _replace(self, state: LeaseState, etag: str | None) -> bool:
        return self._objects.replace(self._name, state.encode(), etag)

    def _refusal(self, state: LeaseState) -> LeaseHeldError:
        holder = f"{state.holder.spelled()}, since {state.since}"
        return LeaseHeldError(f"{self._what} by another command ({holder}); wait for it to end")


def _report(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr, flush=True)
