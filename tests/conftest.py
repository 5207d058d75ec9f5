"""Fixtures that several folders use: the real embedded stack, models, and stores."""

import os
import subprocess
import sys
import uuid

import pytest
import tiny
from prefect.logging.handlers import APILogWorker

from configs.schema import TrackingSection
from deployments.local import settings, stack
from tasks.core.model import loading
from tasks.core.tracking.runs import connect


def pytest_collection_modifyitems(items):
    """Keeps the tests that use the stack together in two groups, so that at most two workers start one."""
    for item in items:
        if "stack" in item.fixturenames:
            group = "pipelines" if item.path.parent.name == "flows" else "servers"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def stack_options():
    """Arguments of `stack.up` for the stack of the session: free ports, and the stack ends when pytest ends."""
    return {
        "ports": {name: settings.free_port() for name in settings.PORTS},
        "die_with": os.getpid(),
        "say": lambda line: None,
    }


@pytest.fixture(scope="session", name="stack")
def running_stack(tmp_path_factory, stack_options):
    """Addresses and folders of a running stack: {"prefect", "mlflow", "s3", "home", "project"}.

    The environment and Prefect's settings point to it.
    """
    folder = tmp_path_factory.mktemp("stack")
    home, project = folder / "home", folder / "project"
    project.mkdir()
    stack_options["project"] = project
    with pytest.MonkeyPatch.context() as patch:
        for name in (n for names in settings.DECIDING.values() for n in names):
            patch.delenv(name, raising=False)
        # By default the worker looks for runs every ten seconds.
        patch.setenv("PREFECT_WORKER_QUERY_SECONDS", "2")
        try:
            urls = stack.up(home, **stack_options)
            for name, value in settings.environment(home).items():
                patch.setenv(name, value)
            with _prefect_settings(home):
                yield {**urls, "home": home, "project": project}
        finally:
            # Prefect would try for a minute to send logs to a server that has ended.
            APILogWorker.drain_all(timeout=10)
            stack.down(home)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a user's module that can be imported as my_rewards."""

    def write(code: str) -> None:
        (tmp_path / "my_rewards.py").write_text(code)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    yield write
    sys.modules.pop("my_rewards", None)


@pytest.fixture(scope="session")
def two_models(tmp_path_factory):
    """(data, policy folder, reference folder): two models with different seeds and one tokenizer."""
    import torch

    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp("evaluate")
    data, first = tiny.build(folder / "one", seed=1)
    _, second = tiny.build(folder / "two", seed=2)
    return data, first / "model", second / "model"


@pytest.fixture(scope="session")
def pair(two_models):
    """The two models of `two_models`, loaded."""
    return tuple(loading.load_policy(folder, tiny.MODEL, tiny.CPU, for_training=False) for folder in two_models[1:])


@pytest.fixture
def tracking(stack):
    """A new experiment on the stack's MLflow server."""
    return connect(TrackingSection(experiment=f"test-{uuid.uuid4().hex[:8]}"))


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def s3_root(stack):
    """A new prefix in the stack's S3 store."""
    return f"s3://ratchet/{uuid.uuid4()}"


@pytest.fixture
def dir_root(tmp_path):
    """A new folder as the root of a store."""
    return f"file://{tmp_path / 'store'}"


def _prefect_settings(home):
    """Prefect reads the environment at import, and a test module may have imported it before the stack was up."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    env = settings.environment(home)
    return temporary_settings({PREFECT_API_URL: env["PREFECT_API_URL"], PREFECT_HOME: env["PREFECT_HOME"]})
