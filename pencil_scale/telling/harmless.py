"""Harmless: what may fail without ending a run, such as a picture or a record for MLflow.

harmless = Harmless()
with harmless("drawing class transitions"):
    ...                              # an exception is logged once, with its reason, and the run continues
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Harmless:
    """Logs the first failure of each kind, and swallows them all."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                reason = f"{type(error).__name__}: {error}"
                log.warning("%s failed (%s); training continues, later failures are not shown", what, reason)
