import itertools

import pytest

from tasks.core.evaluation.statistics import (
    bootstrap_interval,
    majority_at_k,
    matched_interval,
    mcnemar,
    pass_at_k,
    wilson_interval,
)


def drawn(votes, correct, silent, k):
    """maj@k by looking at every subset of k completions."""
    completions = [i for i, count in enumerate(votes) for _ in range(count)] + [None] * silent
    worth = []
    for subset in itertools.combinations(completions, k):
        counts = {i: subset.count(i) for i in set(subset) - {None}}
        tops = [i for i, count in counts.items() if count == max(counts.values())]
        worth.append(sum(correct[i] for i in tops) / len(tops) if tops else 0.0)
    return sum(worth) / len(worth)


@pytest.mark.parametrize(
    ("count", "correct", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 1, 4, 1.0),
        (4, 0, 4, 0.0),
        (10, 3, 5, 1 - 21 / 252),
        (5, 4, 2, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_is_chen_et_als(count, correct, k, expected):
    assert pass_at_k(count, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    right = [1, 1, 0, 0, 0, 0, 0]
    for k in range(1, 8):
        subsets = list(itertools.combinations(right, k))
        assert pass_at_k(7, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_more_than_there_are_cannot_be_drawn(k):
    with pytest.raises(ValueError, match=f"k is {k} and must lie between 1 and the 4 samples there are"):
        pass_at_k(4, 1, k)
    with pytest.raises(ValueError, match=f"k is {k} and must lie between 1 and the 4 samples there are"):
        majority_at_k([2, 1], [True, False], 1, k)


@pytest.mark.parametrize(
    ("votes", "correct", "silent", "k", "expected"),
    [
        ([3, 1], [True, False], 0, 4, 1.0),
        ([1, 3], [True, False], 0, 4, 0.0),
        ([2, 2], [True, False], 0, 4, 0.5),
        ([1, 1, 1, 1], [True, False, False, False], 0, 4, 0.25),
        ([1], [True], 3, 4, 1.0),
        ([1], [True], 3, 1, 0.25),
        ([], [], 4, 2, 0.0),
    ],
)
def test_ties_count_as_their_expected_value_and_silence_has_no_vote(votes, correct, silent, k, expected):
    assert majority_at_k(votes, correct, silent, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", range(1, 9))
def test_majority_is_counted_over_every_subset(k):
    for votes, correct, silent in (
        ([3, 2, 1], [True, False, False], 2),
        ([2, 2, 2, 1], [False, True, False, False], 1),
        ([4, 3], [False, True], 1),
    ):
        assert majority_at_k(votes, correct, silent, k) == pytest.approx(drawn(votes, correct, silent, k), abs=1e-12)


def test_majority_of_64_different_answers_is_counted_and_not_enumerated():
    assert majority_at_k([1] * 64, [True] + [False] * 63, 0, 64) == pytest.approx(1 / 64, abs=1e-12)


def test_wilson_interval_is_the_published_one():
    # 1.96 with 81 of 263: 0.2553 to 0.3662 (Newcombe, Statistics in Medicine 17, 1998, table I, method 3)
    assert [round(x, 4) for x in wilson_interval(81, 263)] == [0.2553, 0.3662]
    assert [round(x, 4) for x in wilson_interval(0, 20)] == [0.0, 0.1611]


def test_bootstrap_interval_is_the_same_every_time():
    assert (
        bootstrap_interval([1.0, 0.0, 0.0, 1.0], 0.95) == bootstrap_interval([1.0, 0.0, 0.0, 1.0], 0.95) == (0.0, 1.0)
    )


def test_bootstrap_interval_of_equal_values_is_that_point():
    assert bootstrap_interval([0.25] * 8) == (0.25, 0.25)


def test_matched_interval_is_agresti_and_mins():
    # 30 better, 10 worse of 100: (30.5 - 10.5) / 102 = 0.19608, and 1.95996 * sqrt(41 - 20^2 / 102) / 102 = 0.11700
    low, high = matched_interval([1.0] * 30 + [-1.0] * 10 + [0.0] * 60, 0.95)
    assert (round(low, 4), round(high, 4)) == (0.0791, 0.3131)


@pytest.mark.parametrize(("better", "worse", "expected"), [(0, 0, 1.0), (5, 0, 2 / 32), (8, 1, 20 / 512), (3, 3, 1.0)])
def test_mcnemars_test_is_exact(better, worse, expected):
    assert mcnemar(better, worse) == pytest.approx(expected, rel=1e-12)
    assert mcnemar(worse, better) == mcnemar(better, worse)
