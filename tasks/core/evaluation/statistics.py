"""Statistics of evaluation: pass@k, maj@k, intervals of proportions, means and paired differences, and McNemar's exact test."""

import math
from statistics import NormalDist

RESAMPLES = 10_000


def pass_at_k(count: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` completions, drawn from `count` of which `correct` are right, is right; unbiased for the model's own.

    1 - C(count - correct, k) / C(count, k) (Chen et al., Evaluating Large Language Models Trained on Code, 2021). Raises ValueError for k > count.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= count:
        raise ValueError(f"k is {k} and must lie between 1 and the {count} samples there are")
    return 1 - math.comb(count - correct, k) / math.comb(count, k)


def majority_at_k(votes: list[int], correct: list[bool], silent: int, k: int) -> float:
    """Probability that the answer most often given in `k` completions is right; `k` are drawn from all, and a tie is decided by lot.

    `votes` are the numbers of completions per different answer, `correct` says of each answer whether it is right, and `silent` completions give
    none and have no vote. Exact: counted over all subsets of k, not drawn. Raises ValueError for more than there are.

    >>> majority_at_k([2, 1], [True, False], silent=0, k=3), majority_at_k([1, 1], [True, False], silent=0, k=2)
    (1.0, 0.5)
    """
    if not 1 <= k <= sum(votes) + silent:
        raise ValueError(f"k is {k} and must lie between 1 and the {sum(votes) + silent} samples there are")
    won = 0.0
    for winner in (i for i, right in enumerate(correct) if right):
        others = [count for i, count in enumerate(votes) if i != winner]
        for most in range(1, min(votes[winner], k) + 1):
            ways = _ways(others, silent, most, k - most)
            won += math.comb(votes[winner], most) * sum(number / (ties + 1) for ties, number in ways.items())
    return won / math.comb(sum(votes) + silent, k)


def _ways(others: list[int], silent: int, most: int, rest: int) -> dict[int, int]:
    """Number of ways to draw `rest` completions so that no other answer has more than `most`, by the number of answers that have exactly as many."""
    ways = {(0, 0): 1}  # (drawn, ties) -> number
    for count in others:
        new: dict[tuple[int, int], int] = {}
        for (drawn, ties), number in ways.items():
            for taken in range(min(count, most, rest - drawn) + 1):
                state = (drawn + taken, ties + (taken == most))
                new[state] = new.get(state, 0) + number * math.comb(count, taken)
        ways = new
    found: dict[int, int] = {}
    for (drawn, ties), number in ways.items():
        found[ties] = found.get(ties, 0) + number * math.comb(silent, rest - drawn)
    return found


def wilson_interval(successes: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a proportion (Wilson, 1927); unlike Wald's it does not shrink to a point at 0 and 1. `count` is at least 1."""
    from scipy.stats import binomtest

    found = binomtest(successes, count).proportion_ci(confidence, method="wilson")
    return float(found.low), float(found.high)


def matched_interval(differences: list[float], confidence: float) -> tuple[float, float]:
    """Interval of the difference of two proportions on the same prompts; `differences` are 1, 0 and -1.

    Wald's interval after half a count is added to each of the four cells (Agresti and Min, Statistics in Medicine 24, 2005): unlike the
    bootstrap it does not shrink to a point when all prompts agree, so that a handful of prompts never decides.
    """
    better, worse = differences.count(1) + 0.5, differences.count(-1) + 0.5
    count = len(differences) + 2
    mean = (better - worse) / count
    error = (
        NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(better + worse - (better - worse) ** 2 / count) / count
    )
    return max(-1.0, mean - error), min(1.0, mean + error)


def bootstrap_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of values or of paired differences (Efron and Tibshirani 1993, section 13.3), seeded.

    At least two values; of equal ones the interval is that point.
    """
    import numpy as np
    from scipy.stats import bootstrap

    found = bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=500,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def mcnemar(better: int, worse: int) -> float:
    """Two-sided p-value of McNemar's exact test: of the prompts that one model alone has right, each is as likely to be the one's as the other's."""
    from scipy.stats import binomtest

    return 1.0 if better + worse == 0 else float(binomtest(better, better + worse).pvalue)
