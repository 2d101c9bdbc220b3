"""List a process and its descendants, for benchmarks and tests.

family(os.getpid())     # {812: "python benchmarks/ingest.py", 820: "ray::IDLE", ...}
"""

import subprocess


def family(ancestor: int) -> dict[int, str]:
    """List a process and its descendants: process id to command line."""
    listed = subprocess.run(["ps", "-axo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [[*line.split(None, 2), ""][:3] for line in listed.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}
    found = {ancestor} & parents.keys()
    # Process ids wrap around, so a child may have a smaller one than its parent.
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {int(pid): words for pid, _, words in rows if int(pid) in found}
