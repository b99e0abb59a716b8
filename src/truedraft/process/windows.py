"""How many steps are drafted: by the text engine's controller, from measured seconds and what became of drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from truedraft.control import Budget, Controller, Goodput
from truedraft.core.budget import NO_DRAFT, RequestView
from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters, DraftShare, DraftTime, RequestStep, StepRecord
from truedraft.options import check_whole
from truedraft.theory.cost_curves import CostCurve

MOST = 16
_SLOW = 0.2  # share by which one round moves what rounds are known to take
_LINEAR = 0.95  # share of what points take one by one, from which a batch brings nothing and larger ones are not tried
_TRIALS, _TURNS = 2, 2  # of each size, and how often where a batch seems to bring nothing
_LEARNS = 8  # chains of a round whose verdicts are learned from
_DRAFT, _PARAMS = "draft", SamplingParams(temperature=1.0)

Ask = Callable[[int], float]
"""Ask the costly function at so many points for a trial: seconds that it took."""


class Times:
    """What rounds take: `truedraft.control.StepTimes`, for the batch of all running chains as one request.

    Rows are those of each chain. What the costly function takes is measured for 1, 2, 4, ... of them, as long as a
    batch is cheaper than its points one by one, and held to the rounds' own times.

    Attributes:
        active: chains that take part.
    """

    def __init__(self) -> None:
        self.active = 1
        self._most_active = 0
        self._seconds: dict[int, float] = {}  # of the costly function, by points
        self._curve: CostCurve | None = None
        self._judging_s = 0.0  # of all else in a round, for each row
        self._draft_s = 0.0  # of one drafted step

    def covers(self, active: int) -> bool:
        """Whether measurements were made for so many chains or more."""
        return active <= self._most_active

    def begin(self, ask: Ask, active: int, most: int) -> int:
        """Measure what was not measured yet for about so many chains and rows; calls that it took."""
        self.active, trials, rows = active, 0, 1
        while rows <= most + 1:
            points = active * rows
            known = any(abs(points - size) <= 0.34 * size for size in self._seconds)
            for _ in range(0 if known else _TURNS):
                seconds = [ask(points) for _ in range(_TRIALS)]
                trials += _TRIALS
                self._seconds[points] = min([*seconds, self._seconds.get(points, math.inf)])
                self._curve = None
                if rows == 1 or self._pays(rows):
                    break
            if rows > 1 and not self._pays(rows):
                break
            rows *= 2
        self._most_active = active
        return trials

    def _pays(self, rows: int) -> bool:
        return self._seconds_of(rows) <= _LINEAR * rows * self._seconds_of(1)

    def _seconds_of(self, rows: float) -> float:
        if self._curve is None:
            self._curve = CostCurve.fit(self._seconds.items())
        return self._curve(rows * self.active)

    def step_s(self, rows: int, contexts: Sequence[int], greedy: bool) -> float:
        return self._seconds_of(rows) + rows * self._judging_s

    def drafting_s(self, drafter: str, requests: int, depth: float, greedy: bool) -> float:
        return depth * self._draft_s

    def catch_up_s(self, drafter: str, behind: int) -> float:
        return 0.0

    def acceptance(self, drafter: str, view: RequestView) -> Sequence[float]:
        return ()

    def measure(self, greedy: bool) -> None:
        """Nothing is left to measure."""

    def observe(self, record: StepRecord, steps: int = 1) -> None:
        points = record.rows
        before = self._seconds.get(points, record.target_s)
        # A round that the system interrupted says little.
        self._seconds[points] = before + _SLOW * (min(record.target_s, 2.0 * before) - before)
        self._curve = None
        if (drafting := sum(each.depth for each in record.drafting)) and record.draft_s:
            own = record.draft_s / drafting
            self._draft_s += (_SLOW if self._draft_s else 1.0) * (own - self._draft_s)
        rest = (record.total_s - record.draft_s - record.target_s) * self.active / points
        self._judging_s += (_SLOW if self._judging_s else 1.0) * (rest - self._judging_s)


class Windows:
    """Chooses how many steps are drafted in each round; 0 makes it a step of the plain process.

    One may serve several runs of a process, which then begin with what it learned.

    Args:
        most: steps that are drafted at most.
        controller: which decides; None takes the text engine's `Goodput`, which never stops comparing with the plain
            process.
        clock: seconds.

    Raises:
        OptionError: `most` is no whole number of 1 or more.
    """

    def __init__(
        self,
        most: int = MOST,
        controller: Controller | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.most = check_whole("most", most, least=1)
        self.times = Times()
        self._controller = controller if controller is not None else Goodput(clock=clock)
        self._controller.begin(self.times)
        self._counters = Counters()
        self._rests, self._last = 0, 0

    def choose(self, active: int, remaining: int) -> int:
        """Steps to draft in the next round, with so many chains, of which the longest has so many steps left."""
        self.times.active = active
        if self._rests > 0:
            return min(self._last, remaining - 1)
        most = min(self.most, remaining - 1)
        limits = Budget(most, 1, most) if most else NO_DRAFT
        view = RequestView(0, _PARAMS, 0, remaining, {_DRAFT: limits}, self._counters)
        (self._decision,) = self._controller.decide([view])
        self._last = min(self._decision.budget.depth, most)
        return self._last

    def observe(
        self, drafted: Sequence[int], accepted: Sequence[int], rows: int, seconds: tuple[float, float, float, float]
    ) -> None:
        """A round is over.

        Args:
            drafted: steps of each chain.
            accepted: of these, of each chain.
            rows: points that the costly function was asked at.
            seconds: of choosing, of drafting, of the costly function, and of the whole round.
        """
        if self._rests > 0:
            self._rests -= 1
            return
        self._rests = self._controller.rests
        choose_s, draft_s, target_s, total_s = seconds
        steps = []
        for nodes, kept in list(zip(drafted, accepted, strict=True))[:_LEARNS]:
            judged = min(kept + 1, nodes)
            shares = (DraftShare(_DRAFT, nodes, nodes, tuple(range(kept)), judged),) if nodes else ()
            step = RequestStep(0, 0, nodes + 1, False, nodes, nodes, nodes, kept, kept + 1, judged > kept)
            step.decision, step.shares = self._decision, shares
            self._counters.count(step)
            steps.append(step)
        depth = max(drafted)
        times = (DraftTime(_DRAFT, 1, depth, sum(drafted), 0, draft_s),) if depth else ()
        # One step stands for the batch, but for its rows, of which that one has the rest.
        steps[0].rows += rows - sum(step.rows for step in steps)
        self._controller.observe(StepRecord(tuple(steps), draft_s, target_s, 0.0, total_s, choose_s, times))
