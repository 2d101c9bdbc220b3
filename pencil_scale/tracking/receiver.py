"""Receiver: sends the entries of a journal to MLflow; no other module imports MLflow.

Every call may be repeated without harm, since a crash may come before the journal deletes what was sent: runs
are found again by their tags, a metric with the same time is the same value, tags and files are overwritten,
parameters are compared first, and a model is identified by the hash of its weights.

Work that is repeated after a crash reports its steps again. MLflow appends, so it would show two values for
one step: values at or before the last step that MLflow has of their series are left out.

    check_server(uri)                         # refuses a server of an unsupported version
    receiver = Receiver(uri, "ab12", experiment="clothing1m")
    num_sent = receiver(entries)              # AwayError: try again later; other errors: never
"""

import io
import json
import logging
import os
import tempfile
from functools import cached_property
from itertools import takewhile
from typing import Any

import mlflow.pytorch
import numpy as np
import torch
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelOutput,
    Metric,
    Param,
    Run,
    RunTag,
    ViewType,
)
from mlflow.exceptions import MlflowException
from mlflow.models import Model, infer_signature
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from packaging.version import InvalidVersion, Version

from pencil_scale.config.command import MLFLOW, require
from pencil_scale.config.settings import FEATURES
from pencil_scale.method.backbones import HeadAlone, build_backbone, fit_head
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import without_passwords
from pencil_scale.tracking.journal import AwayError, Entry

log = logging.getLogger(__name__)

PARENT = "parent"  # the run above those of the stages
RESUMABLE = "SCHEDULED"  # MLflow shows KILLED in red, like FAILED; a stopped run waits to be resumed

# MLflow's limits for one request and for one value.
MOST_METRICS = 1000
MOST_PARAMS = 100
LONGEST_PARAM = 6000
LONGEST_TAG = 8000

# Answers that will not change. All others may, also one to a wrong password.
PRESENT = "RESOURCE_ALREADY_EXISTS"
FINAL = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST", PRESENT)
FINAL_STATUS = (400, 404, 409, 413, 422)


def check_server(uri: str) -> None:
    """Refuse an MLflow server of an unsupported version.

    A server that does not answer is only logged: training must not depend on it.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        answer = http_request(get_default_host_creds(uri), "/version", "GET", timeout=10, max_retries=0)
        found = str(Version(answer.text.strip()))
    except (MlflowException, InvalidVersion) as error:
        text = "MLflow server %s is unreachable, or did not report its version (%s): the job continues"
        log.warning(text, without_passwords(uri), _reason(error))
        return
    require(f"MLflow server {without_passwords(uri)}", found, MLFLOW)


class Receiver:
    """Sends the entries of one run to MLflow. `runs` has the ids of its MLflow runs, by stage."""

    def __init__(self, uri: str, run_id: str, experiment: str, artifacts: str | None = None) -> None:
        self._uri, self._tag, self._experiment, self._artifacts = uri, run_id, experiment, artifacts
        self.runs: dict[str, str] = {}
        self._steps: dict[str, dict[str, int]] = {}  # the last step of each series, by stage

    def __call__(self, entries: list[Entry]) -> int:
        """Send the first entry, or all leading metrics of one run together; return how many were sent."""
        try:
            return self._log_metrics(entries) if entries[0].kind == "metrics" else self._send(entries[0])
        except (MlflowException, OSError) as error:  # an error of `requests` is an OSError
            status = getattr(getattr(error, "response", None), "status_code", None)
            is_final = getattr(error, "error_code", None) in FINAL or status in FINAL_STATUS
            raise (PencilError if is_final else AwayError)(_reason(error)) from error

    def _send(self, entry: Entry) -> int:
        body = entry.body
        if entry.kind == "start":
            self._open_run(body)
            return 1
        client, run_id = self._client, self._run_id(body["stage"])
        if entry.kind == "tag":
            client.set_tag(run_id, body["name"], body["value"][:LONGEST_TAG])
        elif entry.kind == "file":
            client.log_stream(run_id, io.BytesIO(entry.data), body["path"])
        elif entry.kind == "model":
            self._log_model(run_id, entry)
        elif entry.kind == "alias":
            self._move_alias(run_id, body["register_as"], body["alias"])
        elif entry.kind == "dataset":
            client.log_inputs(run_id, [_dataset_input(**body)])
        elif body["status"] == RESUMABLE:
            client.update_run(run_id, RESUMABLE)
        else:
            client.set_terminated(run_id, body["status"], body["time"])
        return 1

    @cached_property
    def _client(self) -> MlflowClient:
        # The delivery retries. MLflow's 7 retries of 2 minutes each would only delay the log line that the
        # server is unreachable.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        for library in ("mlflow", "alembic"):  # they report every table of a new database, and a missing pip
            logging.getLogger(library).setLevel(logging.ERROR)
        return MlflowClient(self._uri, self._uri)

    def _log_metrics(self, entries: list[Entry]) -> int:
        stage, metrics = entries[0].body["stage"], []
        run_id, steps = self._run_id(stage), dict(self._steps[stage])
        same = takewhile(lambda entry: entry.kind == "metrics" and entry.body["stage"] == stage, entries)
        bodies = [entry.body for entry in same]
        for body in bodies:
            for name, value in body["values"].items():
                if body["step"] > steps.get(name, -1):
                    steps[name] = body["step"]
                    metrics.append(Metric(name, value, body["time"], body["step"]))
        for some in _portions(metrics, MOST_METRICS):
            self._client.log_batch(run_id, metrics=some)
        self._steps[stage] = steps
        return len(bodies)

    # --- runs ------------------------------------------------------------------------------------------

    def _run_id(self, stage: str) -> str:
        if stage not in self.runs and self._find_run(stage) is None:
            raise PencilError(f"MLflow has no run for '{stage}'")
        return self.runs[stage]

    def _find_run(self, stage: str, view: int = ViewType.ACTIVE_ONLY) -> Run | None:
        """Find the run of a stage, and the last step of each of its series."""
        same = f"tags.`pencil_scale.run_id` = '{self._tag}' and tags.`pencil_scale.stage` = '{stage}'"
        for run in self._client.search_runs([self._experiment_id], same, view):
            self.runs[stage] = run.info.run_id
            self._steps[stage] = {metric.key: metric.step for metric in run.data._metric_objs}
            return run
        return None

    @cached_property
    def _experiment_id(self) -> str:
        name = self._experiment
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name, self._artifacts))
        if found.lifecycle_stage != "active":
            raise AwayError(f"experiment '{name}' is deleted there; restore it, or set tracking.experiment")
        return str(found.experiment_id)

    def _open_run(self, body: dict[str, Any]) -> None:
        """Find the run of a stage, or create it, and set it to running."""
        client, stage, name = self._client, body["stage"], body["name"]
        tags = {"pencil_scale.run_id": self._tag, "pencil_scale.stage": stage} | body["tags"]
        if stage != PARENT:
            tags["mlflow.parentRunId"] = self._run_id(PARENT)
        run = self._find_run(stage)
        if run is None:
            if self._find_run(stage, ViewType.DELETED_ONLY):
                tags["pencil_scale.continues"] = former = self.runs[stage]
                log.warning("MLflow no longer has run %s of %s: a new one continues it", former, name)
            run = client.create_run(self._experiment_id, body["time"], tags, name)
            self.runs[stage], self._steps[stage] = run.info.run_id, {}
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        # MLflow never changes a parameter: a change becomes a tag. config.json has long ones in full.
        known, params = run.data.params, {key: text[:LONGEST_PARAM] for key, text in body["params"].items()}
        new = [Param(key, text) for key, text in params.items() if key not in known]
        tags |= {f"changed.{key}": text for key, text in params.items() if known.get(key, text) != text}
        for some in _portions(new, MOST_PARAMS):
            client.log_batch(run.info.run_id, params=some)
        for some in _portions(list(tags.items()), MOST_PARAMS):
            client.log_batch(run.info.run_id, tags=[RunTag(key, text[:LONGEST_TAG]) for key, text in some])

    # --- the model -------------------------------------------------------------------------------------

    def _log_model(self, run_id: str, entry: Entry) -> None:
        """Log the network and register it: each step is skipped if it is done.

        If the network cannot be exported, its weights are kept with the run; it is never pickled instead.
        """
        body, client = entry.body, self._client
        tags = {"weights_sha256": body["sha256"]}
        same = f"tags.weights_sha256 = '{body['sha256']}' and source_run_id = '{run_id}'"
        model = next(iter(client.search_logged_models([self._experiment_id], same)), None)
        if model is None:
            model = client.create_logged_model(
                self._experiment_id, "classifier", run_id, tags, model_type="classifier"
            )
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        if model.status != "READY":
            try:
                self._upload(model, entry)
            except (MlflowException, OSError):
                raise
            except Exception as error:  # torch.export cannot export every network, and fails in many ways
                reason = _reason(error)
                log.warning("the network cannot be exported and registered; its weights are kept: %s", reason)
                client.log_stream(run_id, io.BytesIO(entry.data), f"model/weights-{model.model_id}.pt")
                text = f"not exported, only its weights are kept: {reason}"
                client.set_tag(run_id, "warning.model", text)
                client.finalize_logged_model(model.model_id, "FAILED")
                return
        if body["register_as"] is not None:
            self._register(run_id, model, body["register_as"], tags | {"backbone": body["backbone"]})

    def _upload(self, model: LoggedModel, entry: Entry) -> None:
        """Upload the network as a graph and its tensors: loading it executes no code."""
        body = entry.body
        side, num_classes = body["image_size"], len(body["class_names"])
        network = build_backbone(body["backbone"], num_classes)
        weights = torch.load(io.BytesIO(entry.data), map_location="cpu", weights_only=True)
        fit_head(network, weights)
        network.load_state_dict(weights)
        images = np.zeros((2, 3, side, side), np.float32)  # a batch of one would fix the batch size
        if isinstance(network, HeadAlone):
            images = np.zeros((2, int(body["backbone"].removeprefix(FEATURES))), np.float32)
        versions = {"mlflow": mlflow.__version__, "torch": Version(torch.__version__).public}
        model_id, run_id = model.model_id, model.source_run_id
        with tempfile.TemporaryDirectory() as folder:
            mlflow.pytorch.save_model(
                network.eval(),
                f"{folder}/model",
                mlflow_model=Model(model.artifact_location, run_id, model_uuid=model_id, model_id=model_id),
                signature=infer_signature(images, np.zeros((2, num_classes), np.float32)),
                input_example=images,
                metadata={"class_names": body["class_names"], "backbone": body["backbone"]},
                pip_requirements=[f"{name}=={found}" for name, found in versions.items()],
                serialization_format="pt2",
            )
            self._client.log_model_artifacts(model_id, f"{folder}/model")
        self._client.finalize_logged_model(model_id, "READY")

    def _register(self, run_id: str, model: LoggedModel, name: str, tags: dict[str, str]) -> None:
        client = self._client
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != PRESENT:
                raise
        if any(tags.items() <= version.tags.items() for version in self._versions(run_id, name)):
            return
        # A database resolves models:/ID at the process's global URI, which may differ: give the location.
        source = model.model_uri if self._uri.startswith("http") else model.artifact_location
        client.create_model_version(name, source, run_id, tags, model_id=model.model_id)

    def _move_alias(self, run_id: str, name: str, alias: str) -> None:
        """Move an alias to the newest version of a registered model that a run made."""
        versions = [int(version.version) for version in self._versions(run_id, name)]
        if not versions:
            raise PencilError(f"run {run_id} made no version of model {name}")
        self._client.set_registered_model_alias(name, alias, str(max(versions)))

    def _versions(self, run_id: str, name: str) -> list[Any]:
        made = self._client.search_model_versions(f"run_id = '{run_id}'")
        return [version for version in made if version.name == name]


def _dataset_input(
    name: str, use: str, digest: str, url: str, known: dict[str, int], **_: Any
) -> DatasetInput:
    kind = url.partition("://")[0] if "://" in url else "local"
    dataset = Dataset(name, digest, kind, json.dumps({"uri": url}), profile=json.dumps(known))
    version = InputTag("catalogue_version", str(known["catalogue_version"]))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", use), version])


def _portions(items: list[Any], most: int) -> list[list[Any]]:
    return [items[first : first + most] for first in range(0, len(items), most)]


def _reason(error: Exception) -> str:
    return str(without_passwords(" ".join(str(error).split())))[:200]
