"""What is tracked of a run, and where: all that is known before the first step, as plain values.

    plan = plan_tracking(config, catalogue_version="7", run_id=id, state=None)   # on the driver
    plan = plan_tracking(config, catalogue_version="7", run_id=id, state=saved)  # resumes its MLflow runs

Made where the job starts and handed on whole, so that whoever speaks to MLflow needs neither the config nor
the environment of the driver. Passwords are in `uri` alone, and never in what is tracked.
"""

import os
import platform
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pencil_scale import __version__
from pencil_scale.config.loader import describe
from pencil_scale.config.settings import Config
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of, is_local, without_passwords

SERVERS = ("http://", "https://", "databricks")
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")


class TrackingError(PencilError):
    """A run that cannot be tracked as asked."""


@dataclass(frozen=True)
class TrackedRun:
    """Where a run is tracked, under which names, and what is known of it from the start."""

    uri: str
    experiment: str
    name: str
    artifacts: str | None  # where pictures and models go; None: the server knows
    register_as: str | None
    track: str  # names this life of the run: tagged on its MLflow runs, which are found by it again
    runs: dict[str, str] = field(default_factory=dict)  # stage -> MLflow's run id, as far as known
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


def plan_tracking(
    config: Config,
    *,
    catalogue_version: str,
    run_id: str,
    state: Mapping[str, Any] | None = None,
    folder: str = ".",
) -> TrackedRun:
    """Decide where this run is tracked, or say why it cannot be; `state` is what `Tracker.state()` gave."""
    uri, artifacts = _where(config)
    state = state or {}
    return TrackedRun(
        uri=uri,
        experiment=config.tracking.experiment or config.run.name,
        name=config.run.name,
        artifacts=artifacts,
        register_as=config.tracking.register_as,
        track=state.get("track") or uuid.uuid4().hex,
        runs=dict(state.get("runs", {})),
        params=describe(config),
        tags={
            "catalogue_version": catalogue_version,
            "run_id": run_id,
            "seed": str(config.run.seed),
            **{f"version.{name}": found for name, found in installed_versions().items()},
            **({"mlflow.source.git.commit": commit} if (commit := git_commit(folder)) else {}),
        },
    )


def _where(config: Config) -> tuple[str, str | None]:
    """Find the tracking URI, and where artifacts go when no server decides that."""
    filesystem, path = filesystem_of(config.run.storage)
    local = is_local(filesystem)
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri and not local:
        raise TrackingError(
            f"run.storage: {without_passwords(config.run.storage)} is no local folder, so MLflow's database "
            "cannot stand there; name a server with tracking.uri or MLFLOW_TRACKING_URI"
        )
    uri = uri or f"sqlite:///{path}/mlflow.db"
    if uri.startswith(SERVERS):
        return uri, None
    if not uri.startswith(DATABASES):
        raise TrackingError(
            f"tracking.uri: '{without_passwords(uri)}' is neither a server nor a database; http://HOST:PORT "
            "or sqlite:///PATH was expected (MLflow no longer keeps runs in plain folders)"
        )
    return uri, f"{Path(path).as_uri() if local else config.run.storage.rstrip('/')}/mlartifacts"


def installed_versions() -> dict[str, str]:
    """Give the versions a result depends on; a package that is not installed is left out."""
    found = {"python": platform.python_version(), "pencil_scale": __version__}
    for name in ("torch", "torchvision", "ray", "mlflow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit(folder: str = ".") -> str | None:
    """Give the commit a folder stands at; None outside a checkout or where git is missing."""
    try:
        answer = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
