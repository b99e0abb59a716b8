"""What steps take right now: worked examples, changes that are followed, outliers that are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from support.fake_times import FakeClock
from support.simulated_drafting import DRAFT_S, STEP_S, Machine, SimulatedDrafter, simulated, steady
from truedraft.core.stats import DraftTime, RequestStep, StepRecord
from truedraft.engine.policy import RunningTimes
from truedraft.engine.policy.running import Corrected, _between

MEMORY_S = 0.25


def learn_for(corrected: Corrected, clock: FakeClock, seconds: float, factor: float, sizes: Sequence[float]) -> None:
    """Steps of 10 ms by the curve, one after another."""
    for number in range(int(seconds / 0.01)):
        clock.now += 0.01
        corrected.learn(sizes[number % len(sizes)], 0.01 * factor, 0.01)


# ------------------------------------------------------------------------------------------ corrections


def test_between_two_knots_by_hand() -> None:
    assert _between(3) == (1, pytest.approx(math.log2(1.5)))
    assert _between(1) == (0, 0.0)
    assert _between(0.5) == (0, 0.0)
    assert _between(256) == _between(1000) == (8, 0.0)
    assert _between(6) == (2, pytest.approx(math.log2(1.5)))
    assert Corrected(FakeClock()).factor(1000) == 1.0


def test_where_there_is_nothing_yet_the_first_step_says_it_all() -> None:
    corrected = Corrected(FakeClock())
    assert corrected.factor(4) == 1.0
    corrected.learn(4, 0.030, 0.010)
    for size in (1, 4, 5, 300):
        assert corrected.factor(size) == pytest.approx(3.0)


@pytest.mark.parametrize("factor", [0.5, 1.4, 2.0])
def test_a_machine_that_changes_is_followed_within_a_quarter_of_a_second(factor: float) -> None:
    """As far as 1 - 1 / e of the way, and nearly all of it within a second."""
    clock = FakeClock()
    corrected = Corrected(clock)
    learn_for(corrected, clock, 1.0, 1.0, [1])
    learn_for(corrected, clock, 0.5 if abs(math.log(factor)) > 0.5 else MEMORY_S, factor, [1])
    assert math.log(corrected.factor(1)) / math.log(factor) > 1.0 - math.exp(-1.0)
    learn_for(corrected, clock, 1.0, factor, [1])
    assert corrected.factor(1) == pytest.approx(factor, rel=0.03)


def test_what_holds_for_one_size_is_learnt_slowly_and_said_of_its_neighbours() -> None:
    clock = FakeClock()
    corrected = Corrected(clock)
    for _ in range(2000):
        for size, factor in ((1, 1.0), (8, 1.5)):
            clock.now += 0.01
            corrected.learn(size, 0.01 * factor, 0.01)
    assert corrected.factor(8) / corrected.factor(1) == pytest.approx(1.5, rel=0.05)
    assert corrected.factor(1) < corrected.factor(4) < corrected.factor(6) < corrected.factor(8)
    assert corrected.factor(16) < corrected.factor(8), "nobody saw it there"


def test_the_first_steps_of_a_size_say_most_about_it() -> None:
    """A quarter, a fifth, a sixth of what is missing: a curve that is wrong at one size is put right in a few steps."""
    clock = FakeClock()
    corrected = Corrected(clock)
    learn_for(corrected, clock, 0.5, 1.0, [1])
    for number, left in enumerate([3 / 4, 3 / 4 * 4 / 5, 3 / 4 * 4 / 5 * 5 / 6]):
        clock.now += 0.01
        corrected.learn(8, 0.01 * math.exp(0.3), 0.01, common=0.0)
        assert corrected._shape_at(8) == pytest.approx(0.3 * (1.0 - left)), number


def test_one_step_that_was_interrupted_moves_little() -> None:
    clock = FakeClock()
    corrected = Corrected(clock)
    learn_for(corrected, clock, 2.0, 1.0, [1, 4])
    clock.now += 0.01
    corrected.learn(4, 0.5, 0.01)  # fifty times as long
    assert corrected.factor(4) < 1.05
    learn_for(corrected, clock, 1.0, 1.0, [1, 4])
    assert corrected.factor(4) == pytest.approx(1.0, abs=0.02)


def test_times_that_are_none_are_not_looked_at() -> None:
    corrected = Corrected(FakeClock())
    for measured, expected in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)):
        corrected.learn(1, measured, expected)
    assert corrected.factor(1) == 1.0


# ------------------------------------------------------------------------------------------ an engine's times


def times_of(
    *drafters: SimulatedDrafter | float, machine: Machine | None = None
) -> tuple[RunningTimes, FakeClock, Machine]:
    made = simulated(*drafters or (0.5,), machine=machine)
    return made.times, made.clock, made.machine


def record(total_s: float, rows: int = 1, drafting: Sequence[DraftTime] = (), **more: Any) -> StepRecord:
    request = RequestStep(0, 100, rows, more.pop("prefill", False), greedy=True)
    draft_s = sum(each.seconds for each in drafting)
    return StepRecord((request,), draft_s, 0.0, 0.0, total_s, drafting=tuple(drafting), **more)


def test_curves_first_and_then_what_steps_take() -> None:
    times, _, machine = times_of()
    assert times.step_s(5, [100], True) == pytest.approx(machine.step_s(5))
    assert times.drafting_s("a", 1, 3, True) == pytest.approx(3 * DRAFT_S)
    assert times.drafting_s("a", 3, 3, True) == pytest.approx(3 * DRAFT_S * 1.4)
    spent = DraftTime("a", 1, 4, 4, 1, 8 * DRAFT_S)
    for _ in range(2):  # the first one behind another kind is passed over
        times.observe(record(1.5 * machine.step_s(5) + spent.seconds, 5, [spent]))
    expected = pytest.approx(1.5 * machine.step_s(5))
    assert times.step_s(5, [100], True) == expected, "all that surrounds the forward counts"
    assert times.drafting_s("a", 1, 3, True) == pytest.approx(6 * DRAFT_S)


def test_levels_that_guesses_saved_say_nothing_of_the_machine() -> None:
    """Eight tokens in two levels are as fast as ever, and a chain of as many levels as tokens is priced as before."""
    times, _, machine = times_of()
    assert times.drafting_s("a", 1, 2.5, True) == pytest.approx(2.5 * DRAFT_S)
    assert times.step_s(9, [100], True) == pytest.approx(machine.step_s(9))
    spent = DraftTime("a", 1, 8, 8, 1, 2 * DRAFT_S, levels=2)
    for _ in range(3):
        times.observe(record(machine.step_s(9) + spent.seconds, 9, [spent]))
    assert times.drafting_s("a", 1, 8, True) == pytest.approx(8 * DRAFT_S)
    assert times.drafting_s("a", 1, 2.5, True) == pytest.approx(2.5 * DRAFT_S)


def test_deciding_is_a_price_of_drafting_by_its_mean() -> None:
    """Two of three steps keep the decision of the first, so 3 ms in one are 1 ms in each."""
    times, _, machine = times_of()
    assert times.step_s(5, [100], True) == pytest.approx(machine.step_s(5))
    for _ in range(2):
        times.observe(record(machine.step_s(5) + 0.003, 5, decide_s=0.003), decide_s=0.001)
    assert times.step_s(5, [100], True) == pytest.approx(machine.step_s(5) + 0.001)


@pytest.mark.parametrize(
    ("rows", "factor", "options", "counts"),
    [
        (5, 50.0, {"decide_s": 0.5}, False),
        (5, 20.0, {"settled": False}, False),
        (5, 20.0, {}, True),
        (1, 50.0, {"prefill": True}, False),
        (1, 51.0, {"decide_s": 50 * STEP_S}, False),
    ],
    ids=["something was measured", "not settled", "settled", "a prompt", "decided for many plain steps"],
)
def test_steps_that_say_nothing(rows: int, factor: float, options: dict[str, Any], counts: bool) -> None:
    times, _, machine = times_of()
    usual = machine.step_s(rows)
    assert times.step_s(rows, [100], True) == pytest.approx(usual)
    for _ in range(1 if counts else 3):
        times.observe(record(factor * usual, rows, **options))
    found = times.step_s(rows, [100], True)
    assert found > 1.5 * usual if counts else found == pytest.approx(usual)


def test_the_first_step_behind_one_of_another_kind_is_outvoted() -> None:
    """It finds the processor's caches cold. Plain steps come three in a row where they are probed."""
    times, clock, machine = times_of()
    plain, drafted = machine.step_s(1), machine.step_s(5)
    assert times.step_s(1, [100], True) == pytest.approx(plain)
    for _ in range(10):
        for taken in (3 * plain, plain, plain):
            times.observe(record(taken))
        for number in range(20):
            times.observe(record(drafted if number else 3 * drafted, 5))
        clock.now += 0.25
    assert times.step_s(1, [100], True) == pytest.approx(plain, rel=0.03)
    assert times.step_s(5, [100], True) == pytest.approx(drafted, rel=0.03)


def settling() -> tuple[RunningTimes, FakeClock, Machine]:
    """Plain steps of 10 ms that take up to 4 ms more until many follow each other."""
    return times_of(machine=Machine(settles_s=0.004))


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_plain_steps_among_drafted_ones_may_take_longer_than_plain_decoding(slow: float) -> None:
    times, clock, machine = settling()
    plain, drafted = machine.step_s(1), machine.step_s(5)
    assert times.step_s(1, [100], True) == pytest.approx(plain)
    for _ in range(8):
        for _ in range(12):
            times.observe(record(slow * drafted, 5))
        for taken in (plain, plain + 0.004, plain + 0.002):
            times.observe(record(slow * taken))
        clock.now += 0.25
        assert times.step_s(1, [100], True) == pytest.approx(slow * plain, rel=0.01)
    for number in range(60):
        times.observe(record(plain + machine.settling_s(number)))
    assert times.step_s(1, [100], True) == pytest.approx(plain, rel=0.01), "many in a row are what plain decoding takes"


def test_plain_steps_that_took_longer_than_cold_caches_explain_say_so() -> None:
    times, _, machine = settling()
    plain = machine.step_s(1)
    assert times.step_s(1, [100], True) == pytest.approx(plain)
    for _ in range(3):
        times.observe(record(2 * (plain + 0.004)))
    assert times.step_s(1, [100], True) > 1.9 * plain


def test_steps_that_pass_unseen_settle_too() -> None:
    times, _, machine = settling()
    times.step_s(1, [100], True)
    times.observe(record(1.2 * machine.step_s(1)))
    assert times.step_s(1, [100], True) == pytest.approx(machine.step_s(1)), "cold caches explain it"
    for _ in range(3):
        times.observe(record(1.2 * machine.step_s(1)), 30)
    assert times.step_s(1, [100], True) == pytest.approx(1.2 * machine.step_s(1), rel=0.02)


def test_large_drafts_that_take_longer_than_the_curve_says_nothing_of_small_ones() -> None:
    """Eight rows take half as long again, among plain steps that take what is expected: so do not two rows."""
    times, clock, machine = times_of()
    assert times.step_s(8, [100], True) == pytest.approx(machine.step_s(8))
    for _ in range(40):
        for rows, factor in ((1, 1.0), (1, 1.0), (8, 1.5)):
            clock.now += 0.01
            times.observe(record(factor * machine.step_s(rows), rows))
    assert times.step_s(8, [100], True) == pytest.approx(1.5 * machine.step_s(8), rel=0.03)
    assert times.step_s(2, [100], True) == pytest.approx(machine.step_s(2), rel=0.03)


@dataclass
class Piece:
    """A measurement in pieces of 20 ms, of a cost that is known or not; of a drafter or, without a name, of steps."""

    clock: FakeClock
    known: bool = True
    more: bool = True
    name: str | None = None

    def go_on(self) -> bool:
        self.clock.now += 0.02 * self.more
        return self.more

    def release(self) -> None: ...


@pytest.mark.parametrize(("known", "first", "least", "most"), [(False, 0.25, 10.0, 10.3), (True, 0.0, 0.03, 0.07)])
def test_what_is_known_is_measured_better_in_a_two_hundredth_of_the_time(
    known: bool, first: float, least: float, most: float
) -> None:
    """What is not known yet is measured at once for a quarter of a second, then for as long as steps take."""
    times, clock, machine = times_of()
    machine.pieces = lambda *given: [Piece(clock, known)]  # type: ignore[method-assign]
    assert times.ready(greedy=True) == known
    began = clock.now
    times.go_on(1e-9)
    assert clock.now - began == pytest.approx(first, abs=0.021)
    for _ in range(1_000):
        times.go_on(0.01)
    assert least <= clock.now - began <= most


def test_what_catching_up_takes_is_learnt_from_drafters_that_were_behind() -> None:
    times, clock, _ = times_of()
    assert times.catch_up_s("a", 2, True) == 0.0
    assert times.catch_up_s("a", 12, True) == pytest.approx(10 * 0.05 * DRAFT_S)
    for _ in range(60):
        clock.now += 0.02
        spent = DraftTime("a", 1, 4, 4, 22, 4 * DRAFT_S + 20 * 0.0004)
        times.observe(record(0.011 + spent.seconds, 5, [spent]))
    assert times.catch_up_s("a", 12, True) == pytest.approx(10 * 0.0004, rel=0.05)
    assert times.drafting_s("a", 1, 4, True) == pytest.approx(4 * DRAFT_S), "which says nothing of drafting"


@pytest.mark.parametrize("greedy", [False, True])
def test_catching_up_asks_for_no_cost_of_requests_of_another_kind(greedy: bool) -> None:
    times, _, machine = times_of()
    times.catch_up_s("a", 12, greedy)
    assert [each for _, each in machine._measured] == [greedy]


def test_proposals_of_nothing_say_nothing() -> None:
    times, clock, _ = times_of()
    clock.now += 1.0
    times.observe(record(0.01, 1, [DraftTime("a", 1, 0, 0, 1, 0.00001)]))
    assert times.drafting_s("a", 1, 1, True) == pytest.approx(DRAFT_S)


def test_contexts_are_asked_for_to_the_nearest_of_a_few() -> None:
    """So a curve that takes long is not asked at every step."""

    class Counting(Machine):
        asked = 0

        def forwards(self) -> Callable[[int, Sequence[int]], float]:
            def forward(rows: int, contexts: Sequence[int]) -> float:
                self.asked += 1
                return 0.01 + 1e-6 * sum(contexts)

            return forward

    machine = Counting()
    times = times_of(machine=machine)[0]
    for context in range(200):
        times.step_s(3, [context, context], True)
    assert machine.asked <= 5
    assert times.step_s(3, [128, 128], True) == pytest.approx(0.01 + 256e-6)
    for number in range(60_000):  # ever other shapes
        times.step_s(3 + number % 100, [64 * (number // 100)] * 2, True)
    assert len(times._forward_s) <= 4096


def test_gains_measured_before_are_handed_on() -> None:
    times, *_ = times_of(SimulatedDrafter(steady(0.5), known=[0.5, 0.2]), 0.5)
    view = type("View", (), {"params": None})()
    assert times.acceptance("a", view) == [0.5, 0.2]
    assert times.acceptance("b", view) == ()


def test_corrections_of_a_curve_are_not_those_of_the_next() -> None:
    """The first curve was half of what steps take; the one that replaces it is right, and one drafter's says nothing of
    another's.
    """

    times, clock, machine = times_of(0.5, 0.5, machine=Machine(believed=0.5, drafting_believed=0.5))
    for name in "ab":
        times.drafting_s(name, 1, 2, True)
    for _ in range(30):
        for rows in (1, 3):
            clock.now += 0.01
            spent = [DraftTime(name, 1, 2, 2, 1, 2 * DRAFT_S) for name in "ab"] if rows > 1 else []
            times.observe(record(machine.step_s(rows) + 4 * DRAFT_S * bool(spent), rows, spent))
    before = [times.step_s(3, [100], True), times.drafting_s("a", 1, 2, True), times.drafting_s("b", 1, 2, True)]
    assert before == pytest.approx([machine.step_s(3), 2 * DRAFT_S, 2 * DRAFT_S], rel=0.05)
    machine._believed = 1.0
    times._measure_on([Piece(clock, more=False)])  # type: ignore[list-item]
    assert [times.step_s(rows, [100], True) for rows in (1, 3)] == [machine.step_s(rows) for rows in (1, 3)]
    assert times.drafting_s("b", 1, 2, True) == before[2]
    machine._drafting_believed = 1.0
    times._measure_on([Piece(clock, more=False, name="a")])  # type: ignore[list-item]
    assert times.drafting_s("a", 1, 2, True) == pytest.approx(2 * DRAFT_S)
    assert times.drafting_s("b", 1, 2, True) == pytest.approx(4 * DRAFT_S, rel=0.05), "its correction is still there"
