import math

import pytest

from tasks.core.tracking.records import clean, final, flatten, points


def values(metrics):
    return [(p.name, p.value, p.step) for p in points(metrics, 7)]


def test_flatten_joins_names_with_dots():
    assert flatten({"a": {"b": 1, "c": [1, "x"]}, "d": None, "e": {}}) == {
        "a.b": "1",
        "a.c": '[1, "x"]',
        "d": "None",
        "e": "{}",
    }


def test_only_numbers_become_points():
    assert values({"loss": 1, "text": "x", "none": None, "ok": True}) == [("loss", 1.0, 7), ("ok", 1.0, 7)]


def test_infinity_becomes_nan():
    assert [math.isnan(value) for _, value, _ in values({"a": math.inf, "b": -math.inf, "c": math.nan})] == [True] * 3


def test_characters_that_mlflow_refuses_become_underscores():
    assert clean("rewards/f(x)/mean") == "rewards/f_x_/mean"


def test_a_long_name_is_cut_to_250_characters():
    assert clean("a" * 251) == "a" * 250


def test_a_status_that_does_not_end_a_run_is_refused():
    with pytest.raises(ValueError, match=r"^status is 'DONE' and must be one of FINISHED, FAILED, KILLED$"):
        final("DONE")
