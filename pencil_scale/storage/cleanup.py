"""Clean-up after a job has succeeded: what cannot be removed is a warning, and nothing waits for it for long.

clean_up("staged files", lambda: remove_staged(store))
"""

import logging
import threading
from collections.abc import Callable

from pencil_scale.storage.retries import limited_to

LIMIT_S = 15.0  # for an access to a store that does not answer
MOST_S = 120.0

log = logging.getLogger(__name__)


def clean_up(what: str, work: Callable[[], object], most_s: float = MOST_S) -> None:
    """Do the work; a failure, or a store that hangs, is only logged, because the job has succeeded."""
    reasons = [f"still not done after {most_s:g} s"]

    def run() -> None:
        try:
            with limited_to(LIMIT_S):
                work()
            reasons.clear()
        except Exception as error:
            reasons[:] = [f"{type(error).__name__}: {error}"]

    thread = threading.Thread(target=run, name="clean-up", daemon=True)
    thread.start()
    thread.join(most_s)
    for reason in reasons:
        log.warning("%s could not be removed (%s); the job has succeeded all the same", what, reason)
