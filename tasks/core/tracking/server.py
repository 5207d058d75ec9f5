"""The MLflow server: its address, whether it answers, its client, its errors and its experiments."""

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from configs.errors import BadInput, ConfigError, TrackingUnavailable
from configs.schema import TrackingSection

CHECK_SECONDS = 3.0
# MLflow's own defaults try for about four minutes per request. Values in the environment have priority.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    # stdout is reserved for the result of `ratchet run --json`
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def server_uri(section: TrackingSection) -> str:
    """The MLflow server's address. Raises ConfigError if it is not set or not an http(s) address."""
    uri = section.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ConfigError(
            "tracking.uri is not set and neither is MLFLOW_TRACKING_URI: "
            "start the embedded stack with `ratchet up`, or set one of them"
        )
    if not uri.startswith(("http://", "https://")):
        raise ConfigError(
            f"MLFLOW_TRACKING_URI is {uri!r} and must be the http(s) address of an MLflow server: "
            "`ratchet up` starts one"
        )
    return uri.rstrip("/")


def check(uri: str, seconds: float = CHECK_SECONDS) -> None:
    """Raises TrackingUnavailable if the server does not answer within `seconds`. MLflow's own client tries longer."""
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=seconds):
            return
    except urllib.error.HTTPError as error:
        if error.code < 500:  # a hosted server without a public /health answers with 4xx
            return
        reason = f"status {error.code}"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
    raise TrackingUnavailable(
        f"the MLflow server at {uri} does not answer ({reason}): start it with `ratchet up`, or correct tracking.uri"
    )


@contextlib.contextmanager
def mlflow_errors(what: str, uri: str, missing: str | None = None) -> Iterator[None]:
    """Translates the errors of MLflow and of its HTTP client.

    Refusals become BadInput, with the text `missing` if the requested object does not exist. All other errors become
    TrackingUnavailable.
    """
    import requests
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if missing and error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise BadInput(missing) from error
        text = " ".join(str(error.message).split())[:400]
        if refused(error):
            raise BadInput(f"MLflow at {uri} refused to {what}: {text}") from error
        raise TrackingUnavailable(f"MLflow at {uri} could not {what}: {text}") from error
    except (requests.RequestException, OSError) as error:
        raise TrackingUnavailable(f"MLflow at {uri} could not {what}: {error}") from error


def refused(error: Exception) -> bool:
    """Whether MLflow understood the request and refused it: status 4xx, except timeouts and rate limits."""
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException):
        return False
    # A broken connection is an MlflowException too, with status 500.
    status = error.get_http_status_code()
    return 400 <= status < 500 and status not in (408, 429)


def client_for(uri: str) -> Any:
    """An MlflowClient for the runs and the registry at `uri`. A request gives up after about half a minute."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def experiment_id(client: Any, name: str, uri: str) -> str:
    """The id of the experiment, which is created or restored if necessary. Several processes may do so at once."""
    from mlflow.exceptions import MlflowException

    with mlflow_errors(f"open the experiment {name!r}", uri):
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return client.create_experiment(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = client.get_experiment_by_name(name)
        if found.lifecycle_stage == "deleted":
            try:
                client.restore_experiment(found.experiment_id)
            except MlflowException:  # another process may have restored it in the meantime
                if client.get_experiment(found.experiment_id).lifecycle_stage == "deleted":
                    raise
        return found.experiment_id
