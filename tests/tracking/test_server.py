import socket
import threading

import pytest

from configs.errors import BadInput, ConfigError, TrackingUnavailable
from configs.schema import TrackingSection
from tasks.core.tracking.runs import connect
from tasks.core.tracking.server import mlflow_errors


def test_a_missing_address_is_a_config_error(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(
        ConfigError, match=r"tracking.uri is not set and neither is MLFLOW_TRACKING_URI: .*`ratchet up`"
    ):
        connect(TrackingSection())


def test_a_server_that_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    sentence = f"the MLflow server at http://127.0.0.1:{port} does not answer .*`ratchet up`"
    with pytest.raises(TrackingUnavailable, match=sentence):
        connect(TrackingSection(uri=f"http://127.0.0.1:{port}"))


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(TrackingUnavailable, match=r"http://nowhere\.invalid does not answer"):
        connect(TrackingSection(uri="http://nowhere.invalid"))


def test_connecting_without_verification_sends_nothing():
    assert connect(TrackingSection(uri="http://127.0.0.1:9"), verify=False).uri == "http://127.0.0.1:9"


def test_four_threads_that_connect_at_once_get_one_experiment(tracking):
    section = TrackingSection(experiment=f"{tracking.name}-threads")
    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.append(connect(section).experiment())) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(ids) == 4 and len(set(ids)) == 1


def test_a_deleted_experiment_is_restored(tracking):
    tracking.client.delete_experiment(tracking.experiment())
    again = connect(TrackingSection(experiment=tracking.name))
    assert again.experiment() == tracking.experiment()
    assert again.client.get_experiment(again.experiment()).lifecycle_stage == "active"


def test_a_refusal_becomes_bad_input(tracking):
    refused = pytest.raises(BadInput, match=r"refused to show a run: .*not-a-run")
    with refused, mlflow_errors("show a run", tracking.uri):
        tracking.client.get_run("not-a-run")


def test_a_broken_connection_becomes_tracking_unavailable(proxy):
    through_proxy = connect(TrackingSection(uri=proxy.uri), verify=False)
    proxy.disconnect()
    unavailable = pytest.raises(TrackingUnavailable, match="could not show a run")
    with unavailable, mlflow_errors("show a run", proxy.uri):
        through_proxy.client.get_run("0" * 32)
