"""Ray blocks: pieces of one epoch or several, read by Ray Data in other processes, as tables in their order.

One `streaming_split(1)` iterator is made and kept over the epochs: its executor lives in an actor, out of the
training process, and a new epoch costs tenths of a second. Each time it starts, Ray asks our Datasource for
read tasks, more than once; the Datasource asks a small actor, which the rank told its pieces beforehand.

    source = RayBlocks(spec, world=8, worker_cpus=4)
    for table in source.blocks(pieces): ...      # may be left at any time, and begun again
    source.close()

No torch is imported here: the executor's actor and every read task would have to load it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.data import DataContext, Datasource, ExecutionOptions, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import RayError

from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.plan import Piece
from pencil_scale.stream.ray_tasks import cause_of, cluster_resource
from pencil_scale.stream.window_reader import ReadSpec, read_piece

STORE_SHARE = 0.5  # of the object store, for all ranks together
LEAST_AHEAD_BYTES = 1 << 30  # all processors must find something to read, however small an epoch is


@ray.remote(num_cpus=0)
class Pieces:
    """Holds what one rank reads next."""

    def __init__(self) -> None:
        self._pieces: Sequence[Piece] = ()

    def set(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def get(self) -> Sequence[Piece]:
        return self._pieces


class PieceSource(Datasource):
    """Turns the pieces of the hour into read tasks."""

    def __init__(self, pieces: Any, spec: ReadSpec) -> None:
        start: Callable[[], None] = super().__init__
        start()
        self._pieces = pieces
        self._spec = spec

    def get_name(self) -> str:
        return "Windows"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        pieces: Sequence[Piece] = ray.get(self._pieces.get.remote())
        return [self._task(piece) for piece in pieces]

    def _task(self, piece: Piece) -> ReadTask:
        size = self._spec.size
        num_bytes = None if size is None else len(piece) * 3 * size[0] * size[1]
        about = BlockMetadata(num_rows=len(piece), size_bytes=num_bytes, input_files=None, exec_stats=None)
        return ReadTask(partial(read_piece, self._spec, piece), about, schema=self._spec.schema)


class RayBlocks:
    """The blocks of one rank, from epoch to epoch."""

    def __init__(
        self,
        spec: ReadSpec,
        world: int = 1,
        worker_cpus: float = 0.0,
        beside_another: bool = False,
        ahead_bytes: float = math.inf,
    ) -> None:
        """`worker_cpus` is what each of `world` training processes keeps for itself.

        About `ahead_bytes`, but never less than a gigabyte, may be read before anybody asks for them, if the
        object store has room for them.

        `beside_another` stream that is begun but not read, as while a run evaluates: its tasks hold on to
        their processors until somebody takes their blocks, so these must not ask for any.
        """
        self._pieces: Any = Pieces.remote()  # type: ignore[attr-defined]
        free_cpus = cluster_resource("CPU", 1.0) / world - worker_cpus
        dataset = ray.data.read_datasource(
            PieceSource(self._pieces, spec),
            # One block asked for: else Ray would cut the blocks of few tasks into hundreds, even single rows.
            override_num_blocks=1,
            **(_asked(0.0, int(free_cpus)) if beside_another else _asked(free_cpus)),
        )
        _limit(
            dataset.context,
            spec,
            max(1.0, free_cpus),
            min(_store(world), max(LEAST_AHEAD_BYTES, ahead_bytes)),
        )
        (self._iterator,) = dataset.streaming_split(1)

    def blocks(self, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
        """Read these pieces; one at a time, and the one before must have been left or ended."""
        if not pieces:
            return
        try:
            ray.get(self._pieces.set.remote(pieces))
            yield from self._iterator.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=2
            )
        except RayError as error:
            cause = cause_of(error)
            if isinstance(cause, PencilError):  # without the advice that Ray Data appends to the message
                cause.args = (str(cause).splitlines()[0],)
            raise cause from None

    def close(self) -> None:
        """Let go of the actors: they end with their last handle."""
        self._iterator = self._pieces = None


def _asked(free_cpus: float, at_once: int = 1) -> dict[str, Any]:
    """What a task of a rank asks for.

    One more task runs than the rank has processors, so that none idles between two of them. Where the workers
    leave less than a processor, tasks read with what there is: one that asked for a whole one would wait for
    it for ever, and the training for the task.
    """
    if 1 <= free_cpus < 2:
        return {}
    if free_cpus >= 2:
        return {"num_cpus": math.floor(100 * free_cpus / (math.floor(free_cpus) + 1)) / 100}
    return {"num_cpus": max(0.0, math.floor(free_cpus * 100) / 100), "concurrency": max(1, at_once)}


def _store(world: int) -> float:
    """One rank's share of the object store, in bytes."""
    return STORE_SHARE * cluster_resource("object_store_memory", 1 << 30) / world


def _limit(context: DataContext, spec: ReadSpec, cpus: float, store_bytes: float) -> None:
    """Keep one rank's reading to its share of what is free, in order, and without a report every epoch."""
    context.execution_options = ExecutionOptions(
        resource_limits=ExecutionResources.for_limits(cpu=cpus, object_store_memory=store_bytes),
        preserve_order=True,
    )
    # A little under our own block: Ray then passes each on as it is. Above, it would join and cut them anew.
    context.target_max_block_size = spec.block_bytes * 3 // 4
    context.enable_progress_bars = False
    context.print_on_execution_start = False
