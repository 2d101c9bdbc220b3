"""The pages about clusters: what they name exists."""

import re
from importlib.util import find_spec

import pytest
import yaml
from documented_job import ROOT, variables

from pencil_scale.config.keys import help_page

PAGES = ("operations.md", "cluster.md")


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
    access = (ROOT / "cluster" / "access.yaml").read_text()
    access = access.replace("# AWS_ENDPOINT_URL:", "AWS_ENDPOINT_URL:")
    documents = list(yaml.safe_load_all(access))
    given = {name for one in documents for name in one.get("data", {}) | one.get("stringData", {})}
    assert set(variables()) <= given
    page = (ROOT / "docs" / "operations.md").read_text()
    assert not [name for name in given if f"`{name}`" not in page]
