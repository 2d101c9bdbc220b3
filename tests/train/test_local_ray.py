"""A run that does not fit on this machine is refused before it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from training_runs import TinyData

from pencil_scale.config.settings import Workers
from pencil_scale.storage.errors import PencilError
from pencil_scale.train import __main__ as train
from pencil_scale.train.local_ray import require_room, what_is_missing

pytestmark = pytest.mark.ray


def test_workers_that_fit_are_not_mentioned(ray_session: None) -> None:
    assert what_is_missing(Workers(count=[1, 64], cpus=0.5)) == ""
    assert what_is_missing(Workers(in_process=True, cpus=64)) == ""


def test_too_many_processors_are_refused_with_both_numbers(ray_session: None) -> None:
    there = ray.cluster_resources()["CPU"]
    with pytest.raises(PencilError, match=f"workers: 50 need 100 CPUs, {there:g} are there; lower"):
        require_room(Workers(count=50, cpus=2.0))


def test_on_a_cluster_which_may_grow_the_run_prints_what_it_waits_for(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    require_room(Workers(count=900, gpu=True, cpus=0.001))
    assert "900 need 900 GPUs, 0 are there; the run waits" in capsys.readouterr().out


def test_a_dry_run_without_room_for_a_worker_counts_and_waits_for_nothing(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = str(TinyData.make(tmp_path).folder / "config.yaml")
    assert train.main([config, "workers.cpus=900", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "the speed of a worker cannot be measured on this machine" in printed
    assert "steps per epoch" in printed


PRINT_IN_A_TASK = """
import os, ray
from pencil_scale.storage.retries import RETRY_VARIABLE, set_retry_s
from pencil_scale.train.local_ray import ensure_ray
set_retry_s(5)
ensure_ray()
print(ray.get(ray.remote(lambda: os.environ.get(RETRY_VARIABLE)).remote()))
"""


def test_storage_retry_s_reaches_the_processes_of_a_cluster(ray_session: None) -> None:
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    found = subprocess.run([sys.executable, "-c", PRINT_IN_A_TASK], env=env, capture_output=True, text=True)
    assert found.stdout == "5\n", found.stderr


SAY_WHETHER_RAY_IS_THERE = """
import sys, ray
from pencil_scale.train import __main__, run
publish = run.publish
def watched(*given):
    print("Ray while publishing:", ray.is_initialized())
    return publish(*given)
run.publish = watched
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_publishing_does_not_depend_on_ray_which_ends_a_process_whose_node_died(tmp_path: Path) -> None:
    config = str(TinyData.make(tmp_path).folder / "config.yaml")
    settings = ["workers.in_process=true", "workers.count=1", "gate.hold=false"]
    words = [sys.executable, "-c", SAY_WHETHER_RAY_IS_THERE, config, *settings]
    found = subprocess.run(words, capture_output=True, text=True)
    assert "Ray while publishing: False" in found.stdout, found.stderr
    assert found.returncode == 0, found.stderr
