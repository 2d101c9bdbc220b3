"""What all jobs share: pieces of work as Ray tasks, with progress on stderr, and a table of the results.

    for number, counts in each("counting", count, [(rows,) for rows in stretches], shared=rule):
        ...                                       # as they finish; `number` is that of the piece
    print_table("subset", {"samples": "500", "classes": "10"})

A single piece, and work on a store in memory, which no task could see, runs in this process.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from pencil_scale.config.settings import Config
from pencil_scale.storage.errors import PencilError

Result = TypeVar("Result")

LOG_EVERY_S = 5.0


def scratch_folder(config: Config) -> "tempfile.TemporaryDirectory[str]":
    """A folder on the local disk that `workers.scratch` names, which is removed in the end."""
    base = config.workers.scratch
    try:
        if base is not None:
            Path(base).mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=base)
    except OSError as error:
        raise PencilError(
            f"workers.scratch: {base}: {error.strerror}; name a folder on a local disk"
        ) from error


def each(
    what: str,
    work: Callable[..., Result],
    pieces: Sequence[tuple[Any, ...]],
    shared: Any,
    *,
    here: bool = False,
    isolated: bool = False,
) -> Iterator[tuple[int, Result]]:
    """Call `work(shared, *piece)` for every piece; yield the number of the piece with the result.

    With `here` all of it runs in this process; with `isolated` a single piece is a task too, as it might kill
    its process. Progress goes to stderr, so that stdout has only the result.
    """
    results: Iterable[tuple[int, Result]]
    if here or (len(pieces) <= 1 and not isolated):
        results = ((number, work(shared, *piece)) for number, piece in enumerate(pieces))
    else:
        # Ray takes seconds to import, which small jobs and --help need not wait for.
        from pencil_scale.stream.ray_tasks import run_tasks
        from pencil_scale.train.local_ray import ensure_ray

        ensure_ray()
        results = run_tasks(work, pieces, shared)
    started_at = said_at = time.monotonic()
    for num_done, (number, result) in enumerate(results, start=1):
        now = time.monotonic()
        if now - said_at > LOG_EVERY_S or num_done == len(pieces):
            said_at = now
            print(
                f"{what}: {num_done:,} of {len(pieces):,} after {now - started_at:.0f} s",
                file=sys.stderr,
                flush=True,
            )
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


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Print a table of names and values under a title, which a narrow table would wrap."""
    print(title, flush=True)
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(markup=False, highlight=False).print(table)
