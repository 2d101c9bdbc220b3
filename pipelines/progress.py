"""Progress: a bar on a terminal, a line now and then in a log.

with Progress("shards", total=1000) as progress:
    progress.advance(1)
"""

import sys
import time
from types import TracebackType

import rich.progress
from rich.console import Console

LOG_EVERY_S = 15.0


class Progress:
    """Counts things done of a known total, on stderr, so that stdout keeps the result alone."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done = what, total, done
        self._started_at = self._said_at = time.monotonic()
        self._bar: rich.progress.Progress | None = None
        if sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(what, total=total, completed=done)

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, num: int = 1) -> None:
        """Count some more as done."""
        self._done += num
        if self._bar:
            self._bar.advance(self._task, num)
        elif time.monotonic() - self._said_at > LOG_EVERY_S or self._done == self._total:
            self._said_at = time.monotonic()
            passed_s = self._said_at - self._started_at
            print(f"{self._what}: {self._done:,} of {self._total:,} after {passed_s:.0f} s", file=sys.stderr)
