"""Versions outside the tested range are refused in one line, before a job does anything."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pencil_scale import __version__
from pencil_scale.config import command as versions
from pencil_scale.config.command import check_versions, exit_code, require
from pencil_scale.storage.errors import PencilError

ROOT = Path(__file__).parents[2]


def test_the_versions_installed_here_are_supported() -> None:
    check_versions()


@pytest.mark.parametrize("found", ["2.59.0", "3.0.0", "1.0"])
def test_a_version_outside_the_range_is_refused_in_one_line(found: str) -> None:
    with pytest.raises(PencilError) as caught:
        require("Ray", found, versions.RAY)
    assert str(caught.value) == f"Ray {found} found; >=2.60,<3 is supported: install a supported version"


def test_a_missing_package_is_refused() -> None:
    with pytest.raises(PencilError, match=r"MLflow is not installed; MLflow >=3.17,<4 is needed"):
        require("MLflow", None, versions.MLFLOW)


def test_a_job_stops_at_its_start_if_a_version_is_not_supported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "RAY", ">=99")
    assert exit_code(lambda: print("the job ran")) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: Ray ")
    assert len(said.err.splitlines()) == 1


def test_the_package_the_makefile_and_the_readme_state_the_same_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    assert str(needs["ray"]) == str(Requirement(f"ray{versions.RAY}").specifier)
    assert str(needs["mlflow"]) == str(Requirement(f"mlflow{versions.MLFLOW}").specifier)
    assert project["requires-python"] == versions.PYTHON
    assert project["version"] == __version__
    first, last = re.findall(r"\((3, \d+)\)", (ROOT / "Makefile").read_text())
    minors = [minor for minor in range(30) if SpecifierSet(versions.PYTHON).contains(f"3.{minor}")]
    assert (first, last) == (f"3, {minors[0]}", f"3, {minors[-1]}")
    readme = (ROOT / "README.md").read_text()
    for supported in (versions.PYTHON, versions.RAY, versions.MLFLOW):
        assert supported in readme
