"""Ray blocks: Ray Data reads the pieces of one or more epochs in other processes and returns tables in order.

A rank makes one `streaming_split(1)` iterator and keeps it over all epochs: its executor runs in an actor,
outside the training process, and a new epoch costs tenths of a second. When an epoch starts, Ray asks our
Datasource for read tasks, more than once; the Datasource gets the pieces from a small actor, in which the
rank stored them before.

    source = RayBlocks(spec, world=8, worker_cpus=4)
    for table in source.blocks(pieces): ...      # may be left at any time, and called again
    source.close()

Torch is not imported here, because the executor's actor and every read task would have to load it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.data import Datasource, ExecutionOptions, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import RayError

from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.plan import Piece
from pencil_scale.stream.ray_tasks import cause_of, cluster_resource
from pencil_scale.stream.window_reader import ReadSpec, read_piece

STORE_SHARE = 0.5  # of the object store, for all ranks together
LEAST_AHEAD_BYTES = 1 << 30  # keeps all processors busy however small an epoch is


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
    """Turns the pieces that are read next into read tasks."""

    def __init__(self, pieces: Any, spec: ReadSpec) -> None:
        start: Callable[[], None] = super().__init__
        start()
        self._pieces, self._spec = pieces, spec

    def get_name(self) -> str:
        return "Windows"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        size, tasks = self._spec.size, []
        for piece in ray.get(self._pieces.get.remote()):
            num_bytes = None if size is None else len(piece) * 3 * size[0] * size[1]
            about = BlockMetadata(len(piece), num_bytes, input_files=None, exec_stats=None)
            tasks.append(ReadTask(partial(read_piece, self._spec, piece), about, schema=self._spec.schema))
        return tasks


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
        """`worker_cpus` is what each of `world` training processes reserves.

        About `ahead_bytes`, but at least a gigabyte, are read ahead, if the object store has room. Set
        `beside_another` for evaluation: the training stream's tasks hold on to their processors until their
        blocks are taken, so the tasks of this one must not ask for any.
        """
        self._pieces: Any = Pieces.remote()  # type: ignore[attr-defined]
        free_cpus = cluster_resource("CPU", 1.0) / world - worker_cpus
        dataset = ray.data.read_datasource(
            PieceSource(self._pieces, spec),
            # With one block requested Ray does not cut the blocks of few tasks into hundreds or single rows.
            override_num_blocks=1,
            **(_task_options(0.0, int(free_cpus)) if beside_another else _task_options(free_cpus)),
        )
        store_bytes = STORE_SHARE * cluster_resource("object_store_memory", 1 << 30) / world
        dataset.context.execution_options = ExecutionOptions(
            resource_limits=ExecutionResources.for_limits(
                cpu=max(1.0, free_cpus),
                object_store_memory=min(store_bytes, max(LEAST_AHEAD_BYTES, ahead_bytes)),
            ),
            preserve_order=True,
        )
        # A little less than our own blocks, so that Ray passes each on as it is instead of joining and
        # cutting them.
        dataset.context.target_max_block_size = spec.block_bytes * 3 // 4
        dataset.context.enable_progress_bars = False
        dataset.context.print_on_execution_start = False
        (self._iterator,) = dataset.streaming_split(1)

    def blocks(self, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
        """Read these pieces; the iterator before must have been left or ended."""
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
        """Release the actors: they end with their last handle."""
        self._iterator = self._pieces = None


def _task_options(free_cpus: float, at_once: int = 1) -> dict[str, Any]:
    """What a read task of a rank asks for.

    One task more runs than the rank has processors, so that none idles between two tasks. Where the workers
    leave less than one processor, tasks ask for what there is: a task that asked for a complete one would
    wait for it forever, and the training for the task.
    """
    if 1 <= free_cpus < 2:
        return {}
    if free_cpus >= 2:
        return {"num_cpus": math.floor(100 * free_cpus / (math.floor(free_cpus) + 1)) / 100}
    return {"num_cpus": max(0.0, math.floor(free_cpus * 100) / 100), "concurrency": max(1, at_once)}
