"""Lease: the right to write some part of a storage, held by one process at a time, on any storage.

A lease is a small JSON file. Its holder renews it four times in LEASE_S, by compare-and-swap. A process
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
import shlex
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
from typing import Any

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.retries import limited_to

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


def command_name() -> str:
    """The module or script of this process, without its arguments: they may hold passwords."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return main.name.removesuffix(".__main__") if main else PurePath(sys.argv[0] or "python").name


def command_line() -> str:
    """The command of this process, to be run again."""
    script = getattr(sys.modules.get("__main__"), "__spec__", None) is None
    return f"{'' if script else 'python -m '}{command_name()} {shlex.join(sys.argv[1:])}"


@dataclass(frozen=True)
class LeaseState:
    """The content of a lease's file: the process that holds it, and how far it got."""

    token: str  # random, different for every holder
    attempt: int
    host: str
    pid: int
    command: str  # without its arguments: they may hold passwords
    machine: str  # the boot and process namespace in which `pid` means something; empty if not reported
    born: str  # when the process started, in the machine's ticks, because process ids are reused
    since: str  # by the holder's clock, for people
    lease_s: float
    renewed: int = 0  # changes with every heartbeat
    free: bool = False

    @classmethod
    def of_this_process(cls, token: str, attempt: int, lease_s: float) -> "LeaseState":
        _, born = _state_and_birth(os.getpid())
        since = datetime.now(UTC).isoformat(timespec="seconds")
        host = socket.gethostname()
        return cls(token, attempt, host, os.getpid(), command_name(), this_machine(), born, since, lease_s)

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, url: str) -> "LeaseState":
        """Read the file; a damaged one may have a living holder, so only a person may remove it."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise PencilError(
                f"{url}: not a lease ({error}); if no command is running there, remove it"
            ) from error

    @property
    def holder(self) -> str:
        return f"{self.command}, process {self.pid} on {self.host}"

    def is_alive(self) -> bool | None:
        """Whether the holder is alive; None if it ran elsewhere or the system does not report it.

        A suspended process (SIGSTOP, a debugger) may or may not wake up, so it counts as one that ran
        elsewhere.
        """
        if not self.machine or self.machine != this_machine():
            return None
        state, born = _state_and_birth(self.pid)
        if born != self.born:
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


class Lease:
    """A lease that this process holds."""

    @classmethod
    @contextmanager
    def hold(cls, storage: str, name: str, what: str, lease_s: float | None = None) -> Iterator["Lease"]:
        """Acquire a lease, or refuse, because "`what` by another command"; release it at the end."""
        lease = cls(Folder(storage), name, what, lease_s or float(os.environ.get(LEASE_VARIABLE, LEASE_S)))
        try:
            lease._acquire()
            threading.Thread(target=lease._beat, name=f"lease {name}", daemon=True).start()
            yield lease
        finally:
            lease._release()

    def __init__(self, folder: Folder, name: str, what: str, lease_s: float) -> None:
        self.lost, self.attempt = False, 0
        self._folder, self._name, self._what, self._lease_s = folder, name, what, lease_s
        self._url = folder.path(name)
        self._token, self._pid = uuid.uuid4().hex, os.getpid()
        self._ended = threading.Event()

    def put(self, path: str, data: bytes) -> None:
        """Write a file of the storage, unless another process took over the lease.

        The lease is ours at step 2, so a later holder writes after step 2, and therefore after step 1. The
        etag of step 1 then no longer matches what it wrote, and step 3 fails. (On S3 an etag is a hash of the
        bytes: a later holder that wrote the same bytes as step 1 is not noticed.)
        """
        for _ in range(PUT_ATTEMPTS):
            etag = self._folder.etag(path)  # 1
            self.check()  # 2
            if self._folder.replace(path, data, etag):  # 3
                return
        raise PencilError(
            f"{self._folder.path(path)}: changed by others in each of {PUT_ATTEMPTS} attempts to write it"
        )

    def check(self) -> None:
        """Renew the lease now; LeaseLostError if another process took it over."""
        self._change(renewed=time.time_ns())

    def _beat(self) -> None:
        """Renew until the end; an unreachable store does not end a holder, only another holder does."""
        while not self._ended.wait(self._lease_s / RENEWALS):
            try:
                self.check()
            except LeaseLostError:
                return
            except Exception as error:  # each storage library raises its own classes
                _report(f"WARNING: {self._url}: not renewed, trying again: {error}")

    def _change(self, **changes: Any) -> None:
        if os.getpid() != self._pid:
            raise LeaseLostError(f"{self._url}: held by process {self._pid}, not by the processes it forks")
        while True:
            state, etag = self._read()
            if state is None or state.token != self._token or state.free:
                self.lost = True
                how = f"{state.holder} took over the lease" if state else "the lease was removed"
                raise LeaseLostError(
                    f"{self._url}: {how} while this command was paused or cut off; it ends here"
                )
            # False if the file changed since we read it; reading it again shows who changed it.
            if self._folder.replace(self._name, replace(state, **changes).encode(), etag):
                return

    # --- acquiring and releasing -----------------------------------------------------------------------

    def _acquire(self) -> None:
        while True:
            before, etag = self._read()
            if before is not None and not before.free:
                alive = before.is_alive()
                # If this process is named but does not hold it, its release did not reach the store.
                if alive and (before.pid != os.getpid() or before.token in _held_here):
                    raise self._refusal(before)
                if alive is None:
                    self._watch(before, etag)
            attempt = 1 if before is None else before.attempt + 1
            ours = LeaseState.of_this_process(self._token, attempt, self._lease_s)
            if self._folder.replace(self._name, ours.encode(), etag):
                self.attempt = attempt
                _held_here.add(self._token)
                return

    def _watch(self, state: LeaseState, etag: str | None) -> None:
        """Wait until the holder released the lease or must be dead; refuse if the holder renews it."""
        wait_s = max(self._lease_s, state.lease_s)
        _report(
            f"{self._url}: held by {state.holder} since {state.since}; "
            f"watching for up to {wait_s:g} s whether it is still alive"
        )
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            time.sleep(wait_s / LOOKS)
            now, newer = self._read()
            if now is None or now.free:
                return
            if newer != etag:
                raise self._refusal(now)

    def _release(self) -> None:
        """Mark the lease as free, if it is still ours; a failure must not hide the error of the work."""
        self._ended.set()
        _held_here.discard(self._token)
        try:
            with limited_to(self._lease_s / RENEWALS):
                self._change(free=True)
        except LeaseLostError:
            return
        except Exception as error:
            _report(
                f"WARNING: {self._url}: not released: {error}; the next command on another machine waits up "
                f"to {self._lease_s:g} s"
            )

    def _read(self) -> tuple[LeaseState | None, str | None]:
        found = self._folder.read(self._name)
        return (None, None) if found is None else (LeaseState.decode(found[0], self._url), found[1])

    def _refusal(self, state: LeaseState) -> LeaseHeldError:
        holder = f"{state.holder}, since {state.since}"
        return LeaseHeldError(f"{self._what} by another command ({holder}); wait for it to end")


def _report(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr, flush=True)
