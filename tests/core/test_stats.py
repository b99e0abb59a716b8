"""Counters: counts that add up, and rates derived from them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truedraft.core.stats import Counters, DrafterCounters, DraftShare, RequestStep, StepRecord


def count(counters: Counters, nodes: int, depth: int, accepted: int, emitted: int, *, rejected: bool) -> None:
    counters.count(RequestStep(0, 9, 1 + nodes, False, nodes, depth, 0, accepted, emitted, rejected))


def test_nothing_counted_gives_rates_of_zero() -> None:
    empty = Counters()
    assert empty.mean_acceptance_length == 0.0
    assert empty.draft_acceptance_rate == 0.0
    assert empty.accepted_per_position == []


def test_three_calls_by_hand() -> None:
    """Chains of 4, 4 and nothing: 2 kept and a recovered token, 4 kept and a bonus token, then plain decoding."""
    counters = Counters()
    count(counters, nodes=4, depth=4, accepted=2, emitted=3, rejected=True)
    count(counters, nodes=4, depth=4, accepted=4, emitted=5, rejected=False)
    count(counters, nodes=0, depth=0, accepted=0, emitted=1, rejected=False)
    assert counters == Counters(
        target_calls=3,
        draft_tokens=8,
        accepted_tokens=6,
        emitted_tokens=9,
        accepted_per_position=[2, 2, 1, 1],
        tried_per_position=[2, 2, 2, 1],  # the first call never came to its fourth token
        drafted_calls=2,
    )
    assert counters.mean_acceptance_length == 3.0
    assert counters.draft_acceptance_rate == 0.75


@pytest.mark.parametrize(
    ("step", "tried", "accepted"),
    [
        pytest.param((7, 2, 0, 1, True), [1, 0], [0, 0], id="a tree counts its nodes and its longest path"),
        pytest.param((5, 5, 2, 2, False), [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], id="a stop inside an accepted block"),
        pytest.param((4, 3, 1, 2, False), [1, 0, 0], [1, 0, 0], id="a short branch was not tried below its leaf"),
    ],
)
def test_one_call(step: tuple[int, int, int, int, bool], tried: list[int], accepted: list[int]) -> None:
    *counts, rejected = step
    counters = Counters()
    count(counters, *counts, rejected=rejected)
    assert (counters.draft_tokens, counters.accepted_tokens, counters.emitted_tokens) == (step[0], step[2], step[3])
    assert (counters.tried_per_position, counters.accepted_per_position) == (tried, accepted)


calls = st.lists(
    st.integers(0, 6).flatmap(
        lambda depth: st.tuples(st.integers(depth, 20), st.just(depth), st.integers(0, depth), st.integers(0, 8))
    ),
    max_size=8,
)


def counted(each: list[tuple[int, int, int, int]]) -> Counters:
    counters = Counters()
    for call in each:
        nodes, depth, accepted, emitted = call
        count(counters, nodes, depth, accepted, emitted, rejected=accepted < depth)
    return counters


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls, calls)
def test_the_sum_of_two_counts_is_the_count_of_both(left: list, right: list) -> None:
    first, second = counted(left), counted(right)
    before = counted(left)
    assert first + second == counted(left + right)
    assert first == before  # adding changes neither
    (first + second).accepted_per_position.append(99)
    assert first == before


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls)
def test_positions_add_up(each: list) -> None:
    counters = counted(each)
    assert sum(counters.accepted_per_position) == counters.accepted_tokens
    assert all(a <= t for a, t in zip(counters.accepted_per_position, counters.tried_per_position, strict=True))
    assert counters.tried_per_position == sorted(counters.tried_per_position, reverse=True)
    assert counters.target_calls == len(each)


def test_all_fields_are_summed() -> None:
    one = Counters(1, 2, 3, 4, 5, 6, [7], [8, 9], 10, 11, stop_tokens=12, drafted_calls=13, undrafted="why")
    twice = Counters(2, 4, 6, 8, 10, 12, [14], [16, 18], 20, 22, stop_tokens=24, drafted_calls=26, undrafted="why")
    assert one + one == twice
    assert one + Counters() == one
    assert sum([one, one], Counters()) == one + one


def test_drafters_are_counted_apart() -> None:
    """A chain of "a"; then a tree of both, of which "b" had the whole accepted path and "a" its first token."""
    counters = Counters()
    counters.count(RequestStep(0, 9, 4, False, 3, 3, 3, 2, 3, shares=(DraftShare("a", 3, 3, (0, 1), 3),)))
    both = (DraftShare("a", 2, 2, (0,), 1), DraftShare("b", 3, 3, (0, 1), 2))
    counters.count(RequestStep(0, 9, 5, False, 4, 3, 5, 2, 3, shares=both))
    counters.count(RequestStep(0, 9, 1, False, emitted=1))
    assert counters.by_drafter == {"a": DrafterCounters(2, 5, 3), "b": DrafterCounters(1, 3, 2)}
    assert counters.by_drafter["a"].draft_acceptance_rate == 0.6
    assert DrafterCounters().draft_acceptance_rate == 0.0


def test_sums_of_drafters_share_nothing() -> None:
    left = Counters(by_drafter={"a": DrafterCounters(1, 2, 3), "b": DrafterCounters(4, 5, 6)})
    right = Counters(by_drafter={"b": DrafterCounters(1, 1, 1), "c": DrafterCounters(7, 8, 9)})
    total = left + right
    assert total.by_drafter == {
        "a": DrafterCounters(1, 2, 3),
        "b": DrafterCounters(5, 6, 7),
        "c": DrafterCounters(7, 8, 9),
    }
    assert list(total.by_drafter) == ["a", "b", "c"]
    total.by_drafter["a"].target_calls = total.by_drafter["c"].target_calls = 99
    assert left.by_drafter["a"].target_calls == 1 and right.by_drafter["c"].target_calls == 7


def test_counters_do_not_share_their_lists() -> None:
    first, second = Counters(), Counters()
    count(first, 1, 1, 1, 2, rejected=False)
    assert second.accepted_per_position == []
    with pytest.raises(AttributeError):
        first.acepted_tokens = 3  # slots: a misspelt count is an error


def test_a_step_record_sums_its_requests_and_keeps_prefill_apart() -> None:
    drafted = RequestStep(1, 7, 5, False, nodes=4, depth=3, listed_tokens=5, accepted=2, emitted=3, rejected=True)
    stopped = RequestStep(2, 9, 1, False, stop_tokens=1)
    prompt = RequestStep(3, 0, 6, True, emitted=1)
    record = StepRecord((drafted, stopped, prompt), 0.1, 0.2, 0.3, 0.7)
    assert (record.rows, record.contexts, record.nodes, record.prefill) == (12, (7, 9, 0), 4, True)
    assert drafted.survival == (True, True, False) and stopped.survival == ()
    assert record.counters == Counters(
        target_calls=2,
        prefill_calls=1,
        draft_tokens=4,
        accepted_tokens=2,
        emitted_tokens=3,
        prefill_tokens=1,
        accepted_per_position=[1, 1, 0],
        tried_per_position=[1, 1, 1],
        listed_tokens=5,
        stop_tokens=1,
        drafted_calls=1,
    )
