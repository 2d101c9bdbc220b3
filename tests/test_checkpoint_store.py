"""Where Ray keeps its checkpoints: a file there is whole or not there, and what never counted goes."""

import json
import os
import pickle
import time
from pathlib import Path

import pyarrow.fs
import pytest

from pencil_scale.running.checkpoint_store import SNAPSHOT, checkpoint_store, sweep_checkpoints


def test_a_file_being_rewritten_still_has_its_old_content(tmp_path: Path) -> None:
    files, folder = checkpoint_store(str(tmp_path))
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
    files, folder = checkpoint_store(str(tmp_path))
    files.create_dir(folder)
    Path(folder, "state.json.unfinished").symlink_to("/dev/full")
    Path(folder, "state.json").write_text("old")
    with (
        pytest.raises(OSError, match="No space left"),
        files.open_output_stream(f"{folder}/state.json") as out,
    ):
        out.write(b"x" * 100_000)
    assert Path(folder, "state.json").read_text() == "old"


def test_the_store_travels_to_other_processes_and_copies_folders(tmp_path: Path) -> None:
    files, folder = checkpoint_store(str(tmp_path))
    files = pickle.loads(pickle.dumps(files))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "weights.pt").write_bytes(b"weights")
    files.create_dir(f"{folder}/there")
    source = pyarrow.fs.LocalFileSystem()
    pyarrow.fs.copy_files(
        str(tmp_path / "here"), f"{folder}/there", source_filesystem=source, destination_filesystem=files
    )
    assert Path(folder, "there", "weights.pt").read_bytes() == b"weights"


def test_only_checkpoints_that_never_counted_are_swept(tmp_path: Path) -> None:
    run = tmp_path / "checkpoints" / "tiny"
    for name in ("checkpoint-000000003", "checkpoint-000000006", "logs"):
        (run / name).mkdir(parents=True)
    assert sweep_checkpoints(str(tmp_path), "tiny") == []  # no list: nothing can be said
    (run / SNAPSHOT).write_text(json.dumps({"checkpoint_results": ["checkpoint-000000003"]}))
    assert sweep_checkpoints(str(tmp_path), "tiny") == ["checkpoint-000000006"]
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["checkpoint-000000003", "logs"]


def test_an_upload_that_may_still_be_under_way_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "checkpoints" / "tiny"
    for name, age_s in (("checkpoint-000000003", 0), ("checkpoint-000000006", 3600)):
        (run / name).mkdir(parents=True)
        (run / name / "weights.pt").write_bytes(b"")
        os.utime(run / name / "weights.pt", (time.time() - age_s,) * 2)
    (run / SNAPSHOT).write_text("{}")
    assert sweep_checkpoints(str(tmp_path), "tiny") == ["checkpoint-000000006"]
