from dataclasses import replace
from pathlib import Path

import pytest

from pencil_scale.labels.run_record import RunRecord, find_record, read_record, write_record
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease, LeaseLostError
from pencil_scale.storage.storage import Storage

SETTINGS = {"run.seed": "1", "stages.pencil.epochs": "10", "workers.count": "(8, 8)"}


@pytest.fixture
def storage(tmp_path: Path) -> str:
    write_record(str(tmp_path), RunRecord("night", "a1b2", SETTINGS, 3, ("ant", "bee"), {}, "labels.json"))
    return str(tmp_path)


def test_a_record_is_written_only_under_the_lease_and_names_its_attempt(storage: str) -> None:
    record = read_record(storage, "night")
    assert record is not None
    with Lease.hold(storage, "runs/night/lease", "run night is being trained") as lease:
        assert write_record(storage, record, lease, status="stopped").attempt == 1
        (Path(storage) / "runs/night/lease").unlink()  # another command takes over
        with pytest.raises(LeaseLostError):
            write_record(storage, record, lease, status="finished")
    found = read_record(storage, "night")
    assert found is not None
    assert (found.status, found.attempt) == ("stopped", 1)


def test_a_new_name_starts_a_new_run(storage: str) -> None:
    assert find_record(storage, "other", SETTINGS) is None


def test_the_same_settings_resume_on_the_catalogue_they_started_with(storage: str) -> None:
    record = find_record(storage, "night", SETTINGS)
    assert record is not None
    assert record.catalogue_version == 3


@pytest.mark.parametrize("other", [{"workers.count": "(2, 2)"}, {"data.keep_mb": "0"}])
def test_a_run_may_resume_with_another_number_of_workers_or_memory_for_images(
    storage: str, other: dict[str, str]
) -> None:
    assert find_record(storage, "night", {**SETTINGS, **other}) is not None


def test_a_name_started_with_other_settings_is_refused(storage: str) -> None:
    other = {**SETTINGS, "stages.pencil.epochs": "5", "run.seed": "2"}
    with pytest.raises(
        PencilError, match=r"started with run.seed=1, now it is 2 and 1 more key; set it back"
    ):
        find_record(storage, "night", other)


def test_a_run_that_saved_nothing_starts_again_with_other_settings(storage: str) -> None:
    other = {**SETTINGS, "run.seed": "2"}
    assert find_record(storage, "night", other, is_saved=lambda record: False) is None
    assert find_record(storage, "night", SETTINGS, is_saved=lambda record: False) is not None


def test_a_finished_run_is_refused(storage: str) -> None:
    record = read_record(storage, "night")
    assert record is not None
    write_record(storage, record, status="finished")
    with pytest.raises(PencilError, match=r"run night is finished .*choose another run.name"):
        find_record(storage, "night", SETTINGS)


@pytest.mark.parametrize("result", ["labels/published/gone.json", "labels/held/gone.json", "models/gone.pt"])
def test_a_name_whose_record_was_deleted_but_not_its_results_is_refused(storage: str, result: str) -> None:
    path = Path(storage) / result
    path.parent.mkdir(parents=True)
    path.write_bytes(b"labels of a person's last run")
    with pytest.raises(
        PencilError, match=f"{result} exists, left by an earlier run .* nothing is overwritten"
    ):
        find_record(storage, "gone", SETTINGS)
    assert path.read_bytes() == b"labels of a person's last run"


def test_execution_settings_do_not_change_what_a_run_is(storage: str) -> None:
    record = read_record(storage, "night")
    assert record is not None
    other_workers = replace(record, settings={**SETTINGS, "workers.count": "(2, 2)"})
    other_seed = replace(record, settings={**SETTINGS, "run.seed": "2"})
    assert record.fingerprint == other_workers.fingerprint != other_seed.fingerprint


def test_a_held_run_is_refused_with_its_reasons_and_what_to_do(storage: str) -> None:
    record = read_record(storage, "night")
    assert record is not None
    write_record(storage, record, status="held", held_because=("it guesses", "cat vanished"))
    with pytest.raises(PencilError, match=r"run night is held.*it guesses; cat vanished") as refused:
        find_record(storage, "night", SETTINGS)
    assert "promote CONFIG night`" in str(refused.value)
    Storage(storage).put_json("runs/night/summary.json", {"corrected": 0})
    with pytest.raises(PencilError, match="No label changed: to release them would publish the"):
        find_record(storage, "night", SETTINGS)


def test_the_gate_may_change_when_a_run_resumes(storage: str) -> None:
    assert find_record(storage, "night", {**SETTINGS, "gate.hold": "False"}) is not None
