"""Ray tasks: one function over many pieces of work, and the errors they end with.

    ensure_ray()                                     # from pencil_scale.train.local_ray
    for number, counts in run_tasks(count, [(rows,) for rows in stretches], shared=rule):
        ...                                          # as they finish; `number` counts the pieces

Two tasks per processor are under way at a time, so the pieces may come from a generator. `shared` is stored
once per machine, not once per task. A `PencilError` raised in a task is raised here, without Ray's traceback.

    raise cause_of(error) from None                  # any error of Ray: ours, if one is inside

    relay_retries(control)                           # to the driver of a run, from any process of it
"""

import logging
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import ray
from ray._private.state import state as ray_state
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, WorkerCrashedError

from pencil_scale.storage import retries
from pencil_scale.storage.errors import PencilError, TaskDiedError
from pencil_scale.storage.urls import without_passwords

Result = TypeVar("Result")

LONGEST = 400  # characters of a reason
KINDS = {kind.__name__: kind for kind in (retries.RefusedError, retries.UnreachableError)}
OURS = re.compile(r"^pencil_scale[.\w]*\.(\w+): (.+)$", re.MULTILINE)  # an error in a traceback


def run_tasks(
    work: Callable[..., Result],
    pieces: Iterable[tuple[Any, ...]],
    shared: Any,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Call `work(shared, *piece)` in a task for every piece; yield the piece's number with the result.

    `options` are Ray's, such as num_gpus.
    """
    task = ray.remote(**options)(work) if options else ray.remote(work)
    common = ray.put(shared)
    waiting = enumerate(pieces)
    running: dict[Any, int] = {}
    while True:
        for number, piece in islice(waiting, max(0, 2 * num_processors() - len(running))):
            running[task.remote(common, *piece)] = number
        if not running:
            return
        (done,), _ = ray.wait(list(running))
        number = running.pop(done)
        try:
            result: Result = ray.get(done)
        except (WorkerCrashedError, OutOfMemoryError) as error:
            raise TaskDiedError(number, error) from error
        except RayError as error:
            raise cause_of(error) from None
        yield number, result


def alive_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that have not ended, as Ray describes them."""
    all_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    return [node for node in all_nodes() if node["Alive"]]


def leaving_nodes() -> set[str]:
    """The ids of nodes that are about to leave.

    These take no more tasks: a task that needs a processor of theirs would wait forever.
    """
    return set(ray_state.get_draining_nodes())


def cluster_resource(name: str, unknown: float = 0.0) -> float:
    """How much of a resource the cluster has, busy or not, without nodes that are about to leave."""
    leaving = leaving_nodes()
    staying = [node for node in alive_nodes() if node["NodeID"] not in leaving]
    return sum(node["Resources"].get(name, 0.0) for node in staying) or unknown


def num_processors() -> int:
    """Count the processors of the cluster."""
    return max(1, int(cluster_resource("CPU", 1)))


class Relay(logging.Handler):
    """Passes on to the driver what is logged here: Ray would keep it in a file of this node."""

    def __init__(self, control: Any) -> None:
        super().__init__()
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        stores = {name: getattr(record, name, "") for name in ("waits_for", "answers")}
        event = {"kind": "logged", "text": record.getMessage(), **stores}
        self._control.report.remote(pickle.dumps(event))


def relay_retries(control: Any) -> Relay:
    """Tell the control of a run when this process waits for a store, from now on."""
    for handler in retries.log.handlers:
        if isinstance(handler, Relay):
            return handler
    relay = Relay(control)
    retries.log.addHandler(relay)
    return relay


def cause_of(error: BaseException) -> BaseException:
    """Find the `PencilError` inside an error of Ray; if it has none, return the error itself.

    Ray wraps an error once for every process it passes, in a class that also derives from that of the error.
    Of one that ended the start of an actor it keeps only the text.
    """
    seen = [error]
    for found in seen:  # grows on the way: breadth first
        if isinstance(found, PencilError) and not isinstance(found, RayError):
            return found
        inside = [*_wrapped(found), found.__context__]
        seen += [inner for inner in inside if inner is not None and inner not in seen]
    if isinstance(error, RayActorError) and (told := OURS.findall(str(error))):
        name, text = told[-1]
        return KINDS.get(name, PencilError)(text)
    return error


def reason_of(error: BaseException) -> str:
    """Say in one line what went wrong: our own error, or the innermost one."""
    last, seen = cause_of(error), set[int]()
    while not isinstance(last, PencilError) and id(last) not in seen:
        seen.add(id(last))
        last = next(iter(_wrapped(last)), last)
    # Ray puts what it knows about an actor on indented lines; the lines around them say what happened.
    text = " ".join(line for line in str(last).splitlines() if not line.startswith(("\t", " ")))
    text, guesses, _ = text.partition(" Some common causes include:")
    if guesses:
        text += " It was killed, perhaps because memory ran out, or it crashed."
    return str(without_passwords(f"{type(last).__name__}: {text}"))[:LONGEST]


def _wrapped(error: BaseException) -> list[BaseException]:
    """The errors that an error of Ray, or of Ray Train, wraps."""
    workers = getattr(error, "worker_failures", None) or {}
    others = [getattr(error, name, None) for name in ("health_check_failure", "controller_failure", "cause")]
    return [*workers.values(), *(inner for inner in (*others, error.__cause__) if inner is not None)]
