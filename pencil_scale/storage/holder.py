"""Holder: which process holds a lease, and, as far as this machine can tell, whether it is still alive.

holder = this_process()
is_alive(holder)            # True, False, or None where it ran elsewhere or is suspended
"""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath


@dataclass(frozen=True)
class Holder:
    """A process. `machine` names the boot and the process namespace in which `pid` means something."""

    host: str
    pid: int
    command: str
    machine: str  # empty where the system does not tell
    born: str  # when the process started, in the machine's own ticks: process ids are used again

    def spelled(self) -> str:
        return f"{self.command}, process {self.pid} on {self.host}"


def this_process() -> Holder:
    """Describe this process."""
    _, born = _state_and_birth(os.getpid())
    return Holder(socket.gethostname(), os.getpid(), _command(), this_machine(), born)


def is_alive(holder: Holder) -> bool | None:
    """Whether a process of this machine is alive; None if it ran elsewhere, or the system does not tell.

    A suspended process (SIGSTOP, a debugger) may or may not wake: it is judged as one that ran elsewhere.
    """
    if not holder.machine or holder.machine != this_machine():
        return None
    state, born = _state_and_birth(holder.pid)
    if born != holder.born:
        return False
    return None if state in ("T", "t") else True


def this_machine() -> str:
    """Name this boot of this machine and this process namespace; containers have namespaces of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _state_and_birth(pid: int) -> tuple[str, str]:
    """Its state, and when it started; empty when it is gone, whether its parent has noticed or not."""
    try:
        # The name in parentheses may hold anything; the 1st field after it is the state, the 20th the start.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return ("", "") if fields[0] in "ZX" else (fields[0], fields[19])


def _command() -> str:
    """The module or program that runs, without its arguments: they may hold passwords."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return main.name if main else PurePath(sys.argv[0] or "python").name
