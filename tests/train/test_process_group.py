"""A signal to the process group of a command reaches the command, but not what it starts in another group."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

CODE = """
import os, subprocess, sys
from pencil_scale.train.local_ray import another_group
ours = os.getpgrp()
try:
    with another_group():
        child = subprocess.Popen(["sleep", "60"])
        print("inside", child.pid, os.getpgid(child.pid) == ours, flush=True)
        input()
except KeyboardInterrupt:
    sys.exit(130)
print("back", os.getpgrp() == ours, flush=True)
input()
"""

STARTS_RAY = """
import sys
from pencil_scale.config.command import exit_code
from pencil_scale.train.local_ray import ensure_ray
sys.exit(exit_code(ensure_ray))
"""


def start(**options: Any) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", options.pop("code", CODE)]
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, **options)


def say(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def read_words(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_group_spares_the_child_and_takes_effect_when_we_are_back(
    number: int, code: int
) -> None:
    with start(process_group=0) as command:
        _, child, together = read_words(command)
        try:
            assert together == "False"
            os.killpg(command.pid, number)
            os.kill(int(child), 0)
            say(command)
            assert command.wait(60) == code
            os.kill(int(child), 0)  # raises if it were gone
        finally:
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("options", [{"process_group": 0}, {"start_new_session": True}, {}])
def test_afterwards_the_process_is_in_its_old_group(options: dict[str, Any]) -> None:
    with start(**options) as command:
        _, child, together = read_words(command)
        os.kill(int(child), signal.SIGKILL)
        assert together == str("start_new_session" in options)  # the leader of a session cannot leave
        say(command)
        assert read_words(command) == ["back", "True"]
        say(command)
        assert command.wait(60) == 0


def test_sigterm_while_ray_starts_ends_with_the_code_of_a_shell() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with start(code=STARTS_RAY, env=environment) as command:
        while subprocess.run(["pgrep", "-P", str(command.pid), "gcs_server"], capture_output=True).returncode:
            assert command.poll() is None
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 143
