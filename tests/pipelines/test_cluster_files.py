"""The files under cluster/ name things that exist: fields of KubeRay, modules, configs, settings."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from pencil_scale.config.loader import load_config

ROOT = Path(__file__).parents[2]

# The fields of KubeRay 1.7's ray.io/v1 that we use; Kubernetes itself accepts unknown fields.
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


def nightly() -> dict[str, dict[str, Any]]:
    """The documents of the nightly file, by their kind."""
    documents = list(yaml.safe_load_all((ROOT / "cluster" / "nightly-cronjob.yaml").read_text()))
    assert len({one["kind"] for one in documents}) == len(documents)
    return {one["kind"]: one for one in documents}


@pytest.fixture(scope="module", params=["rayjob.yaml", "nightly-cronjob.yaml"])
def job(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A RayJob that we ship: the training run's, and the one that the nightly CronJob creates."""
    if request.param == "rayjob.yaml":
        text = (ROOT / "cluster" / "rayjob.yaml").read_text()
    else:
        text = nightly()["ConfigMap"]["data"]["rayjob.yaml"]
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_a_job_is_a_rayjob_with_fields_that_kuberay_knows(job: dict[str, Any]) -> None:
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


def test_its_entrypoint_is_one_of_our_jobs_with_a_config_that_loads(job: dict[str, Any]) -> None:
    python, flag, module, config, *overrides = shlex.split(job["spec"]["entrypoint"])
    assert (python, flag) == ("python", "-m")
    assert module in ("pencil_scale.train", "pipelines.reclean_nightly")
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


# The fields of a CronJob in batch/v1 that we use.
CRON_FIELDS = {
    "schedule",
    "timeZone",
    "concurrencyPolicy",
    "startingDeadlineSeconds",
    "successfulJobsHistoryLimit",
    "failedJobsHistoryLimit",
    "jobTemplate",
}


def test_the_nightly_cronjob_runs_once_a_day_and_has_fields_that_kubernetes_knows() -> None:
    cron = nightly()["CronJob"]
    assert cron["apiVersion"] == "batch/v1"
    assert set(cron["spec"]) <= CRON_FIELDS
    minute, hour, *days = cron["spec"]["schedule"].split()
    assert (0 <= int(minute) < 60, 0 <= int(hour) < 24, days) == (True, True, ["*", "*", "*"])
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    job_spec = cron["spec"]["jobTemplate"]["spec"]
    assert set(job_spec) <= {"backoffLimit", "template"}
    assert job_spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_nightly_cronjob_may_do_what_its_script_does_and_finds_the_rayjob_it_creates() -> None:
    found = nightly()
    pod = found["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    account = pod["serviceAccountName"]
    assert found["ServiceAccount"]["metadata"]["name"] == account
    assert found["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    (rule,) = found["Role"]["rules"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (script,) = container["args"]
    verbs = set(re.findall(r"kubectl (\w+)", script))
    assert (rule["apiGroups"], rule["resources"]) == (["ray.io"], ["rayjobs"])
    assert verbs <= set(rule["verbs"])
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert f"{mount['mountPath']}/rayjob.yaml" in script
    job = yaml.safe_load(found["ConfigMap"]["data"]["rayjob.yaml"])
    assert f"job={job['metadata']['name']}\n" in script
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(
    ("found", "creates"),
    [("", True), ("pencil-scale-nightly Complete", True), ("pencil-scale-nightly Failed", True)]
    + [(f"pencil-scale-nightly {state}", False) for state in ("", "Running", "Initializing")],
)
def test_a_second_rayjob_is_created_only_when_the_last_has_ended(
    tmp_path: Path, found: str, creates: bool
) -> None:
    (container,) = nightly()["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    kubectl = tmp_path / "kubectl"  # a stub that answers like Kubernetes and logs its calls
    kubectl.write_text(f"#!/bin/sh\necho \"$1\" >> {tmp_path}/asked\n[ $1 != get ] || printf '{found}'\n")
    kubectl.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([*container["command"], *container["args"]], env=path, capture_output=True)
    asked = (tmp_path / "asked").read_text().split()
    assert (done.returncode == 0, asked) == (creates, ["get", "delete", "create"] if creates else ["get"])


def test_the_local_cluster_is_a_program_that_explains_itself() -> None:
    script = ROOT / "cluster" / "local-cluster"
    assert os.access(script, os.X_OK)
    page = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--workers" in page.stdout
    assert "ray job submit" in page.stdout


def test_the_local_cluster_never_calls_ray_stop_which_would_end_every_ray_on_the_machine() -> None:
    assert '"stop"' not in (ROOT / "cluster" / "local-cluster").read_text()
