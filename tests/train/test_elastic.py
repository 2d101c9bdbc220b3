"""A run with a variable number of workers: nodes leave, come and die."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from training_runs import TinyData, mlflow_runs, starts

from pencil_scale.train.driver import RESIZE_VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """A head without room for workers, and two nodes with room for one worker each."""
    from ray.cluster_utils import Cluster

    nodes = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    head = {**nodes, "num_cpus": 1, "include_dashboard": False}  # saves memory
    started = Cluster(initialize_head=True, head_node_args=head)
    yield started, [started.add_node(**nodes) for _ in range(2)]
    started.shutdown()


OTHER_JOB = """
import sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(log_to_driver=False)
class Other:
    def is_there(self):
        return True
there = NodeAffinitySchedulingStrategy(sys.argv[1], soft=False)
other = ray.remote(num_cpus=0, lifetime="detached", name="other")(Other)
assert ray.get(other.options(scheduling_strategy=there).remote().is_there.remote())
"""
COUNT = """
from pencil_scale.stream.ray_tasks import alive_nodes, cluster_resource
from pencil_scale.train.local_ray import ensure_ray
ensure_ray()
print(len(alive_nodes()), cluster_resource("CPU"))
"""


def run_beside(env: dict[str, str], code: str, *words: str) -> str:
    """Run some code in another job of the cluster; return what it prints."""
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_elastic_run_saves_before_a_node_leaves_continues_smaller_grows_again_and_survives_a_dead_node(
    cluster: Any, tmp_path: Path
) -> None:
    nodes, (_, leaving) = cluster
    data = TinyData.make(tmp_path, num_samples=800)
    options = ["workers.cpus=1.5", "workers.timeout_s=30", "workers.count=[1,2]", "gate.hold=false"]
    # Long epochs, so that the notice arrives in the middle of one.
    options += ["checkpoint.every_steps=null", "optimizer.batch_per_worker=2", "stages.finetune.epochs=200"]
    env = {"RAY_ADDRESS": nodes.address, RESIZE_VARIABLE: "5"}
    with data.start(*options, env=env) as command:
        command.wait_for("backbone +epoch 1/")
        run_beside(env, OTHER_JOB, leaving.node_id)  # without it, Ray would end the node when it is idle
        deadline_ms = time.time_ns() // 1_000_000 + 3_600_000
        reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
        client = GcsClient(address=nodes.address)
        assert client.drain_node(leaving.node_id, reason, "a spot notice", deadline_ms)[0]
        command.wait_for("worker . failed: PreemptedError")
        command.wait_for("training with 1 worker from epoch")
        command.wait_for(r"images/s", times=command.output.count("images/s") + 1)
        assert run_beside(env, COUNT) == "3 3.0\n"  # nodes, and processors of the two that stay
        nodes.remove_node(leaving)
        doomed = nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
        command.wait_for("training with 2 workers from epoch")  # Ray looks for new nodes every 20 s
        command.wait_for(r"images/s", times=command.output.count("images/s") + 1)
        nodes.remove_node(doomed, allow_graceful=False)
        command.wait_for("training with 1 worker from epoch", times=2)
        command.wait_for(r"images/s", times=command.output.count("images/s") + 1)
        command.stop()
        assert command.wait() == 143, command.output
    assert f"PreemptedError: node {leaving.node_id} is being taken away; saved" in command.output
    _, (_, smaller), *_ = starts(command.output)
    assert smaller.step > 0  # only the notice saves in the middle of an epoch
    client, runs = mlflow_runs(data)
    (parent,) = (run.info.run_id for run in runs if run.info.run_name == "tiny")
    visited = client.get_metric_history(parent, "epoch/rows_visited")
    assert [value.step for value in visited] == list(range(len(visited)))
    assert {value.value for value in visited} == {data.num_samples}
