"""The MLflow server itself: its address, whether it answers, its client, what its errors mean, and its experiments."""

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from configs.errors import BadInput, ConfigError, TrackingUnavailable
from configs.schema import TrackingSection

CHECK_SECONDS = 3.0
# MLflow alone would try for about four minutes a call. Settings that the environment has already win.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    # stdout belongs to `ratchet run --json`
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def server_uri(section: TrackingSection) -> str:
    """The MLflow server's address. Raises ConfigError when neither the config nor the environment names one."""
    uri = section.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ConfigError(
            "tracking.uri is not set and neither is MLFLOW_TRACKING_URI: start the embedded stack with `ratchet up`, or set one of them"
        )
    if not uri.startswith(("http://", "https://")):
        raise ConfigError(
            f"MLFLOW_TRACKING_URI is {uri!r} and must be the http(s) address of an MLflow server: `ratchet up` starts one"
        )
    return uri.rstrip("/")


def check(uri: str, seconds: float = CHECK_SECONDS) -> None:
    """Raises TrackingUnavailable unless something answers there within a few seconds, before MLflow's own long retries."""
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=seconds):
            return
    except urllib.error.HTTPError as error:
        if error.code < 500:  # hosted servers have no /health, or guard it: they answer all the same
            return
        reason = f"status {error.code}"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
    raise TrackingUnavailable(
        f"the MLflow server at {uri} does not answer ({reason}): start it with `ratchet up`, or correct tracking.uri"
    )


@contextlib.contextmanager
def mlflow_errors(what: str, uri: str, missing: str | None = None) -> Iterator[None]:
    """Translates what MLflow and its HTTP client raise: refusals to BadInput (`missing` is its text for what does not exist), others to TrackingUnavailable."""
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
    """Whether MLflow understood and said no: status 4xx, except those that a later try may not get."""
    from mlflow.exceptions import MlflowException

    # An exhausted connection is an MlflowException too, with status 500.
    return (
        isinstance(error, MlflowException)
        and 400 <= error.get_http_status_code() < 500
        and error.get_http_status_code() not in (408, 429)
    )


def client_for(uri: str) -> Any:
    """An MlflowClient for `uri`, both for runs and for the registry, that gives up within about half a minute."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def experiment_id(client: Any, name: str, uri: str) -> str:
    """The id of the experiment: found, restored when it was deleted, or created; safe when several create it at once."""
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
            except MlflowException:  # somebody else restored it just now
                if client.get_experiment(found.experiment_id).lifecycle_stage == "deleted":
                    raise
        return found.experiment_id
