"""Reads MLflow runs back, for tests that check what has arrived."""

import time


def history(tracking, run_id: str, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric, in the order in which they were logged."""
    return [(m.step, m.value) for m in tracking.client.get_metric_history(run_id, name)]


def children(tracking, parent: str) -> list:
    """The child runs of a parent run."""
    return tracking.client.search_runs([tracking.experiment()], f"tags.`mlflow.parentRunId` = '{parent}'")


def wait_for(condition, seconds: float = 120) -> bool:
    """Whether the condition becomes true within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
