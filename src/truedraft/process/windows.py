"""Adaptive window sizes: the text engine's controller, with measured times and acceptance."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from truedraft.core.budget import NO_DRAFT, RequestView
from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters, DraftShare, DraftTime, RequestStep, StepRecord
from truedraft.core.theory.cost_curves import CostCurve
from truedraft.engine.policy import Budget, Goodput, StepTimes
from truedraft.options import check_whole

MOST = 16
_LAST, _NEAR = 9, 0.34  # number of kept times per size, and relative distance of sizes that count as equal
_LOW = 3  # 1 over the quantile of them that counts
_LINEAR = 0.95  # share of the time of single points from which batching gains nothing and larger sizes are not tried
_TRUST = 2.0  # maximum ratio of a first time to the prediction from smaller sizes
_TRIALS, _REPEATS = 3, 2  # for each size, and repetitions where a batch seems to gain nothing
_OPENING, _OPENING_WINDOW = 12, 8  # drafted rounds at the start of a run, whatever the first of them took
_HOPELESS = 3  # number of these after which they end if accepting every draft would not pay either
_TOGETHER_S, _FIRST_S = 0.06, 0.004  # seconds of plain steps that are made together, later and at the start of a run
_SETTLED = 8  # minimum number of these at which their overhead is negligible per step
_LEARNS = 8  # chains per round with verdicts that are learned from
_DRAFT, _PARAMS = "draft", SamplingParams(temperature=1.0)

Measure = Callable[[int], float]
"""Call the costly function at a number of points for a trial; returns seconds."""


class _Measured:
    """Seconds by size, from times that other programs can only increase.

    A low quantile of the last times of each size counts, and no size takes longer than a larger one.

    Worked example: 3.0 for size 1, 1.0 for 2 and 1.5 for 4 make 1.0, 1.0 and 1.5.
    """

    def __init__(self) -> None:
        self._last: dict[float, deque[float]] = {}
        self._curve = CostCurve((1.0,), (0.0,))

    def add(self, size: float, seconds: float) -> None:
        size = float(f"{size:.2g}")  # limits the number of sizes
        smaller = [each for each in self._last if each < size]
        if size not in self._last and smaller:
            # A single time far above those of smaller sizes means that something else ran.
            seconds = min(seconds, _TRUST * size / max(smaller) * self(max(smaller)))
        self._last.setdefault(size, deque(maxlen=_LAST)).append(seconds)
        sizes = sorted(self._last)
        low = [sorted(self._last[each])[len(self._last[each]) // _LOW] for each in reversed(sizes)]
        self._curve = CostCurve(tuple(sizes), tuple(reversed([*itertools.accumulate(low, min)])))

    @property
    def known(self) -> bool:
        return bool(self._last)

    def near(self, size: float) -> bool:
        return any(abs(size - each) <= _NEAR * each for each in self._last)

    def __call__(self, size: float) -> float:
        return self._curve(size)


class Times(StepTimes):
    """Times of rounds, for the batch of all running chains as one request.

    Rows are those of each chain. The costly function is measured for 1, 2, 4, ... of them, as long as that pays.

    Attributes:
        together: number of plain steps in the round that is observed next.
        pays: whether two points in one call take less time than two calls.
    """

    def __init__(self) -> None:
        self.active, self.together, self.pays = 1, _SETTLED, False
        self._most_active = self._settled = 0
        self._target = _Measured()  # by points
        self._plain, self._judging = _Measured(), _Measured()  # overhead of a plain step, and of a round by rows
        self._draft = _Measured()  # by number of drafted steps in sequence

    def covers(self, active: int) -> bool:
        return active <= self._most_active

    def begin(self, measure: Measure, active: int, most: int) -> int:
        """Measure what is missing for about these numbers of chains and rows; returns the number of calls."""
        self.active, trials, rows = active, 0, 1
        while rows <= most + 1:
            points = active * rows
            for _ in range(0 if self._target.near(points) else _REPEATS):
                for _ in range(_TRIALS):  # the first has cold caches
                    self._target.add(points, measure(points))
                trials += _TRIALS
                if rows == 1 or self._pays(rows):
                    break
            if rows > 1 and not self._pays(rows):
                break
            rows *= 2
        self._most_active, self.pays = active, most > 0 and self._pays(2)
        return trials

    def _pays(self, rows: int) -> bool:
        return self._target(rows * self.active) <= _LINEAR * rows * self._target(self.active)

    @property
    def settled(self) -> bool:
        return self._settled >= _TRIALS

    def may_pay(self, depth: int) -> bool:
        """Whether a round of `depth` drafted steps takes less time than plain steps, if all are accepted."""
        round_s = self.step_s(1 + depth, (), False) + self._draft(depth)
        return round_s < (1 + depth) * self.step_s(1, (), False)

    def step_s(self, rows: int, contexts: Sequence[int], greedy: bool) -> float:
        rest = self._judging if rows > 1 and self._judging.known else self._plain
        return self._target(rows * self.active) + rest(rows)

    def drafting_s(self, drafter: str, requests: int, depth: float, greedy: bool) -> float:
        return self._draft(depth)

    def observe(self, record: StepRecord, steps: int = 1, decide_s: float = 0.0) -> None:
        self._target.add(record.rows, record.target_s)
        rest = self._judging if record.drafting else self._plain
        self._settled += not record.drafting and self.together >= _SETTLED
        if record.drafting or self.together >= _SETTLED:
            rest.add(record.rows / self.active, record.total_s - record.decide_s - record.draft_s - record.target_s)
        for each in record.drafting:
            self._draft.add(each.depth, each.seconds)


class Windows:
    """Chooses the number of drafted steps in each round; 0 makes it a step of the plain process.

    An object may serve several runs of a process; later ones start with what it learned. `Goodput` decides, and keeps
    comparing with the plain process.

    Attributes:
        together: number of plain steps that the last choice of 0 represents.

    Raises:
        OptionError: `most` is not an integer of 1 or more.
    """

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most = check_whole("most", most, least=1)
        self.times = Times()
        self._controller = Goodput(clock=clock, plain_steps=1, follows=False)
        self._controller.begin(self.times)
        self._counters = Counters()
        self._rests, self._last, self._opening = 0, 0, _OPENING
        self.together = 1

    def choose(self, active: int, remaining: int) -> int:
        """Number of steps to draft in the next round of `active` chains with at most `remaining` steps left."""
        self.times.active = active
        if self._rests > 0:
            return min(self._last, remaining - 1)
        most = min(self.most, remaining - 1)
        limits = Budget(most, 1, most) if most else NO_DRAFT
        view = RequestView(0, _PARAMS, 0, remaining, {_DRAFT: limits}, self._counters)
        (self._decision,) = self._controller.decide([view])
        opens = bool(self._opening and most and self.times.pays)
        if opens:
            depth = min(_OPENING_WINDOW, most)
            if self._opening <= _OPENING - _HOPELESS and not self.times.settled and not self.times.may_pay(depth):
                depth = 0  # by the costly function only; the overhead of a plain step must be measured now
            self._decision = replace(self._decision, budget=Budget(depth, 1, depth) if depth else NO_DRAFT)
        measures = opens or self._decision.reason == "probe"  # a plain step measures its time
        least, seconds = (_SETTLED, _FIRST_S) if measures else (1 + self._controller.rests, _TOGETHER_S)
        at_once = int(seconds / max(self.times.step_s(1, (), False), 1e-9)) if least > 1 else 1
        self.together = max(least, at_once)
        self._last = min(self._decision.budget.depth, most)
        return self._last

    def observe(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        rows: int,
        seconds: tuple[float, float, float, float],
        together: int = _SETTLED,
    ) -> None:
        """Record a finished round of `rows` evaluated points. Seconds are of choosing, of drafting, of the costly
        function, and of the round without choosing; for one of the plain steps made `together`.
        """
        if self._rests > 0:
            self._rests -= 1
            return
        self._rests = self._controller.rests if self._last and not self._opening else 0
        choose_s, draft_s, target_s, total_s = seconds
        steps = []
        for nodes, kept in list(zip(drafted, accepted, strict=True))[:_LEARNS]:
            judged = min(kept + 1, nodes)
            shares = (DraftShare(_DRAFT, nodes, nodes, tuple(range(kept)), judged),) if nodes else ()
            counts = nodes, nodes, nodes, kept, kept + 1, judged > kept
            step = RequestStep(0, 0, nodes + 1, False, *counts, decision=self._decision, shares=shares)
            self._counters.count(step)
            steps.append(step)
        depth, self.times.together = max(drafted), together
        times = (DraftTime(_DRAFT, 1, depth, sum(drafted), 0, draft_s),) if depth else ()
        # One step represents the batch, except for its rows, of which it gets the rest.
        steps[0].rows += rows - sum(step.rows for step in steps)
        self._controller.observe(StepRecord(tuple(steps), draft_s, target_s, 0.0, choose_s + total_s, choose_s, times))
        if self._opening:
            self._opening -= depth > 0
            tried = self._opening <= _OPENING - _HOPELESS and self.times.settled
            if tried and not self.times.may_pay(min(_OPENING_WINDOW, self.most)):
                self._opening = 0
            if not self._opening:
                self._controller.begin(self.times)  # earlier plans are void
