"""The goodput controller on simulated machines: what it loses against the best decision and against plain decoding.

All seconds are a fake clock's. A request drafts at most 8 tokens, at a tenth of a plain step each, unless said
otherwise; seeds are fixed, and bounds lie well beyond what other seeds give.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest

from support.pairwise import by_turns
from support.simulated_drafting import (
    DRAFT_S,
    ROW_S,
    STEP_S,
    Acceptance,
    FakeClock,
    Machine,
    SimulatedDrafter,
    SimulatedRequest,
    Simulation,
    steady,
)
from truedraft.core.params import SamplingParams
from truedraft.drafters.cascade import _OWN_MEMORY, _Guessed
from truedraft.engine.policy import Budget, Controller, FixedBudget, Goodput, Hint


def simulated(
    *acceptances: Acceptance,
    requests: int = 1,
    machine: Machine | None = None,
    drafters: Sequence[SimulatedDrafter] = (),
    reading_s: float = 0.0,
    **options: float,
) -> Simulation:
    """A simulation under `Goodput`, of drafters named "a", "b", ..."""
    clock = FakeClock(reading_s)
    each = [*drafters, *map(SimulatedDrafter, acceptances)]
    named = dict(zip("abc", each, strict=False))
    simulation = Simulation(Goodput(clock=clock), named, clock, machine, **options)  # type: ignore[arg-type]
    simulation.requests = [SimulatedRequest(number) for number in range(requests)]
    return simulation


def lengths(simulation: Simulation, request: int = 0, last: int = 200) -> list[int]:
    """Of the last decisions for a request, probes apart."""
    decisions = [each for each in simulation.requests[request].decisions if each.reason != "probe"]
    return [each.budget.nodes for each in decisions[-last:]]


# ------------------------------------------------------------------------------------------ cascades


def answers_of(simulation: Simulation, count: int, pause_s: float) -> list[float]:
    """Of answers of 64 tokens, one after another, each at a temperature of its own, tokens over plain decoding's."""
    found = []
    for number in range(count):
        params = SamplingParams(temperature=0.8 + 0.001 * number)
        simulation.requests = [SimulatedRequest(number, params, remaining=64)]
        simulation.reset()
        while simulation.requests[0].remaining > 0:
            simulation.step()
        found.append(simulation.of_plain)
        simulation.clock.now += pause_s
    return found


def answering(rate: float, guesses: float, answers: int, counted: bool = True) -> list[float]:
    """Answers of 64 tokens, long after one another, by a cascade: a level takes 0.4 of a step.

    Each has a temperature of its own, so that nothing is known of its acceptance.

    Args:
        rate: of its tokens that are accepted.
        guesses: chance that one of its chain's tokens behind the first takes no level.
        answers: that are given.
        counted: whether it says how many tokens took none.
    """
    chance = random.Random(7)
    learned: defaultdict[int, _Guessed] = defaultdict(lambda: _Guessed(_OWN_MEMORY))

    def levels(length: int) -> int:
        taken = length - sum(chance.random() < guesses for _ in range(length - 1))
        learned[simulation.requests[0].id].learn(length - taken, length - 1)
        return taken

    def hint(request: int, seconds: float) -> Hint:
        return Hint(guessed=learned[request].share() if counted else 0.0)

    limits = Budget(12, 1, 12)
    simulation = simulated(drafters=[SimulatedDrafter(steady(rate), 0.4 * STEP_S, limits, hint, levels=levels)])
    return answers_of(simulation, answers, 8.0)


@pytest.mark.parametrize("guesses", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("rate", [0.1, 0.4, 0.9])
def test_a_cascade_is_priced_by_what_its_guesses_save(rate: float, guesses: float) -> None:
    """Whether it copies or not is seen from its rounds: on the mean no answer is slower than plain decoding, and where
    it saves most levels it is much faster than one whose levels nobody counts."""
    found = answering(rate, guesses, 40)
    assert statistics.mean(found) > 0.97
    if rate == 0.9 and guesses == 0.8:
        uncounted = answering(rate, guesses, 40, counted=False)
        assert statistics.median(found) > 1.25 * statistics.median(uncounted)


# ------------------------------------------------------------------------------------------ steady acceptance


def test_nothing_accepted_costs_next_to_nothing() -> None:
    simulation = simulated(steady(0.0))
    simulation.run(1.0)
    assert simulation.of_plain > 0.9, "a second is 100 steps, of which some were spent on finding out"
    simulation.reset()
    simulation.run(30.0)
    assert simulation.of_plain > 0.99
    assert any(simulation.lengths), "it never stops trying"


@pytest.mark.parametrize(("rate", "least"), [(0.1, 0.97), (0.3, 0.97), (0.9, 1.35)])
def test_unknown_sampling_options_cost_little(rate: float, least: float) -> None:
    """Each answer has a temperature of its own, and matches of four lengths, which are expected to be good. Where they
    are not, the drafts that show it lose two percent of the time, and without a limit nine; where they are, nothing."""
    chance = random.Random(1)

    def hint(request: int, seconds: float) -> Hint:
        return Hint(kind=chance.choice([1, 2, 3, 4])) if chance.random() < 0.7 else Hint(finds=False)

    machine = Machine(lambda rows: STEP_S * (1.0 + 0.28 * (rows - 1)))
    drafter = SimulatedDrafter(steady(rate), 0.1 * DRAFT_S, Budget(12, 1, 12), hint)
    assert statistics.mean(answers_of(simulated(drafters=[drafter], machine=machine), 40, 0.0)) > least


def test_plain_decoding_that_settles_is_what_drafting_must_beat() -> None:
    """Drafts bring a tenth over plain steps that stand between others, and lose a tenth to those in a row."""
    machine = Machine(lambda rows: STEP_S if rows == 1 else 0.0125 + ROW_S * (rows - 2), settles_s=0.0025)
    simulation = simulated(drafters=[SimulatedDrafter(steady(0.36), 0.3 * DRAFT_S)], machine=machine)
    simulation.run(5.0, 40.0)
    assert simulation.of_plain > 0.97
    assert any(simulation.lengths), "it tries"


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9, 1.0])
def test_it_comes_near_the_best_length(rate: float) -> None:
    """Found from an acceptance rate of 0.65 that nobody measured, although tokens beyond its drafts go untried."""
    simulation = simulated(steady(rate))
    simulation.run(2.0, 30.0)
    assert simulation.of_best > 0.96
    if rate == 1.0:
        assert sum(length == 8 for length in simulation.lengths) > 0.95 * len(simulation.lengths)


@pytest.mark.parametrize("planned", [False, True])
def test_what_was_measured_before_is_where_it_starts(planned: bool) -> None:
    """The first five steps, over 40 seeds: gains that are right are worth something, of good drafters and bad ones.

    They come with a drafter, or from a plan, which goes before them.
    """
    for rate, gained in ((0.95, 1.02), (0.02, 1.05)):
        rates = []
        for known in ((), [rate**place for place in range(1, 9)]):
            drafter = SimulatedDrafter(steady(rate), known=() if planned else known)
            runs = [simulated(drafters=[drafter], seed=seed) for seed in range(40)]
            for run in runs:
                run.controller.expect({"a": known} if planned and known else {"b": (0.5,)})
            for run, _ in itertools.product(runs, range(5)):
                run.step()
            rates.append(sum(run.tokens for run in runs) / sum(run.seconds for run in runs))
        assert rates[1] > gained * rates[0]


@pytest.mark.parametrize("measuring_s", [0.0, 3.0])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3])
def test_a_drafter_whose_foretold_acceptance_is_far_too_high_is_found_out_at_once(
    rate: float, measuring_s: float
) -> None:
    """Of 200 steps it costs five, over 20 seeds, also where costs are measured in the middle of the first plan.

    Such a plan takes seconds, which say nothing of what planning takes: kept for as many steps as they were worth, it
    lost 16 in 100 of plain decoding.
    """
    found, expected = [], []
    for seed in range(20):
        clock = FakeClock()

        def measure(clock: FakeClock = clock) -> None:
            clock.now += measuring_s

        drafter = SimulatedDrafter(steady(rate), known=[0.9**place for place in range(1, 9)])
        simulation = Simulation(Goodput(clock=clock), {"a": drafter}, clock, Machine(measuring=measure), seed=seed)
        for _ in range(200):
            simulation.step()
        found.append(simulation.of_best)
        decisions = simulation.requests[0].decisions
        expected.append(sum(each.expected_tokens or 1.0 for each in decisions) / simulation.tokens)
    assert statistics.mean(found) > 0.975
    assert statistics.mean(expected) < 1.1, "which are no more than come"


@pytest.mark.parametrize("believed", [1 / 3, 3.0])
@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_curves_that_are_wrong_by_a_factor_of_three_are_put_right(rate: float, believed: float) -> None:
    """The steps' curve one way, and drafting's the other."""
    machine = Machine(believed=believed, drafting_believed=1 / believed)
    simulation = simulated(steady(rate), machine=machine)
    simulation.run(2.0, 20.0)
    assert simulation.of_best > 0.96
    assert simulation.of_plain > 0.98


# ------------------------------------------------------------------------------------------ what changes


@pytest.mark.parametrize(("every", "rates"), by_turns([10, 30, 100, 300, 1000], [(1.0, 0.0), (0.9, 0.1)]))
def test_acceptance_that_switches_never_makes_it_slower_than_plain_decoding(
    every: int, rates: tuple[float, float]
) -> None:
    """Whoever switches knows how long it remembers; the best decision of each moment is known to nobody."""
    good, bad = rates
    simulation = simulated(
        lambda seconds, request, position: good if simulation.requests[0].emitted // every % 2 == 0 else bad
    )
    simulation.run(40.0)
    assert simulation.of_plain > 1.05
    assert simulation.of_best > (0.9 if every == 1000 else 0.45)


def test_a_drafter_that_becomes_useless_is_dropped_within_two_seconds() -> None:
    simulation = simulated(lambda seconds, request, position: 0.9 if seconds < 10.0 else 0.0)
    simulation.run(10.0, 2.0)
    assert simulation.of_plain > 0.75
    simulation.run(1.0, 10.0)
    assert simulation.of_plain > 0.98


@pytest.mark.parametrize("useless_s", [10.0, 60.0, 200.0])
def test_no_gate_stays_shut(useless_s: float) -> None:
    """Acceptance 0 for long; once the drafter is good it is used again, and until then trying it lost under 1 %."""
    simulation = simulated(lambda seconds, request, position: 0.9 if seconds > useless_s else 0.0)
    simulation.run(5.0, useless_s - 5.0)
    assert simulation.of_plain > 0.99
    simulation.run(10.0, 5.0)
    assert simulation.of_best > 0.9


def test_thresholds_may_be_crossed_back_and_forth() -> None:
    """Acceptance goes slowly up and down through where drafting begins to pay, which is 0.13."""
    simulation = simulated(lambda seconds, request, position: 0.5 * abs(seconds % 40.0 / 20.0 - 1.0))
    simulation.run(120.0)
    assert simulation.of_best > 0.95
    assert simulation.of_plain > 1.03


def test_sudden_load_is_followed_at_once() -> None:
    """1 request, 16, and 1 again, on a machine where rows beyond the eighth cost; nothing pays for 16."""
    dear = Machine(lambda rows: STEP_S + ROW_S * (rows - 1) + 0.0015 * max(rows - 8, 0))
    simulation = simulated(steady(0.7), machine=dear)
    simulation.run(3.0)
    assert sum(lengths(simulation)) > 200
    simulation.requests = [SimulatedRequest(100 + number) for number in range(16)]
    simulation.reset()
    simulation.run(1.0)
    assert simulation.of_plain > 0.98
    simulation.requests = [SimulatedRequest(200)]
    simulation.reset()
    simulation.run(1.0)
    assert simulation.of_best > 0.85


def test_a_machine_that_gets_slower_is_followed_within_a_second() -> None:
    simulation = simulated(steady(0.7), machine=Machine(slow=lambda seconds: 2.0 if 10.0 < seconds < 20.0 else 1.0))

    def known() -> float:
        """What a step of five rows is thought to take, over what it takes at its usual speed."""
        return simulation.times.step_s(5, [100], True) / simulation.machine.step_s(5)

    simulation.run(10.0)
    assert known() == pytest.approx(1.0, abs=0.02)
    simulation.run(1.0)
    assert known() == pytest.approx(2.0, abs=0.1)
    simulation.reset()
    simulation.run(4.0)
    assert simulation.of_best > 0.93
    simulation.run(22.0 - simulation.elapsed)
    assert known() == pytest.approx(1.0, abs=0.05)


def test_of_two_drafters_the_better_one_is_found_again_when_they_change_places() -> None:
    simulation = simulated(
        lambda seconds, request, position: 0.8 if seconds < 20.0 else 0.3,
        lambda seconds, request, position: 0.3 if seconds < 20.0 else 0.8,
    )
    simulation.run(20.0)
    assert simulation.of_best > 0.93
    simulation.run(5.0, 10.0)
    assert simulation.of_best > 0.93
    assert sum(each.drafter == "b" for each in simulation.requests[0].decisions[-300:]) > 270


def test_a_second_drafter_that_was_bad_for_a_minute_gets_its_chance() -> None:
    simulation = simulated(steady(0.5), lambda seconds, request, position: 0.0 if seconds < 60.0 else 0.9)
    simulation.run(60.0)
    assert simulation.of_best > 0.96
    simulation.run(20.0)
    assert sum(each.drafter == "b" for each in simulation.requests[0].decisions[-100:]) > 80


def test_verdicts_that_follow_one_another_are_followed() -> None:
    """Whole passages are foreseen, others not at all: no fixed length is right for both."""

    def run(controller: Controller) -> Simulation:
        clock = controller._clock if isinstance(controller, Goodput) else FakeClock()
        passages = random.Random(3).choices((0.97, 0.05), k=20_000)

        def acceptance(seconds: float, request: int, position: int) -> float:
            return passages[(simulation.requests[0].emitted + position) // 24]

        simulation = Simulation(controller, {"a": SimulatedDrafter(acceptance)}, clock)
        simulation.run(100.0)
        return simulation

    fixed = max(run(FixedBudget(Budget(length, 1, length))).tokens for length in range(9))
    assert run(Goodput(clock=FakeClock())).tokens > 1.1 * fixed


@pytest.mark.parametrize(
    ("probabilities", "token_s", "gained"),
    [((0.95, 0.2), 0.001, 1.05), ((0.9, 0.5, 0.1), 0.002, 1.02), ((0.3,), 0.001, 0.96)],
)
def test_chains_that_stop_by_their_probabilities_are_worth_what_they_take_then(
    probabilities: Sequence[float], token_s: float, gained: float
) -> None:
    """They are compared with plain decoding by the tokens that they draft on average; as good as the best floor."""

    def run(controller: Controller) -> int:
        clock = controller._clock if isinstance(controller, Goodput) else FakeClock()
        limits = Budget(12, 1, 12)
        drafter = SimulatedDrafter(
            steady(0.0), token_s, limits, lambda request, seconds: Hint(confident=True), probabilities=probabilities
        )
        simulation = Simulation(controller, {"a": drafter}, clock, Machine(lambda rows: STEP_S + 0.001 * (rows - 1)))
        simulation.run(2.0, 60.0)
        return simulation.tokens

    lengths = max(run(FixedBudget(Budget(length, 1, length))) for length in range(7))
    floors = max(run(FixedBudget(Budget(12, 1, 12, floor=0.05 * floor))) for floor in range(1, 16))
    found = run(Goodput(clock=FakeClock()))
    assert found > 0.96 * max(floors, lengths)
    assert found > gained * lengths


@pytest.mark.parametrize(("rate", "token_share"), [(0.65, 0.2), (0.6, 0.35)])
def test_one_answer_of_bad_drafts_says_little_about_the_next(rate: float, token_share: float) -> None:
    """Hardly anything is accepted in the first of five answers: the others gain as they would have without it.

    By the estimates alone they gain 4 % less.
    """

    def gains(first: float) -> float:
        drafter = SimulatedDrafter(lambda seconds, request, position: rate if request else first, token_share * STEP_S)
        found = []
        for seed in range(8):
            simulation = simulated(drafters=[drafter], seed=seed)
            for number in range(5):
                simulation.requests = [SimulatedRequest(number, remaining=128)]
                if number == 1:
                    simulation.reset()
                while simulation.requests[0].remaining > 0:
                    simulation.step()
            found.append(simulation.of_plain)
        return statistics.mean(found)

    assert gains(0.02) > 0.985 * gains(rate) > 1.1


# ------------------------------------------------------------------------------------------ hysteresis


@pytest.mark.parametrize("jitter", [0.0, 0.005, 0.02])
def test_steps_that_vary_by_two_hundredths_change_no_decision_where_two_are_about_as_good(jitter: float) -> None:
    """The first token is always accepted and no other, and drafting it gains one hundredth over not drafting."""
    token_s = 2.0 * STEP_S / 1.01 - STEP_S - ROW_S
    drafter = SimulatedDrafter(lambda seconds, request, position: float(position == 0), token_s, known=[1.0])
    simulation = simulated(drafters=[drafter], jitter=jitter)
    simulation.run(5.0)
    simulation.run(60.0)
    changes = sum(one != other for one, other in itertools.pairwise(lengths(simulation, last=100_000)))
    assert changes <= 12, "in 65 seconds"
    assert simulation.of_best > 0.96


# ------------------------------------------------------------------------------------------ many requests


def test_in_a_batch_only_those_draft_whose_drafts_are_accepted() -> None:
    """One of eight guesses well. Its tokens count by the geometric mean: 2 to 4 are about equally good for all eight.

    Of 3 by hand: 3.71 tokens to the power of an eighth, 1.178, over 13.3 ms for 12.1.
    """

    def acceptance(seconds: float, request: int, position: int) -> float:
        return 0.95 if request == 3 else 0.05

    simulation = simulated(drafters=[SimulatedDrafter(acceptance, 0.1 * DRAFT_S)], requests=8)
    simulation.run(3.0, 10.0)
    mean = [sum(lengths(simulation, number)) / 200 for number in range(8)]
    assert 1.5 < mean[3] < 4.5
    assert max(mean[:3] + mean[4:]) < 0.5
    assert simulation.of_plain > 1.1
    assert simulation.of_best > 1.1, "no decision that is the same for all is as good"


def test_requests_may_draft_with_different_drafters() -> None:
    def good_for(kind: int) -> SimulatedDrafter:
        return SimulatedDrafter(lambda seconds, request, position: 0.9 if request % 2 == kind else 0.0, 0.2 * DRAFT_S)

    simulation = simulated(drafters=[good_for(0), good_for(1)], requests=4)
    simulation.run(20.0)
    for number, request in enumerate(simulation.requests):
        own = [each.drafter for each in request.decisions[-400:] if each.budget.nodes > 1]
        assert own.count("ab"[number % 2]) > 0.75 * 400
    assert simulation.of_best > 1.3, "no decision that is the same for all is as good"


def test_near_the_end_of_an_answer_no_more_is_drafted_than_can_be_emitted() -> None:
    simulation = simulated(steady(1.0), requests=3)
    simulation.run(1.0)
    for left in (1, 2, 3, 5):
        simulation.requests[1].remaining = left
        simulation.step()
        assert simulation.requests[1].decisions[-1].budget.nodes <= left - 1
        assert simulation.requests[0].decisions[-1].budget.nodes > 1


def test_limits_of_zero_are_plain_decoding() -> None:
    none = SimulatedDrafter(steady(1.0), limits=Budget(0, 0, 0))
    simulation = simulated(drafters=[none], requests=2)
    simulation.run(0.2)
    assert not any(simulation.lengths)
    simulation = simulated(steady(1.0), drafters=[none])
    simulation.run(0.5)
    assert {each.drafter for each in simulation.requests[0].decisions if not each.is_zero} == {"b"}


# ------------------------------------------------------------------------------------------ hints


def test_kinds_of_hints_are_told_apart_and_nothing_is_asked_of_who_finds_nothing() -> None:
    """As prompt lookup: a long match is mostly right, a short one never, and often there is none."""
    kinds = (Hint(4), Hint(1), Hint(finds=False))

    def now(seconds: float) -> int:
        return int(seconds / 0.4) % 3

    drafter = SimulatedDrafter(
        lambda seconds, request, position: 0.95 if now(seconds) == 0 else 0.0,
        0.5 * DRAFT_S,
        hint=lambda request, seconds: kinds[now(seconds)],
    )
    simulation = simulated(drafters=[drafter])
    simulation.run(12.0)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(600):
        kind = now(simulation.elapsed)
        simulation.step()
        seen[kind].append(simulation.requests[0].decisions[-1].budget.nodes)
    long, short, none = (sum(each) / len(each) for each in seen.values())
    assert long > 5.0
    assert short < 0.3
    assert none == 0.0


def test_who_finds_nothing_now_and_then_is_learnt_about_all_the_same() -> None:
    """Without kinds: what is proposed is never accepted, so soon nothing is asked for."""
    steps = itertools.count()
    drafter = SimulatedDrafter(steady(0.0), hint=lambda request, seconds: Hint(finds=next(steps) % 7 > 2))
    simulation = simulated(drafters=[drafter])
    simulation.run(2.0, 10.0)
    assert simulation.of_plain > 0.98


# ------------------------------------------------------------------------------------------ what deciding costs


def counted(simulation: Simulation) -> Counter[str]:
    """How often the controller asks from now on what something takes."""
    asked: Counter[str] = Counter()
    for name in ("step_s", "drafting_s"):
        ask = getattr(simulation.times, name)

        def count(*of: object, name: str = name, ask: Callable[..., float] = ask) -> float:
            asked[name] += 1
            return ask(*of)

        setattr(simulation.times, name, count)
    return asked


def test_decisions_are_kept_where_making_them_takes_long() -> None:
    """A look at the clock takes a millisecond here, so a decision a tenth of a step and more."""
    simulation = simulated(steady(0.7), requests=2, reading_s=0.001)
    asked = counted(simulation)
    simulation.run(3.0)
    simulation.reset()
    made = 0
    for _ in range(300):
        before = asked["step_s"]
        simulation.step()
        made += asked["step_s"] > before
    assert 3 <= made <= 60


@pytest.mark.parametrize("asking_s", [5e-6, 2e-5, 1.5e-4])
def test_where_asking_takes_long_it_is_asked_of_fewer_steps(asking_s: float) -> None:
    """Steps of two milliseconds and more. At most four in a row with drafts go by without a question."""
    machine = Machine(lambda rows: 0.002 + 0.00006 * (rows - 1))
    drafter = SimulatedDrafter(steady(0.7), token_s=0.0002)
    simulation = simulated(drafters=[drafter], machine=machine, reading_s=asking_s / 5.0, deciding_s=asking_s)
    simulation.run(1.0, 5.0)
    asked = simulation.deciding_s / asking_s / len(simulation.lengths)
    if asking_s < 1e-4:
        assert asked > 0.99
    else:
        assert 1 / 5 <= asked < 0.6
    assert simulation.deciding_s < 0.03 * simulation.seconds
    assert simulation.of_best > 0.93


@pytest.mark.parametrize(("token_s", "row_s", "looks"), [(5e-5, 5e-5, False), (5e-5, 3e-4, True), (3e-4, 5e-5, True)])
def test_probabilities_are_looked_at_where_drafting_and_judging_a_token_takes_long(
    token_s: float, row_s: float, looks: bool
) -> None:
    drafter = SimulatedDrafter(steady(0.8), token_s, hint=lambda request, seconds: Hint(confident=True))
    machine = Machine(lambda rows: STEP_S + row_s * (rows - 1))
    simulation = simulated(drafters=[drafter], machine=machine)
    simulation.run(1.0)
    drafted = [each.budget for each in simulation.requests[0].decisions if each.budget.nodes]
    assert drafted
    assert all((each.floor > 0.0) is looks for each in drafted[-20:])


def test_steps_between_two_decisions_are_learnt_from() -> None:
    """Of three steps two keep the decision of the first; what became of all three drafts is counted."""
    drafter = SimulatedDrafter(steady(0.7), token_s=0.0002)
    machine = Machine(lambda rows: 0.002 + 0.00006 * (rows - 1))
    simulation = simulated(drafters=[drafter], machine=machine, deciding_s=1.5e-4)
    simulation.run(1.0)
    counters = simulation.requests[0].counters
    controller = simulation.controller
    assert isinstance(controller, Goodput)
    tried, before = sum(each._tried[0] for each in controller._pool.values()), counters.drafted_calls
    while counters.drafted_calls < before + 9:
        simulation.step()
    kept = math.exp(-9 / 200)
    controller._learn_unread()
    found = sum(each._tried[0] for each in controller._pool.values())
    assert found == pytest.approx(9 + kept * tried, rel=0.03)


def test_costs_that_are_measured_in_a_decision_are_no_loss_of_drafts() -> None:
    simulation = simulated(steady(0.8))
    simulation.run(1.0)
    simulation._deciding_s, before = 5.0, simulation.deciding_s
    while simulation.deciding_s == before:
        simulation.step()
    simulation._deciding_s = 0.0
    simulation.reset()
    for _ in range(20):
        simulation.step()
        assert simulation.controller.rests == 0, "deciding takes as little as before"
    simulation.run(1.0)
    assert simulation.of_best > 0.95


def test_what_others_save_pays_for_trying_a_drafter_again() -> None:
    """The second drafter was bad at first and is better than the other now; it waits longer without what that saves."""
    found = []
    for times in (0.0, 25.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("truedraft.engine.policy.goodput._SAVED_TIMES", times)
            clock, late = FakeClock(), SimulatedDrafter(lambda seconds, *_: 0.0 if seconds < 5.0 else 0.95)
            drafters = {"a": SimulatedDrafter(steady(0.6)), "b": late}
            simulation = Simulation(Goodput(clock=clock, probing=0.002), drafters, clock)
            simulation.run(5.0)
            while not sum(each.drafter == "b" for each in simulation.requests[0].decisions[-20:]) > 10:
                simulation.step()
            found.append(simulation.elapsed - 5.0)
    assert found[1] < 0.7 * found[0]


def test_a_decision_for_many_requests_asks_for_few_costs() -> None:
    """At most one for each number of rows and each depth that it weighs, however many requests there are."""
    for requests in (4, 16):
        simulation = simulated(steady(0.6), steady(0.4), requests=requests)
        simulation.run(1.0)
        asked = counted(simulation)
        for _ in range(50):
            simulation.step()
        assert asked["step_s"] / 50 < 60
        assert asked["drafting_s"] / 50 < 120


def test_what_is_learned_of_sampling_options_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.engine.policy.goodput._MOST_KINDS", 8)
    simulation = simulated(steady(0.8), requests=1)
    for number in range(40):
        for params in (SamplingParams(), SamplingParams(temperature=0.01 * (number + 1))):
            simulation.requests = [SimulatedRequest(2 * number + (not params.greedy), params)]
            simulation.run(STEP_S * 20)
    pools = simulation.controller._pool  # type: ignore[attr-defined]
    assert len(pools) == 8
    usual = [gains for (shaping, _), gains in pools.items() if shaping == ((0.0, 0, 1.0, 0.0), False, False)]
    assert len(usual) == 2, "behind accepted proposals and behind rejected ones"
    assert max(each._step for each in usual) > 700, "what is used goes on learning, however many others come"
    assert simulation.requests[0].decisions


def test_a_plan_that_makes_steps_longer_is_kept_no_longer_for_it() -> None:
    """Plain steps of 0.1 ms, then drafts that bring nothing and take twenty times what is believed."""

    class Wrong(Machine):
        def __call__(self, rows: int, contexts: Sequence[int]) -> float:
            return self.step_s(1)

    def hint(request: int, seconds: float) -> Hint:
        return Hint(finds=seconds > 0.2)

    drafter = SimulatedDrafter(steady(0.0), token_s=0.0, hint=hint)
    machine = Wrong(lambda rows: 1e-4 if rows == 1 else 2e-3)
    simulation = simulated(drafters=[drafter], machine=machine, reading_s=2e-5)
    simulation.run(0.3)
    assert 0 < sum(length > 0 for length in simulation.lengths) < 20


# ------------------------------------------------------------------------------------------ words


def test_why_nothing_was_drafted_is_told_by_what_it_takes() -> None:
    dear = SimulatedDrafter(steady(0.1), token_s=STEP_S, known=[0.1, 0.01, 0.001, 0.0001])
    simulation = simulated(drafters=[dear])
    simulation.run(20 * STEP_S)
    assert all(each.is_zero or each.reason == "probe" for each in simulation.requests[0].decisions)
    found = re.fullmatch(
        r"plain was expected to be faster \(a: a draft of 2 takes (.*) ms, a row (.*) ms, and (.*) of 2 were expected "
        r"to be accepted; a plain step takes (.*) ms\)",
        simulation.controller.undrafted(0),
    )
    assert found is not None, simulation.controller.undrafted(0)
    draft, row, accepted, step = map(float, found.groups())
    assert (draft, row, step) == pytest.approx((2e3 * STEP_S, 1e3 * ROW_S, 1e3 * STEP_S), rel=0.05)
    assert accepted == 0.1
    assert simulation.controller.undrafted(7) == "no drafter found anything to propose"
