"""Ray tasks: one function over many pieces of work, a bounded number under way, results as they come.

for place, counts in each(count, [(rows,) for rows in stretches], shared=rule, here=False):
    ...

Work over a store in memory, and work that is a single piece, is done here: no cluster could see or speed it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pencil_scale.storage.errors import PencilError

Result = TypeVar("Result")


def each(
    work: Callable[..., Result],
    pieces: Sequence[tuple[Any, ...]],
    shared: Any,
    here: bool = False,
) -> Iterator[tuple[int, Result]]:
    """Call `work(shared, *piece)` for every piece; gives the piece's number with its result."""
    if here or len(pieces) <= 1:
        for number, piece in enumerate(pieces):
            yield number, work(shared, *piece)
        return
    yield from _on_cluster(work, pieces, shared)


def is_in_memory(url: str) -> bool:
    """Whether a store is this process's memory, which no task could see."""
    return url.startswith("memory:")


def _on_cluster(
    work: Callable[..., Result], pieces: Sequence[tuple[Any, ...]], shared: Any
) -> Iterator[tuple[int, Result]]:
    import ray

    from pencil_scale.stream.ray_tasks import num_processors
    from pencil_scale.train.local_ray import ensure_ray

    ensure_ray()
    task = ray.remote(max_retries=3)(_guarded)
    common = ray.put(shared)  # held once a machine, not once a task
    waiting = list(enumerate(pieces))[::-1]
    running: dict[Any, int] = {}
    while waiting or running:
        while waiting and len(running) < 2 * num_processors():
            number, piece = waiting.pop()
            running[task.remote(work, common, piece)] = number
        for done in ray.wait(list(running), num_returns=1)[0]:
            result = ray.get(done)
            if isinstance(result, PencilError):
                raise result
            yield running.pop(done), result


def _guarded(work: Callable[..., Any], shared: Any, piece: tuple[Any, ...]) -> Any:
    """An error for people comes back as a value, without Ray's traceback around it."""
    try:
        return work(shared, *piece)
    except PencilError as error:
        return error
