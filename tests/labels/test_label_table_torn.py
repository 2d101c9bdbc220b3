"""Label tables after a kill at any moment, on a full disk, and in a folder that cannot be written."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from label_making import names, new_labels, new_table, predicted

from pencil_scale.labels.manifest import Manifest, remove_unnamed
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError

NUM_ROWS, NUM_CLASSES, BATCH = 5000, 5, 250
STEPS = NUM_ROWS // BATCH
NUM_KILLS = 50

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pencil_scale.labels.table", "pytest"])


def value(rows: np.ndarray, epoch: int) -> np.ndarray:
    """The logits of rows after an epoch: no two rows or epochs share them."""
    return (rows[:, None] * 8 + np.arange(NUM_CLASSES) + (epoch + 1) / 64).astype(np.float32)


def state_after(num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and ledger after this many steps, worked out without a table."""
    epoch, step = divmod(num_steps, STEPS)
    rows = np.arange(NUM_ROWS)
    done = rows < step * BATCH
    logits = np.where(done[:, None], value(rows, epoch), value(rows, epoch - 1))
    if epoch == 0:
        start = np.eye(NUM_CLASSES, dtype=np.float32)[rows % NUM_CLASSES] * 10
        logits = np.where(done[:, None], logits, start)
    return logits, np.where(done, epoch + 1, epoch)


def predictions_after(last_epoch: np.ndarray) -> np.ndarray:
    """The log-probability of the last class kept of each row, at the last epoch of its ledger."""
    found = np.full(NUM_ROWS, np.nan, np.float16)
    for epoch in np.unique(last_epoch[last_epoch > 0]):
        rows = np.flatnonzero(last_epoch == epoch)
        found[rows] = predicted(rows, NUM_CLASSES, epoch - 1)[:, -1]
    return found


def write_and_snapshot_for_ever(folder: Path, manifest_path: Path, seed: int) -> None:
    """Resume from the last snapshot, as a restarted run would, with a snapshot every few steps."""
    manifest = Manifest.load(manifest_path)
    table = LabelTable.restore(manifest, folder / f"attempt-{seed}")
    rng = random.Random(seed)
    for num_steps in range(int(manifest_path.stem) + 1, 10**9):
        epoch, step = divmod(num_steps - 1, STEPS)
        rows = np.arange(step * BATCH, (step + 1) * BATCH)
        table.write(rows, value(rows, epoch), predicted(rows, NUM_CLASSES, epoch), epoch)
        if rng.random() < 0.3:
            table.snapshot().save(folder / "manifests" / f"{num_steps:08d}.json")


def kill_at_random(writer: BaseProcess, folder: Path, start: Path, rng: random.Random) -> None:
    """Kill a writer at any moment: half of them anywhere, the others some time after their first snapshot."""
    patient = rng.random() < 0.5
    while patient and manifests_of(folder)[-1] == start and writer.is_alive():
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.1))
    writer.kill()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL


def manifests_of(folder: Path) -> list[Path]:
    return sorted((folder / "manifests").glob("*.json"))


@pytest.mark.slow
def test_a_writer_killed_fifty_times_always_leaves_a_complete_snapshot(tmp_path: Path) -> None:
    start = new_labels(tmp_path / "store", np.arange(NUM_ROWS) % NUM_CLASSES, names(NUM_CLASSES))
    start.save(tmp_path / "manifests" / f"{0:08d}.json")
    rng, killed_inside, reached = random.Random(0), 0, set()
    for kill in range(NUM_KILLS):
        last = manifests_of(tmp_path)[-1]
        args = (tmp_path, last, kill)
        writer = CONTEXT.Process(target=write_and_snapshot_for_ever, args=args, daemon=True)
        writer.start()
        kill_at_random(writer, tmp_path, last, rng)

        *older, newest = manifests_of(tmp_path)
        restored = LabelTable.restore(Manifest.load(newest), tmp_path / "restored")
        logits, last_epoch = state_after(int(newest.stem))
        assert np.array_equal(restored.read(np.arange(NUM_ROWS)), logits)
        assert np.array_equal(restored.read(np.arange(NUM_ROWS), "last_epoch"), last_epoch)
        last_log_p = restored.read(np.arange(NUM_ROWS), "predicted_log_p")[:, -1]
        assert np.array_equal(last_log_p, predictions_after(last_epoch), equal_nan=True)

        # Files that no manifest names are what a snapshot had written when it was killed.
        killed_inside += bool(
            remove_unnamed(tmp_path / "store", start.run, map(Manifest.load, [*older, newest]))
        )
        for path in older:
            path.unlink()
        reached.add(newest.name)
        shutil.rmtree(tmp_path / f"attempt-{kill}", ignore_errors=True)
    assert len(reached) > 10  # the writers got somewhere between the kills
    assert killed_inside > 0


def in_small_disk(tmp_path: Path, options: str, code: str) -> str:
    """Run Python code in a new mount namespace, where `disk` is a small file system."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o {options} tmpfs {disk}"
    program = f"import sys; sys.path[:0] = {sys.path!r}; disk = {str(disk)!r}\n{code}"
    (tmp_path / "program.py").write_text(program)
    command = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f"{mount} || exit 77; exec {sys.executable} $0",
    ]
    found = subprocess.run(
        [*command, str(tmp_path / "program.py")], capture_output=True, text=True, check=False
    )
    if found.returncode == 77 or "unshare" in found.stderr:
        pytest.skip(f"this machine does not allow mounting a small disk: {found.stderr.strip()}")
    assert found.returncode == 0, found.stderr
    return found.stdout


FULL_DISK = """
import numpy as np
from label_making import new_labels
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError
from pathlib import Path
def files():
    return sorted(str(path.relative_to(disk)) for path in Path(disk).rglob("*") if path.is_file())
try:
    LabelTable.restore(new_labels(disk + "-elsewhere", np.zeros(100_000, int), "abcde"), disk + "/big")
except PencilError as error:
    print(error)
print(files())
table = LabelTable.restore(new_labels(disk + "/store", np.zeros(6_000, int), "abcde"), disk + "/small")
try:
    for epoch in range(9):
        table.write(np.arange(6_000), np.full((6_000, 5), epoch, np.float32), None, epoch)
        table.snapshot()
except PencilError as error:
    print(error)
assert not [name for name in files() if "unfinished" in name]
table.write([5], np.ones((1, 5), np.float32), None, epoch=9)
print(table.read([5]).tolist())
"""


@pytest.mark.slow
def test_a_full_disk_is_named_and_nothing_unfinished_stays(tmp_path: Path) -> None:
    lines = in_small_disk(tmp_path, "size=1m", FULL_DISK).splitlines()
    assert "big/labels.arrow: No space left on device; nothing unfinished was kept" in lines[0]
    assert lines[1] == "[]"
    assert "No space left on device" in lines[2]
    assert lines[3] == "[[1.0, 1.0, 1.0, 1.0, 1.0]]"


READ_ONLY = """
import subprocess
from pathlib import Path
import numpy as np
from label_making import new_labels, new_table
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError
table = new_table(Path(disk + "-elsewhere"), np.arange(3000) % 5, "abcde", disk + "/store")
table.write([7], np.ones((1, 5), np.float32), None, epoch=0)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
for attempt in (
    lambda: new_labels(disk + "/another", np.zeros(10, int), "abcde"),
    lambda: LabelTable.restore(table.manifest, disk + "/again"),
    lambda: table.snapshot(),
):
    try:
        attempt()
    except PencilError as error:
        print(error)
print(LabelTable.restore(table.manifest, disk + "-again").read([8]).argmax())
"""


@pytest.mark.slow
def test_a_read_only_folder_is_named_and_can_still_be_read(tmp_path: Path) -> None:
    lines = in_small_disk(tmp_path, "size=10m", READ_ONLY).splitlines()
    assert len(lines) == 4
    for line in lines[:3]:
        assert "cannot be written (Read-only file system); choose a folder this user may write to" in line
    assert lines[3] == "3"


def test_a_folder_under_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PencilError, match=r"cannot be written \(Not a directory\)"):
        new_labels(tmp_path / "file" / "store", np.zeros(10, int), names(5))
    manifest = new_labels(tmp_path / "store", np.zeros(10, int), names(5))
    with pytest.raises(PencilError, match=r"file/table/labels.arrow: cannot be written \(Not a directory\)"):
        LabelTable.restore(manifest, tmp_path / "file" / "table")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_another_user_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(PencilError, match="Permission denied"):
        new_table(tmp_path / "table", np.zeros(10, int), names(5))
