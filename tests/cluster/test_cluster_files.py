"""The files under cluster/ fit KubeRay's schema and name things that exist: modules, configs, settings."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pencil_scale.config.loader import load_config

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
CRDS = ROOT.parent / "shared" / "kuberay"  # KubeRay's custom resource definitions, which are not part of this
JOBS = {
    "index-rayjob.yaml": "pipelines.index_shards",
    "subset-rayjob.yaml": "pipelines.balance_subset",
    "train-rayjob.yaml": "pencil_scale.train",
    "nightly-cronjob.yaml": "pipelines.reclean_nightly",
}


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The documents of a file, by kind and name."""
    found = list(yaml.safe_load_all((CLUSTER / name).read_text()))
    named = {f"{one['kind']} {one['metadata'].get('name', '')}".strip(): one for one in found}
    assert len(named) == len(found)
    return named


NIGHTLY = documents("nightly-cronjob.yaml")
ACCESS = documents("access.yaml")
CRON = NIGHTLY["CronJob pencil-scale-nightly"]
NIGHTLY_MAP = NIGHTLY["ConfigMap pencil-scale-nightly"]


@pytest.fixture(params=JOBS)
def file(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def job(file: str) -> dict[str, Any]:
    """A RayJob that we ship; the nightly one is what the CronJob creates."""
    if file == "nightly-cronjob.yaml":
        found: dict[str, Any] = yaml.safe_load(NIGHTLY_MAP["data"]["rayjob.yaml"])
        return found
    (job,) = documents(file).values()
    return job


def groups_of(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The head and the groups of workers."""
    cluster = job["spec"]["rayClusterSpec"]
    return {
        "head": cluster["headGroupSpec"],
        **{group["groupName"]: group for group in cluster["workerGroupSpecs"]},
    }


def pods_of(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: group["template"]["spec"] for name, group in groups_of(job).items()}


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    found: dict[str, Any] = container
    return found


# --- against KubeRay's schema ------------------------------------------------------------------------


@cache
def schema() -> Any:
    """The schema of a RayJob; as `kubectl` does, it refuses fields that it does not know."""
    path = CRDS / "ray.io_rayjobs.yaml"
    if not path.exists():
        pytest.skip(f"{path} is not here: no schema to check against")
    versions = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    (found,) = (one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1")
    return strict(found)


def strict(node: Any) -> Any:
    """Refuse unknown fields, and take a number or a text where Kubernetes takes both."""
    if isinstance(node, list):
        return [strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {name: strict(one) for name, one in node.items()}
    if isinstance(node.get("properties"), dict) and "additionalProperties" not in node:
        found["additionalProperties"] = "x-kubernetes-preserve-unknown-fields" in node
    return found


def test_a_job_fits_the_schema_of_kuberay(job: dict[str, Any]) -> None:
    rules = schema()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    problems = [
        f"{one.json_path}: {one.message}" for one in jsonschema.Draft7Validator(rules).iter_errors(job)
    ]
    assert not problems


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("entrypont", "python"),
        ("rayClusterSpec.headGroupSpec.template.spec.restartpolicy", "Never"),
        ("rayClusterSpec.enableInTreeAutoscaling", "yes"),
        ("rayClusterSpec.autoscalerOptions.version", "v3"),
    ],
)
def test_a_misspelt_or_wrong_field_does_not_fit_the_schema(path: str, value: str) -> None:
    rules = schema()["properties"]["spec"]
    (job,) = documents("train-rayjob.yaml").values()
    spec = yaml.safe_load(yaml.dump(job["spec"]))
    assert jsonschema.Draft7Validator(rules).is_valid(spec)
    *parents, last = path.split(".")
    target = spec
    for name in parents:
        target = target[name]
    target[last] = value
    assert not jsonschema.Draft7Validator(rules).is_valid(spec)


def test_the_pod_of_the_nightly_cronjob_fits_the_schema_of_a_pod() -> None:
    cluster = schema()["properties"]["spec"]["properties"]["rayClusterSpec"]["properties"]
    rules = cluster["headGroupSpec"]["properties"]["template"]["properties"]["spec"]
    pod = CRON["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert not [one.message for one in jsonschema.Draft7Validator(rules).iter_errors(pod)]


def test_rays_autoscaler_finds_cpus_in_every_group_and_a_gpu_in_those_that_train(job: dict[str, Any]) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    made = {"metadata": {"name": "a", "namespace": "b"}, "spec": job["spec"]["rayClusterSpec"]}
    assert job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"]
    config = _derive_autoscaling_config_from_ray_cr(made)
    types = config["available_node_types"]
    resources = {name: types[name]["resources"] for name in groups_of(job) if name in types}
    assert resources["cpu"]["CPU"] == 16
    assert "GPU" not in resources["cpu"]
    if "gpu" in resources:
        assert (resources["gpu"]["CPU"], resources["gpu"]["GPU"]) == (12, 1)


# --- against this repository -------------------------------------------------------------------------


def test_its_entrypoint_is_one_of_our_jobs_with_a_config_that_loads(file: str, job: dict[str, Any]) -> None:
    python, flag, module, config, *overrides = shlex.split(job["spec"]["entrypoint"])
    assert (python, flag, module) == ("python", "-m", JOBS[file])
    assert find_spec(module)
    assert load_config(ROOT / config, overrides)
    # KubeRay pastes the entry point into a shell of another pod, which would run what follows one of these.
    assert not set("&|;<>(){}$`*?#\\\n") & set(job["spec"]["entrypoint"])


def test_a_job_that_trains_may_have_as_many_gpus_as_its_config_has_workers(job: dict[str, Any]) -> None:
    _, _, module, config, *overrides = shlex.split(job["spec"]["entrypoint"])
    workers, groups = load_config(ROOT / config, overrides).workers, groups_of(job)
    for group in groups.values():
        if "groupName" in group:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert groups["cpu"]["minReplicas"] >= 1
    trains = module in ("pencil_scale.train", "pipelines.reclean_nightly")
    assert ("gpu" in groups) == (trains and workers.gpu)
    if trains:
        assert groups["gpu"]["maxReplicas"] == workers.count[1]
        resources = container_of(pods_of(job)["gpu"])["resources"]
        assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"
        assert int(resources["requests"]["cpu"]) >= workers.cpus + 1


def test_head_and_workers_run_the_image_of_the_dockerfile_with_a_supported_version_of_ray(
    job: dict[str, Any],
) -> None:
    (image,) = {container_of(pod)["image"] for pod in pods_of(job).values()}
    dockerfile = (CLUSTER / "Dockerfile").read_text()
    assert f"-t {image} ." in dockerfile
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray=={version}" in (ROOT / "constraints.txt").read_text().split()
    working_dir = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["working_dir"]
    assert f"WORKDIR {working_dir}\n" in dockerfile
    for pod in pods_of(job).values():
        assert container_of(pod)["workingDir"] == working_dir
        assert pod["securityContext"]["runAsNonRoot"]
        assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile


def test_every_pod_gets_the_account_the_settings_and_the_secrets_that_are_shipped(
    job: dict[str, Any],
) -> None:
    for pod in pods_of(job).values():
        assert f"ServiceAccount {pod['serviceAccountName']}" in ACCESS
        sources = [(kind, source[kind]["name"]) for source in container_of(pod)["envFrom"] for kind in source]
        kinds = {"configMapRef": "ConfigMap", "secretRef": "Secret"}
        assert {f"{kinds[kind]} {name}" for kind, name in sources} == {
            name for name in ACCESS if not name.startswith("ServiceAccount")
        }
    settings = ACCESS["ConfigMap pencil-scale"]["data"]
    assert {"AWS_DEFAULT_REGION", "MLFLOW_TRACKING_URI"} <= set(settings)
    assert "AWS_ENDPOINT_URL" not in settings  # botocore would ask there for the credentials of a role
    assert all(isinstance(value, str) for value in settings.values())
    secrets = ACCESS["Secret pencil-scale-storage"]["stringData"]
    secrets |= ACCESS["Secret pencil-scale-mlflow"]["stringData"]
    assert set(secrets) == {
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    }
    assert set(secrets.values()) == {"replace-this"}


def test_the_pod_for_commands_by_hand_has_the_image_and_the_access_of_the_jobs() -> None:
    pod = documents("tools-pod.yaml")["Pod pencil-scale-tools"]["spec"]
    (job,) = documents("train-rayjob.yaml").values()
    head = pods_of(job)["head"]
    for key in ("serviceAccountName", "securityContext", "volumes"):
        assert pod[key] == head[key]
    for key in ("image", "workingDir", "envFrom", "securityContext", "resources", "volumeMounts"):
        assert container_of(pod)[key] == container_of(head)[key]
    cluster = schema()["properties"]["spec"]["properties"]["rayClusterSpec"]["properties"]
    rules = cluster["headGroupSpec"]["properties"]["template"]["properties"]["spec"]
    assert not [one.message for one in jsonschema.Draft7Validator(rules).iter_errors(pod)]


def test_every_pod_has_scratch_space_and_room_for_rays_object_store(job: dict[str, Any]) -> None:
    for pod in pods_of(job).values():
        container = container_of(pod)
        volumes = {one["name"]: one["emptyDir"] for one in pod["volumes"]}
        mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert set(mounts) == {"/dev/shm", "/tmp"}
        assert gigabytes(mounts["/tmp"]["sizeLimit"]) >= 50
        # Ray takes 30 % of the memory for its object store; what does not fit into /dev/shm is on disk.
        memory = gigabytes(container["resources"]["limits"]["memory"])
        assert gigabytes(mounts["/dev/shm"]["sizeLimit"]) >= 0.3 * memory


def gigabytes(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi"))


def test_a_stopped_pod_gets_time_to_save(job: dict[str, Any]) -> None:
    wait_s = int(ACCESS["ConfigMap pencil-scale"]["data"]["RAY_JOB_STOP_WAIT_TIME_S"])
    _, _, _, config, *overrides = shlex.split(job["spec"]["entrypoint"])
    assert wait_s >= load_config(ROOT / config, overrides).workers.stop_s + 30  # for a step, and a checkpoint
    for name, pod in pods_of(job).items():
        assert pod["terminationGracePeriodSeconds"] > wait_s
        shell, flag, hook = container_of(pod)["lifecycle"]["preStop"]["exec"]["command"]
        assert subprocess.run([shell, flag, "-n", "-c", hook]).returncode == 0
        if name != "head":
            (deadline,) = re.findall(r"--deadline-remaining-seconds (\d+)", hook)
            assert int(deadline) == wait_s


# --- the nightly CronJob -----------------------------------------------------------------------------

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
    assert CRON["apiVersion"] == "batch/v1"
    assert set(CRON["spec"]) <= CRON_FIELDS
    minute, hour, *days = CRON["spec"]["schedule"].split()
    assert (0 <= int(minute) < 60, 0 <= int(hour) < 24, days) == (True, True, ["*", "*", "*"])
    assert CRON["spec"]["concurrencyPolicy"] == "Forbid"
    job_spec = CRON["spec"]["jobTemplate"]["spec"]
    assert set(job_spec) <= {"backoffLimit", "template"}
    assert job_spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_nightly_cronjob_may_do_what_its_script_does_and_finds_the_rayjob_it_creates() -> None:
    pod = CRON["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    account = pod["serviceAccountName"]
    assert f"ServiceAccount {account}" in NIGHTLY
    binding = NIGHTLY["RoleBinding pencil-scale-nightly"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    (rule,) = NIGHTLY[f"Role {binding['roleRef']['name']}"]["rules"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (script,) = container["args"]
    verbs = set(re.findall(r"kubectl (\w+)", script))
    assert (rule["apiGroups"], rule["resources"]) == (["ray.io"], ["rayjobs"])
    assert verbs <= set(rule["verbs"])
    assert f"ConfigMap {volume['configMap']['name']}" in NIGHTLY
    (mount,) = container["volumeMounts"]
    assert f"{mount['mountPath']}/rayjob.yaml" in script
    job = yaml.safe_load(NIGHTLY_MAP["data"]["rayjob.yaml"])
    assert f"job={job['metadata']['name']}\n" in script
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(
    ("found", "creates"),
    [("", True)]
    + [(f"pencil-scale-nightly {state}", True) for state in ("Complete", "Failed", "ValidationFailed")]
    + [(f"pencil-scale-nightly {state}", False) for state in ("", "Running", "Initializing")],
)
def test_a_second_rayjob_is_created_only_when_the_last_has_ended(
    tmp_path: Path, found: str, creates: bool
) -> None:
    (container,) = CRON["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
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
