"""The real embedded stack, once per session for the tests that ask for it."""

import os
import subprocess
import uuid

import pytest
from prefect.logging.handlers import APILogWorker

from deployments.local import settings, stack


@pytest.fixture(scope="session")
def stack_options():
    """Arguments of `stack.up` for the session's stack: free ports, and an end when pytest ends, however it does."""
    return {"ports": {name: settings.free_port() for name in settings.PORTS}, "die_with": os.getpid(), "say": lambda line: None}


@pytest.fixture(scope="session", name="stack")
def running_stack(tmp_path_factory, stack_options):
    """`{"prefect", "mlflow", "s3", "home", "project"}` of a stack that runs; the environment and Prefect's settings lead to it."""
    folder = tmp_path_factory.mktemp("stack")
    home, project = folder / "home", folder / "project"
    project.mkdir()
    stack_options["project"] = project
    with pytest.MonkeyPatch.context() as patch:
        for name in (n for names in settings.DECIDING.values() for n in names):
            patch.delenv(name, raising=False)
        # The worker looks for runs every ten seconds, unless told otherwise.
        patch.setenv("PREFECT_WORKER_QUERY_SECONDS", "2")
        try:
            urls = stack.up(home, **stack_options)
            for name, value in settings.environment(home).items():
                patch.setenv(name, value)
            with _prefect_settings(home):
                yield {**urls, "home": home, "project": project}
        finally:
            # Logs on their way to a server that is gone would be tried for a minute.
            APILogWorker.drain_all(timeout=10)
            stack.down(home)


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
    """A prefix of its own in the stack's S3."""
    return f"s3://ratchet/{uuid.uuid4()}"


@pytest.fixture
def dir_root(tmp_path):
    """A folder of its own, as a store."""
    return f"file://{tmp_path / 'store'}"


def _prefect_settings(home):
    """Prefect reads the environment when it is imported, which a test module may have done before the stack was up."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    env = settings.environment(home)
    return temporary_settings({PREFECT_API_URL: env["PREFECT_API_URL"], PREFECT_HOME: env["PREFECT_HOME"]})
