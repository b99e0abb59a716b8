"""Estimates of acceptance from verdicts, and what may be hoped of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from truedraft.core.stats import DraftShare
from truedraft.engine.policy.acceptance import LEAST_GAIN, Acceptance, falling


def chain(judged: int, accepted: int, length: int = 8) -> DraftShare:
    return DraftShare("a", length, length, tuple(range(accepted)), judged)


def learnt(gains: Acceptance, rate: float, count: int, length: int = 4, seed: int = 0) -> Acceptance:
    """After so many chains, each token of which is accepted with the same chance."""
    chance = random.Random(seed)
    for step in range(count):
        accepted = next((place for place in range(length) if chance.random() >= rate), length)
        gains.learn(chain(min(accepted + 1, length), accepted, length), step)
    return gains


def test_priors_are_what_is_expected_first() -> None:
    assert Acceptance([0.8, 0.5], chain=True).gains(3) == pytest.approx([0.8, 0.4, 0.2])
    assert Acceptance([0.5, 0.3, 0.2], chain=False).gains(5) == pytest.approx([0.5, 0.3, 0.2])
    assert len(Acceptance([0.1], chain=True).gains(8)) == 2, "a thousandth is not looked at"
    assert len(Acceptance([0.001], chain=True).gains(8)) == 1, "but the first node always is"


def test_one_verdict_by_hand() -> None:
    """A prior of 0.5 worth four verdicts and one that was accepted: 3 of 5; the second place follows by 6 to 5."""
    gains = Acceptance([0.5], chain=True)
    gains.learn(chain(1, 1), 0)
    assert gains.rates(2) == pytest.approx([0.6, 0.5 * 5 / 4.5])
    assert gains.gains(2) == pytest.approx([0.6, 0.6 * 0.5 * 5 / 4.5])


def test_the_first_rate_may_be_a_standard_error_higher_by_hand() -> None:
    """A prior of 0.5 worth four verdicts has one of 0.25. Requests after the first also differ from each other by 0.2,
    and a request's own verdicts leave the others' 4 of 5 parts of the weight after the first.
    """
    gains = Acceptance([0.5], chain=True)
    assert gains.optimism == pytest.approx(0.75 / 0.5)
    first, second = gains.of_one(), gains.of_one()
    assert second.optimism == pytest.approx((0.5 + math.hypot(0.25, 0.2)) / 0.5)
    first.learn(chain(1, 1), 0)
    assert first.rates(1) == pytest.approx([0.6])
    assert first.optimism == pytest.approx((0.6 + 0.8 * math.hypot(0.25, 0.2)) / 0.6)
    assert Acceptance([1.0], chain=True).optimism == 1.0
    assert learnt(Acceptance([0.5], chain=True), 0.5, 400).optimism < 1.1


def test_how_long_proposals_are_that_may_stop_by_hand() -> None:
    """At first the square root of the chance that all tokens before are accepted; then the shares of those drafted."""
    gains = Acceptance([0.64], chain=True)
    assert gains.drafted(3) == pytest.approx([1.0, 0.8, 0.64])
    gains.learn(chain(1, 1, 1), 0, most=3)  # the second place counts as rejected
    rates = [(4 * 0.64 + 1) / 5, (4 * 0.64 * (4 + 1) / (4 + 0.64)) / 5]
    assert gains.rates(2) == pytest.approx(rates)
    survival = [1.0, rates[0], rates[0] * rates[1]]
    assert gains.drafted(3) == pytest.approx([1.0, 0.8 * survival[1] ** 0.5, 0.8 * survival[2] ** 0.5])
    own = gains.of_one()
    expected = gains.drafted(2)[1]
    own.learn(chain(2, 1, 2), 1, most=2)  # drafted in full: the second was rejected itself
    weight = gains._weight
    assert own.drafted(2)[1] == pytest.approx((weight * expected + 1) / (weight + 1))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
def test_estimates_find_the_truth(rate: float) -> None:
    gains = learnt(Acceptance([0.65], chain=True), rate, 400)
    expected = [rate**place for place in range(1, 5)]
    found = gains.gains(4)
    for place, gain in enumerate(found):
        assert gain == pytest.approx(expected[place], abs=0.07)
    assert all(gain <= 2 * LEAST_GAIN for gain in expected[len(found) :])


def test_places_that_were_never_tried_follow_those_before_them() -> None:
    """Chains of two show what chains of eight bring; few failures from long ago do not stay."""
    assert learnt(Acceptance([0.65], chain=True), 1.0, 300, length=2).gains(8)[7] > 0.9
    assert learnt(Acceptance([0.65], chain=True), 0.3, 300, length=1).rates(2)[1] == pytest.approx(0.3, abs=0.07)
    gains = Acceptance([0.65], chain=True).of_one()
    for step in range(7):
        gains.learn(chain(3, 2), step)
    assert gains.rates(3)[2] < 0.4
    for step in range(60):
        gains.learn(chain(2, 2, 2), 7 + step)
    assert gains.rates(3)[2] > 0.9


def test_gains_never_rise_and_lie_between_none_and_all() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        for gains in (Acceptance([0.9, 0.2, 0.7], chain=True), Acceptance([0.4, 0.3, 0.2, 0.1], chain=False)):
            for step in range(40):
                nodes = chance.randint(1, 4)
                accepted = chance.randint(0, nodes)
                gains.learn(DraftShare("a", nodes, nodes, tuple(range(accepted)), min(accepted + 1, nodes)), step)
                found = list(gains.gains(6))
                assert found == sorted(found, reverse=True)
                assert 0.0 <= found[-1] <= found[0] <= 1.0
                assert list(gains.gains(2)) == found[:2]


def test_trees_count_each_node_and_expect_as_much_of_those_they_did_not_draft() -> None:
    gains = Acceptance([0.4, 0.2, 0.1], chain=False)
    for step in range(200):
        gains.learn(DraftShare("a", 2, 2, (0,) if step % 5 else (1,), 1), step)
    first, second, third = gains.gains(3)
    assert first == pytest.approx(0.8, abs=0.02)
    assert second == pytest.approx(0.2, abs=0.01)
    assert third == pytest.approx(0.1 * (4 + 200) / (4 + 120), abs=0.01)


def test_a_node_that_is_accepted_more_often_than_those_before_it_counts_with_them() -> None:
    """The worked example; and the sum of all stays."""
    gains = Acceptance([0.2] * 3, chain=False)
    for step in range(40):
        for path in [(0,)] * 5 + [(1,)] + [(2,)] * 3 + [()]:
            gains.learn(DraftShare("a", 3, 1, path, len(path) + 1, ()), step)
    assert falling([0.5, 0.1, 0.3]) == pytest.approx([0.5, 0.2, 0.2])
    assert gains.gains(3) == pytest.approx([0.5, 0.2, 0.2], abs=0.02)
    rates = [random.Random(seed).random() for seed in range(40)]
    found = Acceptance(rates, chain=False).gains(40)
    assert all(one >= other for one, other in itertools.pairwise(found)) and sum(found) == pytest.approx(sum(rates))


def test_what_larger_trees_may_bring_is_sure_once_they_were_drafted() -> None:
    gains = Acceptance([0.5, 0.1, 0.1, 0.1], chain=False)
    assert gains.hoped(4, 2, 0)[:2] == [0.5, pytest.approx(sum(gains.hoped(4, 2, 0)[1:]) / 3)], "more than the second"
    for step in range(60):
        gains.learn(DraftShare("a", 4, 1, (3,) if step % 2 else (), 1, ()), step)
    hopes = [sum(gains.hoped(4, 2, step)) - sum(gains.gains(4)) for step in (60, 300, 5000)]
    assert 0.0 < hopes[0] < 0.2 and hopes == sorted(hopes), "long ago"
    assert hopes[-1] > 1.2 * hopes[0]


def test_a_requests_own_estimates_start_from_the_pool_and_leave_it() -> None:
    pool = learnt(Acceptance([0.65], chain=True), 0.9, 300)
    own = pool.of_one()
    assert own.gains(4) == pytest.approx(pool.gains(4))
    learnt(own, 0.0, 12)
    assert own.gains(1)[0] < 0.3
    assert pool.gains(1)[0] > 0.8


def verdict(accepted: bool) -> DraftShare:
    """Of a chain of one token."""
    return DraftShare("a", 1, 1, (0,) if accepted else (), 1)


@pytest.mark.parametrize(("alike", "after_three"), [(True, 0.53), (False, 0.71)])
def test_how_much_a_request_counts_against_all_is_learnt(alike: bool, after_three: float) -> None:
    """Half of all drafts are accepted: of every request half, or of every second request all."""
    pool, draw = Acceptance([0.5], chain=True), random.Random(0)
    for request in range(60):
        own = pool.of_one()
        for _ in range(12):
            accepted = draw.random() < 0.5 if alike else request % 2 == 0
            own.learn(verdict(accepted), 0)
            pool.learn(verdict(accepted), 0)
    lucky = pool.of_one()
    for _ in range(3):
        lucky.learn(verdict(accepted=True), 0)
    assert lucky.gains(1)[0] == pytest.approx(after_three, abs=0.05)


def test_doubt_falls_with_verdicts_and_grows_without() -> None:
    gains = Acceptance([0.65], chain=True)
    assert gains.hoped(1, 0, 0) == pytest.approx([min(0.65 + 1.5 * math.sqrt(0.65 * 0.35 / 4), 1.0)])
    learnt(gains, 0.0, 300)
    assert 0.0 < gains.hoped(1, 0, 300)[0] < 0.05, "a rate of 0 is doubted, too"
    later = [gains.hoped(1, 0, step)[0] for step in (300, 1000, 3000, 10_000)]
    assert later == sorted(later) and later[-1] == pytest.approx(1.0)


def test_others_verdicts_make_a_request_sure_for_as_long_as_they_are_new() -> None:
    pool, draw = Acceptance([0.5], chain=True), random.Random(0)
    own, strangers = pool.of_one(), [pool.of_one() for _ in range(9)]
    for step in range(100):
        accepted = draw.random() < 0.5
        strangers[step // 12].learn(verdict(accepted), step)
        pool.learn(verdict(accepted), step)
    rate = pool.gains(1)[0]
    assert own.hoped(1, 0, 100)[0] < rate + 0.5 * 1.5 * math.sqrt(0.25 / 3)
    assert own.hoped(1, 0, 10_000)[0] == pytest.approx(0.5 + 1.5 * math.sqrt(0.25 / 4), rel=0.05)


def test_of_a_tree_a_requests_verdicts_tell_how_good_all_nodes_are() -> None:
    """Eight trees of two nodes, each of which was accepted at its second: 12 tokens for 8.8, prior of four included."""
    pool = Acceptance([0.4, 0.2, 0.1], chain=False)
    own = pool.of_one()
    for step in range(8):
        own.learn(DraftShare("a", 2, 1, (1,), 1), step)
    keep = sum(math.exp(-place / 12.0) for place in range(8))
    factor = (4 + keep) / (4 + 0.6 * keep)
    assert own.rates(3) == pytest.approx([each * factor for each in (0.4, 0.2, 0.1)], rel=0.02)
    assert pool.rates(3) == pytest.approx([0.4, 0.2, 0.1])
