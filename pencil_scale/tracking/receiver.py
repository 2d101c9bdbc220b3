"""MLflow, in the one module that speaks to it.

`check_server` asks a server whether we know its version. `Receiver` is where an outbox is delivered to. Each
of its calls may be repeated without harm, because a crash may fall between a call and its being noted: runs
are found again by a tag, a metric with the same time is the same value, tags and files are written over,
parameters are compared first, and a model is known by the hash of its weights.
"""

import io
import logging
import os
import tempfile
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlflow.pytorch
import numpy as np
import torch
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from packaging.version import InvalidVersion, Version
from torch import nn

from pencil_scale.config.command import MLFLOW, require
from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.urls import without_passwords
from pencil_scale.tracking.delivery import AwayError, RefusedError
from pencil_scale.tracking.outbox import Outbox, Record

log = logging.getLogger(__name__)

# MLflow's own limits, of one request and of one value.
MOST_METRICS = 1000
MOST_PARAMS = 100
LONGEST_PARAM = 6000
LONGEST_TAG = 8000

# Answers that no waiting changes. All others, a wrong password too, may be another answer later.
FINAL = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE")
ABSENT, PRESENT = "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"


def check_server(uri: str) -> None:
    """Stop with one line if an MLflow server of an unsupported version stands at `uri`.

    A server that does not answer is no reason to stop: training must not depend on it. That is logged.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        answer = http_request(get_default_host_creds(uri), "/version", "GET", timeout=10, max_retries=0)
        found = str(Version(answer.text.strip()))
    except (MlflowException, InvalidVersion) as error:
        log.warning("MLflow server %s did not tell its version: %s", without_passwords(uri), _reason(error))
        return
    require(f"MLflow server {without_passwords(uri)}", found, MLFLOW)


class Receiver:
    """Takes the records of an outbox to MLflow; the outbox notes the ids of the runs it made."""

    def __init__(self, uri: str, outbox: Outbox) -> None:
        self._uri = uri
        self._outbox = outbox
        self._client: MlflowClient | None = None

    def __call__(self, records: list[Record]) -> int:
        """Take as many records from the front as go in one request, and say how many."""
        try:
            return self._take(records)
        except MlflowException as error:
            said = RefusedError if error.error_code in (*FINAL, ABSENT, PRESENT) else AwayError
            raise said(_reason(error)) from error
        except OSError as error:  # requests' errors are, too
            status = getattr(getattr(error, "response", None), "status_code", None)
            said = RefusedError if status in (400, 404, 409, 413, 422) else AwayError
            raise said(_reason(error)) from error

    def _take(self, records: list[Record]) -> int:
        record, body = records[0], records[0].body
        if record.kind == "start":
            self._open_run(body)
        elif record.kind == "metrics":
            return self._log_metrics(records)
        elif record.kind == "tag":
            self._server().set_tag(self._run_id(body), body["name"], body["value"][:LONGEST_TAG])
        elif record.kind == "file":
            self._server().log_stream(self._run_id(body), io.BytesIO(record.blob), body["path"])
        elif record.kind == "model":
            self._log_model(self._run_id(body), body)
        elif record.kind == "alias":
            self._move_alias(self._run_id(body), body)
        elif record.kind == "end":
            self._server().set_terminated(self._run_id(body), body["status"], body["time"])
        else:
            raise RefusedError(f"a record of unknown kind '{record.kind}'")
        return 1

    def _server(self) -> MlflowClient:
        if self._client is None:
            # Here somebody else is patient, on disk: MLflow's own 7 retries of 2 minutes each would only
            # keep the log from saying that the server is away.
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            self._client = MlflowClient(self._uri, self._uri)
        return self._client

    def _run_id(self, body: dict[str, Any]) -> str:
        run_id = self._outbox.noted(f"run:{body['owner']}")
        if run_id is None:
            raise RefusedError("the run it belongs to could not be opened")
        return run_id

    # --- runs ------------------------------------------------------------------------------------------

    def _open_run(self, body: dict[str, Any]) -> None:
        """Find the run this record speaks of, or make it, and let it run."""
        client, experiment = self._server(), self._experiment(body)
        tags = {f"pencil_scale.{name}": body[name] for name in ("track", "stage")} | body.get("tags", {})
        if body["parent"] is not None:
            tags["mlflow.parentRunId"] = self._run_id({"owner": body["parent"]})
        former = self._outbox.noted(f"run:{body['owner']}") or body["run_id"]
        run = self._known_run(former)
        if former is not None and run is None:
            log.warning("MLflow knows run %s of %s no longer: a new one goes on", former, body["name"])
            tags["pencil_scale.continues"] = former
        run = run or self._found_run(experiment, body)
        if run is None:
            run = client.create_run(experiment, body["time"], tags, body["name"])
            log.info("MLflow run %s of experiment %s: %s", run.info.run_id, body["experiment"], body["name"])
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        tags |= self._log_params(run, body.get("params", {}))
        for some in _portions(tags.items(), MOST_PARAMS):
            client.log_batch(run.info.run_id, tags=[RunTag(name, text[:LONGEST_TAG]) for name, text in some])
        self._outbox.note(f"run:{body['owner']}", run.info.run_id)

    def _experiment(self, body: dict[str, Any]) -> str:
        client, name = self._server(), body["experiment"]
        found = client.get_experiment_by_name(name)
        if found is None:
            return str(client.create_experiment(name, artifact_location=body["artifacts"]))
        if found.lifecycle_stage != "active":
            raise AwayError(f"experiment '{name}' is deleted there; restore it, or set tracking.experiment")
        return str(found.experiment_id)

    def _known_run(self, run_id: str | None) -> Run | None:
        if run_id is None:
            return None
        try:
            run = self._server().get_run(run_id)
        except MlflowException as error:
            if error.error_code != ABSENT:
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _found_run(self, experiment: str, body: dict[str, Any]) -> Run | None:
        same = " and ".join(f"tags.`pencil_scale.{name}` = '{body[name]}'" for name in ("track", "stage"))
        return next(iter(self._server().search_runs([experiment], same)), None)

    def _log_params(self, run: Run, params: dict[str, str]) -> dict[str, str]:
        """Log what the run does not hold yet. MLflow keeps a parameter for ever: a change becomes a tag."""
        # config.json, among the run's files, holds the long ones whole.
        short = {
            name: text if len(text) <= LONGEST_PARAM else f"{text[: LONGEST_PARAM - 3]}..."
            for name, text in params.items()
        }
        held = run.data.params
        new = [Param(name, text) for name, text in short.items() if name not in held]
        for some in _portions(new, MOST_PARAMS):
            self._server().log_batch(run.info.run_id, params=some)
        changed = {name: text for name, text in short.items() if held.get(name, text) != text}
        if changed:
            log.info("MLflow keeps the first value of %s; tags 'changed.*' hold the new", ", ".join(changed))
        return {f"changed.{name}": text for name, text in changed.items()}

    # --- metrics ---------------------------------------------------------------------------------------

    def _log_metrics(self, records: list[Record]) -> int:
        """Send the leading records of one run together."""
        owner = records[0].body["owner"]
        metrics: list[Metric] = []
        taken = 0
        for record in takewhile(lambda r: r.kind == "metrics" and r.body["owner"] == owner, records):
            body = record.body
            if metrics and len(metrics) + len(body["values"]) > MOST_METRICS:
                break
            metrics += [
                Metric(name, value, body["time"], body["step"]) for name, value in body["values"].items()
            ]
            taken += 1
        self._server().log_batch(self._run_id(records[0].body), metrics=metrics)
        return taken

    # --- the model -------------------------------------------------------------------------------------

    def _log_model(self, run_id: str, body: dict[str, Any]) -> None:
        """Log the network, register it and move the alias: three steps, each left out where it is done."""
        file = self._outbox.folder / body["file"]
        model = self._logged_model(run_id, body)
        if model.status != LoggedModelStatus.READY:
            if not file.exists():
                raise RefusedError(f"the weights {file} are gone")
            try:
                self._upload(model, file, body)
            except (MlflowException, OSError):
                raise
            except Exception as error:  # torch.export cannot follow every network, and says so in many ways
                self._log_weights(run_id, model.model_id, file, _reason(error))
        if body["register_as"] is not None and model.status == LoggedModelStatus.READY:
            self._register(body["register_as"], run_id, model, body)
        file.unlink(missing_ok=True)

    def _logged_model(self, run_id: str, body: dict[str, Any]) -> LoggedModel:
        client, tags = self._server(), {"weights_sha256": body["sha256"]}
        experiment = client.get_run(run_id).info.experiment_id
        same = f"tags.weights_sha256 = '{body['sha256']}' and source_run_id = '{run_id}'"
        for model in client.search_logged_models([experiment], same):
            return model
        made = client.create_logged_model(experiment, "classifier", run_id, tags, model_type="classifier")
        client.log_outputs(run_id, [LoggedModelOutput(made.model_id, step=0)])
        return made

    def _upload(self, model: LoggedModel, file: Path, body: dict[str, Any]) -> None:
        network = build_backbone(body["backbone"], body["num_classes"])
        network.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        described = Model(
            model.artifact_location,
            model.source_run_id,
            signature=_signature(body["image_size"], body["num_classes"]),
            metadata=body["metadata"],
            model_uuid=model.model_id,
            model_id=model.model_id,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            _export(network, described, body["image_size"], path)
            self._server().log_model_artifacts(model.model_id, str(path))
        model.status = self._server().finalize_logged_model(model.model_id, "READY").status

    def _log_weights(self, run_id: str, model_id: str, file: Path, reason: str) -> None:
        """Keep the weights with the run where the network cannot be exported; it is never pickled instead."""
        log.warning("the network cannot be exported and registered; its weights are kept: %s", reason)
        self._server().log_artifact(run_id, str(file), "model")
        self._server().set_tag(run_id, "warning.model", f"not exported, weights alone are kept: {reason}")
        self._server().finalize_logged_model(model_id, "FAILED")

    def _register(self, name: str, run_id: str, model: LoggedModel, body: dict[str, Any]) -> None:
        client = self._server()
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != PRESENT:
                raise
        tags = {"weights_sha256": body["sha256"], "backbone": body["backbone"]}
        made = client.search_model_versions(f"run_id = '{run_id}'")
        same = [one for one in made if one.name == name and tags.items() <= one.tags.items()]
        # A database resolves models:/ID at the process's global URI, which may be another: give it the place.
        source = model.model_uri if self._uri.startswith("http") else model.artifact_location
        if not same:
            same = [client.create_model_version(name, source, run_id, tags, model_id=model.model_id)]
        version = same[0].version
        if body["alias"] is not None:
            client.set_registered_model_alias(name, body["alias"], str(version))
        log.info("MLflow model %s version %s is '%s'", name, version, body["alias"] or "without an alias")

    def _move_alias(self, run_id: str, body: dict[str, Any]) -> None:
        """Point an alias at the newest version that a run made of a registered model."""
        name, client = body["register_as"], self._server()
        made = [one for one in client.search_model_versions(f"run_id = '{run_id}'") if one.name == name]
        if not made:
            raise RefusedError(f"run {run_id} made no version of model {name}")
        version = max(int(one.version) for one in made)
        client.set_registered_model_alias(name, body["alias"], str(version))
        log.info("MLflow model %s version %d is '%s'", name, version, body["alias"])


def _signature(image_size: int, num_classes: int) -> ModelSignature:
    float32 = np.dtype(np.float32)
    images = TensorSpec(float32, (-1, 3, image_size, image_size))
    return ModelSignature(Schema([images]), Schema([TensorSpec(float32, (-1, num_classes))]))


def _export(network: nn.Module, described: Model, image_size: int, path: Path) -> None:
    """Write the network as a graph and its tensors: loading it runs nobody's code."""
    mlflow.pytorch.save_model(
        network.eval(),
        path,
        mlflow_model=described,
        signature=described.signature,
        input_example=np.zeros(
            (2, 3, image_size, image_size), np.float32
        ),  # of one, the batch would be fixed
        pip_requirements=[f"mlflow=={mlflow.__version__}", f"torch=={Version(torch.__version__).public}"],
        serialization_format="pt2",
    )


def _portions(items: Iterable[Any], most: int) -> list[list[Any]]:
    whole = list(items)
    return [whole[first : first + most] for first in range(0, len(whole), most)]


def _reason(error: Exception) -> str:
    return str(without_passwords(" ".join(str(error).split())))[:200]
