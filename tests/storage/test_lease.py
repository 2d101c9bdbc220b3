"""Leases are acquired, released, taken over and lost by real processes, on any storage."""

import fcntl
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from s3_front import Front, fresh_front

from pencil_scale.storage import lease as lease_module
from pencil_scale.storage import retries
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.lease import Lease, LeaseHeldError, LeaseLostError, LeaseState

ROOT = Path(__file__).parents[2]
LEASE, WHAT = "runs/demo/lease", "run demo is being trained"
SHORT_S = 1.0
FOREVER_S = 3600.0  # no test waits this long

# Holds the lease and obeys commands, one per line.
HOLDER = f"""
import os, sys
from pencil_scale.storage.lease import Lease, LeaseLostError
with Lease.hold(sys.argv[1], {LEASE!r}, {WHAT!r}, lease_s=float(sys.argv[2])) as lease:
    print("held", lease.attempt, flush=True)
    for word in map(str.strip, sys.stdin):
        try:
            if word == "put":
                lease.put("runs/demo/run.json", b"by the first")
            elif word == "check":
                lease.check()
            elif word == "wait until lost":
                while not lease.lost:
                    pass
            print("done", flush=True)
        except LeaseLostError as error:
            print("lost", lease.lost, flush=True)
"""


@pytest.fixture
def front(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Front:
    return fresh_front(monkeypatch)


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage that several processes may share."""
    if request.param == "disk":
        return str(tmp_path)
    request.getfixturevalue("front")
    return "s3://lake/clothing"


class Process:
    """Another process that holds the lease."""

    def __init__(self, storage: str, lease_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, storage, str(lease_s)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.first_line = self.hear()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self.hear()

    def end(self, number: int) -> int:
        self._process.send_signal(number)
        return self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def started(storage: str, lease_s: float = FOREVER_S) -> Process:
            process = Process(storage, lease_s)
            stack.callback(process.close)
            return process

        yield started


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process believe that the processes it starts run on another machine."""
    monkeypatch.setattr(lease_module, "this_machine", lambda: "another one")


def hold(storage: str, lease_s: float = FOREVER_S) -> AbstractContextManager[Lease]:
    return Lease.hold(storage, LEASE, WHAT, lease_s)


def state(storage: str) -> LeaseState:
    found = Folder(storage).read(LEASE)
    assert found is not None
    return LeaseState.decode(found[0], LEASE)


def test_a_second_process_is_refused_at_once_while_the_first_is_alive(
    storage: str, start: Callable[..., Process]
) -> None:
    first = start(storage)
    with (
        pytest.raises(
            LeaseHeldError,
            match=rf"^{WHAT} by another command \(-c, process {first.pid} on .*, since 20.*wait",
        ),
        hold(storage),
    ):
        pass
    with Lease.hold(storage, "runs/other/lease", "run other is being trained") as other:
        assert other.attempt == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_on_the_same_machine_the_lease_of_a_killed_process_is_free_at_once(
    tmp_path: Path, start: Callable[..., Process], number: int
) -> None:
    start(str(tmp_path)).end(number)
    assert not state(str(tmp_path)).free
    with hold(str(tmp_path)) as lease:
        assert lease.attempt == 2


def test_attempts_are_counted_across_releases_errors_and_kills(
    storage: str, start: Callable[..., Process]
) -> None:
    with hold(storage) as lease:
        assert lease.attempt == 1
    with pytest.raises(ValueError, match="broken"), hold(storage):
        raise ValueError("broken")
    first = start(storage)
    assert first.first_line == "held 3"
    assert first.end(signal.SIGINT) != 0
    assert state(storage).free
    second = start(storage)
    assert second.first_line == "held 4"
    second.end(signal.SIGKILL)
    with hold(storage) as lease:
        assert lease.attempt == 5


def test_from_another_machine_a_live_holder_is_respected_and_a_dead_one_is_replaced(
    storage: str, start: Callable[..., Process], elsewhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start(storage, SHORT_S)
    with pytest.raises(LeaseHeldError, match=f"process {first.pid}"), hold(storage, FOREVER_S / 100):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert f"process {first.pid}" in line
    assert "watching for up to 36 s" in line
    first.end(signal.SIGKILL)
    with hold(storage, SHORT_S) as lease:
        assert lease.attempt == 2


def test_a_paused_holder_whose_lease_was_taken_over_cannot_write_any_more(
    storage: str, start: Callable[..., Process], elsewhere: None
) -> None:
    first = start(storage, SHORT_S)
    assert first.tell("put") == "done"
    pause(first.pid, Path(storage, LEASE).parent / ".lock")
    with hold(storage, SHORT_S) as lease:
        lease.put("runs/demo/run.json", b"by the second")
        os.kill(first.pid, signal.SIGCONT)
        assert first.tell("wait until lost") == "done"
        assert first.tell("put") == "lost True"
        assert first.tell("check") == "lost True"
        lease.check()
        first.end(signal.SIGINT)  # it no longer has anything to release
        lease.put("runs/demo/summary.json", b"{}")
    found = Folder(storage).read("runs/demo/run.json")
    assert found is not None
    assert found[0] == b"by the second"


def pause(pid: int, lock: Path) -> None:
    """Pause a process at a moment when it does not hold the lock of a folder."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        if not lock.exists():
            return
        with lock.open() as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                os.kill(pid, signal.SIGCONT)


def test_a_put_in_flight_when_the_lease_is_lost_is_refused(
    storage: str, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: after the old holder renewed its lease, before its put."""
    with hold(storage) as old:
        put = old._folder.replace

        def paused(name: str, data: bytes, etag: str | None) -> bool:
            if name == "CURRENT":
                monkeypatch.setattr(old._folder, "replace", put)
                found, known = Folder(storage), old._folder.etag(LEASE)
                theirs = LeaseState.of_this_process("another", 2, FOREVER_S)
                assert found.replace(LEASE, theirs.encode(), known)
                assert found.replace("CURRENT", b"by the second", found.etag("CURRENT"))
            return put(name, data, etag)

        monkeypatch.setattr(old._folder, "replace", paused)
        with pytest.raises(LeaseLostError, match="took over the lease"):
            old.put("CURRENT", b"by the first")
    found = Folder(storage).read("CURRENT")
    assert found is not None
    assert found[0] == b"by the second"


def test_a_put_is_repeated_when_another_run_changed_the_object(storage: str) -> None:
    with hold(storage) as lease, Lease.hold(storage, "other", "x is done") as other:
        other.put("summary.json", b"theirs")
        check = lease.check
        changes = iter([b"theirs again"])

        def check_while_the_other_writes() -> None:
            for data in changes:
                other.put("summary.json", data)
            check()

        lease.check = check_while_the_other_writes  # type: ignore[method-assign]
        lease.put("summary.json", b"ours")
    found = Folder(storage).read("summary.json")
    assert found is not None
    assert found[0] == b"ours"


def test_a_process_whose_release_did_not_reach_the_store_can_acquire_the_lease_again() -> None:
    storage = f"memory://{uuid.uuid4().hex}"
    with hold(storage) as lease:
        held = state(storage)
        with pytest.raises(LeaseHeldError), hold(storage):
            pass
        lease.check()
    store = Folder(storage)
    assert store.replace(LEASE, held.encode(), store.etag(LEASE))
    with hold(storage) as lease:
        assert lease.attempt == 2


def test_only_the_process_that_acquired_a_lease_uses_or_releases_it(tmp_path: Path) -> None:
    with hold(str(tmp_path)) as lease:
        child = os.fork()
        if child == 0:
            refused = False
            try:
                lease.check()
            except LeaseLostError:
                refused = True
            lease._release()
            os._exit(0 if refused else 1)
        assert os.waitpid(child, 0)[1] == 0
        lease.check()


def test_a_removed_lease_is_lost_and_a_damaged_one_is_reported(tmp_path: Path) -> None:
    with hold(str(tmp_path)) as lease:
        (tmp_path / LEASE).unlink()
        with pytest.raises(LeaseLostError, match=r"runs/demo/lease: the lease was removed"):
            lease.check()
        assert lease.lost
    (tmp_path / LEASE).write_text("{")
    with pytest.raises(PencilError, match=r"runs/demo/lease: not a lease .*remove it"), hold(str(tmp_path)):
        pass


@pytest.mark.slow
def test_an_outage_longer_than_the_lease_does_not_end_its_holder(
    front: Front, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "SILENT_S", 0.5)
    monkeypatch.setattr(retries, "BOTOCORE_RETRIES", {"total_max_attempts": 1})
    with hold("s3://lake/clothing", 0.2) as lease:
        front.is_down = True
        while "does not answer" not in caplog.text:
            time.sleep(0.1)
        assert not lease.lost
        front.is_down = False
        before = state("s3://lake/clothing").renewed
        while state("s3://lake/clothing").renewed == before:
            time.sleep(0.05)
        assert not lease.lost


def this_process() -> LeaseState:
    return LeaseState.of_this_process("token", 1, FOREVER_S)


def test_a_reused_process_id_is_a_dead_holder_and_another_machine_is_unknown() -> None:
    ours = this_process()
    assert ours.is_alive() is True
    assert replace(ours, born="1").is_alive() is False
    assert replace(ours, machine="another boot").is_alive() is None
    assert replace(ours, machine="").is_alive() is None


def test_a_zombie_is_a_dead_holder(tmp_path: Path, start: Callable[..., Process]) -> None:
    child = start(str(tmp_path))
    theirs = state(str(tmp_path))
    assert theirs.is_alive() is True
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert theirs.is_alive() is False


def test_a_suspended_holder_is_neither_alive_nor_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may never wake up, so its lease is watched."""
    sleeper = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(os, "getpid", lambda: sleeper.pid)
    process = this_process()
    try:
        assert process.is_alive()
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)  # until it has stopped
        assert process.is_alive() is None
        sleeper.send_signal(signal.SIGCONT)
        os.waitpid(sleeper.pid, os.WCONTINUED)
        assert process.is_alive()
    finally:
        sleeper.kill()
        sleeper.wait()
    assert process.is_alive() is False
