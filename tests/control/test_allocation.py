"""Allocations: by hand, against all that there are, and at given prices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.fake_times import FakeTimes
from truedraft.control.allocation import Allocation, Allocator, Candidate, Share
from truedraft.core.budget import NO_DRAFT, Budget

CHAIN = Budget(4, 1, 4)
WORST = {"even": 0.94, "jumping": 0.87}
"""Of the rate of the best of all allocations, what is found at least: where each row costs the same, and where one may
cost nothing and the next a third of a step; the mean lies above 0.99 in both."""


def shares(allocation: Allocation) -> list[tuple[str, int] | None]:
    return [None if share is None else (share[0].drafter, share[1]) for share in allocation.shares]


# ------------------------------------------------------------------------------------------ by hand

WORKED = FakeTimes([0.0, 0.010, 0.011, 0.011], {"a": 0.001})


def test_the_worked_example() -> None:
    allocator = Allocator(WORKED, [0], greedy=True)
    one = Candidate("a", CHAIN, [0.6, 0.3])
    assert allocator.plain().rate == pytest.approx(100.0)
    assert allocator.priced([(one, 1)]).rate == pytest.approx(1.6 / 0.012)
    assert allocator.priced([(one, 2)]).rate == pytest.approx(1.9 / 0.013)
    best = allocator.best([[one]])
    assert shares(best) == [("a", 2)]
    assert (best.tokens, best.seconds, best.rows) == (pytest.approx(1.9), pytest.approx(0.013), 3)


def test_what_starting_to_draft_costs_beside_rows() -> None:
    """A second row takes 2 ms, further ones a quarter of 0.4 ms: 1.9 ms are for drafting at all, 0.19 tokens' time."""
    allocator = Allocator(
        FakeTimes([0.0, 0.010, 0.012, 0.0121, 0.0122, 0.0123, 0.0124], {"a": 0.001}), [0], greedy=True
    )
    assert allocator.start_tokens() == pytest.approx(0.19)
    plain = allocator.plain()
    assert allocator.surplus(plain, None) == 0.0
    share = Candidate("a", CHAIN, [0.6, 0.3]), 2
    assert allocator.surplus(plain, share) == pytest.approx(0.9 - 0.01 * 2 - 0.2)
    late = Candidate("a", CHAIN, [0.6, 0.3], catch_up_s=0.004, steps=4), 2
    assert allocator.surplus(plain, late) == pytest.approx(0.9 - 0.01 * 2 - 0.2 - 0.1)


def test_budgets_of_candidates() -> None:
    tree = Candidate("a", Budget(3, 4, 9, 0.2), [0.5] * 9)
    assert tree.budget(0) == NO_DRAFT
    assert tree.budget(2) == Budget(2, 4, 2, 0.2)
    assert tree.budget(7) == Budget(3, 4, 7, 0.2)


def test_tokens_that_guesses_give_take_no_level_of_drafting() -> None:
    """Of three tokens the two behind the first take half a level each; of a tree as deep as it is, as many."""
    chain = Candidate("a", CHAIN, [0.9, 0.8, 0.7], guessed=0.5)
    assert [chain.levels(nodes) for nodes in (1, 2, 3, 9)] == [1.0, 1.5, 2.0, 2.5]
    assert Candidate("a", Budget(3, 4, 9), [0.5] * 9).levels(7) == 3
    allocator = Allocator(FakeTimes([0.0] + [0.010] * 9, {"a": 0.004}), [0], greedy=True)
    assert allocator.priced([(chain, 3)]).seconds == pytest.approx(0.010 + 2 * 0.004)
    slow = Candidate("a", CHAIN, [0.9, 0.8, 0.7])
    both = Allocator(FakeTimes([0.0] + [0.010] * 9, {"a": 0.004}), [0, 0], greedy=True)
    assert both.priced([(chain, 3), (slow, 3)]).seconds == pytest.approx(0.010 + 3 * 0.004 * 1.2)


def test_nothing_to_choose_from_is_plain_decoding() -> None:
    allocator = Allocator(WORKED, [0, 0], greedy=True)
    assert shares(allocator.best([[], []])) == [None, None]
    worthless = Candidate("a", CHAIN, [0.001])
    assert shares(allocator.best([[worthless], []])) == [None, None]
    assert allocator.plain().tokens == 2.0


def test_catching_up_is_paid_for() -> None:
    allocator = Allocator(WORKED, [0], greedy=True)
    assert shares(allocator.best([[Candidate("a", CHAIN, [0.3, 0.1], catch_up_s=0.0)]])) == [("a", 1)]
    assert shares(allocator.best([[Candidate("a", CHAIN, [0.3, 0.1], catch_up_s=0.002)]])) == [None]


# ------------------------------------------------------------------------------------------ against all there are


def every_allocation(allocator: Allocator, candidates: Sequence[Sequence[Candidate]]) -> list[Allocation]:
    """All of them."""
    options: list[list[Share]] = [
        [None, *((one, nodes) for one in own for nodes in range(1, len(one.gains) + 1))] for own in candidates
    ]
    return [allocator.priced(list(chosen)) for chosen in itertools.product(*options)]


def random_case(rows: str, seed: int) -> tuple[Allocator, list[list[Candidate]]]:
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
    return Allocator(times, [0] * requests, greedy=True), candidates


@pytest.mark.parametrize("rows", WORST)
def test_no_allocation_is_much_better_than_the_one_that_is_found(rows: str) -> None:
    found = []
    for seed in range(150):
        allocator, candidates = random_case(rows, seed)
        best = allocator.best(candidates)
        assert allocator.priced(list(best.shares)).rate == pytest.approx(best.rate), "it knows what it is worth"
        assert best.rate >= allocator.plain().rate
        found.append(best.rate / max(each.rate for each in every_allocation(allocator, candidates)))
        assert found[-1] >= WORST[rows], f"case {seed}"
    assert sum(found) / len(found) > 0.99


# ------------------------------------------------------------------------------------------ at given prices


def test_alone_a_request_pays_what_its_rows_and_its_drafter_cost() -> None:
    """At 100 tokens a second and no dearer rows, a token of 2 ms must bring 0.2; shared drafting costs it a fifth."""
    even = FakeTimes([0.0] + [0.010] * 20, {"a": 0.002, "b": 0.002})
    allocator = Allocator(even, [0], greedy=True)
    plain = allocator.plain()
    assert allocator.alone(plain, []) is None
    assert allocator.alone(plain, [Candidate("a", CHAIN, [0.19, 0.1])]) is None
    share = allocator.alone(plain, [Candidate("a", CHAIN, [0.3, 0.21, 0.19])])
    assert share is not None and share[1] == 2
    drafting = allocator.priced([(Candidate("b", CHAIN, [1.0]), 1)])
    assert drafting.rate == pytest.approx(2 / 0.012)
    share = allocator.alone(drafting, [Candidate("b", CHAIN, [0.1, 0.08, 0.05])])
    assert share is not None and share[1] == 2, "0.2 * 2 ms * 167 tokens a second are 0.067"
    assert allocator.alone(drafting, [Candidate("a", CHAIN, [0.1])]) is None
    better = [Candidate("a", CHAIN, [0.5]), Candidate("b", CHAIN, [0.9])]
    assert allocator.alone(plain, better) == (better[1], 1)
    assert allocator.alone(plain, [Candidate("a", CHAIN, [0.3], catch_up_s=0.002)]) is None


def test_what_is_priced_counts_each_drafter_once_at_its_deepest() -> None:
    times = FakeTimes([0.01 * rows for rows in range(20)], {"a": 0.001, "b": 0.003})
    one, other = Candidate("a", CHAIN, [0.5, 0.2]), Candidate("b", CHAIN, [0.9], catch_up_s=0.004)
    found = Allocator(times, [0] * 4, greedy=True).priced([(one, 2), None, (one, 1), (other, 1)])
    assert found.rows == 4 + 4
    assert found.tokens == pytest.approx(4 * (1.7 * 1.5 * 1.9) ** 0.25)
    assert found.seconds == pytest.approx(0.08 + 0.001 * 2 * 1.2 + 0.003 + 0.004)


@pytest.mark.parametrize(("width", "second"), [(1, 0.8 * 0.8), (2, 0.4)])
def test_hope_by_hand(width: int, second: float) -> None:
    """Drafting nothing now: a failure costs drafting and rows.

    If the first token of a chain is accepted with 0.8 so is the second; of a tree the first gain scales those below.
    """
    times = FakeTimes([0.0, 0.010, 0.011, 0.012, 0.020], {"a": 0.001})
    allocator = Allocator(times, [0], greedy=True)
    candidate = Candidate("a", replace(CHAIN, width=width), [0.4, 0.2, 0.1])
    value, nodes, lost_s = allocator.hope(allocator.plain(), 0, candidate, 0.8)
    assert nodes == 2
    assert value == pytest.approx(0.8 + second - 100.0 * (0.002 + 0.002))
    assert lost_s == pytest.approx(0.004)


def test_hope_in_place_of_another_drafter_stakes_what_that_one_would_bring() -> None:
    times = FakeTimes([0.0] + [0.010] * 10, {"a": 0.001, "b": 0.001})
    allocator = Allocator(times, [0], greedy=True)
    now = allocator.priced([(Candidate("b", CHAIN, [0.5]), 1)])
    value, nodes, lost_s = allocator.hope(now, 0, Candidate("a", CHAIN, [0.1]), 0.9)
    assert nodes == 4
    assert value == pytest.approx(0.9 + 0.9**2 + 0.9**3 + 0.9**4 - 0.5 - now.rate * 3 * 0.001)
    assert lost_s == pytest.approx(3 * 0.001 + 0.5 / now.rate)
