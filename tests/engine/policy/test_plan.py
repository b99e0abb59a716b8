"""Plans: by hand, against all that there are, and beside others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from support.fake_times import FakeTimes
from truedraft.core.budget import Budget
from truedraft.engine.policy.plan import Candidate, Plan, Planner, Share

CHAIN = Budget(4, 1, 4)
WORST = {"even": 0.94, "jumping": 0.94}
"""Of the rate of the best of all plans, what is found at least: where each row costs the same, and where one may
cost nothing and the next a third of a step; the mean lies above 0.99 in both."""


def shares(plan: Plan) -> list[tuple[str, int] | None]:
    return [None if share is None else (share[0].drafter, share[1]) for share in plan.shares]


# ------------------------------------------------------------------------------------------ by hand

WORKED = FakeTimes([0.0, 0.010, 0.011, 0.011], {"a": 0.001})


def test_the_worked_example() -> None:
    planner = Planner(WORKED, [0], greedy=True)
    one = Candidate("a", CHAIN, [0.6, 0.3])
    assert planner.plain.rate == pytest.approx(100.0)
    assert planner.plan([(one, 1)]).rate == pytest.approx(1.6 / 0.012)
    assert planner.plan([(one, 2)]).rate == pytest.approx(1.9 / 0.013)
    best = planner.best([[one]])
    assert shares(best) == [("a", 2)]
    assert (best.tokens, best.seconds) == (pytest.approx(1.9), pytest.approx(0.013))


def test_budgets_of_candidates() -> None:
    tree = Candidate("a", Budget(3, 4, 9, 0.2), [0.5] * 9)
    assert tree.budget(2) == Budget(2, 4, 2, 0.2)
    assert tree.budget(7) == Budget(3, 4, 7, 0.2)


def test_a_chain_that_can_stop_takes_what_it_drafts_on_average() -> None:
    """Of three tokens the second is drafted in half of all steps, the third in a quarter: 1.75 rows and levels.

    A further row takes 1 ms, as a level does: 2 ms are worth 0.362 tokens where 1.9 take 10.5 ms. Tokens after a first
    one gain 0.3 and cost 0.75 of that, so a further token is worth 0.6 + 0.0286 where it is drafted.
    """
    chain = Candidate("a", CHAIN, [0.6, 0.2, 0.1], odds=(0.1, 0.9), drafted=[1.0, 0.5, 0.25])
    assert (chain.rows(3), chain.levels(3), chain.sizes) == (1.75, 1.75, [3])
    planner = Planner(FakeTimes([0.0, 0.008, 0.008, 0.009, 0.010, 0.011, 0.012], {"a": 0.001}), [0], greedy=True)
    best = planner.best([[chain]])
    assert shares(best) == [("a", 3)]
    assert (best.tokens, best.seconds) == (pytest.approx(1.9), pytest.approx(0.00875 + 0.00175))
    floor = planner.floor(best, best.shares[0])
    price = 1.9 / 0.0105 * (0.001 + 0.001)
    assert floor == pytest.approx(price / (0.6 + 0.3 - 0.75 * price))
    assert chain.budget(3, floor) == Budget(4, 1, 4, 0.0, pytest.approx(floor), (0.1, 0.9))
    assert chain.budget(3) == Budget(3, 1, 3), "without a floor there is nothing to stop by"


def test_hope_chooses_and_what_is_expected_is_said() -> None:
    chain = Candidate("a", CHAIN, [0.6, 0.3], optimism=1.5)
    assert list(chain.tokens) == pytest.approx([1.0, 1.9, 2.35])
    assert [chain.expected(nodes) for nodes in range(3)] == pytest.approx([1.0, 1.6, 1.9])
    assert list(Candidate("a", CHAIN, [0.8], optimism=2.0).tokens) == [1.0, 2.0], "never more than all"


def test_tokens_that_guesses_give_take_no_level_of_drafting() -> None:
    """Of three tokens the two behind the first take half a level each; of a tree as deep as it is, as many."""
    chain = Candidate("a", CHAIN, [0.9, 0.8, 0.7], guessed=0.5)
    assert [chain.levels(nodes) for nodes in (1, 2, 3, 9)] == [1.0, 1.5, 2.0, 2.5]
    assert Candidate("a", Budget(3, 4, 9), [0.5] * 9).levels(7) == 3
    planner = Planner(FakeTimes([0.0] + [0.010] * 9, {"a": 0.004}), [0], greedy=True)
    assert planner.plan([(chain, 3)]).seconds == pytest.approx(0.010 + 2 * 0.004)
    slow = Candidate("a", CHAIN, [0.9, 0.8, 0.7])
    both = Planner(FakeTimes([0.0] + [0.010] * 9, {"a": 0.004}), [0, 0], greedy=True)
    assert both.plan([(chain, 3), (slow, 3)]).seconds == pytest.approx(0.010 + 3 * 0.004 * 1.2)


def test_nothing_to_choose_from_is_plain_decoding() -> None:
    planner = Planner(WORKED, [0, 0], greedy=True)
    assert shares(planner.best([[], []])) == [None, None]
    worthless = Candidate("a", CHAIN, [0.001])
    assert shares(planner.best([[worthless], []])) == [None, None]
    assert planner.plain.tokens == 2.0


def test_catching_up_is_paid_for() -> None:
    planner = Planner(WORKED, [0], greedy=True)
    assert shares(planner.best([[Candidate("a", CHAIN, [0.3, 0.1], setup_s=0.0)]])) == [("a", 1)]
    assert shares(planner.best([[Candidate("a", CHAIN, [0.3, 0.1], setup_s=0.002)]])) == [None]


# ------------------------------------------------------------------------------------------ against all there are


def every_plan(planner: Planner, candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
    """All of them."""
    options: list[list[Share]] = [
        [None, *((one, nodes) for one in own for nodes in range(1, len(one.gains) + 1))] for own in candidates
    ]
    return [planner.plan(list(chosen)) for chosen in itertools.product(*options)]


def random_case(rows: str, seed: int) -> tuple[Planner, list[list[Candidate]]]:
    """Up to three requests and two drafters, four nodes each."""
    chance = random.Random(seed)
    requests = chance.randint(1, 3)
    steps, costs = [0.0, 0.01], [0.0, 0.0002, 0.001, 0.003]
    even = chance.choice(costs)
    for _ in range(20):
        steps.append(steps[-1] + (even if rows == "even" else chance.choice(costs)))
    times = FakeTimes(steps, {"a": chance.choice([0.0, 0.0005, 0.002]), "b": chance.choice([0.0, 0.0005, 0.002])})
    candidates = []
    for _ in range(requests):
        own = []
        for name in "ab"[: chance.randint(1, 2)]:
            rate = chance.random()
            gains = [rate ** (place + 1) for place in range(4)]
            own.append(Candidate(name, CHAIN, gains, chance.choice([0.0, 0.0, 0.001])))
        candidates.append(own)
    return Planner(times, [0] * requests, greedy=True), candidates


@pytest.mark.parametrize("rows", WORST)
def test_no_plan_is_much_better_than_the_one_that_is_found(rows: str) -> None:
    found = []
    for seed in range(150):
        planner, candidates = random_case(rows, seed)
        best = planner.best(candidates)
        assert planner.plan(list(best.shares)).rate == pytest.approx(best.rate), "it knows what it is worth"
        assert best.rate >= planner.plain.rate
        found.append(best.rate / max(each.rate for each in every_plan(planner, candidates)))
        assert found[-1] >= WORST[rows], f"case {seed}"
    assert sum(found) / len(found) > 0.99


# ------------------------------------------------------------------------------------------ beside others


def test_alone_a_request_pays_what_its_rows_and_its_drafter_cost() -> None:
    """At 100 tokens a second and no dearer rows, a token of 2 ms must bring 0.2; shared drafting costs it a fifth."""
    even = FakeTimes([0.0] + [0.010] * 20, {"a": 0.002, "b": 0.002})
    planner = Planner(even, [0], greedy=True)

    def alone(*candidates: Candidate) -> Share:
        return planner.choice(planner.plain, [None], candidates).share

    assert alone() is None
    assert alone(Candidate("a", CHAIN, [0.19, 0.1])) is None
    share = alone(Candidate("a", CHAIN, [0.3, 0.21, 0.19]))
    assert share is not None and share[1] == 2
    better = [Candidate("a", CHAIN, [0.5]), Candidate("b", CHAIN, [0.9])]
    assert alone(*better) == (better[1], 1)
    assert alone(Candidate("a", CHAIN, [0.3], setup_s=0.002)) is None
    planner = Planner(even, [0, 0], greedy=True)
    one = Candidate("b", CHAIN, [1.0, 1.0]), 2
    drafting = planner.plan([one, None])
    assert drafting.rate == pytest.approx(2 * 2.0**0.5 * 1.5**0.5 / 0.014)
    share = planner.choice(drafting, [one, None], [Candidate("b", CHAIN, [0.2, 0.15, 0.05])]).share
    assert share is not None and share[1] == 2, "0.2 * 2 ms * 247 tokens a second are 0.1, of 1.7 tokens"
    assert planner.choice(drafting, [one, None], [Candidate("a", CHAIN, [0.2])]).share is None


def test_what_is_planned_counts_each_drafter_once_at_its_deepest() -> None:
    times = FakeTimes([0.01 * rows for rows in range(20)], {"a": 0.001, "b": 0.003})
    one, other = Candidate("a", CHAIN, [0.5, 0.2]), Candidate("b", CHAIN, [0.9], setup_s=0.004)
    planner = Planner(times, [0] * 4, greedy=True)
    found = planner.plan([(one, 2), None, (one, 1), (other, 1)])
    assert found.tokens == pytest.approx(4 * (1.7 * 1.5 * 1.9) ** 0.25)
    assert found.seconds == pytest.approx(0.08 + 0.001 * 2 * 1.2 + 0.003 + 0.004)
    shallow = planner.valued(found, [(one, 2), None, None, (other, 1)], (one, 1))
    assert shallow.seconds == pytest.approx(0.01 + 0.001 * 2 * 0.2), "the deepest is paid for by whoever drafts it"


def test_what_was_drafted_before_stays_where_little_is_gained() -> None:
    """Two tokens bring 1.9 in 13 ms and one 1.6 in 12 ms: 0.15 of 1.9 more, by the rate of two."""
    planner = Planner(WORKED, [0], greedy=True)
    one = Candidate("a", CHAIN, [0.6, 0.3])
    best = planner.best([[one]])
    assert shares(planner.settled(best, [(one, 1)], 0.07)) == [("a", 2)]
    assert shares(planner.settled(best, [(one, 1)], 0.09)) == [("a", 1)]
    assert shares(planner.settled(best, [None], 0.09)) == [("a", 2)]
