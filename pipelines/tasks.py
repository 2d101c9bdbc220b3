"""Tasks of a job: one function over many pieces of work, with progress on stderr.

    for number, counts in each("counting", count, [(rows,) for rows in stretches], shared=rule):
        ...                                       # as they finish; `number` is that of the piece

Pieces run as Ray tasks. A single piece, and work on a store in memory, which no task could see, runs in this
process. Progress is a bar on a terminal, and an occasional line in a log.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import rich.progress
from rich.console import Console

Result = TypeVar("Result")

LOG_EVERY_S = 15.0


def each(
    what: str,
    work: Callable[..., Result],
    pieces: Iterable[tuple[Any, ...]],
    shared: Any,
    *,
    here: bool = False,
    isolated: bool = False,
    num_pieces: int | None = None,
    num_done: int = 0,
) -> Iterator[tuple[int, Result]]:
    """Call `work(shared, *piece)` for every piece; yield the number of the piece with the result.

    With `here` all of it runs in this process; with `isolated` a single piece is a task too, as it might kill
    its process. `num_pieces` is needed if `pieces` has no length. `num_done` more count as done before.
    """
    if num_pieces is None:
        assert isinstance(pieces, Sequence)
        num_pieces = len(pieces)
    run = _run_here if here or (num_pieces <= 1 and not isolated) else _run_on_ray
    with Progress(what, num_done + num_pieces, num_done) as progress:
        for number, result in run(work, pieces, shared):
            progress.advance()
            yield number, result


def all_of(
    what: str, work: Callable[..., Result], pieces: Sequence[tuple[Any, ...]], shared: Any, here: bool
) -> list[Result]:
    """Do all pieces of work, as `each` does; return the results in the order of the pieces."""
    results = dict(each(what, work, pieces, shared, here=here))
    return [results[number] for number in range(len(pieces))]


def is_in_memory(url: str) -> bool:
    """Whether a store is in the memory of this process, where no task can see it."""
    return url.startswith("memory:")


def _run_here(
    work: Callable[..., Result], pieces: Iterable[tuple[Any, ...]], shared: Any
) -> Iterator[tuple[int, Result]]:
    for number, piece in enumerate(pieces):
        yield number, work(shared, *piece)


def _run_on_ray(
    work: Callable[..., Result], pieces: Iterable[tuple[Any, ...]], shared: Any
) -> Iterator[tuple[int, Result]]:
    # Ray takes seconds to import, which small jobs and --help need not wait for.
    from pencil_scale.stream.ray_tasks import run_tasks
    from pencil_scale.train.local_ray import ensure_ray

    ensure_ray()
    yield from run_tasks(work, pieces, shared)


class Progress:
    """Counts finished items of a known total on stderr, so that stdout has only the result."""

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

    def advance(self) -> None:
        """Count one more as done."""
        self._done += 1
        if self._bar:
            self._bar.advance(self._task)
        elif time.monotonic() - self._said_at > LOG_EVERY_S or self._done == self._total:
            self._said_at = time.monotonic()
            passed_s = self._said_at - self._started_at
            print(f"{self._what}: {self._done:,} of {self._total:,} after {passed_s:.0f} s", file=sys.stderr)
