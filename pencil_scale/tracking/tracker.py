"""Tracker: reports a run to MLflow. Every call returns at once, whether the server answers or not.

    tracker = Tracker(config, catalogue_version=7, run_id="ab12")
    tracker.log_step("pencil", step, {"loss": 0.41})              # one parent run, one child per stage
    tracker.log_epoch("pencil", epoch, {"label_accuracy": 0.93})
    tracker.finish("FINISHED", wait_s=60)

What is reported goes to a journal in the run's storage, and a thread delivers it in order; the next start of
the run, on any host, continues in the same MLflow runs and delivers the rest. MLflow shows nothing twice: a
value keeps the time at which it was reported, so a repeated delivery is the same value, and the steps that a
resumed run repeats are left out.
"""

import hashlib
import io
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pencil_scale import __version__
from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import describe
from pencil_scale.config.settings import Config
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of, is_local, without_passwords
from pencil_scale.tracking.journal import Delivery, Entry, Journal
from pencil_scale.tracking.receiver import PARENT, Receiver

SERVERS = ("http://", "https://", "databricks")
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")
LONGEST_NAME = 250


def find_server(config: Config) -> tuple[str, str | None]:
    """Find the tracking URI, and where pictures and models go if no server decides that."""
    filesystem, path = filesystem_of(config.run.storage)
    local = is_local(filesystem)
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri and not local:
        raise PencilError(
            f"run.storage: {without_passwords(config.run.storage)} is not a local folder, so it cannot hold "
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


def git_commit(folder: str = ".") -> str | None:
    """The checked-out commit; None outside a checkout or without git."""
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


class Tracker:
    """Reports one run, from one process."""

    def __init__(
        self,
        config: Config,
        catalogue_version: int,
        run_id: str,
        params: Mapping[str, str] | None = None,
        every_s: float = 1.0,
    ) -> None:
        """Start the run, or resume it. `params` are its settings, if the config has others by now."""
        self._name, self._register_as = config.run.name, config.tracking.register_as
        self._stage: str | None = None  # the stage that is running
        self.about: list[str] = []  # the first paragraphs of its description
        params = dict(params or describe(config))
        uri, artifacts = find_server(config)
        self._project, self._where = _project(config), _where(config, run_id)
        self._receiver = Receiver(uri, **self._where, artifacts=artifacts)
        self._journal = Journal(_journal_url(config, run_id), every_s)
        versions = {name: version(name) for name in ("torch", "torchvision", "ray")}
        versions |= {"mlflow": version("mlflow-skinny"), "python": platform.python_version()}
        versions["pencil_scale"] = __version__
        tags = {f"version.{name}": found for name, found in versions.items()}
        tags |= {"catalogue_version": str(catalogue_version), "run_id": run_id, "seed": str(config.run.seed)}
        if commit := git_commit():
            tags["mlflow.source.git.commit"] = commit
        self._add("start", PARENT, name=self._name, tags=tags, params=params)
        self.log_json("config", params)
        server = f"MLflow {without_passwords(uri)}"
        self._delivery = Delivery(self._journal, self._receiver, server, every_s)

    def state(self) -> dict[str, Any]:
        """Where MLflow has the run, and the ids of its runs that are known so far, for the run's record."""
        return {**self._where, "runs": dict(self._receiver.runs)}

    def flush_soon(self) -> None:
        """Start to write all that was reported so far, and return at once."""
        self._journal.flush_soon()

    def start_stage(self, stage: str) -> None:
        """Start the run of a stage, or resume it; the stage before it has ended."""
        if stage != self._stage:
            if self._stage is not None:
                self._add("end", self._stage, status="FINISHED")
            self._stage = stage
            self._add("start", stage, name=f"{self._name}-{stage}", tags={"stage": stage}, params={})

    def log_step(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Report the values of a step, in the stage's run, as `step/NAME`."""
        self.start_stage(stage)
        self._log(stage, "step", step, metrics)

    def log_epoch(self, stage: str, epoch: int, metrics: Mapping[str, float]) -> None:
        """Report the values of an epoch as `epoch/NAME`, in the stage's run and in the parent run."""
        self.start_stage(stage)
        self._log(stage, "epoch", epoch, metrics)
        self._log(PARENT, "epoch", epoch, metrics)

    def set_tag(self, name: str, text: str) -> None:
        """Tag the run."""
        self._add("tag", PARENT, name=_allowed(name), value=text)

    def describe(self, *results: str) -> None:
        """Set the description of the run: what it is `about`, and what came of it so far."""
        text = "\n\n".join([*self.about, *results])  # Markdown
        self.set_tag("mlflow.note.content", without_passwords(text))

    def log_dataset(self, use: str, catalogue: Catalogue) -> None:
        """Report data that the run reads as an input: for training, validation or test."""
        url, counted = without_passwords(catalogue.folder), {"num_samples": catalogue.num_ok}
        known = {"catalogue_version": catalogue.version, **counted, "num_classes": catalogue.num_classes}
        name = f"{self._project} {use}"
        self._add("dataset", PARENT, name=name, use=use, digest=catalogue.digest, url=url, known=known)

    def log_picture(self, name: str, png: bytes) -> None:
        """Keep a picture with the run, as `pictures/NAME.png`."""
        self._add("file", PARENT, png, path=f"pictures/{name}.png")

    def log_json(self, name: str, value: object) -> None:
        """Keep a value with the run, as `NAME.json`."""
        text = json.dumps(value, indent=2, default=str)
        self._add("file", PARENT, text.encode(), path=f"{name}.json")

    def log_model(
        self,
        backbone: str,
        weights: Mapping[str, Tensor],
        class_names: Sequence[str],
        image_size: int,
        alias: str | None = "current",
    ) -> None:
        """Log the trained network with its signature; if the config names a model, register it as that.

        The network is exported as a graph; nothing is pickled. The class names become its metadata. Without
        an alias, `move_alias` sets one later.
        """
        file = io.BytesIO()
        torch.save(dict(weights), file)
        data = file.getvalue()
        model = {"backbone": backbone, "class_names": list(class_names), "image_size": image_size}
        known = {"sha256": hashlib.sha256(data).hexdigest(), "register_as": self._register_as}
        self._add("model", PARENT, data, **model, **known)
        if alias is not None:
            self.move_alias(alias)

    def move_alias(self, alias: str) -> None:
        """Move an alias of the registered model to the version that this run made."""
        if self._register_as is not None:
            self._add("alias", PARENT, register_as=self._register_as, alias=alias)

    def finish(self, status: str = "FINISHED", wait_s: float = 60.0) -> bool:
        """End the runs, wait for the server for this long at most; return whether all was delivered.

        A status of MLflow: FINISHED, FAILED, or SCHEDULED for a run that was stopped and can be resumed.
        """
        for stage in filter(None, (self._stage, PARENT)):
            self._add("end", stage, status=status)
        return self._delivery.finish(wait_s)

    def _log(self, stage: str, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        values = {_allowed(f"{axis}/{name}"): float(value) for name, value in metrics.items()}
        self._add("metrics", stage, step=step, values=values)

    def _add(self, kind: str, stage: str, blob: bytes | None = None, /, **body: Any) -> None:
        self._journal.add(kind, {"stage": stage, "time": time.time_ns() // 1_000_000, **body}, blob)


def _allowed(name: str) -> str:
    """Replace what MLflow does not allow in a name; a class may have any name."""
    return re.sub(r"[^\w/.\-: ]", "_", name)[:LONGEST_NAME]


def copy_page(config: Config, tracking: Mapping[str, Any], name: str, page: str) -> str | None:
    """Keep a page with its finished run, as its record has it, in MLflow; return the reason if that fails."""
    if not tracking:
        return "MLflow knows no run of these labels"
    try:
        receiver = Receiver(find_server(config)[0], tracking["run_id"], tracking["experiment"])
        receiver([Entry("page", "file", {"stage": PARENT, "path": name}, data=page.encode())])
    except PencilError as error:
        return str(error)
    return None


def _project(config: Config) -> str:
    return filesystem_of(config.run.storage)[1].rpartition("/")[2] or config.run.name


def _where(config: Config, run_id: str) -> dict[str, str]:
    """Where MLflow has a run: all runs of a storage are in one experiment, where MLflow can compare them."""
    return {"run_id": run_id, "experiment": config.tracking.experiment or _project(config)}


def _journal_url(config: Config, run_id: str) -> str:
    storage = Storage(config.run.storage)
    return storage.path(storage.run(config.run.name, f"journal/{run_id}"))


def deliver(config: Config, run_id: str) -> tuple[int, dict[str, Any]]:
    """Deliver what is left in the journal of a run; return how many records, and where MLflow has it.

    Nothing else may deliver the records of this run meanwhile, so its lease has to be held.
    """
    (uri, artifacts), where = find_server(config), _where(config, run_id)
    receiver, journal = Receiver(uri, **where, artifacts=artifacts), Journal(_journal_url(config, run_id))
    num, server = journal.count(), f"MLflow {without_passwords(uri)}"
    if not Delivery(journal, receiver, server).finish(wait_s=None):
        raise PencilError(
            f"run {config.run.name}: {server} did not receive all records; the rest is in {journal.url}. "
            "Start the server, or set tracking.uri, then run this command again"
        )
    return num, {**where, "runs": dict(receiver.runs)}
