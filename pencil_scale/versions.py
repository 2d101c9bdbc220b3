"""Which Python, Ray and MLflow this release was tested with; outside them a job stops at its start."""

import platform
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from pencil_scale.schema import PencilError

PYTHON = ">=3.11,<3.13"
RAY = ">=2.60,<3"
MLFLOW = ">=3.17,<4"  # client and server alike


class VersionError(PencilError):
    """Something this release builds on is older or newer than it was tested with."""


def check_versions() -> None:
    """Stop with one line if Python, Ray or the MLflow client is outside the supported range."""
    require("Python", platform.python_version(), PYTHON)
    require("Ray", _installed("ray"), RAY)
    require("MLflow", _installed("mlflow", "mlflow-skinny"), MLFLOW)


def require(thing: str, found: str | None, supported: str) -> None:
    """Raise unless the version found lies within the supported range."""
    if found is None:
        raise VersionError(f"{thing} is not installed; {thing} {supported} is needed: run 'make install'")
    if not SpecifierSet(supported).contains(found, prereleases=True):
        raise VersionError(f"{thing} {found} found; {thing} {supported} is supported: install such a version")


def _installed(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
