"""Process groups: what a command starts need not hear what is meant for the command.

with another_group():
    ray.init("local")           # Ctrl-C, `timeout` and schedulers signal a group: it reaches us, not Ray
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def another_group() -> Iterator[None]:
    """Put what is started inside into another process group; a signal to ours counts once we are back.

    A Ray that ended with SIGTERM would leave the workers nobody to save through. The leader of a session
    cannot leave its group: what it starts stays with it.
    """
    ours = os.getpgrp()
    with _idler() as keeper:  # a group needs a member to live on; this one also takes its signals
        with _idler(process_group=0) as other, suppress(PermissionError):
            os.setpgid(0, other.pid)
        try:
            yield
        finally:
            if os.getpgrp() != ours:
                os.setpgid(0, ours)
            keeper.send_signal(signal.SIGCONT)  # it may have been stopped, and has to end
    if keeper.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    if keeper.returncode < 0:
        raise SystemExit(128 - keeper.returncode)


def _idler(**options: Any) -> subprocess.Popen[bytes]:
    """A process that waits for the end of its `with`."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **options)
