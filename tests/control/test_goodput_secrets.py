"""Verdicts of a sampled request whose seed somebody chose decide nothing about any other request.

Requests with one seed share their noise, so a budget that followed another one's verdicts would bend the distribution
of its answer (DESIGN section 2, predictable choice). Here what becomes of one request's drafts is changed at will while
seconds and all else stay the same, and the decisions for the others are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from support.simulated_drafting import DRAFT_S, FakeClock, Machine, SimulatedDrafter, SimulatedRequest, Simulation
from truedraft import SamplingParams
from truedraft.control import Decision, Goodput, RequestView
from truedraft.core.stats import RequestStep, StepRecord

PRIVATE = SamplingParams(temperature=1.0, seed=7)
OPEN = SamplingParams(temperature=1.0)
KINDS = {
    "one seed": PRIVATE,
    "fresh seed": OPEN,
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=1.0, seed=7, coupled=True),
}
STEP_SECONDS = 0.002
DECIDING_SECONDS = LOOKING_SECONDS = 0.0001  # so dear that decisions are kept for some steps where they may be

Seen = list[tuple[str, int, str]]
"""Of each decision its drafter, nodes and reason."""


class EvenSteps(Simulation):
    """A simulation in which each step takes the same, whatever is drafted, and each request draws its own chances.

    What a request accepts hangs on its own number and step alone, so the fates of the others stay as they were. Longer
    contexts are thought to take longer.
    """

    def step(self) -> StepRecord:
        self.controller._look_s = LOOKING_SECONDS  # type: ignore[attr-defined]
        return super().step()

    def _judged(self, request: SimulatedRequest, view: RequestView, decision: Decision, now: float) -> RequestStep:
        self._chance = random.Random(f"{request.id}/{len(request.decisions)}")
        return super()._judged(request, view, decision, now)

    def _record(self, steps: list[RequestStep], now: float, decide_s: float) -> StepRecord:  # type: ignore[override]
        return StepRecord(tuple(steps), 0.0, STEP_SECONDS, 0.0, STEP_SECONDS, decide_s)


Script = Callable[[EvenSteps, SimulatedRequest, list[SimulatedRequest]], None]


def together(simulation: EvenSteps, first: SimulatedRequest, others: list[SimulatedRequest]) -> None:
    """All the time."""
    simulation.requests = [first, *others]
    for _ in range(400):
        simulation.step()


def first_is_ahead(simulation: EvenSteps, first: SimulatedRequest, others: list[SimulatedRequest]) -> None:
    """The first one alone for a while, then all, then the others alone, then a last one alone."""
    for batch, steps in (([first], 150), ([first, *others], 150), (others, 150), (others[:1], 250)):
        simulation.requests = list(batch)
        for _ in range(steps):
            simulation.step()


def one_joins_another(simulation: EvenSteps, first: SimulatedRequest, others: list[SimulatedRequest]) -> None:
    """In turns, in batches of all kinds."""
    for round_ in range(12):
        simulation.requests = [each for each in (first, *others) if (each.id + round_) % 3]
        for _ in range(40):
            simulation.step()


def the_others_pause(simulation: EvenSteps, first: SimulatedRequest, others: list[SimulatedRequest]) -> None:
    """In turns the first one alone and all of them, as where the others had no room for a drafter in between."""
    for _ in range(8):
        for batch in ([first, *others], [first]):
            simulation.requests = list(batch)
            for _ in range(40):
                simulation.step()


def decisions_for_others(accepted: float, params: SamplingParams, script: Script, seed: int) -> list[Seen]:
    """What is decided for all requests but the first, whose drafts are accepted at a given rate."""
    chance = random.Random(seed)
    rates = {name: [accepted, *(chance.random() for _ in range(3))] for name in ("a", "b")}
    drafters = {
        name: SimulatedDrafter(
            lambda seconds, request, position, own=own: own[request], chance.choice([0.1, 1.0, 5.0]) * DRAFT_S
        )
        for name, own in rates.items()
    }
    clock = FakeClock()
    machine = Machine(context_share=0.001)
    simulation = EvenSteps(Goodput(clock=clock), drafters, clock, machine, deciding_s=DECIDING_SECONDS)
    simulation.times.observe = lambda record: None  # type: ignore[method-assign]
    first, *others = [SimulatedRequest(number, params if number < 2 else OPEN) for number in range(4)]
    others[0].params = PRIVATE  # whose seed is the first one's
    script(simulation, first, others)
    return [[(each.drafter, each.budget.nodes, each.reason) for each in one.decisions] for one in others]


@pytest.mark.parametrize("script", [together, first_is_ahead, one_joins_another, the_others_pause])
def test_nothing_hangs_on_what_became_of_a_private_requests_drafts(script: Script) -> None:
    for seed in range(3):
        expected = decisions_for_others(0.0, PRIVATE, script, seed)
        assert any(nodes for _, nodes, _ in expected[0]), "it drafts now and then"
        for accepted in (0.6, 1.0):
            assert decisions_for_others(accepted, PRIVATE, script, seed) == expected


@pytest.mark.parametrize("kind", ["fresh seed", "greedy", "coupled"])
def test_verdicts_of_others_are_learnt_from(kind: str) -> None:
    """So the comparison above could have found something."""
    seen = [decisions_for_others(accepted, KINDS[kind], first_is_ahead, 0) for accepted in (0.0, 1.0)]
    assert seen[0] != seen[1]
