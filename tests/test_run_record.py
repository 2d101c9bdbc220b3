from pathlib import Path

import pytest

from pencil_scale.running.run_record import RunNameError, RunRecord, find_record, read_record, write_record
from pencil_scale.storage.lease import Lease, LeaseLostError

SETTINGS = {"run.seed": "1", "stages.pencil.epochs": "10", "workers.count": "(8, 8)"}


@pytest.fixture
def storage(tmp_path: Path) -> str:
    write_record(str(tmp_path), RunRecord("night", SETTINGS, 3, "labels.json"))
    return str(tmp_path)


def test_a_record_written_under_a_lease_names_its_attempt_and_is_kept_from_who_lost_it(storage: str) -> None:
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


def test_a_new_name_begins_a_new_run(storage: str) -> None:
    assert find_record(storage, "other", SETTINGS) is None


def test_the_same_settings_go_on_with_the_catalogue_they_began_with(storage: str) -> None:
    record = find_record(storage, "night", SETTINGS)
    assert record is not None
    assert record.catalogue_version == 3


def test_another_number_of_workers_may_go_on(storage: str) -> None:
    assert find_record(storage, "night", {**SETTINGS, "workers.count": "(2, 2)"}) is not None


def test_a_name_begun_with_other_settings_is_refused(storage: str) -> None:
    other = {**SETTINGS, "stages.pencil.epochs": "5", "run.seed": "2"}
    with pytest.raises(
        RunNameError, match=r"begun with run.seed=1, now it is 2 and 1 more keys; set it back"
    ):
        find_record(storage, "night", other)


def test_a_finished_run_is_refused(storage: str) -> None:
    record = read_record(storage, "night")
    assert record is not None
    write_record(storage, record, status="finished")
    with pytest.raises(RunNameError, match=r"run night is finished .*choose another run.name"):
        find_record(storage, "night", SETTINGS)
