"""An outbox loses nothing when its process is killed; delivery keeps the order whatever the receiver does."""

import errno
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pencil_scale.tracking import delivery as delivery_module
from pencil_scale.tracking.delivery import AwayError, Delivery, RefusedError
from pencil_scale.tracking.outbox import MOST_BYTES, Outbox, Record, open_outbox


class Receiver:
    """Takes records, except while it is away, and never those it dislikes."""

    def __init__(self, most: int = 3) -> None:
        self.got: list[int] = []
        self.sizes: list[int] = []
        self.away = False
        self.dislikes: set[int] = set()
        self.most = most

    def __call__(self, records: list[Record]) -> int:
        if self.away:
            raise AwayError("no answer")
        taken = records[: self.most]
        if any(record.body["n"] in self.dislikes for record in taken):
            raise RefusedError("a value it dislikes")
        self.got += [record.body["n"] for record in taken]
        self.sizes.append(len(taken))
        return len(taken)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(delivery_module, "LAST_PAUSE_S", 0.02)


def delivering(outbox: Outbox, receiver: Receiver) -> Delivery:
    return Delivery(outbox, receiver, "the receiver", every_s=0.01)


def until(true: Callable[[], bool]) -> None:
    for _ in range(4000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


def test_records_arrive_in_order_and_in_batches(tmp_path: Path) -> None:
    outbox, receiver = Outbox(tmp_path), Receiver(most=7)
    for number in range(100):
        outbox.add("number", {"n": number})
    assert delivering(outbox, receiver).finish(30) == 0
    assert receiver.got == list(range(100))
    assert max(receiver.sizes) == 7


def test_the_log_speaks_once_of_going_and_once_of_coming_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, receiver = Outbox(tmp_path), Receiver()
    receiver.away = True
    delivery = delivering(outbox, receiver)
    for number in range(20):
        outbox.add("number", {"n": number})
    until(lambda: bool(caplog.records))
    time.sleep(0.2)  # room for several attempts
    receiver.away = False
    until(lambda: len(caplog.records) > 1)
    assert delivery.finish(30) == 0
    assert receiver.got == list(range(20))
    went, came = (record.getMessage() for record in caplog.records)
    assert went == f"the receiver is away (no answer): the work goes on, records wait in {outbox.path}"
    assert came == "the receiver is back: 20 records delivered"


def test_what_is_refused_is_set_aside_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, receiver = Outbox(tmp_path), Receiver(most=10)
    receiver.dislikes = {3, 4, 17}
    for number in range(20):
        outbox.add("number", {"n": number})
    delivery = delivering(outbox, receiver)
    until(lambda: len(receiver.got) == 17)
    assert outbox.num_refused() == 3
    assert delivery.finish(30) == 0
    assert receiver.got == [number for number in range(20) if number not in receiver.dislikes]
    assert "refuses a number (a value it dislikes)" in caplog.messages[0]
    assert "refused 3 records" in caplog.messages[-1]


def test_a_fault_of_the_sender_does_not_stop_it(tmp_path: Path) -> None:
    outbox, receiver = Outbox(tmp_path), Receiver(most=10)
    outbox.add("number", {"wrong": 1})
    outbox.add("number", {"n": 2})
    assert delivering(outbox, receiver).finish(30) == 0
    assert receiver.got == [2]


def test_finish_waits_no_longer_than_asked_and_the_next_start_delivers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, receiver = Outbox(tmp_path), Receiver()
    receiver.away = True
    for number in range(5):
        outbox.add("number", {"n": number})
    assert delivering(outbox, receiver).finish(0.2) == 5
    assert "5 records did not reach the receiver (no answer)" in caplog.text
    assert f"{outbox.path} keeps them" in caplog.text
    receiver.away = False
    again = Outbox(tmp_path)
    again.add("number", {"n": 5})
    assert (
        delivering(again, receiver).finish(30) == 0
    )  # though the first thread may still be in its last pause
    assert receiver.got == list(range(6))


def test_a_killed_process_leaves_all_it_said(tmp_path: Path) -> None:
    code = (
        "import sys; from pencil_scale.tracking.outbox import Outbox\n"
        "box, number = Outbox(sys.argv[1]), 0\n"
        "while True:\n"
        "    box.add('number', {'n': number}, b'x' * 1000); print(number, flush=True); number += 1"
    )
    talker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert talker.stdout is not None
    for _ in range(500):
        talker.stdout.readline()
    os.kill(talker.pid, signal.SIGKILL)
    said = 500 + len(talker.stdout.read().splitlines())
    talker.wait()
    receiver = Receiver(most=100)
    assert delivering(Outbox(tmp_path), receiver).finish(30) == 0
    assert receiver.got == list(range(len(receiver.got)))
    assert len(receiver.got) in (said, said + 1)  # the kill may fall between keeping and printing


def test_a_step_said_twice_is_kept_once(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    assert outbox.add_values("metrics", "a", 1, {"loss": 3.0, "rate": 0.1}) == []
    assert outbox.add_values("metrics", "a", 2, {"loss": 2.0}) == []
    outbox.close()
    resumed = Outbox(tmp_path)
    assert resumed.add_values("metrics", "a", 1, {"loss": 3.0, "rate": 0.1}) == ["loss", "rate"]
    assert resumed.add_values("metrics", "a", 2, {"loss": 2.0, "rate": 0.1}) == ["loss"]
    assert resumed.add_values("metrics", "b", 1, {"loss": 9.0}) == []
    kept = [(record.body["owner"], record.body["step"], record.body["values"]) for record in resumed.first()]
    assert kept == [
        ("a", 1, {"loss": 3.0, "rate": 0.1}),
        ("a", 2, {"loss": 2.0}),
        ("a", 2, {"rate": 0.1}),
        ("b", 1, {"loss": 9.0}),
    ]
    resumed.forget("a")
    assert resumed.add_values("metrics", "a", 1, {"loss": 3.0}) == []
    assert resumed.add_values("metrics", "b", 1, {"loss": 9.0}) == ["loss"]


def test_no_more_is_read_at_once_than_memory_likes(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for number in range(4):
        outbox.add("picture", {"n": number}, b"x" * (MOST_BYTES // 3))
    assert [record.body["n"] for record in outbox.first()] == [0, 1]
    outbox.drop(outbox.first(1)[0].number)
    outbox.add("picture", {"n": 4}, b"x" * (2 * MOST_BYTES))
    outbox.drop(outbox.first()[-1].number)
    outbox.drop(outbox.first(1)[0].number)
    assert [record.body["n"] for record in outbox.first()] == [4]


def test_the_file_does_not_grow_with_what_was_delivered(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    sizes = []
    for _ in range(6):
        for number in range(200):
            outbox.add("number", {"n": number}, b"x" * 2000)
        outbox.drop(outbox.first(200)[-1].number)
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert sizes[-1] <= 1.1 * sizes[-3]


def test_a_full_disk_costs_records_and_never_the_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, receiver = Outbox(tmp_path), Receiver()
    outbox.add("number", {"n": 0})
    outbox._database.execute("pragma max_page_count = 1")  # SQLite's own "database or disk is full"
    for number in range(1, 4):
        outbox.add("number", {"n": number}, b"x" * 100_000)
    outbox._database.execute("pragma max_page_count = 1000000")
    assert delivering(outbox, receiver).finish(30) == 0
    assert receiver.got == [0]
    assert "full" in caplog.messages[0]
    assert "3 writes" in caplog.messages[-1]


def test_a_damaged_file_is_moved_away_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "outbox.sqlite").write_bytes(b"not a database at all" * 1000)
    outbox = Outbox(tmp_path)
    outbox.add("number", {"n": 1})
    assert len(outbox) == 1
    assert "is damaged" in caplog.text
    assert len(list(tmp_path.glob("outbox.damaged-*"))) == 1


def test_only_one_of_two_hands_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    first, second = Outbox(tmp_path), Outbox(tmp_path)
    assert first.claim()
    receiver = Receiver()
    waiting = delivering(second, receiver)
    second.add("number", {"n": 1})
    until(lambda: bool(caplog.records))
    assert receiver.got == []
    first.close()
    until(lambda: receiver.got == [1])
    assert waiting.finish(30) == 0
    assert "somebody else" in caplog.messages[0]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_disk_without_locks_is_named_once_and_its_records_are_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pencil_scale.tracking.outbox.fcntl.flock", refuse)
    outbox, receiver = Outbox(tmp_path), Receiver()
    for n in range(5):
        outbox.add("number", {"n": n})
    assert delivering(outbox, receiver).finish(30) == 0
    assert receiver.got == list(range(5))
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path} cannot be locked ([Errno {number}]")


def test_a_delivery_that_ends_early_says_why_and_what_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(tmp_path)
    outbox.add("number", {"n": 0})

    def fail(most: int) -> list[Record]:
        raise sqlite3.DatabaseError("disk image is malformed")

    monkeypatch.setattr(outbox, "first", fail)
    assert delivering(outbox, Receiver()).finish(30) == 1
    assert "delivery to the receiver ended (DatabaseError: disk image is malformed)" in caplog.messages[0]
    assert "1 records did not reach the receiver (DatabaseError: disk image" in caplog.messages[1]


def test_a_record_that_cannot_be_written_down_is_lost_and_never_ends_the_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(tmp_path)
    outbox.add("number", {"n": object()})
    outbox.add("number", {"n": 1})
    assert [record.body["n"] for record in outbox.first()] == [1]
    assert "object is not JSON serializable" in caplog.text


def test_records_wait_on_this_machine_where_the_folder_cannot_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))
    (tmp_path / "file").write_text("no folder")
    outbox = open_outbox(tmp_path / "file" / "outbox")
    outbox.add("number", {"n": 1})
    assert outbox.path.is_relative_to(tmp_path / "local")
    assert f"they wait in {outbox.folder} instead" in caplog.text
