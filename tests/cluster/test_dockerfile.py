"""Every step of cluster/Dockerfile runs in a fresh Debian, and the image has what KubeRay and jobs need."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from image_building import DOCKERFILE, ROOT, Image, fresh_debian, require_answer, steps_of

BUILDS = {"cuda": "", "cpu": "https://download.pytorch.org/whl/cpu"}


def test_the_dockerfile_ends_as_a_numeric_user_that_is_not_root() -> None:
    # With runAsNonRoot, Kubernetes accepts only a number: a name could stand for root.
    assert steps_of(DOCKERFILE)[-1] == ("USER", "1000")


def test_packages_are_installed_with_the_pinned_versions_and_copied_files_exist() -> None:
    steps = steps_of(DOCKERFILE)
    installs = [rest for word, rest in steps if word == "RUN" and "pip install" in rest]
    assert all("--constraint constraints.txt" in rest or "--no-deps" in rest for rest in installs)
    copied = [name for word, rest in steps if word == "COPY" for name in rest.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"torch", "ray", "mlflow", "faiss-cpu"} <= pinned


def test_the_builds_that_the_dockerfile_documents_are_the_ones_that_are_tested() -> None:
    (default,) = (rest for word, rest in steps_of(DOCKERFILE) if word == "ARG")
    assert default == f"TORCH_INDEX={BUILDS['cuda']}"
    assert f"--build-arg TORCH_INDEX={BUILDS['cpu']} ." in DOCKERFILE.read_text()


@pytest.fixture(scope="module", params=BUILDS)
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image, built step by step; its folder of some gigabytes is removed at the end."""
    if index := BUILDS[request.param]:
        require_answer(f"{index}/torch/")
    (_, base), *steps = steps_of(DOCKERFILE)
    suite = re.fullmatch(r"debian:(\w+)-slim", base)
    assert suite
    folder: Path = tmp_path_factory.mktemp("image")
    image = fresh_debian(folder, suite[1])
    for step in steps:
        image.apply(step, {"TORCH_INDEX": BUILDS[request.param]})
    yield image
    shutil.rmtree(folder)


@pytest.mark.image
@pytest.mark.timeout(3600)
def test_the_image_has_what_ray_kuberay_and_the_jobs_need(image: Image) -> None:
    assert image.run("id -u").strip() == "1000"
    # KubeRay starts Ray with `bash -c` or `bash -lc`, submits jobs with `ray job`, and asks `wget` or Python
    # whether a node is alive.
    for shell in ("bash -c", "bash -lc"):
        assert image.run(f"{shell} 'which python ray'").split() == [
            "/opt/venv/bin/python",
            "/opt/venv/bin/ray",
        ]
    for words in ("ray job submit --help", "ray kuberay-autoscaler --help", "ray drain-node --help"):
        assert "Usage" in image.run(words)
    image.run("wget --version; pgrep --version; g++ --version")
    pins = set((ROOT / "constraints.txt").read_text().split())
    installed = image.run("pip freeze --exclude pencil_scale").split()
    different = [line for line in installed if line.partition("+")[0] not in pins]
    assert not different
    # What torch.compile writes is compiled in the image.
    image.run("python -c 'import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(8))'")
    assert "clothing1m" in image.run("pencil-scale configs")


@pytest.mark.image
@pytest.mark.timeout(3600)
def test_a_pod_that_ends_waits_for_its_driver_and_its_training_process(image: Image) -> None:
    cluster = yaml.safe_load((ROOT / "cluster" / "train-rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    processes = {"python -m pencil_scale.train x.yaml": cluster["headGroupSpec"]}
    processes["ray::RayTrainWorker"] = cluster["workerGroupSpecs"][1]
    for title, group in processes.items():
        (container,) = group["template"]["spec"]["containers"]
        *shell, hook = container["lifecycle"]["preStop"]["exec"]["command"]
        (image.folder / "tmp" / "hook").write_text(hook)
        # The first ends when it is told to, the second by itself: its driver tells it.
        image.run(
            f"""bash -c 'exec -a "{title}" sleep {3 if "ray" in title else 3000}' &
            until pgrep -f '^{title}'; do sleep 0.1; done
            {" ".join(shell)} "$(cat /tmp/hook)"
            ! pgrep -f '^{title}'"""
        )
