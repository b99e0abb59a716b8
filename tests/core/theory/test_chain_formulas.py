"""Chains: the published table, Monte Carlo, limits."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, stdev

import pytest

from truedraft.core.theory import (
    best_gamma,
    expected_tokens,
    least_speedup,
    operations_factor,
    pays,
    speedup,
)
from truedraft.errors import OptionError, TruedraftError

# Leviathan et al. 2211.17192, table 1: alpha, gamma, operations, speed-up, both at negligible cost of drafting.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
RATES = [0.05, 0.3, 0.6, 0.9, 0.99]
COSTS = [0.0, 0.02, 0.1, 0.4, 0.8, 1.5]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "factor"), TABLE_1)
def test_the_published_table(alpha: float, gamma: int, operations: float, factor: float) -> None:
    assert speedup(alpha, gamma, 0.0) == pytest.approx(factor, abs=0.006)
    assert operations_factor(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.006)


def test_the_sum_is_the_published_quotient() -> None:
    for alpha, gamma in itertools.product(RATES, (0, 1, 4, 9)):
        assert expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-12)


def test_expected_tokens_against_monte_carlo() -> None:
    """20,000 simulated calls; off by more than 4.5 standard errors about once in 150,000 seeds."""
    generator = random.Random(1)
    tokens = []
    for _ in range(20_000):
        accepted = 0
        while accepted < 4 and generator.random() < 0.6:
            accepted += 1
        tokens.append(accepted + 1)
    error = stdev(tokens) / math.sqrt(len(tokens))
    assert abs(fmean(tokens) - expected_tokens(0.6, 4)) < 4.5 * error


def test_limits() -> None:
    assert expected_tokens(0.0, 7) == 1.0
    assert expected_tokens(1.0, 7) == 8.0
    assert expected_tokens(1.0 - 1e-13, 7) == pytest.approx(8.0, rel=1e-11)
    assert expected_tokens(0.7, 400) == pytest.approx(1 / 0.3, rel=1e-12)
    assert speedup(0.7, 5, 0.0) == expected_tokens(0.7, 5)
    assert speedup(0.7, 0, 0.3) == 1.0
    assert speedup(0.7, 10_000, 0.5) < 1e-3
    assert operations_factor(1.0, 5, 0.25) == pytest.approx(1 + 5 * 0.25 / 6)
    assert operations_factor(0.0, 3, 0.5) == 5.5


def test_it_pays_exactly_where_the_best_gamma_gains() -> None:
    for alpha, c in itertools.product(RATES, COSTS):
        best = best_gamma(alpha, c)
        assert (best > 0) == pays(alpha, c)
        if best:
            assert speedup(alpha, best, c) >= least_speedup(alpha, c) - 1e-12
            assert least_speedup(alpha, c) == pytest.approx(speedup(alpha, 1, c))
            assert least_speedup(alpha, c) > 1.0
        else:
            assert least_speedup(alpha, c) == 1.0
            assert all(speedup(alpha, gamma, c) <= 1.0 for gamma in range(1, 30))


def test_no_gamma_within_the_limit_beats_the_best() -> None:
    for alpha, c in itertools.product(RATES, COSTS):
        best = speedup(alpha, best_gamma(alpha, c, limit=12), c)
        assert all(speedup(alpha, gamma, c) <= best for gamma in range(13))


def test_free_drafts_are_as_long_as_allowed() -> None:
    assert best_gamma(0.9, 0.0, limit=9) == 9
    assert best_gamma(0.0, 0.0) == 0
    assert best_gamma(0.9, 0.05, limit=0) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.1, 2), "alpha must be a number in .0, 1., got 1.1"),
        (lambda: expected_tokens(math.nan, 2), "got nan"),
        (lambda: expected_tokens(True, 2), "got True"),
        (lambda: expected_tokens(0.5, -1), "gamma must be a whole number of 0 or more, got -1"),
        (lambda: expected_tokens(0.5, 1.5), "got 1.5"),
        (lambda: speedup(0.5, 2, -0.1), "c must be a number of 0 or more, got -0.1"),
        (lambda: operations_factor(0.5, 2, math.inf), "c_ops must be .* got inf"),
        (lambda: best_gamma(0.5, 0.1, limit=-1), "limit must be"),
        (lambda: pays(0.5, "x"), "got 'x'"),
    ],
)
def test_bad_arguments(call: object, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        call()  # type: ignore[operator]
    assert isinstance(caught.value, TruedraftError)
