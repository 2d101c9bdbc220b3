"""A journal keeps what was written when its process is killed; delivery keeps the order in every case."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_front import Front, fresh_front

from pencil_scale.storage.folder import Folder
from pencil_scale.tracking import delivery as delivery_module
from pencil_scale.tracking import journal as journal_module
from pencil_scale.tracking.delivery import Delivery
from pencil_scale.tracking.journal import SEGMENT_BYTES, AwayError, Journal, Record, RefusedError

SELDOM_S = 3600.0  # no segment is written unless it is asked for


class Receiver:
    """Accepts records, except while it is unreachable, and never those it dislikes."""

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


@pytest.fixture(params=["disk", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder for a journal on each kind of storage."""
    if request.param == "s3":
        request.getfixturevalue("s3_endpoint")
        fresh_front(request.getfixturevalue("monkeypatch"))
        return "s3://lake/runs/demo/journal"
    return str(tmp_path / "journal") if request.param == "disk" else f"memory://{tmp_path.name}/journal"


def delivering(journal: Journal, receiver: Receiver) -> Delivery:
    return Delivery(journal, receiver, "the receiver", every_s=0.01)


def until(true: Callable[[], bool]) -> None:
    for _ in range(4000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


def journal_of(folder: str | Path, numbers: range = range(0), every_s: float = 0.01) -> Journal:
    journal = Journal(str(folder), every_s)
    for number in numbers:
        journal.add("number", {"n": number})
    return journal


def numbers_in(journal: Journal) -> list[int]:
    """Take all records that are left."""
    found: list[int] = []
    while records := journal.first(7):
        found += [record.body["n"] for record in records]
        journal.drop(records[-1])
    return found


def files_in(folder: str) -> list[str]:
    return Folder(folder).names("segments") + Folder(folder).names("blobs")


def test_records_arrive_in_order_and_in_batches(folder: str) -> None:
    journal, receiver = journal_of(folder, range(100), SELDOM_S), Receiver(most=7)
    assert delivering(journal, receiver).finish(30) == 0
    assert receiver.got == list(range(100))
    assert max(receiver.sizes) == 7


def test_the_log_says_once_that_the_receiver_is_unreachable_and_once_that_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver()
    receiver.away = True
    journal = journal_of(tmp_path, range(20), SELDOM_S)
    journal.flush()
    delivery = delivering(journal, receiver)
    until(lambda: bool(caplog.records))
    time.sleep(0.2)  # room for several attempts
    receiver.away = False
    until(lambda: len(caplog.records) > 1)
    assert delivery.finish(30) == 0
    assert receiver.got == list(range(20))
    went, came = (record.getMessage() for record in caplog.records)
    assert went == f"the receiver is unreachable (no answer): the run continues, records wait in {tmp_path}"
    assert came == "the receiver is back: 20 records delivered"


def test_what_is_refused_is_kept_apart_and_stops_no_other_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, receiver = journal_of(tmp_path, range(20)), Receiver(most=10)
    receiver.dislikes = {3, 4, 17}
    delivery = delivering(journal, receiver)
    until(lambda: len(receiver.got) == 17)
    assert delivery.finish(30) == 0
    assert receiver.got == [number for number in range(20) if number not in receiver.dislikes]
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "refused").iterdir())]
    assert [(one["body"]["n"], one["reason"]) for one in kept] == [
        (number, "a value it dislikes") for number in (3, 4, 17)
    ]
    assert "refuses a number (a value it dislikes)" in caplog.messages[0]
    assert "refused 3 records" in caplog.messages[-1]


def test_a_fault_of_the_sender_does_not_stop_it(tmp_path: Path) -> None:
    journal, receiver = journal_of(tmp_path), Receiver(most=10)
    journal.add("number", {"wrong": 1})
    journal.add("number", {"n": 2})
    assert delivering(journal, receiver).finish(30) == 0
    assert receiver.got == [2]


def test_finish_waits_no_longer_than_asked_and_the_next_start_delivers(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver()
    receiver.away = True
    assert delivering(journal_of(folder, range(5)), receiver).finish(0.2) == 5
    assert "5 records did not reach the receiver (no answer)" in caplog.text
    assert f"{folder} keeps them" in caplog.text
    receiver.away = False
    again = journal_of(folder, range(5, 6))  # though the first thread may still be in its last pause
    assert delivering(again, receiver).finish(30) == 0
    assert receiver.got == list(range(6))


def test_a_killed_process_leaves_all_that_it_flushed(tmp_path: Path) -> None:
    code = (
        "import sys; from pencil_scale.tracking.journal import Journal\n"
        "journal, number = Journal(sys.argv[1], 3600), 0\n"
        "while True:\n"
        "    journal.add('number', {'n': number}, b'x' * 1000); number += 1\n"
        "    journal.add('number', {'n': number}); number += 1; journal.flush(); print(number, flush=True)"
    )
    talker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert talker.stdout is not None
    for _ in range(50):
        talker.stdout.readline()
    os.kill(talker.pid, signal.SIGKILL)
    flushed = 100 + 2 * len(talker.stdout.read().splitlines())
    talker.wait()
    receiver = Receiver(most=100)
    assert delivering(journal_of(tmp_path), receiver).finish(30) == 0
    assert receiver.got == list(range(len(receiver.got)))
    assert len(receiver.got) in (flushed, flushed + 2)  # the kill may come between writing and printing


def test_what_is_added_is_written_without_being_asked(folder: str) -> None:
    journal_of(folder, range(3), every_s=0.01)
    until(lambda: bool(Folder(folder).names("segments")))
    large = Journal(folder, every_s=SELDOM_S)
    large.add("picture", {"n": 3}, b"x" * (SEGMENT_BYTES + 1))
    found: list[int] = []
    until(lambda: found.extend(numbers_in(large)) or len(found) == 4)
    large.add("number", {"n": 4})
    large.flush_soon()
    until(lambda: found.extend(numbers_in(large)) or len(found) == 5)
    assert found == [0, 1, 2, 3, 4]


def test_a_blob_stays_until_its_record_is_acknowledged(folder: str) -> None:
    journal = journal_of(folder, every_s=SELDOM_S)
    for number in range(3):
        journal.add("picture", {"n": number}, bytes([number]) * 10)
    journal.flush()
    first, second, third = journal.first()
    journal.drop(first)
    journal.drop(second, refused="no such kind")
    journal.flush()
    again = journal_of(folder, every_s=SELDOM_S)
    (left,) = again.first()
    assert (left.number, left.read()) == (third.number, bytes([2]) * 10)
    again.drop(left)
    again.flush()
    assert files_in(folder) == [f"blobs/{second.blob}"]  # the refused one, for a person to look at


def test_a_step_reported_twice_is_kept_once_whether_or_not_it_was_delivered(folder: str) -> None:
    journal = journal_of(folder, every_s=SELDOM_S)
    assert journal.add_values("a", 1, {"loss": 3.0, "rate": 0.1}) == []
    journal.flush()
    journal.drop(journal.first()[0])
    assert journal.add_values("a", 2, {"loss": 2.0}) == []
    journal.close()
    resumed = journal_of(folder, every_s=SELDOM_S)
    assert resumed.add_values("a", 1, {"loss": 3.0, "rate": 0.1}) == ["loss", "rate"]
    assert resumed.add_values("a", 2, {"loss": 2.0, "rate": 0.1}) == ["loss"]
    assert resumed.add_values("b", 1, {"loss": 9.0}) == []
    resumed.flush()
    kept = []
    while records := resumed.first(1):
        kept += [(record.body["stage"], record.body["step"], record.body["values"]) for record in records]
        resumed.drop(records[-1])
    assert kept == [("a", 2, {"loss": 2.0}), ("a", 2, {"rate": 0.1}), ("b", 1, {"loss": 9.0})]


def test_a_journal_does_not_grow_with_what_was_delivered(folder: str) -> None:
    journal = journal_of(folder, every_s=SELDOM_S)
    for first in (0, 200):
        for number in range(first, first + 200):
            journal.add("number", {"n": number}, b"x" * 20 if number % 50 == 0 else None)
        journal.flush()
        assert numbers_in(journal) == list(range(first, first + 200))
        journal.flush()
        assert files_in(folder) == []
    assert len(journal_of(folder)) == 0


def test_storage_that_cannot_be_written_never_fails_a_call_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal, receiver = journal_of(tmp_path, every_s=SELDOM_S), Receiver()
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "MOST_WAITING_BYTES", 500)

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(journal._objects, "create", fail)
        for number in range(4):
            journal.add("number", {"n": number}, b"x" * 400)
            journal.flush()
    assert delivering(journal, receiver).finish(30) == 0
    assert receiver.got == [0, 1]
    assert "No space left" in caplog.messages[0]
    assert "2 records could not be written" in caplog.messages[-1]


def test_a_damaged_segment_is_named_and_kept_and_the_others_are_delivered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = journal_of(tmp_path, every_s=SELDOM_S)
    for number in range(3):
        journal.add("number", {"n": number})
        journal.flush()
    (tmp_path / "segments" / "000000000002.jsonl").write_bytes(b"not JSON at all")
    again = journal_of(tmp_path, range(3, 4), every_s=SELDOM_S)
    again.flush()
    assert numbers_in(again) == [0, 2, 3]
    again.flush()
    assert files_in(str(tmp_path)) == ["segments/000000000002.jsonl"]
    assert f"{tmp_path}/segments/000000000002.jsonl is damaged" in caplog.text


def test_a_damaged_acknowledgement_repeats_records_and_loses_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = journal_of(tmp_path, range(3), every_s=SELDOM_S)
    journal.flush()
    journal.drop(journal.first(1)[0])
    journal.flush()
    (tmp_path / "delivered.json").write_text("{")
    assert numbers_in(journal_of(tmp_path)) == [0, 1, 2]
    assert "delivered.json is damaged" in caplog.text


def test_the_process_that_opened_a_journal_last_delivers_and_the_former_one_stops(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    former, receiver = journal_of(folder, range(2), every_s=SELDOM_S), Receiver(most=1)
    former.flush()
    former.drop(former.first(1)[0])
    latter = journal_of(folder, range(3, 4), every_s=SELDOM_S)
    former.add("number", {"n": 2})
    former.flush()  # finds that it is no longer the owner; its record is in the journal all the same
    assert delivering(former, receiver).finish(30) > 0
    assert "delivery to the receiver ended" in caplog.text
    assert "another process delivers its records now" in caplog.text
    assert receiver.got == []
    latter.flush()
    assert numbers_in(latter) == [0, 1, 2, 3]  # nothing was acknowledged by the former


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_records_are_delivered_from_a_disk_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pencil_scale.storage.folder.fcntl.flock", refuse)
    receiver = Receiver()
    assert delivering(journal_of(tmp_path, range(5)), receiver).finish(30) == 0
    assert receiver.got == list(range(5))


@pytest.mark.slow
def test_a_store_that_is_down_for_a_while_delays_records_and_loses_none(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    front: Front = fresh_front(monkeypatch)
    journal, receiver = journal_of("s3://lake/runs/demo/journal", range(3), every_s=0.05), Receiver()
    journal.flush()
    front.is_down = True
    delivery = delivering(journal, receiver)
    journal.add("number", {"n": 3}, b"blob")
    until(lambda: "cannot be written" in caplog.text)
    front.is_down = False
    assert delivery.finish(60) == 0
    assert receiver.got == [0, 1, 2, 3]


def test_a_delivery_that_ends_early_says_why_and_what_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = journal_of(tmp_path, range(1))

    def fail(most: int) -> list[Record]:
        raise ValueError("a bug")

    monkeypatch.setattr(journal, "first", fail)
    assert delivering(journal, Receiver()).finish(30) == 1
    assert "delivery to the receiver ended (ValueError: a bug)" in caplog.messages[0]
    assert "1 records did not reach the receiver (ValueError: a bug)" in caplog.messages[1]


def test_a_record_that_cannot_be_written_is_lost_and_never_ends_the_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = journal_of(tmp_path, every_s=SELDOM_S)
    journal.add("number", {"n": object()})
    journal.add("number", {"n": 1})
    journal.flush()
    assert numbers_in(journal) == [1]
    assert "object is not JSON serializable" in caplog.text
