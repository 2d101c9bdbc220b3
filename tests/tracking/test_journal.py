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

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.tracking import journal as journal_module
from pencil_scale.tracking.journal import AwayError, Delivery, Entry, Journal

SELDOM_S = 3600.0  # no segment is written unless the test asks for it


class Receiver:
    """Accepts entries, except while it is unreachable, and never those it dislikes."""

    def __init__(self, most: int = 3) -> None:
        self.got: list[int] = []
        self.sizes: list[int] = []
        self.away = False
        self.dislikes: set[int] = set()
        self.most = most

    def __call__(self, entries: list[Entry]) -> int:
        if self.away:
            raise AwayError("no answer")
        taken = entries[: self.most]
        if any(entry.body["n"] in self.dislikes for entry in taken):
            raise PencilError("a value it dislikes")
        self.got += [entry.body["n"] for entry in taken]
        self.sizes.append(len(taken))
        return len(taken)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    monkeypatch.setattr(journal_module, "SHORT_S", 0.01)


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
    """Take all remaining entries."""
    found: list[int] = []
    while (entries := journal.first()) is not None:
        found += [entry.body["n"] for entry in entries]
        journal.drop()
    return found


def files_in(folder: str) -> list[str]:
    return Folder(folder).names("segments") + Folder(folder).names("blobs")


def test_entries_arrive_in_order_and_in_batches(folder: str) -> None:
    journal, receiver = journal_of(folder, range(100), SELDOM_S), Receiver(most=7)
    assert delivering(journal, receiver).finish(30)
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
    assert delivery.finish(30)
    assert receiver.got == list(range(20))
    assert caplog.messages == [
        f"the receiver is unreachable (no answer): the run continues, entries wait in {tmp_path}",
        "the receiver is back: the entries that waited are delivered",
    ]


def test_a_storage_that_is_unreachable_is_not_taken_for_the_receiver(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, journal = Receiver(), journal_of(tmp_path, range(20), SELDOM_S)
    journal.flush()

    def fail(*_: object) -> None:
        raise OSError("disk gone")

    with monkeypatch.context() as broken:
        broken.setattr(journal_module.Folder, "names", fail)
        delivery = delivering(journal, receiver)
        until(lambda: bool(caplog.records))
    assert delivery.finish(30)
    assert receiver.got == list(range(20))
    assert caplog.messages == [
        f"{tmp_path} is unreachable (disk gone): the run continues, entries wait in memory",
        f"{tmp_path} is back: the entries that waited are delivered",
    ]


def test_what_is_refused_is_kept_apart_and_stops_no_other_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, receiver = journal_of(tmp_path, range(20)), Receiver(most=10)
    receiver.dislikes = {3, 4, 17}
    assert delivering(journal, receiver).finish(30)
    assert receiver.got == [number for number in range(20) if number not in receiver.dislikes]
    kept = [json.loads(path.read_text()) for path in (tmp_path / "refused").iterdir()]
    assert {(one["body"]["n"], one["reason"]) for one in kept} == {
        (number, "a value it dislikes") for number in (3, 4, 17)
    }
    assert "refuses a number (a value it dislikes)" in caplog.messages[0]
    assert "refused 3 entries" in caplog.messages[-1]


def test_a_bug_in_the_sender_does_not_stop_the_other_entries(tmp_path: Path) -> None:
    journal, receiver = journal_of(tmp_path), Receiver(most=10)
    journal.add("number", {"wrong": 1})
    journal.add("number", {"n": 2})
    assert delivering(journal, receiver).finish(30)
    assert receiver.got == [2]


def test_finish_waits_no_longer_than_asked_and_the_next_start_delivers(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver()
    receiver.away = True
    assert not delivering(journal_of(folder, range(5)), receiver).finish(0.2)
    assert (
        f"the receiver has not received 5 records of this run (no answer). They are in {folder}; to deliver"
        in (caplog.text)
    )
    again = journal_of(folder, range(5, 6))  # though the first thread may still be in its last pause
    receiver.away = False
    assert delivering(again, receiver).finish(30)
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
    assert delivering(journal_of(tmp_path), receiver).finish(30)
    assert receiver.got == list(range(len(receiver.got)))
    assert len(receiver.got) in (flushed, flushed + 2)  # the kill may come between writing and printing


def test_what_is_added_is_written_without_being_asked(folder: str) -> None:
    journal_of(folder, range(3), every_s=0.01)
    until(lambda: bool(Folder(folder).names("segments")))
    slow = Journal(folder, every_s=SELDOM_S)
    slow.add("number", {"n": 3})
    slow.flush_soon()
    found: list[int] = []
    until(lambda: found.extend(numbers_in(slow)) or len(found) == 4)
    assert found == [0, 1, 2, 3]


def test_a_blob_stays_until_its_entry_is_delivered(folder: str) -> None:
    journal = journal_of(folder, every_s=SELDOM_S)
    for number in range(3):
        journal.add("picture", {"n": number}, bytes([number]) * 10)
    journal.flush()
    assert journal.first() is not None  # and the process dies before it has delivered them
    again = journal_of(folder, every_s=SELDOM_S)
    entries = again.first()
    assert entries is not None
    assert [entry.data for entry in entries] == [bytes([number]) * 10 for number in range(3)]
    again.refuse(entries[1], "no such kind")
    again.drop()
    assert files_in(folder) == [f"blobs/{entries[1].blob}"]  # the refused one is kept


def test_a_journal_does_not_grow_with_what_was_delivered(folder: str) -> None:
    journal = journal_of(folder, every_s=SELDOM_S)
    for first in (0, 200):
        for number in range(first, first + 200):
            journal.add("number", {"n": number}, b"x" * 20 if number % 50 == 0 else None)
        journal.flush()
        assert numbers_in(journal) == list(range(first, first + 200))
        assert files_in(folder) == []


def test_a_long_outage_leaves_more_segments_than_are_delivered_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_SEGMENTS", 2)
    journal, receiver = journal_of(tmp_path, every_s=SELDOM_S), Receiver()
    for number in range(5):
        journal.add("number", {"n": number})
        journal.flush()
    assert delivering(journal, receiver).finish(30)
    assert receiver.got == list(range(5))


def test_storage_that_cannot_be_written_never_fails_a_call_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal, receiver = journal_of(tmp_path, every_s=SELDOM_S), Receiver()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journal._folder, "put", fail)
        for number in range(4):
            journal.add("number", {"n": number}, b"x" * 400)
            journal.flush()
    assert delivering(journal, receiver).finish(30)
    assert receiver.got == [0, 1, 2, 3]
    (message,) = caplog.messages
    assert "No space left" in message


def test_entries_that_can_never_be_written_are_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = journal_of(tmp_path, range(2), every_s=SELDOM_S)

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(journal._folder, "put", fail)
    assert not delivering(journal, Receiver()).finish(0.1)
    assert f"2 entries could not be written to {tmp_path} and are lost" in caplog.messages[-1]


def test_a_damaged_segment_is_named_and_kept_and_the_others_are_delivered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = journal_of(tmp_path, every_s=SELDOM_S)
    for number in range(3):
        journal.add("number", {"n": number})
        journal.flush()
    (damaged,) = tmp_path.glob("segments/000000000002-*.jsonl")
    damaged.write_bytes(b"not JSON at all")
    again = journal_of(tmp_path, range(3, 4), every_s=SELDOM_S)
    again.flush()
    assert numbers_in(again) == [0, 2, 3]
    assert files_in(str(tmp_path)) == []
    assert (tmp_path / "refused" / damaged.name).read_bytes() == b"not JSON at all"
    assert f"{damaged} is damaged" in caplog.text


def test_the_process_that_opened_a_journal_last_delivers_and_the_former_one_stops(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    former, receiver = journal_of(folder, range(2), every_s=SELDOM_S), Receiver(most=1)
    former.flush()
    latter = journal_of(folder, range(3, 4), every_s=SELDOM_S)
    former.add("number", {"n": 2})
    assert not delivering(former, receiver).finish(30)
    assert "delivery to the receiver ended" in caplog.text
    assert "another process delivers its entries now" in caplog.text
    assert receiver.got == []
    latter.flush()
    assert sorted(numbers_in(latter)) == [0, 1, 2, 3]  # also what the former one wrote in the end


def test_a_storage_is_not_asked_again_and_again_while_nothing_is_written(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, receiver, lists = journal_of(folder), Receiver(), list[str]()
    listed = Folder.names
    monkeypatch.setattr(Folder, "names", lambda self, under: lists.append(under) or listed(self, under))
    delivery = delivering(journal, receiver)
    until(lambda: len(lists) == 1)
    time.sleep(0.2)  # some ten turns of the thread that delivers
    assert len(lists) == 1
    journal.add("number", {"n": 0})
    until(lambda: receiver.got == [0])
    former = journal_of(folder, range(1, 2), every_s=SELDOM_S)
    Folder(folder).put("owner", journal._id.encode())
    former.flush()  # the delivering process is not told
    assert delivery.finish(30)
    assert receiver.got == [0, 1]


@pytest.mark.slow
def test_a_store_that_is_down_for_a_while_delays_entries_and_loses_none(
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
    assert delivery.finish(60)
    assert receiver.got == [0, 1, 2, 3]


def test_a_delivery_that_ends_early_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = journal_of(tmp_path, range(1))

    def fail(**how: bool) -> list[Entry]:
        raise ValueError("a bug")

    monkeypatch.setattr(journal, "first", fail)
    assert not delivering(journal, Receiver()).finish(30)
    assert "delivery to the receiver ended (ValueError: a bug)" in caplog.messages[0]
    assert "the receiver has not received 1 record of this run (ValueError: a bug)" in caplog.messages[1]


def test_a_value_that_json_does_not_know_is_kept_as_text(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, every_s=SELDOM_S)
    journal.add("tag", {"value": Path("labels")})
    journal.flush()
    assert [entry.body for entry in journal.first() or ()] == [{"value": "labels"}]
