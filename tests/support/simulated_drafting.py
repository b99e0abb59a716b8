"""An engine without models: drafters of known acceptance, steps of known cost, and a clock that only they move.

It asks a controller as the engine does and tells it what the engine would, so what a controller loses against the best
decision, or against plain decoding, is known. `simulated` sets it up.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.fake_times import FakeClock
from truedraft import SamplingParams
from truedraft.core.stats import Counters, DraftShare, DraftTime, RequestStep, StepRecord
from truedraft.engine.policy import Budget, Controller, Decision, Goodput, Hint, RequestView, RunningTimes

Acceptance = Callable[[float, int, int], float]
"""Of seconds, the request's number and the drafted position, from 0: the chance that the token is accepted."""

STEP_S, ROW_S, DRAFT_S = 0.010, 0.0003, 0.001
"""Of a step with one row, of each further row, and of a drafted token."""


def steady(rate: float) -> Acceptance:
    return lambda seconds, request, position: rate


@dataclass
class SimulatedDrafter:
    """A drafter of chains, or of trees."""

    acceptance: Acceptance
    token_s: float = DRAFT_S  # true seconds of drafting a token
    limits: Budget = field(default_factory=lambda: Budget(8, 1, 8))
    hint: Callable[[int, float], Hint] | None = None  # what it knows before it drafts, by request and seconds
    known: Sequence[float] = ()  # gains that were measured before
    levels: Callable[[int], int] | None = None  # that a chain of a length takes, each `token_s`; None: one a token
    # Of each node of a tree, in the order in which budgets take them, its parent (-1 is the root) and the true chance
    # that it is accepted; then `acceptance` says nothing. Those of siblings add up to no more than their parent's.
    tree: Sequence[tuple[int, float]] = ()
    # Of a chain's tokens, all equally likely; each is accepted with its probability, and the drafter stops by it.
    probabilities: Sequence[float] = ()

    def gains(self, seconds: float, request: int) -> list[float]:
        """True chances that its first, second, ... node is accepted."""
        if self.tree:
            return [chance for _, chance in self.tree]
        chances = (self.acceptance(seconds, request, position) for position in range(self.limits.depth))
        return list(itertools.accumulate(chances, operator.mul))

    def accepted(self, nodes: int, seconds: float, request: int, chance: random.Random) -> tuple[int, ...]:
        """Draw the path that is accepted of so many nodes."""
        path: list[int] = []
        if not self.tree:
            while len(path) < nodes and chance.random() < self.acceptance(seconds, request, len(path)):
                path.append(len(path))
            return tuple(path)
        node, below = -1, chance.random()
        for place, (parent, share) in enumerate(self.tree[:nodes]):
            if parent == node and below < share:
                path.append(place)
                node, below = place, chance.random() * share
            elif parent == node:
                below -= share
        return tuple(path)

    def draw(self, budget: Budget, chance: random.Random) -> tuple[list[float], int]:
        """Probabilities of the tokens of a chain, where it stops by them, and how many tokens are accepted."""
        drawn: list[float] = []
        survival = 1.0
        while len(drawn) < min(budget.depth, budget.nodes) and (not drawn or budget.continues(drawn[-1], survival)):
            drawn.append(chance.choice(self.probabilities))
            survival *= budget.chance(drawn[-1])
        return drawn, next((place for place, each in enumerate(drawn) if chance.random() >= each), len(drawn))

    @property
    def trees(self) -> SimulatedDrafter:
        """What is known of them is known of it."""
        return self

    def acceptance_curve(self, params: SamplingParams) -> Any:
        return type("Curve", (), {"marginal_gains": self.known}) if self.known else None


@dataclass
class SimulatedRequest:
    """A request that is running."""

    id: int
    params: SamplingParams = field(default_factory=SamplingParams)
    remaining: int = 1_000_000  # tokens that it may still emit
    emitted: int = 0
    decisions: list[Decision] = field(default_factory=list)  # step by step
    counters: Counters = field(default_factory=Counters)


class Machine:
    """What steps and drafting truly take, and what is believed of it beforehand.

    Args:
        step_s: of rows; what many plain steps in a row take in the end.
        believed, drafting_believed: factors of the curves that a controller starts from.
        slow: factor of all true seconds, by the clock.
        settles_s: seconds that plain steps save where many follow each other, truly and as is believed.
        measuring: called when what drafting takes is asked for the first time, as where nobody measured it.
    """

    def __init__(
        self,
        step_s: Callable[[int], float] = lambda rows: STEP_S + ROW_S * (rows - 1),
        believed: float = 1.0,
        drafting_believed: float = 1.0,
        slow: Callable[[float], float] = lambda seconds: 1.0,
        settles_s: float = 0.0,
        measuring: Callable[[], None] = lambda: None,
    ) -> None:
        self.step_s, self.slow, self.settles_s = step_s, slow, settles_s
        self._believed, self._drafting_believed = believed, drafting_believed
        self._measuring = measuring
        self._measured: set[tuple[int, bool]] = set()

    def drafting_s(self, drafter: SimulatedDrafter, requests: int, depth: int) -> float:
        """Seconds of proposals for some requests together, a fifth more for each further one."""
        return drafter.token_s * depth * (1.0 + 0.2 * (requests - 1)) if requests else 0.0

    # What `RunningTimes` asks of measured costs.
    def pieces(self, drafters: object, params: object, failed: object) -> list[Any]:
        return []

    def forwards(self) -> Machine:
        return self

    def __call__(self, rows: int, contexts: Sequence[int]) -> float:
        return self._believed * self.step_s(rows)

    def settling_s(self, steps: int) -> float:
        return self.settles_s * math.exp(-steps / 12)

    def judge(self, ratio: float) -> None: ...

    def drafting(self, drafter: SimulatedDrafter, params: SamplingParams) -> Callable[[int], float]:
        if (id(drafter), params.greedy) not in self._measured:
            self._measured.add((id(drafter), params.greedy))
            self._measuring()
        return lambda depth: self._drafting_believed * drafter.token_s * depth


class Simulation:
    """Steps of some requests under a controller.

    Args:
        jitter: standard deviation of steps' seconds, a fraction.
        deciding_s: that asking the controller takes.
        seed: of what is accepted.

    Attributes:
        tokens: emitted so far, without those of steps before `reset`, in `seconds`, `deciding_s` of them for deciding.
        best_tokens: that the best fixed decision of each moment would be expected to emit in these seconds.
        plain_tokens: likewise, without drafting.
        lengths: drafted nodes by step.
    """

    def __init__(
        self,
        controller: Controller,
        drafters: Mapping[str, SimulatedDrafter],
        clock: FakeClock,
        machine: Machine | None = None,
        *,
        requests: int = 1,
        jitter: float = 0.0,
        deciding_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.controller, self.drafters, self.clock = controller, drafters, clock
        self.machine = machine or Machine()
        self.requests = [SimulatedRequest(number) for number in range(requests)]
        self.began = clock.now
        self._rests = 0  # steps in which the controller is not asked
        self._unsettled = 0.0  # share of what plain steps may save that they do not
        self._asked_for: list[int] = []
        self._decisions: list[Decision] = []
        self._jitter, self._deciding_s = jitter, deciding_s
        self._chance = random.Random(seed)
        self.times = RunningTimes(self.machine, drafters, clock)  # type: ignore[arg-type]
        controller.begin(self.times)
        self.reset()

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return self.clock.now - self.began

    def reset(self) -> None:
        """Forget what was counted so far."""
        self.tokens = 0
        self.seconds = self.deciding_s = self.best_tokens = self.plain_tokens = 0.0
        self.lengths: list[int] = []

    @property
    def of_best(self) -> float:
        """Tokens over those of the best fixed decision of each moment, for all requests the same."""
        return self.tokens / self.best_tokens

    @property
    def of_plain(self) -> float:
        """Tokens over those of plain decoding."""
        return self.tokens / self.plain_tokens

    def run(self, seconds: float, counted: float | None = None) -> None:
        """Steps until so many seconds have passed; then, if given, what is counted begins anew for so many more."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.step()
        if counted is not None:
            self.reset()
            self.run(counted)

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def answer(self, request: SimulatedRequest) -> None:
        """Steps of one request, alone, until it is over."""
        self.requests = [request]
        while request.remaining > 0:
            self.step()

    def drafted_by(self, drafter: str, last: int, request: int = 0) -> int:
        """How many of the last decisions for a request name a drafter."""
        return sum(each.drafter == drafter for each in self.requests[request].decisions[-last:])

    def step(self) -> StepRecord:
        """One step of all requests."""
        views = [self._view(request) for request in self.requests]
        running = [request.id for request in self.requests]
        rests = self._rests > 0 and running == self._asked_for
        if not rests:
            self._decisions = list(self.controller.decide(views))
            self._rests, self._asked_for = self.controller.rests + 1, running
        self._rests -= 1
        decisions = self._decisions
        assert len(decisions) == len(views)
        now = self.elapsed
        steps = [self._judged(*each, now) for each in zip(self.requests, views, decisions, strict=True)]
        record = self._record(steps, now, 0.0 if rests else self._deciding_s)
        self.clock.now += record.total_s
        self.tokens += sum(step.emitted for step in steps)
        self.seconds += record.total_s
        self.deciding_s += record.decide_s
        rates = self.rates(now)
        self.best_tokens += record.total_s * max(rates.values())
        self.plain_tokens += record.total_s * rates["", 0]
        self.lengths.append(sum(step.nodes for step in steps))
        if record.nodes or not rests:
            self.controller.observe(record)
        return record

    def _view(self, request: SimulatedRequest) -> RequestView:
        hints = {
            name: (lambda drafter=drafter: drafter.hint(request.id, self.elapsed))
            for name, drafter in self.drafters.items()
            if drafter.hint is not None
        }
        limits = {name: drafter.limits for name, drafter in self.drafters.items()}
        context = 10 + request.emitted
        return RequestView(request.id, request.params, context, request.remaining, limits, request.counters, hints)

    def _judged(self, request: SimulatedRequest, view: RequestView, decision: Decision, now: float) -> RequestStep:
        """Draw what becomes of what was decided, as the engine cuts it."""
        request.decisions.append(decision)
        decision = decision.cut(max(request.remaining - 1, 0))
        nodes = depth = 0
        path: tuple[int, ...] = ()
        confidence: tuple[float, ...] = ()
        drafter = self.drafters[decision.drafter]
        if not decision.is_zero and (drafter.hint is None or drafter.hint(request.id, now).finds):
            limits, budget = drafter.limits, decision.budget
            depth = min(budget.depth, budget.nodes)
            nodes = budget.nodes if drafter.tree else depth
            assert nodes <= limits.nodes and depth <= limits.depth, "more than the drafter's limits allow"
            if drafter.probabilities:
                drawn, accepted = drafter.draw(budget, self._chance)
                nodes = depth = len(drawn)
                path, confidence = tuple(range(accepted)), tuple(drawn[: accepted + 1])
            else:
                path = drafter.accepted(nodes, now, request.id, self._chance)
        accepted = len(path)
        rejected = accepted < depth
        share = DraftShare(decision.drafter, nodes, depth, path, accepted + rejected, confidence)
        step = RequestStep(
            request.id, view.context, 1 + nodes, False, nodes, depth, nodes, accepted, accepted + 1, rejected,
            decision=decision, shares=(share,) if nodes else (), greedy=request.params.greedy,
        )  # fmt: skip
        request.emitted += step.emitted
        request.remaining -= step.emitted
        request.counters.count(step)
        return step

    def _record(self, steps: Sequence[RequestStep], now: float, decide_s: float) -> StepRecord:
        factor = self.machine.slow(now) * (1.0 + self._chance.gauss(0.0, self._jitter))
        spent = []
        for name, drafter in self.drafters.items():
            own = [step for step in steps if step.shares and step.shares[0].drafter == name]
            if own:
                depth = max(step.depth for step in own)
                levels = None if drafter.levels is None else drafter.levels(depth)
                seconds = self.machine.drafting_s(drafter, len(own), depth if levels is None else levels) * factor
                nodes = sum(step.nodes for step in own)
                spent.append(DraftTime(name, len(own), depth, nodes, len(own), seconds, levels))
        # Plain steps take the longer the longer drafting paused the target before.
        pause_s, rows = sum(each.seconds for each in spent), sum(step.rows for step in steps)
        late_s = 0.0 if spent else self.machine.settles_s * self._unsettled
        paused = pause_s / (pause_s + self.machine.step_s(1))
        self._unsettled = max(self._unsettled * math.exp(-1 / 12), paused)
        target_s = (self.machine.step_s(rows) + late_s) * factor
        draft_s = sum(each.seconds for each in spent)
        total_s = draft_s + target_s + decide_s
        return StepRecord(tuple(steps), draft_s, target_s, 0.0, total_s, decide_s, drafting=tuple(spent))

    def rates(self, now: float) -> dict[tuple[str, int], float]:
        """Expected tokens a second of each fixed decision, by drafter and length, the same for all requests."""
        count, slow = len(self.requests), self.machine.slow(now)
        rates = {("", 0): count / (self.machine.step_s(count) * slow)}
        for name, drafter in self.drafters.items():
            gains = [drafter.gains(now, request.id) for request in self.requests]
            tokens = float(count)
            for nodes in range(1, drafter.limits.nodes + 1):
                tokens += sum(each[nodes - 1] for each in gains)
                levels = min(nodes, drafter.limits.depth)
                seconds = self.machine.step_s(count * (1 + nodes)) + self.machine.drafting_s(drafter, count, levels)
                rates[name, nodes] = tokens / (seconds * slow)
        return rates


def simulated(
    *drafters: SimulatedDrafter | Acceptance | float,
    controller: Controller | None = None,
    machine: Machine | None = None,
    reading_s: float = 0.0,
    probing: float = 0.01,
    **options: Any,
) -> Simulation:
    """A simulation of drafters named "a", "b", ..., each given whole or by its acceptance. `Goodput` decides if no
    other controller is given.

    Args:
        reading_s: that each look at the clock takes.
        options: of `Simulation`.
    """
    clock, named = FakeClock(reading_s), {}
    for name, each in zip("abc", drafters, strict=False):
        acceptance = steady(each) if isinstance(each, float) else each
        named[name] = acceptance if isinstance(acceptance, SimulatedDrafter) else SimulatedDrafter(acceptance)
    return Simulation(controller or Goodput(clock=clock, probing=probing), named, clock, machine, **options)
