from __future__ import annotations

import math

import pytest

from truedraft.core.intervals import Interval, ratio_of_totals, ratio_over_prompts, resampled


def test_ratio_of_totals_by_hand() -> None:
    """Sums 1 and 3 over 10 tokens each: 0.2, with both samples 1 off, so an error of sqrt(2 * 2) / 20."""
    found = ratio_of_totals([1.0, 3.0], [10, 10])
    assert found.value == 0.2
    assert found.high - 0.2 == pytest.approx((1.96 + 2.4) * 0.1)
    assert ratio_of_totals([1.0], [10]) == Interval(0.1, -math.inf, math.inf)


def test_resampled_intervals_hold_the_value_and_shrink_to_it_without_spread() -> None:
    spread = ratio_over_prompts([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    assert spread.low < spread.value == 2.5 < spread.high
    assert ratio_over_prompts([2.0, 2.0], [1.0, 1.0]) == Interval(2.0, 2.0, 2.0)


def test_draws_without_a_finite_value_bound_nothing() -> None:
    found = resampled([[1.0, 1.0], [0.0, 0.0]], lambda sums: sums[0] / sums[1])
    assert (found.low, found.high) == (-math.inf, math.inf)
