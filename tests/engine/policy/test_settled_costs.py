"""Costs of models whose forwards are recorded: those of replays count, on a clock that forwards alone move."""

from __future__ import annotations

import pytest
from timed_doubles import Clock as PlainClock

from support.recorded_time import UNRECORDED, Clock, recorded_model
from truedraft.core.stats import Settling
from truedraft.drafters import DraftModel
from truedraft.engine.policy import Effort, measure_drafter, measure_target
from truedraft.engine.policy.measuring import piecewise
from truedraft.progress import unwatched
from truedraft.testing import MarkovModel

SHORT, ONCE = Effort(1.0, 3, 25), Effort(0.0, 1, 1)
DRAFT_S = 0.5e-3


def seconds(rows: int) -> float:
    """Of a large model on a GPU: nearly all of it is reading the weights."""
    return 5.5e-3 + 1e-5 * rows


@pytest.mark.parametrize("effort", [ONCE, SHORT], ids=["one round", "as at the first request"])
def test_what_a_target_costs_is_what_its_replays_take(effort: Effort) -> None:
    clock = Clock()
    cost = measure_target(recorded_model("target", clock, seconds), effort=effort, clock=clock)
    for rows in (1, 2, 5, 16, 33, 64):
        assert cost(rows, [128]) == pytest.approx(seconds(rows), rel=1e-9)
        assert cost(rows, [448]) == pytest.approx(seconds(rows), rel=1e-9)
    assert cost(8, [128] * 8) == pytest.approx(seconds(8), rel=1e-9)
    assert cost.settles_s == 0.0


def test_what_a_draft_costs_is_what_its_replays_take() -> None:
    """A level of depth is a forward, and the first one catches up: by two rows where all was accepted, in round 1."""
    clock = Clock()
    target, draft = recorded_model("target", clock, seconds), recorded_model("draft", clock, lambda rows: DRAFT_S)
    cost = measure_drafter(DraftModel(draft, 4), target, effort=Effort(0.0, 2, 2), clock=clock)
    for depth in (1, 2, 3, 4):
        assert cost(depth) == pytest.approx(depth * DRAFT_S, rel=1e-9)


def test_where_no_forward_is_ever_settled_they_count_as_they_are() -> None:
    clock = Clock()
    model = recorded_model("target", clock, seconds, forgets=True)
    cost = measure_target(model, effort=SHORT, clock=clock)
    assert cost(8, [128]) == pytest.approx(UNRECORDED * seconds(8))
    assert clock.now < 110.0, "it is not tried again and again"
    drafted = measure_drafter(DraftModel(model, 2), MarkovModel.random(97, 0, context_length=512), effort=ONCE)
    assert [point.depth for point in drafted.points] == [1, 2]


def test_rounds_measure_until_that_was_settled() -> None:
    """A key settles at its third time; later another one makes all begin anew. The first round takes no budget."""
    clock = PlainClock()
    seen: dict[str, int] = dict.fromkeys("ab", 0)
    settled: list[tuple[str, int]] = []

    def measure(key: str, number: int) -> bool:
        clock.now += 1.0
        seen[key] += 1
        if seen[key] == 5:
            seen.update(dict.fromkeys("ab", 1))
        if seen[key] < 3:
            return False
        settled.append((key, number))
        return True

    assert list(piecewise("ab", measure, Effort(3.0, 2, 9), unwatched, "x", clock))[-1] == 2
    assert sorted(settled) == sorted((key, number) for key in "ab" for number in (-1, 0, 1))
    assert clock.now > 6.0


def test_a_key_that_never_settles_is_soon_tried_once_a_round() -> None:
    clock = PlainClock()
    calls: list[int] = []

    def measure(key: str, number: int) -> bool:
        clock.now += 1.0
        calls.append(number)
        return False

    assert list(piecewise("a", measure, Effort(8.0, 1, 99), unwatched, "x", clock))[-1] == 3
    assert calls == [-1] * 6 + [0, 1, 2]


def test_settled_is_what_warms_nothing_up() -> None:
    class Counts:
        warmups = 3

    one, other = Counts(), Counts()
    settling, said = Settling(one, other), []
    for warmups in (3, 4, 3, 0):  # 0: other weights, whose count began anew
        other.warmups = warmups
        said.append(settling.settled)
    assert said == [True, False, True, False]
    assert Settling(one, other).settled
