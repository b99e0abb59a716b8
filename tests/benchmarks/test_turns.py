"""Turns: quantiles and intervals against the textbook, and several contests visited in turns."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from turns import (
    Answered,
    Contest,
    Stop,
    median_interval,
    middle_by_mean,
    middle_by_median,
    student_quantile,
    take_turns,
)


def test_the_quantile_of_student_is_the_one_of_tables() -> None:
    for freedom in (1, 2, 3, 4, 7, 30, 121):
        assert student_quantile(freedom) == pytest.approx(float(stats.t.ppf(0.975, freedom)), rel=1e-9)


def test_one_value_has_no_interval() -> None:
    assert middle_by_mean([0.3]) == middle_by_median([0.3]) == (0.3, -math.inf, math.inf)


def test_the_interval_of_a_median_covers_what_it_says() -> None:
    """400 draws of 30 values; 95 % of the intervals hold the median, give or take three standard errors."""
    draw, covered = np.random.default_rng(5), 0
    for _ in range(400):
        low, high = median_interval(draw.standard_cauchy(30).tolist())
        covered += low <= 0.0 <= high
    assert abs(covered / 400 - 0.95) < 0.033


class Worker:
    """Takes its time, and one turn in ten ten times as long."""

    def __init__(self, name: str, clock: list[float], seconds: float) -> None:
        self.name, self.asked = name, 0
        self._clock, self._s = clock, seconds

    def answer(self, group: str) -> Answered:
        self.asked += 1
        self._clock[0] += self._s * (10.0 if self.asked % 10 == 3 else 1.0)
        return Answered([[ord(group)]], alike=[0])


def contests(clock: list[float]) -> list[Contest[str]]:
    stop = Stop(half_width=0.015, least_rounds=9)
    return [
        Contest([Worker("a", clock, 1.0), Worker("b", clock, 1.25)], [group], [("a", "b")], stop, lambda: clock[0],
                middle_by_median)
        for group in "xy"
    ]  # fmt: skip


def test_several_contests_are_visited_in_turns_until_each_is_known() -> None:
    found = contests([0.0])
    take_turns(found, 1e9, lambda: 0.0)
    for each in found:
        (ratio,) = each.estimates
        assert ratio.ratio == pytest.approx(1.25) and ratio.half_width <= 0.015, "a slow turn does not move the median"
        assert each.measured.status == "reached" and each.measured.rounds >= 9
        assert sum(turn.different for turn in each.measured.turns) == 0


def test_turns_end_with_the_time() -> None:
    clock = [0.0]
    found = contests(clock)
    take_turns(found, 12.0, lambda: clock[0])
    assert [each.measured.rounds for each in found] == [2, 2]
