"""The files under cluster/ name things that exist: fields of KubeRay, modules, configs, settings."""

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from pencil_scale.config import load_config

ROOT = Path(__file__).parent.parent

# What KubeRay 1.7's ray.io/v1 knows, as far as we use it; Kubernetes rejects no unknown field by itself.
JOB_FIELDS = {
    "entrypoint",
    "submissionMode",
    "backoffLimit",
    "shutdownAfterJobFinishes",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "runtimeEnvYAML",
    "rayClusterSpec",
}
CLUSTER_FIELDS = {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
HEAD_FIELDS = {"rayStartParams", "template"}
WORKER_FIELDS = HEAD_FIELDS | {"groupName", "replicas", "minReplicas", "maxReplicas"}
START_PARAMS = {"num-cpus"}


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "cluster" / "rayjob.yaml").read_text())
    return found


def test_the_training_job_is_a_rayjob_with_fields_that_kuberay_knows(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    assert set(spec) <= JOB_FIELDS
    assert set(cluster) <= CLUSTER_FIELDS
    assert set(cluster["headGroupSpec"]) <= HEAD_FIELDS
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert set(group) <= WORKER_FIELDS
        assert set(group["rayStartParams"]) <= START_PARAMS
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_its_entrypoint_is_the_main_job_with_a_config_that_loads(job: dict[str, Any]) -> None:
    python, flag, module, config, *overrides = shlex.split(job["spec"]["entrypoint"])
    assert (python, flag, module) == ("python", "-m", "pencil_scale.train")
    assert find_spec(module)
    loaded = load_config(ROOT / config, overrides)
    assert loaded.workers.gpu


def test_its_cluster_has_a_gpu_and_spare_processors_for_every_worker(job: dict[str, Any]) -> None:
    _, _, _, config, *overrides = shlex.split(job["spec"]["entrypoint"])
    loaded = load_config(ROOT / config, overrides)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert loaded.workers.count == (group["replicas"], group["replicas"])
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert int(container["resources"]["requests"]["cpu"]) >= loaded.workers.cpus + 1


def test_head_and_workers_run_the_same_image_and_a_version_of_ray_that_is_supported(
    job: dict[str, Any],
) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [one for group in groups for one in group["template"]["spec"]["containers"]]
    assert len({container["image"] for container in containers}) == 1
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()


def test_a_stopped_job_gets_time_to_save(job: dict[str, Any]) -> None:
    runtime = yaml.safe_load(job["spec"]["runtimeEnvYAML"])
    wait_s = int(runtime["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert 30 <= wait_s < head["terminationGracePeriodSeconds"]
    assert runtime["working_dir"] == head["containers"][0]["workingDir"]


def test_the_local_cluster_is_a_program_that_explains_itself() -> None:
    script = ROOT / "cluster" / "local-cluster"
    assert os.access(script, os.X_OK)
    page = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--workers" in page.stdout
    assert "ray job submit" in page.stdout


def test_the_local_cluster_calls_no_ray_stop_which_would_end_every_ray_of_the_machine() -> None:
    assert '"stop"' not in (ROOT / "cluster" / "local-cluster").read_text()
