import subprocess
import sys
from pathlib import Path

import pytest

from pencil_scale.running.run_lock import run_lock
from pencil_scale.running.run_record import RunNameError

HOLD = "import sys; from pencil_scale.running.run_lock import run_lock\nwith run_lock(sys.argv[1], 'demo'): print('held', flush=True); sys.stdin.read()"


def test_a_second_command_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(RunNameError, match="demo is being trained by another command"),
            run_lock(str(tmp_path), "demo"),
        ):
            pass
        with run_lock(str(tmp_path), "another"):
            pass
        holder.kill()
        holder.wait()
        with run_lock(str(tmp_path), "demo"):
            pass


def test_a_run_that_was_refused_lets_go(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="refused"), run_lock(str(tmp_path), "demo"):
        raise ValueError("refused")
    with run_lock(str(tmp_path), "demo"):
        pass
