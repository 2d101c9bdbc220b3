"""Shard tasks: shards indexed on the cluster, one task each, a bounded number under way.

What comes back through Ray is a report of a few hundred bytes; records go from the task to the store. What
a dead run had staged is taken over. A little is read here, in less time than a local Ray takes to start.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import ray

from pencil_scale.catalogue.changes import check_early
from pencil_scale.catalogue.shard_index import IndexRules
from pencil_scale.catalogue.shard_urls import Shard
from pencil_scale.catalogue.staging import ShardReport, stage_shard, staged_name
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.stream.ray_tasks import num_processors
from pencil_scale.train.local_ray import ensure_ray
from pipelines.progress import Progress

LITTLE_BYTES = 64 << 20


def stage_all(
    store: Folder, shards: Sequence[Shard], rules: IndexRules, rules_name: str, limit: float, what: str
) -> list[ShardReport]:
    """Stage the shards and give their reports in order; `limit` is the share that may be damaged."""
    tasks = [(shard, staged_name(shard, rules_name)) for shard in shards]
    total_bytes = sum(shard.version.num_bytes for shard in shards)
    run_all = _here if _is_little(store, total_bytes, rules) else _on_cluster
    reports: dict[str, ShardReport] = {}
    with Progress(what, len(tasks)) as progress:
        for report in run_all(store.url, tasks, rules):
            reports[report.staged_as] = report
            progress.advance()
            if len(reports).bit_count() == 1:  # after 1, 2, 4, 8 ... shards
                read = [(shard, reports[name]) for shard, name in tasks if name in reports]
                seen, found = zip(*read, strict=True)
                check_early(seen, found, total_bytes, limit)
    return [reports[name] for _, name in tasks]


def _is_little(store: Folder, total_bytes: int, rules: IndexRules) -> bool:
    """Tell whether a cluster would only cost time: none stands yet, and one core is done in a second.

    Decoding is left to tasks in any case: an image that kills its decoder must not kill the job.
    """
    if store.url.startswith("memory:"):  # cannot be shared with tasks; it is for trying things out
        return True
    stands = ray.is_initialized() or "RAY_ADDRESS" in os.environ
    return total_bytes <= LITTLE_BYTES and not stands and not rules.decode_images


def _here(store_url: str, tasks: Sequence[tuple[Shard, str]], rules: IndexRules) -> Iterator[ShardReport]:
    for shard, name in tasks:
        yield stage_shard(Folder(store_url), shard, rules, name)


def _on_cluster(
    store_url: str, tasks: Sequence[tuple[Shard, str]], rules: IndexRules
) -> Iterator[ShardReport]:
    """Run one task a shard, two a processor under way, and give reports as they come."""
    if not tasks:
        return
    ensure_ray()
    task = ray.remote(max_retries=3)(_stage)
    shared = ray.put(rules)  # label tables are held once a machine, not once a task
    waiting = list(reversed(tasks))
    running: dict[Any, Shard] = {}
    while waiting or running:
        while waiting and len(running) < 2 * num_processors():
            shard, name = waiting.pop()
            running[task.remote(store_url, shard, shared, name)] = shard
        for done in ray.wait(list(running), num_returns=1)[0]:
            yield _report(done, running.pop(done))


def _report(done: Any, shard: Shard) -> ShardReport:
    try:
        found: ShardReport | PencilError = ray.get(done)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise PencilError(
            f"shard {shard.url}: the process that read it died again and again ({type(error).__name__}); "
            "take it off the list, or index with data.check_images=header"
        ) from error
    if isinstance(found, PencilError):
        raise found
    return found


def _stage(store_url: str, shard: Shard, rules: IndexRules, name: str) -> ShardReport | PencilError:
    """Stage one shard; an error for people comes back as a value, without Ray's traceback around it."""
    try:
        return stage_shard(Folder(store_url), shard, rules, name)
    except PencilError as error:
        return error
