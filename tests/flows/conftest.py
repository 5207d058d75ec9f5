"""One pipeline run from an empty store, for all tests of the flows."""

import pytest
from small_run import PASSING, succeed


@pytest.fixture(scope="session")
def root(stack):
    return "s3://ratchet/pipeline"


@pytest.fixture(scope="session")
def first(stack, root):
    """The summary of a run from an empty store that passes."""
    return succeed(stack["project"], root, *PASSING.items())
