"""Where Ray keeps its checkpoints: files are complete or absent, and uncommitted checkpoints are removed."""

import json
import pickle
import resource
from pathlib import Path

import pyarrow.fs
import pytest

from pencil_scale.storage.errors import PencilError
from pencil_scale.train.checkpoints import SNAPSHOT, CheckpointStore


def test_a_file_being_rewritten_still_has_its_old_content(tmp_path: Path) -> None:
    files, folder = CheckpointStore(str(tmp_path), "tiny", "aaaa").filesystem()
    files.create_dir(folder)
    name = f"{folder}/{SNAPSHOT}"
    with files.open_output_stream(name) as stream:
        stream.write(b"old")
    with files.open_output_stream(name) as stream:
        stream.write(b"new and longer")
        assert Path(name).read_bytes() == b"old"  # what a kill at this moment would leave
    assert Path(name).read_bytes() == b"new and longer"
    assert [path.name for path in Path(folder).iterdir()] == [SNAPSHOT]


def test_a_file_that_did_not_fit_keeps_its_old_content(tmp_path: Path) -> None:
    files, folder = CheckpointStore(str(tmp_path), "tiny", "aaaa").filesystem()
    files.create_dir(folder)
    Path(folder, "state.json").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with (
            pytest.raises(PencilError, match=r"state.json: File too large; nothing unfinished was kept"),
            files.open_output_stream(f"{folder}/state.json") as out,
        ):
            out.write(b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(folder, "state.json").read_text() == "old"
    assert [path.name for path in Path(folder).iterdir()] == ["state.json"]


def test_the_store_travels_to_other_processes_and_copies_folders(tmp_path: Path) -> None:
    files, folder = CheckpointStore(str(tmp_path), "tiny", "aaaa").filesystem()
    files = pickle.loads(pickle.dumps(files))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "weights.pt").write_bytes(b"weights")
    files.create_dir(f"{folder}/there")
    source = pyarrow.fs.LocalFileSystem()
    pyarrow.fs.copy_files(
        str(tmp_path / "here"), f"{folder}/there", source_filesystem=source, destination_filesystem=files
    )
    assert Path(folder, "there", "weights.pt").read_bytes() == b"weights"


def listed(storage: Path, attempt: str, *checkpoints: str) -> None:
    """What Ray leaves of an attempt: checkpoints, of which its list names the last as the latest."""
    folder = storage / "checkpoints" / "tiny" / attempt
    for name in checkpoints:
        (folder / name).mkdir(parents=True)
    latest = {"checkpoint_dir_name": checkpoints[-1]} if checkpoints else None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SNAPSHOT).write_text(json.dumps({"latest_checkpoint_result": latest}))


def test_a_run_finds_the_newest_committed_checkpoint_of_its_own_attempts(tmp_path: Path) -> None:
    mine, other = (
        CheckpointStore(str(tmp_path), "tiny", "aaaa"),
        CheckpointStore(str(tmp_path), "tiny", "bbbb"),
    )
    assert mine.newest() is None
    listed(tmp_path, "aaaa-0001", "checkpoint-000000003", "checkpoint-000000006")
    listed(tmp_path, "aaaa-0002")  # ended before its first checkpoint
    listed(tmp_path, "bbbb-0009", "checkpoint-000000099")  # an earlier run of the same name
    (tmp_path / "checkpoints" / "tiny" / "aaaa-0003" / "checkpoint-000000009").mkdir(
        parents=True
    )  # not listed
    found = mine.newest()
    assert found is not None
    assert found[0] == 1
    assert found[1].endswith("aaaa-0001/checkpoint-000000006")
    assert CheckpointStore(str(tmp_path), "tiny", "cccc").newest() is None
    assert mine.remove(before=2) == [1]
    assert mine.remove() == [2, 3]
    assert other.attempts() == [9]
