"""Scratch folders of killed processes, made by real processes that are really killed."""

import subprocess
import sys
from pathlib import Path

from pencil_scale.train.preparation import claim_scratch, sweep_scratch

ROOT = Path(__file__).parents[2]


def hold(code: str, *arguments: str | Path) -> "subprocess.Popen[str]":
    """Run some code in another process, which prints a line and then waits."""
    words = [sys.executable, "-c", f"import sys\n{code}\nprint('held', flush=True)\nsys.stdin.read()"]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*words, *map(str, arguments)], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_is_left_alone_while_its_process_lives_and_removed_when_it_was_killed(
    tmp_path: Path,
) -> None:
    claimed = "from pencil_scale.train.preparation import claim_scratch\nclaim_scratch(sys.argv[1], 'labels')"
    process = hold(claimed, tmp_path)
    (theirs,) = tmp_path.iterdir()
    (theirs / "labels.arrow").write_text("much")
    ours = claim_scratch(str(tmp_path), "checkpoint")
    assert set(tmp_path.iterdir()) == {theirs, ours}
    process.kill()
    process.wait()
    another = claim_scratch(str(tmp_path), "checkpoint")
    assert set(tmp_path.iterdir()) == {ours, another}


def test_folders_that_are_not_scratch_are_never_swept(tmp_path: Path) -> None:
    for name in ("pencil_scale-outbox-12", "pencil_scale-ab34", "photos"):
        (tmp_path / name).mkdir()
    assert sweep_scratch(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_scratch_folder_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    assert claim_scratch(str(tmp_path / "fast" / "disk"), "labels").is_dir()
