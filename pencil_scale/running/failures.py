"""What Ray Train does about dead workers in silence, told to the driver: who died, and of what."""

from typing import Any

from ray.train import UserCallback

from pencil_scale.running.control import tell
from pencil_scale.shapes import without_passwords

LONGEST = 400  # characters of a reason


class TellFailures(UserCallback):
    """Runs beside Ray Train's controller, before it starts the workers again or gives up."""

    def __init__(self, control: Any) -> None:
        self._control = control

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Leave word of every rank that failed."""
        reasons = {rank: in_a_line(error) for rank, error in sorted(worker_exceptions.items())}
        tell(self._control, {"kind": "failed", "reasons": reasons})


def in_a_line(error: BaseException) -> str:
    """The innermost error in one line: what Ray wraps around it begins with pages of its own."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        seen.append(found)
        found = (
            getattr(found, "health_check_failure", None) or getattr(found, "cause", None) or found.__cause__
        )
    last = seen[-1]
    # Ray lists what it knows of an actor in lines of their own, set in; what happened stands around them.
    said = " ".join(line for line in str(last).splitlines() if not line.startswith(("\t", " ")))
    said, guesses, _ = said.partition(" Some common causes include:")
    if guesses:
        said += " It was killed, perhaps for want of memory, or it crashed."
    return str(without_passwords(f"{type(last).__name__}: {said}"))[:LONGEST]
