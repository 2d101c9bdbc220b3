"""Receiver: sends the records of a journal to MLflow; no other module imports MLflow.

Every call may be repeated without harm, since a crash may come between a call and its acknowledgement: runs
are found again by a tag, a metric with the same time is the same value, tags and files are overwritten,
parameters are compared first, and a model is identified by the hash of its weights.

    check_server(uri)                         # refuses a server of an unsupported version
    num_sent = Receiver(uri, runs)(records)   # AwayError: try again later; RefusedError: never
"""

import io
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
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from packaging.version import InvalidVersion, Version

from pencil_scale.config.command import MLFLOW, require
from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.urls import without_passwords
from pencil_scale.tracking.journal import AwayError, Record, RefusedError

log = logging.getLogger(__name__)

PARENT = "parent"  # the run above those of the stages

# MLflow's limits for one request and for one value.
MOST_METRICS = 1000
MOST_PARAMS = 100
LONGEST_PARAM = 6000
LONGEST_TAG = 8000

# Answers that will not change. All others may, also one to a wrong password.
ABSENT, PRESENT = "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"
FINAL = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", ABSENT, PRESENT)
FINAL_STATUS = (400, 404, 409, 413, 422)
FLOAT32 = np.dtype(np.float32)


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
        log.warning("MLflow server %s did not report its version: %s", without_passwords(uri), _reason(error))
        return
    require(f"MLflow server {without_passwords(uri)}", found, MLFLOW)


class Receiver:
    """Sends records to MLflow, and adds the ids of the runs it makes to `runs`."""

    def __init__(self, uri: str, runs: dict[str, str]) -> None:
        self._uri, self._runs = uri, runs

    def __call__(self, records: list[Record]) -> int:
        """Send as many records from the front as fit into one request; return how many."""
        try:
            return self._log_metrics(records) if records[0].kind == "metrics" else self._send(records[0])
        except (MlflowException, OSError) as error:  # an error of `requests` is an OSError
            status = getattr(getattr(error, "response", None), "status_code", None)
            is_final = getattr(error, "error_code", None) in FINAL or status in FINAL_STATUS
            raise (RefusedError if is_final else AwayError)(_reason(error)) from error

    def _send(self, record: Record) -> int:
        body, client = record.body, self._client
        if record.kind == "start":
            self._open_run(body)
        elif record.kind == "tag":
            client.set_tag(self._run_id(body), body["name"], body["value"][:LONGEST_TAG])
        elif record.kind == "file":
            client.log_stream(self._run_id(body), io.BytesIO(record.read()), body["path"])
        elif record.kind == "model":
            self._log_model(self._run_id(body), record)
        elif record.kind == "alias":
            self._move_alias(self._run_id(body), body)
        elif record.kind == "end":
            client.set_terminated(self._run_id(body), body["status"], body["time"])
        else:
            raise RefusedError(f"a record of unknown kind '{record.kind}'")
        return 1

    @cached_property
    def _client(self) -> MlflowClient:
        # The delivery retries. MLflow's 7 retries of 2 minutes each would only delay the log line that the
        # server is unreachable.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        return MlflowClient(self._uri, self._uri)

    def _run_id(self, body: dict[str, Any]) -> str:
        if body["stage"] not in self._runs:
            raise RefusedError("the run it belongs to could not be opened")
        return self._runs[body["stage"]]

    # --- runs ------------------------------------------------------------------------------------------

    def _open_run(self, body: dict[str, Any]) -> None:
        """Find the run of this record, or create it, and set it to running."""
        client, experiment = self._client, self._experiment(body["experiment"], body["artifacts"])
        known = {f"pencil_scale.{name}": body[name] for name in ("run_id", "stage")}
        tags = known | body["tags"]
        if body["stage"] != PARENT:
            tags["mlflow.parentRunId"] = self._run_id({"stage": PARENT})
        former = self._runs.get(body["stage"])
        run = self._known_run(former)
        if former is not None and run is None:
            log.warning("MLflow no longer has run %s of %s: a new one continues it", former, body["name"])
            tags["pencil_scale.continues"] = former
        if run is None:
            same = " and ".join(f"tags.`{name}` = '{text}'" for name, text in known.items())
            run = next(iter(client.search_runs([experiment], same)), None)
        if run is None:
            run = client.create_run(experiment, body["time"], tags, body["name"])
            log.info("MLflow run %s of experiment %s: %s", run.info.run_id, body["experiment"], body["name"])
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        tags |= self._log_params(run, body.get("params", {}))
        for some in portions(list(tags.items()), MOST_PARAMS):
            client.log_batch(run.info.run_id, tags=[RunTag(name, text[:LONGEST_TAG]) for name, text in some])
        self._runs[body["stage"]] = run.info.run_id

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        if found.lifecycle_stage != "active":
            raise AwayError(f"experiment '{name}' is deleted there; restore it, or set tracking.experiment")
        return str(found.experiment_id)

    def _known_run(self, run_id: str | None) -> Run | None:
        try:
            run = self._client.get_run(run_id) if run_id else None
        except MlflowException as error:
            if error.error_code != ABSENT:
                raise
            return None
        return run if run and run.info.lifecycle_stage == "active" else None

    def _log_params(self, run: Run, params: dict[str, str]) -> dict[str, str]:
        """Log what the run does not have yet. MLflow never changes a parameter: a change becomes a tag."""
        # config.json, among the run's files, has the long ones in full.
        short = {
            name: text if len(text) <= LONGEST_PARAM else f"{text[: LONGEST_PARAM - 3]}..."
            for name, text in params.items()
        }
        held = run.data.params
        new = [Param(name, text) for name, text in short.items() if name not in held]
        for some in portions(new, MOST_PARAMS):
            self._client.log_batch(run.info.run_id, params=some)
        changed = {name: text for name, text in short.items() if held.get(name, text) != text}
        if changed:
            log.info("MLflow keeps the first value of %s; tags 'changed.*' hold the new", ", ".join(changed))
        return {f"changed.{name}": text for name, text in changed.items()}

    # --- metrics ---------------------------------------------------------------------------------------

    def _log_metrics(self, records: list[Record]) -> int:
        """Send the metrics of the leading records of one run together."""
        stage = records[0].body["stage"]
        metrics: list[Metric] = []
        taken = 0
        for record in takewhile(lambda r: r.kind == "metrics" and r.body["stage"] == stage, records):
            body = record.body
            if metrics and len(metrics) + len(body["values"]) > MOST_METRICS:
                break
            time, step = body["time"], body["step"]
            metrics += [Metric(name, value, time, step) for name, value in body["values"].items()]
            taken += 1
        self._client.log_batch(self._run_id(records[0].body), metrics=metrics)
        return taken

    # --- the model -------------------------------------------------------------------------------------

    def _log_model(self, run_id: str, record: Record) -> None:
        """Log the network, register it and move the alias: three steps, each skipped if it is done.

        If the network cannot be exported, its weights are kept with the run; it is never pickled instead.
        """
        body, client = record.body, self._client
        experiment = client.get_run(run_id).info.experiment_id
        same = f"tags.weights_sha256 = '{body['sha256']}' and source_run_id = '{run_id}'"
        model = next(iter(client.search_logged_models([experiment], same)), None)
        if model is None:
            tags = {"weights_sha256": body["sha256"]}
            model = client.create_logged_model(
                experiment, "classifier", run_id, tags, model_type="classifier"
            )
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        if model.status != LoggedModelStatus.READY:
            weights = record.read()
            try:
                self._upload(model, weights, body)
            except (MlflowException, OSError):
                raise
            except Exception as error:  # torch.export cannot export every network, and fails in many ways
                reason = _reason(error)
                log.warning("the network cannot be exported and registered; its weights are kept: %s", reason)
                client.log_stream(run_id, io.BytesIO(weights), f"model/weights-{model.model_id}.pt")
                text = f"not exported, only its weights are kept: {reason}"
                client.set_tag(run_id, "warning.model", text)
                client.finalize_logged_model(model.model_id, "FAILED")
        if body["register_as"] is not None and model.status == LoggedModelStatus.READY:
            self._register(run_id, model, body)

    def _upload(self, model: LoggedModel, weights: bytes, body: dict[str, Any]) -> None:
        """Upload the network as a graph and its tensors: loading it executes no code."""
        side, num_classes = body["image_size"], body["num_classes"]
        network = build_backbone(body["backbone"], num_classes)
        network.load_state_dict(torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True))
        signature = ModelSignature(
            Schema([TensorSpec(FLOAT32, (-1, 3, side, side))]),
            Schema([TensorSpec(FLOAT32, (-1, num_classes))]),
        )
        described = Model(
            model.artifact_location,
            model.source_run_id,
            signature=signature,
            metadata=body["metadata"],
            model_uuid=model.model_id,
            model_id=model.model_id,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model"
            mlflow.pytorch.save_model(
                network.eval(),
                path,
                mlflow_model=described,
                signature=signature,
                # With a batch of one, the batch size would be fixed.
                input_example=np.zeros((2, 3, side, side), np.float32),
                pip_requirements=[
                    f"mlflow=={mlflow.__version__}",
                    f"torch=={Version(torch.__version__).public}",
                ],
                serialization_format="pt2",
            )
            self._client.log_model_artifacts(model.model_id, path)
        model.status = self._client.finalize_logged_model(model.model_id, "READY").status

    def _register(self, run_id: str, model: LoggedModel, body: dict[str, Any]) -> None:
        client, name = self._client, body["register_as"]
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != PRESENT:
                raise
        tags = {"weights_sha256": body["sha256"], "backbone": body["backbone"]}
        made = client.search_model_versions(f"run_id = '{run_id}'")
        same = [one for one in made if one.name == name and tags.items() <= one.tags.items()]
        # A database resolves models:/ID at the process's global URI, which may differ: give the location.
        source = model.model_uri if self._uri.startswith("http") else model.artifact_location
        if not same:
            same = [client.create_model_version(name, source, run_id, tags, model_id=model.model_id)]
        version = same[0].version
        if body["alias"] is not None:
            client.set_registered_model_alias(name, body["alias"], str(version))
        log.info("MLflow model %s version %s is '%s'", name, version, body["alias"] or "without an alias")

    def _move_alias(self, run_id: str, body: dict[str, Any]) -> None:
        """Move an alias to the newest version of a registered model that a run made."""
        name, client = body["register_as"], self._client
        made = [one for one in client.search_model_versions(f"run_id = '{run_id}'") if one.name == name]
        if not made:
            raise RefusedError(f"run {run_id} made no version of model {name}")
        version = max(int(one.version) for one in made)
        client.set_registered_model_alias(name, body["alias"], str(version))
        log.info("MLflow model %s version %d is '%s'", name, version, body["alias"])


def portions(items: list[Any], most: int) -> list[list[Any]]:
    """Cut a list into lists of this length at most."""
    return [items[first : first + most] for first in range(0, len(items), most)]


def _reason(error: Exception) -> str:
    return str(without_passwords(" ".join(str(error).split())))[:200]
