"""A budget of minutes: shares of it, and the steps that fit; and the schedule of the rates over these."""

from __future__ import annotations

import math

import pytest

from truedraft.errors import OptionError, TrainingError
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.workspace import TRAINED, TimeBudget, duration


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_shares_of_a_budget():
    """Steps wait for what comes before them, and from `loaded` on shares are of what is left."""
    clock = Clock()
    budget = TimeBudget(10, clock)
    assert budget.limited and budget.left_s() == 600.0 and budget.left_s(0.5) == 300.0
    assert budget.steps(1000, 1.0, begin=0.5) == int(0.9 * 600 * (TRAINED - 0.5)) == 135
    clock.now += 301.0
    assert budget.over(0.5) and not budget.over(0.6) and budget.left_s(0.5) == 0.0
    # 149 seconds are left until training must be over; a tenth of them is kept for what comes between the steps.
    assert budget.steps(1000, 1.0) == int(0.9 * (600 * TRAINED - 301)) == 134
    assert budget.steps(100, 1.0) == 100
    clock.now += 99.0
    assert budget.steps(1000, 1.0, begin=0.5) == int(0.9 * (600 * TRAINED - 400)) == 45
    assert budget.over(0.4)
    budget.loaded()
    assert budget.left_s() == 200.0 and budget.left_s(0.4) == pytest.approx(80.0) and not budget.over(0.4)
    assert budget.steps(1000, 1.0, begin=0.4) == int(0.9 * 0.35 * 200)
    clock.now += 500.0
    assert budget.steps(1000, 1.0) == 1


def test_a_part_of_a_budget_ends_with_it_and_without_minutes_nothing_ends():
    clock = Clock()
    budget, unlimited = TimeBudget(1, clock), TimeBudget(None, clock)
    short, long, endless = budget.within(10.0), budget.within(1000.0), unlimited.within(1.0)
    clock.now += 11.0
    assert short() and not long()
    clock.now += 50.0
    assert long() and not endless() and not unlimited.limited and not unlimited.over()
    assert unlimited.left_s() == math.inf and unlimited.steps(7, 1e9) == 7


def test_few_steps_are_refused_and_not_many_are_noted_with_the_minutes_that_they_need():
    budget, notes = TimeBudget(4), []
    with pytest.raises(TrainingError) as error:
        budget.buys(3, 500, "3 steps of training", notes.append)
    assert str(error.value) == (
        "in 4 minutes there is time for 3 steps of training, from which a drafter learns next to nothing: give it "
        "--minutes 7 for the least, some 134 for one that helps, a faster machine, or a smaller drafter"
    )
    budget.buys(40, 500, "40 steps of training", notes.append)
    assert notes == [
        "in 4 minutes there is time for 40 steps of training, and a drafter learns little in fewer than 100: some 10 "
        "minutes help"
    ]
    budget.buys(100, 500, "100 steps", notes.append)
    budget.buys(3, 3, "all that is asked for", notes.append)
    TimeBudget().buys(1, 500, "no limit", notes.append)
    assert len(notes) == 1


def test_unusable_minutes():
    for minutes in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="minutes must be a number above 0"):
            TimeBudget(minutes)


@pytest.mark.parametrize("steps", [1, 7, 1000, 2000])
def test_a_shortened_schedule_keeps_its_shape(steps):
    whole = WarmupStableDecay(20, 800, 200)
    short = whole.shortened(steps)
    assert short.total_steps == min(steps, 1000) and 1 <= short.warmup_steps <= short.stable_steps
    assert abs(short.decay_steps - 0.2 * short.total_steps) <= 1
    assert all(0.0 < short(step) <= 1.0 for step in range(short.total_steps))


def test_seconds_in_words():
    assert [duration(s) for s in (3.0, 120.0, 7200.0)] == ["3.0 seconds", "2.0 minutes", "2.0 hours"]


def test_values_of_a_schedule():
    """The stable stretch does not know when the decay begins."""
    schedule = WarmupStableDecay(warmup_steps=4, stable_steps=10, decay_steps=3)
    values = [0.25, 0.5, 0.75, 1.0, *[1.0] * 6, 1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]
    assert [schedule(step) for step in range(13)] == pytest.approx(values)
    assert schedule.total_steps == 13 and schedule(1000) == 0.0
    assert [WarmupStableDecay(4, 100, 50)(step) for step in range(10)] == values[:10]
    assert WarmupStableDecay(1, 1, 1, floor=0.1)(10_000) == pytest.approx(0.1)
    assert WarmupStableDecay(10, 2, 1)(0) == pytest.approx(0.1), "a run shorter than its warm-up"


@pytest.mark.parametrize("steps", [1, 2, 1000])
def test_schedules_have_the_steps_that_are_asked_for(steps):
    schedule = WarmupStableDecay.of(steps, 0.4)
    assert schedule.total_steps == steps and schedule.stable_steps >= 1
    assert all(0.0 < schedule(step) <= 1.0 for step in range(steps))
