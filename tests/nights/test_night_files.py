"""Nights and CURRENT: nights are started, resumed or abandoned, used, rolled back, and removed when old."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from catalogue_making import CLASSES, samples
from night_making import Nights, started

from pencil_scale.export.files import MANIFEST, ExportManifest
from pencil_scale.labels.run_record import RunRecord, read_record, write_record
from pencil_scale.nights import record
from pencil_scale.nights.record import Night, labels_in_use, night_name, remove_old
from pencil_scale.nights.start import adopt, resumable
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.lease import LeaseHeldError, LeaseLostError

EXPORT = ExportManifest("labels", "a1b2", 1, "run", ("a", "b"), 0, 0, ())


@pytest.fixture
def bench(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def night(number: int, parent: str | None, **more: Any) -> Night:
    made = {"class_names": ("a", "b"), "labels": "labels", "model": "model", "trained_by": "run"}
    return started(number, parent, number, **{"status": "passed", **made, **more})


def test_current_moves_to_a_night_only_from_its_parent(bench: Nights) -> None:
    nights = bench.nights
    assert nights.current() is None
    for number, parent in ((1, None), (2, "night-0001"), (3, "night-0001")):
        nights.save(night(number, parent, reasons=("why",)))
    nights.move_current(nights.must_find("night-0001"), expected=None)
    nights.move_current(nights.must_find("night-0002"), expected="night-0001")
    nights.move_current(nights.must_find("night-0002"), expected="night-0001")  # again, after a kill
    with pytest.raises(
        PencilError, match=r"was moved to night-0002 while night-0003 was made from night-0001"
    ):
        nights.move_current(nights.must_find("night-0003"), expected="night-0001")
    current = nights.current()
    assert current is not None
    assert (current.name, current.class_names, current.reasons) == ("night-0002", ("a", "b"), ("why",))
    with pytest.raises(PencilError, match="no finished night of this name; kept are night-0001, night-0002"):
        nights.must_find("night-0007")


def test_the_labels_in_use_are_those_of_the_night_that_follows_a_run(bench: Nights) -> None:
    nights = bench.nights
    for name in ("first", "other", "night-0001", "night-0002"):
        Folder(nights.storage).put(f"labels/published/{name}.json", b"{}")
    assert labels_in_use(nights.storage, "first") == "first"
    nights.save(replace(night(1, None), name="first", number=0))
    for number, parent in ((1, "first"), (2, "night-0001")):
        nights.save(night(number, parent))
    nights.move_current(nights.must_find("night-0002"), expected=None)
    for run, expected in {
        "first": "night-0002",  # which nights continue
        "nightly": "night-0002",  # no run
        "other": "other",  # another run in the same storage
        "night-0001": "night-0001",
    }.items():
        assert labels_in_use(nights.storage, run) == expected


def test_two_nights_started_at_once_get_different_numbers(bench: Nights) -> None:
    records = [replace(started(1, settings={"run.seed": "1"}), id=f"id-{job}") for job in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(bench.nights.start, records))
    assert sorted((one.name, one.number) for one in found) == [
        (night_name(number), number) for number in range(1, 5)
    ]
    assert [bench.nights.record(one.name) for one in found] == found
    assert bench.nights.next_number() == 5


def test_current_stays_where_another_job_moved_it_between_our_read_and_our_write(
    bench: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, parent in ((1, None), (2, "night-0001"), (3, "night-0001")):
        bench.nights.save(night(number, parent))
    bench.nights.move_current(bench.nights.must_find("night-0001"), expected=None)
    with bench.nights.leased() as nights:

        def overtaken() -> None:
            bench.nights.move_current(nights.must_find("night-0002"), expected="night-0001")

        monkeypatch.setattr(nights._lease, "check", overtaken)
        with pytest.raises(
            PencilError, match="moved to night-0002 while night-0003 was made from night-0001"
        ):
            nights.move_current(nights.must_find("night-0003"), expected="night-0001")
    current = bench.nights.current()
    assert current is not None
    assert current.name == "night-0002"


def test_a_job_that_lost_its_lease_writes_nothing_more(bench: Nights) -> None:
    first = night(1, None)
    with bench.nights.leased() as nights:
        nights.save(first)
        Folder(f"{bench.storage}/nights").delete("lease")  # as if another job took over
        with bench.nights.leased():
            for write in (
                lambda: nights.start(started(2)),
                lambda: nights.save(first, model="another"),
                lambda: nights.move_current(first, expected=None),
            ):
                with pytest.raises(LeaseLostError):
                    write()
    assert bench.nights.nights() == [first]
    assert bench.nights.records() == [first]
    assert bench.nights.current() is None


def test_only_one_job_at_a_time_may_change_the_nights(bench: Nights) -> None:
    refused = pytest.raises(LeaseHeldError, match=r"the nights of memory:.* are being changed by another")
    with bench.nights.leased(), refused, bench.nights.leased():
        pass
    with bench.nights.leased():
        pass


def test_a_night_that_was_started_resumes_until_it_is_closed(
    bench: Nights, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.shard("a.tar", samples(range(3)))
    bench.version()
    nights = bench.nights
    first = nights.start(started(1, settings={"run.seed": "1"}))
    assert resumable(nights, {"run.seed": "1"}, CLASSES) == first
    assert "night-0001 resumes" in capsys.readouterr().out
    assert nights.nights() == []  # it has made nothing yet
    made = nights.save(first, status="passed", labels="labels")
    assert resumable(nights, {"run.seed": "2"}, CLASSES) == made  # its last step is missing
    nights.save(made, closed=True)
    assert resumable(nights, {"run.seed": "1"}, CLASSES) is None
    assert nights.next_number() == 2


@pytest.mark.parametrize("why", ["settings", "parent", "shard", "classes"])
def test_a_night_is_abandoned_if_what_it_was_started_with_has_changed(
    bench: Nights, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.shard("a.tar", samples(range(3)))
    bench.version()
    nights = bench.nights
    nights.move_current(nights.save(night(1, None, closed=True)), expected=None)
    nights.start(started(2, "night-0001" if why != "parent" else None, settings={"run.seed": "1"}))
    if why == "shard":
        bench.shard("a.tar", samples(range(4)))
    names = CLASSES[::-1] if why == "classes" else CLASSES
    assert resumable(nights, {"run.seed": "2" if why == "settings" else "1"}, names) is None
    assert "night-0002 was not finished, and is abandoned" in capsys.readouterr().out
    assert nights.unclosed() is None
    assert [one.status for one in nights.records()] == ["passed", "abandoned"]
    assert nights.next_number() == 3  # a number is never used twice


def test_old_nights_are_removed_but_never_current_or_its_parent(bench: Nights) -> None:
    nights = bench.nights
    for number in range(1, 8):
        nights.save(night(number, night_name(number - 1)))
        run = RunRecord(night_name(number), f"id-{number}", {}, 1, ("a", "b"), {}, "")
        write_record(bench.storage, run)
        Folder(f"{bench.storage}/exports/{night_name(number)}").put(MANIFEST, EXPORT.encode())
        Folder(f"{bench.storage}/models").put(f"{night_name(number)}.pt", b"")
    nights.move_current(nights.must_find("night-0003"), expected=None)
    assert remove_old(nights, keep=2) == ["night-0001", "night-0004", "night-0005"]
    kept = ["night-0002", "night-0003", "night-0006", "night-0007"]
    assert [one.name for one in nights.nights()] == kept
    assert Folder(bench.storage).names("exports") == [f"exports/{name}" for name in kept]
    assert Folder(bench.storage).names("models") == [f"models/{name}.pt" for name in kept]
    assert Folder(bench.storage).names("runs") == [f"runs/{name}" for name in kept]
    assert remove_old(nights, keep=2) == []


def test_files_of_another_run_with_the_name_of_an_old_night_stay(bench: Nights) -> None:
    nights, theirs = bench.nights, RunRecord("night-0001", "theirs", {}, 1, ("a", "b"), {}, "")
    nights.start(started(1))
    nights.start(started(2))
    write_record(bench.storage, theirs)
    Folder(f"{bench.storage}/models").put("night-0001.pt", b"theirs")
    for run in ("theirs", "id-1"):
        Folder(f"{bench.storage}/checkpoints/night-0001/{run}-0001").put("weights.pt", b"")
    Folder(f"{bench.storage}/exports/night-0001").put("notes.txt", b"theirs")
    Folder(f"{bench.storage}/exports/night-0001").put(MANIFEST, EXPORT.encode())
    assert remove_old(nights, keep=1) == ["night-0001"]
    assert read_record(bench.storage, "night-0001") == theirs
    checkpoints = "checkpoints/night-0001"
    assert Folder(bench.storage).names(checkpoints) == [f"{checkpoints}/theirs-0001"]
    assert Folder(bench.storage).names("models") == ["models/night-0001.pt"]
    assert Folder(bench.storage).names("exports/night-0001") == ["exports/night-0001/notes.txt"]


def test_the_first_night_starts_from_a_finished_run(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    bench.version()
    nights = bench.nights
    assert adopt(nights, None) is None
    for name, status in (("big", "finished"), ("half", "running")):
        write_record(
            bench.storage, RunRecord(name, "id", {}, 1, ("ant", "bee", "cat"), {}, "labels", status=status)
        )
        facts = json.dumps({"test_accuracy": 0.75}).encode()
        Folder(f"{bench.storage}/runs/{name}").put("summary.json", facts)
    with pytest.raises(PencilError, match=r"half is not a finished run of .*; finished are big"):
        adopt(nights, "half")
    taken = adopt(nights, None)
    assert taken is not None
    assert (taken.name, taken.figures, taken.class_names) == (
        "big",
        {"clean_accuracy": 0.75},
        ("ant", "bee", "cat"),
    )
    assert nights.current() == taken
    write_record(
        bench.storage, RunRecord("small", "id", {}, 1, ("ant", "bee", "cat"), {}, "labels", status="finished")
    )
    with pytest.raises(PencilError, match=r"nightly.start_from: which run"):
        adopt(nights, None)


def test_an_interrupted_removal_is_repeated_and_its_night_is_never_used(
    bench: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = bench.nights
    for number in (1, 2, 3):
        nights.save(night(number, night_name(number - 1) if number > 1 else None, closed=True))
    nights.move_current(nights.must_find("night-0003"), expected=None)

    def interrupt(*_: object) -> None:
        raise OSError("the store is gone")

    with monkeypatch.context() as patch:
        patch.setattr(record, "sweep_run", interrupt)
        with pytest.raises(OSError, match="the store is gone"):
            remove_old(nights, keep=1)
    assert [one.name for one in nights.nights()] == ["night-0002", "night-0003"]
    assert remove_old(nights, keep=1) == ["night-0001"]
    assert [one.name for one in nights.records()] == ["night-0002", "night-0003"]


@pytest.mark.parametrize("text", [b"[]", b'{"format": 1}'])
def test_a_record_in_another_format_is_refused(bench: Nights, text: bytes) -> None:
    Folder(bench.storage).put("nights/night-0001/night.json", text)
    with pytest.raises(PencilError, match=r"night-0001/night.json: a night of format .* reads format 2"):
        bench.nights.nights()
