"""How many steps are drafted: by the text engine's controller, from measured seconds and what became of drafts."""

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
from truedraft.engine.policy import Budget, Controller, Goodput
from truedraft.options import check_whole

MOST = 16
_LAST, _NEAR = 9, 0.34  # times of each size that are kept, and how far sizes may be apart to say the same
_LOW = 3  # part of them that lies below the one that counts
_LINEAR = 0.95  # share of what points take one by one, from which a batch brings nothing and larger ones are not tried
_TRUST = 2.0  # times that a first time may be beyond what smaller sizes say
_TRIALS, _TURNS = 3, 2  # of each size, and how often where a batch seems to bring nothing
_OPENING, _OPENING_WINDOW = 12, 8  # rounds that a run begins with, drafted whatever the first of them took
_HOPELESS = 3  # of these, after which it ends where keeping every draft would not pay either
_TOGETHER_S, _FIRST_S = 0.06, 0.004  # of plain steps that are made together, and of those that a run begins with
_SETTLED = 8  # of these, by which what a few of them take besides is no part of a step
_LEARNS = 8  # chains of a round whose verdicts are learned from
_DRAFT, _PARAMS = "draft", SamplingParams(temperature=1.0)

Ask = Callable[[int], float]
"""Ask the costly function at so many points for a trial: seconds that it took."""


class _Measured:
    """Seconds by size, from times that other programs only ever make longer.

    Of each size a low one of the last few counts, and no size takes longer than a larger one. The least would make
    rounds look shorter than they are, and plain steps not, of which many are measured together.

    Worked example: 3.0 for size 1, 1.0 for 2 and 1.5 for 4 make 1.0, 1.0 and 1.5.
    """

    def __init__(self) -> None:
        self._last: dict[float, deque[float]] = {}
        self._curve = CostCurve((1.0,), (0.0,))

    def add(self, size: float, seconds: float) -> None:
        size = float(f"{size:.2g}")  # so that there are not many
        smaller = [each for each in self._last if each < size]
        if size not in self._last and smaller:
            # A single time that is far beyond those of fewer says that something else ran.
            seconds = min(seconds, _TRUST * size / max(smaller) * self(max(smaller)))
        self._last.setdefault(size, deque(maxlen=_LAST)).append(seconds)
        sizes = sorted(self._last)
        low = [sorted(self._last[each])[len(self._last[each]) // _LOW] for each in reversed(sizes)]
        self._curve = CostCurve(tuple(sizes), tuple(reversed([*itertools.accumulate(low, min)])))

    @property
    def known(self) -> bool:
        """Whether any time was seen."""
        return bool(self._last)

    def near(self, size: float) -> bool:
        return any(abs(size - each) <= _NEAR * each for each in self._last)

    def __call__(self, size: float) -> float:
        return self._curve(size)


class Times:
    """What rounds take: `truedraft.engine.policy.StepTimes`, for the batch of all running chains as one request.

    Rows are those of each chain. What the costly function takes is measured for 1, 2, 4, ... of them, as long as a
    batch is cheaper than its points one by one, and held to the rounds' own times.

    Attributes:
        active: chains that take part.
        together: plain steps that the round was that is observed next.
        pays: whether two points in one call were cheaper than in two.
    """

    def __init__(self) -> None:
        self.active, self.together, self.pays = 1, _SETTLED, False
        self._most_active = self._settled = 0
        self._target = _Measured()  # by points
        self._plain, self._judging = _Measured(), _Measured()  # all else in a plain step, and in a round by rows
        self._draft = _Measured()  # by drafted steps, one behind another

    def covers(self, active: int) -> bool:
        """Whether measurements were made for so many chains or more."""
        return active <= self._most_active

    def begin(self, ask: Ask, active: int, most: int) -> int:
        """Measure what was not measured yet for about so many chains and rows; calls that it took."""
        self.active, trials, rows = active, 0, 1
        while rows <= most + 1:
            points = active * rows
            for _ in range(0 if self._target.near(points) else _TURNS):
                for _ in range(_TRIALS):  # the first finds caches cold
                    self._target.add(points, ask(points))
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
        """Whether it is known what a plain step takes: the first of them find caches cold."""
        return self._settled >= _TRIALS

    def may_pay(self, depth: int) -> bool:
        """Whether a round of so many drafted steps takes less than plain steps do, if all of them are accepted."""
        round_s = self.step_s(1 + depth, (), False) + self._draft(depth)
        return round_s < (1 + depth) * self.step_s(1, (), False)

    def step_s(self, rows: int, contexts: Sequence[int], greedy: bool) -> float:
        rest = self._judging if rows > 1 and self._judging.known else self._plain
        return self._target(rows * self.active) + rest(rows)

    def drafting_s(self, drafter: str, requests: int, depth: float, greedy: bool) -> float:
        return self._draft(depth)

    def catch_up_s(self, drafter: str, behind: int) -> float:
        return 0.0

    def acceptance(self, drafter: str, view: RequestView) -> Sequence[float]:
        return ()

    def ready(self, greedy: bool) -> bool:
        return True

    def measure(self, greedy: bool) -> None:
        """Nothing is left to measure."""

    def observe(self, record: StepRecord, steps: int = 1) -> None:
        self._target.add(record.rows, record.target_s)
        rest = self._judging if record.drafting else self._plain
        self._settled += not record.drafting and self.together >= _SETTLED
        if record.drafting or self.together >= _SETTLED:
            rest.add(record.rows / self.active, record.total_s - record.draft_s - record.target_s)
        for each in record.drafting:
            self._draft.add(each.depth, each.seconds)


def _goodput(clock: Callable[[], float]) -> Goodput:
    """The text engine's, for steps each of which has noise of its own, and of which many stand for a plain one."""
    return Goodput(clock=clock, plain_steps=1, follows=False)


class Windows:
    """Chooses how many steps are drafted in each round; 0 makes it a step of the plain process.

    One may serve several runs of a process, which then begin with what it learned.

    Args:
        most: steps that are drafted at most.
        controller: which decides; None takes the text engine's `Goodput`, which never stops comparing with the plain
            process.
        clock: seconds.

    Attributes:
        times: what rounds take.
        together: plain steps that the last choice of 0 stands for.

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
        self._controller = controller if controller is not None else _goodput(clock)
        self._controller.begin(self.times)
        self._counters = Counters()
        self._rests, self._last, self._opening = 0, 0, _OPENING
        self.together = 1

    def choose(self, active: int, remaining: int) -> int:
        """Steps to draft in the next round, with so many chains, of which the longest has so many steps left."""
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
                depth = 0  # by what the costly function takes alone; what else a plain step takes must be known now
            self._decision = replace(self._decision, budget=Budget(depth, 1, depth) if depth else NO_DRAFT)
        tells = opens or self._decision.reason == "probe"  # a plain step, what one takes
        least, seconds = (_SETTLED, _FIRST_S) if tells else (1 + self._controller.rests, _TOGETHER_S)
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
        """A round is over.

        Args:
            drafted: steps of each chain.
            accepted: of these, of each chain.
            rows: points that the costly function was asked at.
            seconds: of choosing, of drafting, of the costly function, and of the round, choosing apart.
            together: plain steps that were made at once, of which the seconds are one's.
        """
        if self._rests > 0:
            self._rests -= 1
            return
        # Plain steps were made together.
        self._rests = self._controller.rests if self._last and not self._opening else 0
        choose_s, draft_s, target_s, total_s = seconds
        steps = []
        for nodes, kept in list(zip(drafted, accepted, strict=True))[:_LEARNS]:
            judged = min(kept + 1, nodes)
            shares = (DraftShare(_DRAFT, nodes, nodes, tuple(range(kept)), judged),) if nodes else ()
            step = RequestStep(0, 0, nodes + 1, False, nodes, nodes, nodes, kept, kept + 1, judged > kept)
            step.decision, step.shares = self._decision, shares
            self._counters.count(step)
            steps.append(step)
        depth, self.times.together = max(drafted), together
        times = (DraftTime(_DRAFT, 1, depth, sum(drafted), 0, draft_s),) if depth else ()
        # One step stands for the batch, but for its rows, of which that one has the rest.
        steps[0].rows += rows - sum(step.rows for step in steps)
        self._controller.observe(StepRecord(tuple(steps), draft_s, target_s, 0.0, total_s, choose_s, times))
        if self._opening:
            self._opening -= depth > 0
            tried = self._opening <= _OPENING - _HOPELESS and self.times.settled
            if tried and not self.times.may_pay(min(_OPENING_WINDOW, self.most)):
                self._opening = 0
            if not self._opening:
                self._controller.begin(self.times)  # what was planned before is void
