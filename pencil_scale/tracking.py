"""MLflow, in the one module that speaks to it."""

import logging

from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from packaging.version import InvalidVersion, Version

from pencil_scale.shapes import without_passwords
from pencil_scale.versions import MLFLOW, require

log = logging.getLogger(__name__)


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
        reason = without_passwords(" ".join(str(error).split()))[:200]
        log.warning("MLflow server %s did not tell its version: %s", without_passwords(uri), reason)
        return
    require(f"MLflow server {without_passwords(uri)}", found, MLFLOW)
