"""Tracker: reports a run to MLflow. Every call returns at once, whether the server answers or not.

    tracker = Tracker(plan_tracking(config, catalogue_version=7, run_id="ab12"))
    tracker.log_step("pencil", step, {"loss": 0.41})              # one parent run, one child per stage
    tracker.log_epoch("pencil", epoch, {"label_accuracy": 0.93})
    tracker.finish("FINISHED", wait_s=60)

Records go to a journal in the run's storage, and a thread delivers them in order; the next start of the run,
on any host, continues in the same MLflow runs and delivers what is left. MLflow shows nothing twice: a value
keeps the time at which it was reported, so a repeated delivery is the same value, and the steps that a
resumed run repeats are left out.
"""

import hashlib
import io
import json
import logging
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pencil_scale import __version__
from pencil_scale.config.loader import describe
from pencil_scale.config.settings import Config
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of, is_local, without_passwords
from pencil_scale.tracking.delivery import Delivery, Harmless
from pencil_scale.tracking.journal import Journal, Record
from pencil_scale.tracking.receiver import MOST_METRICS, PARENT, Receiver, portions

log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]
SERVERS = ("http://", "https://", "databricks")
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")
LONGEST_NAME = 250


# --- where a run is tracked --------------------------------------------------------------------------


@dataclass(frozen=True)
class TrackedRun:
    """Where a run is tracked, and what is known of it before its first step."""

    uri: str
    journal: str
    experiment: str
    name: str
    artifacts: str | None  # where pictures and models go; None: the server decides
    register_as: str | None
    run_id: str  # also a tag on its MLflow runs, by which they are found again
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


def plan_tracking(config: Config, catalogue_version: int, run_id: str) -> TrackedRun:
    """Decide where a run is tracked, and what is known of it."""
    uri, artifacts = _find_server(config)
    storage, commit = Storage(config.run.storage), git_commit()
    return TrackedRun(
        uri=uri,
        journal=storage.path(storage.run(config.run.name, f"journal/{run_id}")),
        experiment=config.tracking.experiment or config.run.name,
        name=config.run.name,
        artifacts=artifacts,
        register_as=config.tracking.register_as,
        run_id=run_id,
        params=describe(config),
        tags={
            "catalogue_version": str(catalogue_version),
            "run_id": run_id,
            "seed": str(config.run.seed),
            **{f"version.{name}": found for name, found in installed_versions().items()},
            **({"mlflow.source.git.commit": commit} if commit else {}),
        },
    )


def _find_server(config: Config) -> tuple[str, str | None]:
    """Find the tracking URI, and where artifacts go if no server decides that."""
    filesystem, path = filesystem_of(config.run.storage)
    local = is_local(filesystem)
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri and not local:
        raise PencilError(
            f"run.storage: {without_passwords(config.run.storage)} is no local folder, so it cannot hold "
            "MLflow's database; name a server with tracking.uri or MLFLOW_TRACKING_URI"
        )
    uri = uri or f"sqlite:///{path}/mlflow.db"
    if uri.startswith(SERVERS):
        return uri, None
    if not uri.startswith(DATABASES):
        raise PencilError(
            f"tracking.uri: '{without_passwords(uri)}' is neither a server nor a database; http://HOST:PORT "
            "or sqlite:///PATH was expected (MLflow no longer keeps runs in plain folders)"
        )
    return uri, f"{Path(path).as_uri() if local else Storage(config.run.storage).url}/mlartifacts"


def installed_versions() -> dict[str, str]:
    """The versions that a result depends on, without packages that are not installed."""
    found = {"python": platform.python_version(), "pencil_scale": __version__}
    for name in ("torch", "torchvision", "ray", "mlflow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit(folder: str = ".") -> str | None:
    """The checked-out commit; None outside a checkout or without git."""
    try:
        answer = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


# --- what is reported --------------------------------------------------------------------------------


class Tracker:
    """Reports one run, from one process."""

    def __init__(self, plan: TrackedRun, every_s: float = 1.0) -> None:
        self._plan = plan
        self._harmless = Harmless()
        self._journal = Journal(plan.journal, every_s)
        self._stage: str | None = None  # the stage that is running
        self._num_repeated = 0
        self._start(PARENT, plan.name, params=plan.params, tags=plan.tags)
        self.log_json("config", plan.params)
        receiver, name = Receiver(plan.uri, self._journal.runs), f"MLflow {without_passwords(plan.uri)}"
        self._delivery = Delivery(self._journal, receiver, name, every_s)

    def state(self) -> dict[str, Any]:
        """The ids of the MLflow runs by stage, as far as the server has answered, for the run's record."""
        return {"runs": dict(self._journal.runs)}

    def flush_soon(self) -> None:
        """Start to write all that was reported so far, and return at once."""
        self._journal.flush_soon()

    # --- figures ---------------------------------------------------------------------------------------

    def start_stage(self, stage: str) -> None:
        """Start the run of a stage, or resume it; the stage before it has ended."""
        if stage == self._stage:
            return
        if self._stage is not None:
            self._add("end", self._stage, status="FINISHED")
        self._stage = stage
        self._start(stage, f"{self._plan.name}-{stage}", tags={"stage": stage})

    def log_step(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Report the values of a step, in the stage's run, as `step/NAME`."""
        self.start_stage(stage)
        self._log(stage, "step", step, metrics)

    def log_epoch(self, stage: str, epoch: int, metrics: Mapping[str, float]) -> None:
        """Report the values of an epoch as `epoch/NAME`, in the stage's run and in the parent run."""
        self.start_stage(stage)
        self._log(stage, "epoch", epoch, metrics)
        self._log(PARENT, "epoch", epoch, metrics)

    def set_warning(self, name: str, text: str) -> None:
        """Log a warning, and tag the run with it as `warning.NAME`."""
        log.warning("%s: %s", name, text)
        self.set_tag(f"warning.{name}", text)

    def set_tag(self, name: str, text: str) -> None:
        """Tag the run."""
        self._add("tag", PARENT, name=_allowed(name), value=text)

    def log_picture(self, name: str, png: bytes) -> None:
        """Keep a picture with the run, as `pictures/NAME.png`."""
        self._add("file", PARENT, png, path=f"pictures/{name}.png")

    def log_json(self, name: str, value: object) -> None:
        """Keep a value with the run, as `NAME.json`."""
        with self._harmless(f"writing {name}.json for MLflow"):
            text = json.dumps(value, indent=2, default=str)
            self._add("file", PARENT, text.encode(), path=f"{name}.json")

    # --- the trained network ---------------------------------------------------------------------------

    def log_model(
        self,
        backbone: str,
        weights: Mapping[str, Tensor],
        class_names: Sequence[str],
        image_size: int,
        alias: str | None = "current",
        **facts: Any,
    ) -> None:
        """Log the trained network with its signature; if the config names a model, register it as that.

        The network is exported as a graph; nothing is pickled. `facts`, such as the mean that was subtracted,
        and the class names become its metadata. Without an alias, `move_alias` sets one later.
        """
        if alias is not None and not re.fullmatch(r"(?!(?i:latest|v\d+)$)[\w-]+", alias):
            raise PencilError(
                f"alias '{alias}': letters, digits, '_' and '-' were expected, but not 'latest' or 'v1', "
                "which MLflow keeps for itself; take 'current'"
            )
        with self._harmless("writing the model for MLflow"):
            data = io.BytesIO()
            torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, data)
            self._add(
                "model",
                PARENT,
                data.getvalue(),
                sha256=hashlib.sha256(data.getvalue()).hexdigest(),
                backbone=backbone,
                num_classes=len(class_names),
                image_size=image_size,
                register_as=self._plan.register_as,
                alias=alias,
                metadata={"class_names": list(class_names), "backbone": backbone, **facts},
            )

    def move_alias(self, alias: str = "current") -> None:
        """Move an alias of the registered model to the version that this run made."""
        if self._plan.register_as is not None:
            self._add("alias", PARENT, register_as=self._plan.register_as, alias=alias)

    def finish(self, status: Status = "FINISHED", wait_s: float = 60.0) -> int:
        """End the runs, wait for the server for this long at most; return how many records remain."""
        for stage in filter(None, (self._stage, PARENT)):
            self._add("end", stage, status=status)
        if self._num_repeated:
            log.info("%d values of steps that were reported before are left out", self._num_repeated)
        with self._harmless("the last report to MLflow"):
            return self._delivery.finish(wait_s)
        return 0

    # --- records ---------------------------------------------------------------------------------------

    def _start(self, stage: str, name: str, **known: Any) -> None:
        where = {key: getattr(self._plan, key) for key in ("run_id", "experiment", "artifacts")}
        self._add("start", stage, name=name, **where, **known)

    def _log(self, stage: str, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        values: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                values[_allowed(f"{axis}/{name}")] = float(value)
            except (TypeError, ValueError):
                log.warning("metric %s of %s %d is not a number and not tracked: %r", name, axis, step, value)
        for some in portions(list(values.items()), MOST_METRICS):
            self._num_repeated += len(self._journal.add_values(stage, step, dict(some), time=_now()))

    def _add(self, kind: str, stage: str, blob: bytes | None = None, /, **body: Any) -> None:
        self._journal.add(kind, {"stage": stage, "time": _now(), **body}, blob)


def _allowed(name: str) -> str:
    """Replace what MLflow does not allow in a name; a class may have any name."""
    return re.sub(r"[^\w/.\-: ]", "_", name)[:LONGEST_NAME]


def _now() -> int:
    return time.time_ns() // 1_000_000


def copy_page(config: Config, tracking: Mapping[str, Any], name: str, page: str) -> str | None:
    """Keep a page with its finished run, as its record has it, in MLflow; return the reason if that fails."""
    runs = tracking.get("runs", {})
    if PARENT not in runs:
        return "MLflow knows no run of these labels"
    try:
        record = Record(1, "file", {"stage": PARENT, "path": name}, page.encode)
        Receiver(_find_server(config)[0], runs)([record])
    except PencilError as error:
        return str(error)
    return None
