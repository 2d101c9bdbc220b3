"""The stream through Ray Data: the same rows in the same order, also on few processors; damage is named."""

import sys
from pathlib import Path

import numpy as np
import pytest
import stream_making
from stream_making import (
    CHANGED,
    NUM_ROWS,
    Shards,
    assert_damage_named,
    assert_own_pixels,
    damaged,
    five_shards,
    planned,
    rows_of,
    touched,
)

from pencil_scale.storage import retries
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.stream import StarvedError, Stream, StreamSpec


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return five_shards(tmp_path_factory.mktemp("stream"))


def read_epochs(spec: StreamSpec, rank: int, world: int, visited: np.ndarray) -> dict[str, np.ndarray]:
    """Read as a training process does, in a separate process; one epoch is left early."""
    stream = Stream(spec, rank, world)
    found = {"first": rows_of(list(stream.batches(0)))}
    for _ in stream.batches(1):
        break
    batches = list(stream.batches(2))
    for batch in batches:
        assert_own_pixels(batch)
    assert len(batches) == stream.num_steps()
    found["second"] = rows_of(batches)
    found["resumed"] = rows_of(list(stream.batches(2, visited)))
    stream.close()
    return found


@pytest.mark.ray
@pytest.mark.parametrize("world", [1, 2])
def test_through_ray_every_row_comes_once_in_the_order_of_the_plan(
    ray_session: None, shards: Shards, world: int
) -> None:
    import ray

    for module in (sys.modules[__name__], stream_making):  # workers cannot import tests
        ray.cloudpickle.register_pickle_by_value(module)
    spec = shards.spec(worker_cpus=1.0)
    visited = np.arange(NUM_ROWS) % 3 == 0
    task = ray.remote(num_cpus=1)(read_epochs)
    found = ray.get([task.remote(spec, rank, world, visited) for rank in range(world)])
    for rank, read in enumerate(found):
        alone = Stream(spec, rank, world, in_process=True)
        assert np.array_equal(read["first"], planned(alone, 0))
        assert np.array_equal(read["second"], planned(alone, 2))
        assert np.array_equal(read["resumed"], planned(alone, 2, visited))
    for name, expected in (("first", np.arange(NUM_ROWS)), ("resumed", np.flatnonzero(~visited))):
        assert np.array_equal(np.sort(np.concatenate([read[name] for read in found])), expected)


@pytest.mark.ray
def test_a_stream_whose_readers_find_no_processor_any_more_says_so_and_gives_up(
    ray_session: None, shards: Shards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    class Other:
        def is_there(self) -> bool:
            return True

    monkeypatch.setattr("pencil_scale.stream.stream.SLOW_S", 1.0)
    stream = Stream(shards.spec(worker_cpus=1.0, starved_s=4.0))
    other = ray.remote(num_cpus=ray.cluster_resources()["CPU"])(Other).remote()  # as if nodes had died
    assert ray.get(other.is_there.remote())
    try:
        with pytest.raises(StarvedError, match=r"worker 0 has had no samples for 4 s: .* free for reading"):
            list(stream.batches(0))
    finally:
        ray.kill(other)
        stream.close()
    said = [record.message for record in caplog.records if record.name == retries.log.name]
    assert [line.partition(":")[0] for line in said] == ["worker 0 has had no samples for 1 s"]


@pytest.mark.ray
@pytest.mark.parametrize("gpu_share", [0.3, 1.0])
def test_through_ray_the_same_images_stay_encoded(
    ray_session: None, shards: Shards, gpu_share: float
) -> None:
    spec = shards.spec(gpu_share=gpu_share)
    read = Stream(spec)
    alone = list(Stream(spec, in_process=True).batches(0))
    for found, expected in zip(read.batches(0), alone, strict=True):
        assert found.rows.tolist() == expected.rows.tolist()
        assert found.encoded == expected.encoded
        assert np.array_equal(found.images.numpy(), expected.images.numpy())
    read.close()


@pytest.mark.ray
def test_through_ray_reading_works_if_the_workers_leave_less_than_one_processor(
    ray_session: None, shards: Shards
) -> None:
    import ray

    class Worker:
        def is_ready(self) -> bool:
            return True

    num_cpus = ray.cluster_resources()["CPU"] - 0.5
    worker = ray.remote(num_cpus=num_cpus)(Worker).remote()  # reserves them
    assert ray.get(worker.is_ready.remote())
    stream = Stream(shards.spec(worker_cpus=num_cpus, num_epochs=3))
    for epoch in range(3):  # read one after another
        assert np.array_equal(rows_of(list(stream.batches(epoch))), planned(stream, epoch))
    stream.close()


@pytest.mark.ray
def test_through_ray_damage_is_named_and_a_changed_shard_stops_the_run_in_one_line(
    ray_session: None, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    stream = Stream(damaged(tmp_path / "a").spec())
    assert_damage_named(list(stream.batches(0)), tmp_path / "a")
    stream.close()
    stream = Stream(touched(tmp_path / "b").spec(resize=4))
    with pytest.raises(PencilError, match=CHANGED):
        list(stream.batches(0))
    stream.close()
