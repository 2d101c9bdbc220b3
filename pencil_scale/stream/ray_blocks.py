"""Ray blocks: Ray Data reads the pieces of one or more epochs in other processes and returns tables in order.

A rank makes one `streaming_split(1)` iterator and keeps it over all epochs: its executor runs in an actor,
outside the training process, and a new epoch costs tenths of a second. When an epoch starts, Ray asks our
Datasource for read tasks, more than once; the Datasource gets the pieces from a small actor, in which the
rank stored them before.

    source = RayBlocks(spec, world=8, worker_cpus=4, for_evaluation=False, ahead_bytes=2 << 30)
    for table in source.blocks(pieces): ...      # may be left at any time, and called again

Torch is not imported here, because the executor's actor and every read task would have to load it.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.data import Datasource, ExecutionOptions, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import RayError

from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.live_metrics import count_retries
from pencil_scale.stream.plan import Piece
from pencil_scale.stream.ray_tasks import cause_of, cluster_resource, relay_retries
from pencil_scale.stream.window_reader import ReadSpec, read_piece

STORE_SHARE = 0.5  # of the object store, for all ranks together
LEAST_AHEAD_BYTES = 1 << 30  # keeps all processors busy however small an epoch is


@ray.remote(num_cpus=0)
class Pieces:
    """Holds what one rank reads next."""

    _pieces: Sequence[Piece] = ()

    def set(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def get(self) -> Sequence[Piece]:
        return self._pieces


def read_in_task(spec: ReadSpec, piece: Piece, control: Any) -> Iterator[pa.Table]:
    """Read a piece in a task of Ray, which counts and reports the retries of its process."""
    count_retries()
    if control is not None:
        relay_retries(control)
    return read_piece(spec, piece)


class PieceSource(Datasource):
    """Turns the pieces that are read next into read tasks."""

    def __init__(self, pieces: Any, spec: ReadSpec, control: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pieces, self._spec, self._control = pieces, spec, control

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        tasks = []
        for piece in ray.get(self._pieces.get.remote()):
            num_bytes = None if self._spec.gpu_share else piece.num_rows * self._spec.pixel_bytes
            about = BlockMetadata(piece.num_rows, num_bytes, input_files=None, exec_stats=None)
            read = partial(read_in_task, self._spec, piece, self._control)
            tasks.append(ReadTask(read, about, schema=self._spec.schema))
        return tasks


class RayBlocks:
    """The blocks of one rank, from epoch to epoch; its actors end with the last reference to it."""

    def __init__(
        self,
        spec: ReadSpec,
        world: int,
        worker_cpus: float,
        for_evaluation: bool,
        ahead_bytes: int,
        control: Any = None,
    ) -> None:
        """Each of `world` training processes reserves `worker_cpus`. Readers report retries to `control`.

        About `ahead_bytes`, but at least a gigabyte, are read ahead, if the object store has room.
        """
        self._pieces: Any = Pieces.remote()  # type: ignore[attr-defined]
        free_cpus = cluster_resource("CPU", 1.0) / world - worker_cpus
        dataset = ray.data.read_datasource(
            PieceSource(self._pieces, spec, control),
            # With one block requested Ray does not cut the blocks of few tasks into hundreds or single rows.
            override_num_blocks=1,
            **_task_options(free_cpus, for_evaluation),
        )
        store_bytes = STORE_SHARE * cluster_resource("object_store_memory", 1 << 30) / world
        dataset.context.execution_options = ExecutionOptions(
            resource_limits=ExecutionResources.for_limits(
                cpu=max(1.0, free_cpus),
                object_store_memory=min(store_bytes, max(LEAST_AHEAD_BYTES, ahead_bytes)),
            ),
            preserve_order=True,
        )
        # A little less than our own blocks, so that Ray passes each on unchanged instead of joining and
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


def _task_options(free_cpus: float, for_evaluation: bool) -> dict[str, Any]:
    """What a read task of a rank asks for.

    In training one task more runs than the rank has processors, so that none idles between two tasks. Where
    the workers leave less than one processor, a task asks for what there is: one that asked for a complete
    processor would wait for it forever, and the training for the task. In evaluation tasks ask for none, as
    those of the training stream hold on to their processors until their blocks are taken.
    """
    if for_evaluation:
        return {"num_cpus": 0.0, "concurrency": max(1, int(free_cpus))}
    num_tasks = 1 if free_cpus < 2 else int(free_cpus) + 1
    num_cpus = min(1.0, max(0.0, math.floor(100 * free_cpus / num_tasks) / 100))
    return {"num_cpus": num_cpus, **({"concurrency": 1} if free_cpus < 1 else {})}
