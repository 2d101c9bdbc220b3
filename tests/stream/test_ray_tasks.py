"""Work in Ray tasks: every result once, few tasks at a time, and errors without Ray's wrapping."""

import os
import sys
from collections.abc import Iterator

import pytest
from ray.exceptions import RayTaskError
from ray.train import WorkerGroupError

from pencil_scale.storage.errors import DamagedError, PencilError, TaskDiedError
from pencil_scale.storage.retries import RefusedError
from pencil_scale.stream.ray_tasks import cause_of, num_processors, reason_of, run_tasks


def multiplied(factor: int, number: int) -> int:
    return factor * number


def refused(_: None, number: int) -> None:
    raise DamagedError(f"shard {number}: damaged\nfetch it again")


def crashed(_: None, number: int) -> None:
    if number == 1:
        os._exit(1)


@pytest.fixture
def cluster(ray_session: None) -> None:
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.mark.ray
def test_every_piece_gives_one_result_and_few_are_started_ahead(cluster: None) -> None:
    taken = []

    def pieces() -> Iterator[tuple[int]]:
        for number in range(40):
            taken.append(number)
            yield (number,)

    results = run_tasks(multiplied, pieces(), shared=3)
    found = [next(results)]
    assert len(taken) == 2 * num_processors()
    assert dict([*found, *results]) == {number: 3 * number for number in range(40)}
    assert list(run_tasks(multiplied, [], shared=3)) == []


@pytest.mark.ray
def test_a_pencil_error_keeps_its_class_and_message(cluster: None) -> None:
    with pytest.raises(DamagedError) as raised:
        list(run_tasks(refused, [(7,)], shared=None))
    assert str(raised.value) == "shard 7: damaged\nfetch it again"


@pytest.mark.ray
def test_a_task_whose_process_dies_is_named_by_its_number(cluster: None) -> None:
    with pytest.raises(
        TaskDiedError, match=r"task 1: its process died in every attempt \(WorkerCr"
    ) as raised:
        list(run_tasks(crashed, [(0,), (1,)], shared=None))
    assert raised.value.number == 1


def wrapped(error: Exception) -> Exception:
    """Wrap an error as it arrives from a worker of Ray Train after passing two processes."""
    once = RayTaskError("read", "Traceback ...", error, "", 1, "ip").as_instanceof_cause()
    twice = RayTaskError("read", "Traceback ...", once, "", 1, "ip").as_instanceof_cause()
    return WorkerGroupError("worker 0 failed", {0: twice})


def test_a_pencil_error_is_found_inside_the_errors_of_ray() -> None:
    ours = DamagedError("shard 7: damaged")
    assert cause_of(wrapped(ours)) is ours
    assert cause_of(ours) is ours
    assert reason_of(wrapped(ours)) == "DamagedError: shard 7: damaged"
    other = wrapped(ValueError("no such key"))
    assert cause_of(other) is other
    assert reason_of(other) == "ValueError: no such key"


@pytest.mark.ray
def test_a_pencil_error_that_ended_the_start_of_an_actor_is_read_from_the_text_of_ray(cluster: None) -> None:
    import ray

    class Refused:
        def __init__(self) -> None:
            raise RefusedError("s3://lake/run: no access (403)")

        def work(self) -> None: ...

    with pytest.raises(ray.exceptions.ActorDiedError) as raised:
        ray.get(ray.remote(Refused).remote().work.remote())
    found = cause_of(raised.value)
    assert type(found) is RefusedError
    assert str(found) == "s3://lake/run: no access (403)"


def test_errors_that_refer_to_each_other_are_searched_once() -> None:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert cause_of(one) is one
    ours = PencilError("found")
    ours.__cause__ = one
    one.__context__ = ours
    assert cause_of(other) is ours
