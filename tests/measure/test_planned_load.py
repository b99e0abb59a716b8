"""What a load needs, by hand: V(n) = 9 + n ms, chains of one and two that bring 1.6 and 2.0 tokens for 1 and 2 ms."""

from __future__ import annotations

import dataclasses

import pytest

from measure.test_plans import chains, plan_of
from truedraft.errors import OptionError
from truedraft.measure import NONE, Traffic, WhatIf, levels, load_record
from truedraft.measure.predictions import Level, Way, replicas, stops_to_pay

MADE = plan_of(chains())
TRAFFIC = Traffic(30.0, prompt=11, answer=11)  # a prompt takes 20 ms, and ten tokens follow the first


def test_a_replica_by_hand() -> None:
    one, _, _, four = levels(MADE, TRAFFIC, 4)
    assert (one.requests, one.rows, four.rows) == (1, 3, 8)
    assert one.plain == Way(NONE, pytest.approx(1 / 0.120), pytest.approx(11 / 0.120), pytest.approx(10.0))
    assert one.best.drafter == "draft,num_speculative_tokens=2" and one.best.token_ms == pytest.approx(14 / 2.0)
    assert one.best.tokens_per_s == pytest.approx(11 / (0.020 + 10 * 0.007))
    # Of four, chains of one: (17 + 1) / 1.6 = 11.25 ms a token, and for three other prompts 60 ms are waited in ten.
    assert four.best.drafter == "draft,num_speculative_tokens=1"
    assert four.best.token_ms == pytest.approx(11.25 + 6.0)
    assert four.ratio == pytest.approx((0.080 + 0.130) / (0.080 + 0.1125))
    assert four.best.requests_per_s == pytest.approx(4 / (4 * 0.020 + 10 * 0.01125))
    assert four.plain.requests_per_s == pytest.approx(4 / (4 * 0.020 + 10 * 0.013))


def test_replicas_by_hand() -> None:
    """Plain, four requests open are answered 19.05 times a second, of which three quarters are 14.29: 30 need three."""
    ways = [level.plain for level in levels(MADE, TRAFFIC, 4)]
    found = replicas(ways, TRAFFIC)
    assert found is not None and (found.count, found.requests) == (3, 2)
    assert found.way.requests_per_s == pytest.approx(2 / 0.150), "10 a second are more than the 8.3 of one open request"
    # A token takes 10 ms of one alone and 13 of two: with that bound each answers 8.3 * 0.75.
    bound = dataclasses.replace(TRAFFIC, token_ms=12.5)
    found = replicas(ways, bound)
    assert found is not None and (found.count, found.requests) == (5, 1) and found.way.token_ms <= 12.5
    assert replicas(ways, dataclasses.replace(TRAFFIC, token_ms=9.0)) is None
    record = load_record(levels(MADE, TRAFFIC, 4), TRAFFIC)
    assert record["replicas"]["plain"]["count"] == 3 > record["replicas"]["best"]["count"] == 2


def test_where_drafting_stops_to_pay() -> None:
    """A further row costs 2 ms: V(n) = 9 + 2 n."""
    found = levels(plan_of(chains(), row_s=0.002), TRAFFIC, 64)
    stops = stops_to_pay(found)
    assert stops is not None and found[stops - 2].best.drafter != NONE
    assert all(level.best == level.plain and level.rows == level.requests for level in found[stops - 1 :])
    assert stops_to_pay(levels(plan_of(chains(), row_s=0.0), TRAFFIC, 64)) is None
    assert stops_to_pay(levels(plan_of(chains(1.0)), TRAFFIC, 4)) == 1
    assert [level.plain.token_ms for level in found] == sorted(level.plain.token_ms for level in found)


def test_lengths_are_the_plans_where_nothing_is_said_and_memory_may_be_faster() -> None:
    """3 prompts, 90 tokens behind first ones, 100 cached tokens at the mean: 85 of the prompt, and half of 30."""
    assert Traffic.of(MADE, 1.0, None, None, None) == Traffic(1.0, 85, 31)
    assert Traffic.of(MADE, 1.0, 7, 9, 0.5) == Traffic(1.0, 7, 9, 0.5)
    faster: Level = levels(MADE, TRAFFIC, 1, WhatIf(bandwidth=2.0))[0]
    assert faster.plain.token_ms == pytest.approx(5.0) and faster.plain.requests_per_s == pytest.approx(1 / 0.065)
    for wrong, name in ((lambda: Traffic(0.0, 1, 2), "load"), (lambda: Traffic(1.0, 1, 1), "answer_tokens")):
        with pytest.raises(OptionError, match=name):
            wrong()
