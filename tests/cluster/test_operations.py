"""The pages about clusters: what they name exists, and the documented way to pass variables works."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from training_runs import ROOT, TinyData, started

from pencil_scale.config.keys import help_page
from pencil_scale.config.loader import load_config
from pencil_scale.storage.folder import Folder
from pipelines import index_shards

PAGES = ("operations.md", "cluster.md")
EXAMPLE = re.compile(r"^```\n(ray job submit .*?)\n```", re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent


def example() -> list[str]:
    """The documented `ray job submit` with variables, as the shell splits it."""
    (text,) = EXAMPLE.findall((ROOT / "docs" / "operations.md").read_text())
    return shlex.split(text.replace("\\\n", " "))


def variables() -> dict[str, str]:
    words = example()
    found: dict[str, str] = json.loads(words[words.index("--runtime-env-json") + 1])["env_vars"]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_modules_the_config_keys_and_the_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for module in re.findall(r"python -m ((?:pencil_scale|pipelines)[\w.]*)", text):
        assert find_spec(module), module
    for name in re.findall(r"\b(?:cluster|configs)/[\w-]+\.yaml|cluster/Dockerfile", text):
        assert name == "configs/mine.yaml" or (ROOT / name).exists(), name
    known = set(re.findall(r"^ *([a-z]+(?:\.[a-z_]+)+)\b", help_page(), re.MULTILINE))
    sections = {key.partition(".")[0] for key in known}
    named = set(re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text))
    assert {key for key in named if key.partition(".")[0] in sections} - known == set()


def test_the_variables_that_a_job_passes_are_those_that_pods_get() -> None:
    documents = list(yaml.safe_load_all((ROOT / "cluster" / "access.yaml").read_text()))
    given = {name for one in documents for name in one.get("data", {}) | one.get("stringData", {})}
    assert set(variables()) <= given
    page = (ROOT / "docs" / "operations.md").read_text()
    assert not [name for name in given if f"`{name}`" not in page]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_variables_passed_with_a_job_reach_its_workers_and_readers(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from mlflow_server import free_port

    data = TinyData.make(tmp_path)
    port, dashboard = free_port(), free_port()
    cluster = [sys.executable, "cluster/local-cluster", "--workers", "1", "--port", str(port)]
    cluster += ["--dashboard-port", str(dashboard)]
    with started(cluster, tmp_path / "cluster.log") as nodes:
        nodes.wait_for("ready;")
        endpoint = request.getfixturevalue("s3_endpoint")  # now: its variables must not reach the nodes
        store = Folder("s3://lake/shards")
        store._files.mkdir("lake")
        for name in ("000.tar", "001.tar"):
            store.put(name, (data.folder / name).read_bytes())
        small = [
            "data.shards=s3://lake/shards/{000..001}.tar",
            "run.storage=s3://lake/tiny",
            "workers.count=1",
        ]
        small += ["stages.backbone.epochs=1", "stages.pencil.epochs=0", "stages.finetune.epochs=0"]
        small += ["gate.hold=false", "storage.retry_s=30", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
        index_shards.run(load_config(data.folder / "config.yaml", small))
        values = {name: os.environ.get(name, "") for name in variables()} | {"AWS_ENDPOINT_URL": endpoint}
        del values["MLFLOW_TRACKING_URI"]
        words = example()
        words[words.index("--runtime-env-json") + 1] = json.dumps({"env_vars": values})
        words[words.index("configs/clothing1m.yaml") :] = [str(data.folder / "config.yaml"), *small]
        done = submitted(words, dashboard)
        assert done.returncode == 0, done.stdout + done.stderr
        assert Folder("s3://lake/tiny").read_json("runs/tiny/summary.json")["coverage"] == [1.0]

        del values["AWS_ACCESS_KEY_ID"], values["AWS_SECRET_ACCESS_KEY"]
        words[words.index("--runtime-env-json") + 1] = json.dumps({"env_vars": values})
        refused = submitted([*words, "run.name=other"], dashboard)
        assert refused.returncode != 0
        assert re.search(r"error: s3://lake/tiny/\S+: no access .*run.storage", refused.stdout), (
            refused.stdout
        )
        nodes.process.send_signal(signal.SIGINT)
        assert nodes.wait() == 0


def submitted(words: list[str], dashboard: int) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}", "RAY_AUTH_MODE": "disabled"}
    command = [str(BIN / words[0]), *words[1:]]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=600)
