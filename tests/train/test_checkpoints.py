"""Checkpoints come back bit for bit or not at all, and Ray's files about them are complete or absent."""

import json
import pickle
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.fs
import pytest
import torch
from label_making import names, new_labels

from pencil_scale.labels.manifest import Manifest, fold_id
from pencil_scale.labels.run_record import RunRecord, write_record
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.errors import PencilError
from pencil_scale.train.checkpoints import (
    SNAPSHOT,
    CheckpointStore,
    Kept,
    Progress,
    Saved,
    fetch_checkpoint,
    read_checkpoint,
    write_checkpoint,
)

RUN = "a1b2"


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    model = build_backbone("small_convnet", 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    labels = new_labels(tmp_path / "store", [0, 1, 2], names(10))
    figures = [{"epoch": 0, "stage": "backbone", "loss": 2.3}]
    progress = Progress(epoch=1, step=3, all_steps=7, num_unreadable=2, unreadable=["a.png", "b.png"])
    best = Kept(1, {name: tensor + 1 for name, tensor in model.state_dict().items()}, labels)
    weights, momenta = model.state_dict(), optimizer.state_dict()
    return Saved(RUN, weights, momenta, progress, labels, figures, best, agreed=[3, 7])


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path, saved: Saved) -> None:
    (tmp_path / "checkpoint").mkdir()
    for progress in (Progress(), saved.progress):  # within one process, the next is written over the last
        write_checkpoint(tmp_path / "checkpoint", replace(saved, progress=progress))
    found = read_checkpoint(tmp_path / "checkpoint", RUN)
    assert (found.progress, found.labels, found.figures) == (saved.progress, saved.labels, saved.figures)
    assert (found.best.epoch, found.best.labels, found.agreed) == (1, saved.labels, [3, 7])
    for name, tensor in saved.weights.items():
        assert torch.equal(found.weights[name], tensor)
        assert torch.equal(found.best.weights[name], tensor + 1)
    momentum = saved.optimizer["state"][0]["momentum_buffer"]
    assert torch.equal(found.optimizer["state"][0]["momentum_buffer"], momentum)


@pytest.mark.parametrize(
    "name", ["weights.pt", "optimizer.pt", "labels.json", "state.json", "best/weights.pt"]
)
def test_a_checkpoint_that_lacks_or_garbles_a_file_is_refused(
    tmp_path: Path, saved: Saved, name: str
) -> None:
    (tmp_path / "checkpoint").mkdir()
    write_checkpoint(tmp_path / "checkpoint", saved)
    path = tmp_path / "checkpoint" / name
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(PencilError, match="checkpoint") as caught:
        read_checkpoint(tmp_path / "checkpoint", RUN)
    path.unlink()
    with pytest.raises(PencilError, match="not a complete checkpoint"):
        read_checkpoint(tmp_path / "checkpoint", RUN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["weights.pt", "optimizer.pt", "labels.json", "state.json", "best/weights.pt", "best/labels.json"]
)
def test_one_flipped_bit_is_noticed_and_the_checkpoint_is_copied_again(
    tmp_path: Path, saved: Saved, name: str
) -> None:
    write_checkpoint(tmp_path, saved)
    intact = (tmp_path / name).read_bytes()
    number = next(n for n in range(len(intact) // 2, len(intact)) if 0x31 <= intact[n] < 0x39 or n % 97 == 0)
    flipped = bytearray(intact)
    flipped[number] ^= 1  # a digit becomes another one, so that JSON stays valid
    copies = [bytes(flipped), intact]

    @contextmanager
    def copied() -> Iterator[str]:
        (tmp_path / name).write_bytes(copies.pop(0))
        yield str(tmp_path)

    assert fetch_checkpoint(copied, RUN).progress == saved.progress
    copies += [bytes(flipped), bytes(flipped)]
    with pytest.raises(PencilError, match=rf"not a complete checkpoint \({name} is damaged\)"):
        fetch_checkpoint(copied, RUN)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, saved: Saved) -> None:
    write_checkpoint(tmp_path, saved)
    with pytest.raises(PencilError, match=r"version 5 and run id a1b2; expected version 5 and run id c3d4"):
        read_checkpoint(tmp_path, "c3d4")


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


def test_label_parts_that_no_checkpoint_names_any_more_are_removed_while_a_run_trains(tmp_path: Path) -> None:
    keep = 2
    start = new_labels(tmp_path / "labels", [0, 1, 2], names(10), run=RUN)
    table, most, unsaved = LabelTable.restore(start, tmp_path / "scratch"), 0, dict[str, list[Manifest]]()
    for step in range(1, 9):
        attempt = 1 if step < 5 else 2  # the run is killed and resumed after step 4
        unsaved = unsaved if step != 5 else {}
        store = CheckpointStore(str(tmp_path), "tiny", RUN)
        unsaved = store.sweep(attempt, unsaved, [start])
        table.write([0, 1], torch.full((2, 10), float(step)), None, epoch=step)
        manifest = table.snapshot()
        unsaved[f"checkpoint-{step:09d}"] = [manifest]
        most = max(most, len(list((tmp_path / "labels" / "parts" / RUN).iterdir())))
        # Ray commits a checkpoint, and then removes those that are too many.
        folder = tmp_path / "checkpoints" / "tiny" / store.attempt_name(attempt)
        (folder / f"checkpoint-{step:09d}").mkdir(parents=True)
        (folder / f"checkpoint-{step:09d}" / "labels.json").write_bytes(manifest.encode())
        latest = {"latest_checkpoint_result": {"checkpoint_dir_name": f"checkpoint-{step:09d}"}}
        (folder / SNAPSHOT).write_text(json.dumps(latest))
        for old in sorted(folder.glob("checkpoint-0*"))[:-keep]:
            shutil.rmtree(old)
        for kept in (tmp_path / "checkpoints").glob("*/*/*/labels.json"):
            LabelTable.restore(Manifest.load(kept), tmp_path / "again")
    assert most == keep + 2
    store.sweep(2, unsaved, [start])
    assert len(list((tmp_path / "labels" / "parts" / RUN).iterdir())) == keep + 1
    assert store.attempts() == [2]


def test_the_parts_of_a_checkpoint_that_is_not_committed_yet_stay(tmp_path: Path) -> None:
    start = new_labels(tmp_path / "labels", [0, 1, 2], names(10), run=RUN)
    table = LabelTable.restore(start, tmp_path / "scratch")
    table.write([0], torch.ones(1, 10), None, epoch=1)
    best = table.snapshot()
    table.write([0], torch.zeros(1, 10), None, epoch=2)
    waiting = {"checkpoint-000000001": [table.snapshot(), best]}
    store = CheckpointStore(str(tmp_path), "tiny", RUN)
    assert store.sweep(1, waiting, [start]) == waiting
    for labels in waiting["checkpoint-000000001"]:
        LabelTable.restore(labels, tmp_path / "again")
    assert store.sweep(1, {}, [start]) == {}
    with pytest.raises(PencilError, match="missing"):
        LabelTable.restore(best, tmp_path / "again")


def test_workers_of_a_command_that_was_replaced_remove_nothing(tmp_path: Path) -> None:
    start = new_labels(tmp_path / "labels", [0, 1, 2], names(10), run=RUN)
    table = LabelTable.restore(start, tmp_path / "scratch")
    table.write([0], torch.ones(1, 10), None, epoch=1)
    coming = table.snapshot()  # of the new command, which no checkpoint names yet
    write_record(str(tmp_path), RunRecord("tiny", RUN, {}, 1, (), {}, "", attempt=2))
    store = CheckpointStore(str(tmp_path), "tiny", RUN)
    store.sweep(1, {}, [start])
    LabelTable.restore(coming, tmp_path / "again")
    store.sweep(2, {}, [start])
    with pytest.raises(PencilError, match="missing"):
        LabelTable.restore(coming, tmp_path / "again")


def test_a_damaged_manifest_stops_the_sweeping_but_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = new_labels(tmp_path / "labels", [0, 1, 2], names(10), run=RUN)
    (tmp_path / "labels" / "published").mkdir()
    (tmp_path / "labels" / "published" / "other.json").write_text("{")
    assert CheckpointStore(str(tmp_path), "tiny", RUN).sweep(1, {}, []) == {}
    assert "were not removed" in caplog.text
    LabelTable.restore(start, tmp_path / "again")


def test_the_parts_of_a_fold_and_of_a_night_stay_while_a_run_trains(tmp_path: Path) -> None:
    named = {"runs/tiny/fold-1-labels.json": fold_id(RUN, 1), "nights/n/carried.json": RUN}
    for name, run in named.items():
        labels = new_labels(tmp_path / "labels", [0, 1, len(run)], names(50), run=run)
        (tmp_path / name).parent.mkdir(parents=True)
        labels.save(tmp_path / name)
    CheckpointStore(str(tmp_path), "tiny", RUN).sweep(1, {}, [])
    for name, run in named.items():
        kept = LabelTable.restore(Manifest.load(tmp_path / name), tmp_path / "again")
        assert kept.read(np.arange(3), "noisy_class").tolist() == [0, 1, len(run)]
