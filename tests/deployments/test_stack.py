"""The embedded stack, for real: one per session, restarted once here."""

import os
import signal

import psutil
import pytest

from configs.errors import StackError
from deployments.local import control, health, serving, settings
from deployments.local import stack as embedded

SERVICES = ["s3-account", "s3-container", "s3-object", "s3", "mlflow", "prefect", "worker"]


@pytest.fixture(scope="module")
def restarted(stack, stack_options):
    """What was left of the stack after its supervisor was killed and it was taken down, and it is up again."""
    import mlflow

    client = s3(stack)
    client.put_object(Bucket="ratchet", Key="kept/é.txt", Body=b"kept")
    mlflow.create_experiment("kept")
    urls = {name: stack[name] for name in settings.PORTS}
    before = control.processes(stack["home"])
    os.kill(int((stack["home"] / "supervisord.pid").read_text()), signal.SIGKILL)
    try:
        embedded.down(stack["home"])
        left, rows = control.processes(stack["home"]), embedded.status(stack["home"])
    finally:
        again = embedded.up(stack["home"], **stack_options)
    return {"before": before, "left": left, "rows": rows, "same_urls": again == urls}


def s3(stack):
    import boto3

    env = settings.environment(stack["home"])
    keys = {"aws_access_key_id": env["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": env["AWS_SECRET_ACCESS_KEY"]}
    return boto3.client("s3", endpoint_url=stack["s3"], region_name="us-east-1", **keys)


def pids(home):
    return {row["service"]: row["pid"] for row in embedded.status(home)}


def test_credentials_are_readable_by_their_owner_alone(stack):
    assert (stack["home"] / "credentials.json").stat().st_mode & 0o777 == 0o600


def test_no_other_file_that_holds_the_secret_key_is_readable_by_others(stack):
    secret = settings.credentials(stack["home"])["secret_key"].encode()
    open_to_others = [
        f for f in stack["home"].rglob("*") if f.is_file() and f.stat().st_mode & 0o077 and secret in f.read_bytes()
    ]
    assert open_to_others == []


def test_status_lists_every_service(stack):
    rows = embedded.status(stack["home"])
    assert [(row["service"], row["state"]) for row in rows] == [(name, "RUNNING") for name in SERVICES]
    assert {row["service"]: row["url"] for row in rows if row["url"]} == {
        name: stack[name] for name in ("s3", "mlflow", "prefect")
    }
    assert all(psutil.pid_exists(row["pid"]) for row in rows)


def test_everything_listens_on_loopback_alone(stack):
    addresses = {
        c.laddr.ip
        for p in control.processes(stack["home"])
        for c in p.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


def test_a_second_up_leaves_every_process_as_it_is(stack, stack_options):
    before = pids(stack["home"])
    assert embedded.up(stack["home"], **stack_options) == {name: stack[name] for name in ("prefect", "mlflow", "s3")}
    assert pids(stack["home"]) == before


def test_unchanged_flows_are_not_deployed_again(stack):
    assert serving.deploy(stack["home"], f"{stack['prefect']}/api", stack["project"]) is False


def test_deployments_work_in_the_folder_that_up_was_called_from(stack):
    found = health.ask(f"{stack['prefect']}/api/deployments/filter", {})
    steps = {
        d["name"]: d["pull_steps"][0]["prefect.deployments.steps.set_working_directory"]["directory"] for d in found
    }
    assert steps == dict.fromkeys(["nightly-retrain", "post-train", "promote", "rollback"], str(stack["project"]))


def test_the_nightly_run_has_a_schedule_and_never_overlaps(stack):
    found = health.ask(f"{stack['prefect']}/api/deployments/name/post-train/nightly-retrain")
    assert [(s["schedule"]["cron"], s["slug"], s["active"]) for s in found["schedules"]] == [
        ("0 2 * * *", "nightly", True)
    ]
    assert (found["global_concurrency_limit"]["limit"], found["concurrency_options"]["collision_strategy"]) == (
        1,
        "CANCEL_NEW",
    )
    assert found["parameters"] == {"preset": "tiny", "overrides": {}}


def test_promotions_wait_for_each_other(stack):
    found = health.ask(f"{stack['prefect']}/api/deployments/name/promote/promote")
    assert (found["global_concurrency_limit"]["limit"], found["concurrency_options"]["collision_strategy"]) == (
        1,
        "ENQUEUE",
    )


def test_a_port_that_is_asked_for_while_the_stack_runs_on_another_is_refused(stack, stack_options):
    with pytest.raises(
        StackError, match=r"^port 4 is asked for mlflow, which already runs on port \d+: call `ratchet down` first$"
    ):
        embedded.up(stack["home"], **stack_options | {"ports": {"mlflow": 4}})


def test_the_store_refuses_another_secret(stack):
    import boto3
    from botocore.exceptions import ClientError

    key = settings.credentials(stack["home"])["access_key"]
    client = boto3.client(
        "s3", endpoint_url=stack["s3"], region_name="us-east-1", aws_access_key_id=key, aws_secret_access_key="guess"
    )
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        client.list_buckets()


def test_nothing_is_left_running_after_down_even_where_supervisor_was_killed(restarted):
    assert restarted["left"] == []
    assert len(restarted["before"]) >= len(SERVICES) + 1 and not any(p.is_running() for p in restarted["before"])


def test_status_of_a_stopped_stack(restarted):
    assert [(row["state"], row["url"], row["pid"]) for row in restarted["rows"]] == [("STOPPED", None, None)] * len(
        SERVICES
    )


def test_ports_are_kept(restarted):
    assert restarted["same_urls"]


def test_objects_are_kept(restarted, stack):
    assert s3(stack).get_object(Bucket="ratchet", Key="kept/é.txt")["Body"].read() == b"kept"


def test_experiments_are_kept(restarted, stack):
    import mlflow

    assert mlflow.MlflowClient(stack["mlflow"]).get_experiment_by_name("kept").lifecycle_stage == "active"


def test_deployments_are_kept(restarted, stack):
    found = health.ask(f"{stack['prefect']}/api/deployments/filter", {})
    assert sorted(d["name"] for d in found) == ["nightly-retrain", "post-train", "promote", "rollback"]
