"""What steps take right now: measured curves, held to the times of the steps that an engine makes."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from truedraft.core.budget import RequestView
from truedraft.core.params import SamplingParams
from truedraft.core.stats import DraftTime, StepRecord
from truedraft.costs.kept import StepCosts
from truedraft.drafters.base import Drafter

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MEMORY_S = 0.25  # of what holds for all sizes: how busy the machine is
_SHAPE = 0.04  # share by which one step moves what holds for one size
_MOST = 0.5  # log ratio that one step may count for; beyond it lies a step that the system interrupted
_FURTHER_REQUEST = 0.2  # of a proposal for one request, until more were drafted for together
_READ_TOKEN = 0.05  # of a proposal of one token, until a drafter caught up with something
_LEARN = 0.2
_PAUSE_S = 0.01  # between steps that are looked at: of faster ones some will do
_GREEDY, _SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


class Corrected:
    """How measured seconds stand to a curve: a part that is common to all sizes and follows within a quarter of a
    second, and one for each size that moves slowly.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._common = 0.0  # logs of measured / expected
        self._shape = [0.0] * len(_KNOTS)
        self._last: float | None = None

    def factor(self, size: float) -> float:
        """Measured over expected seconds at a size (rows, or requests)."""
        left, share = _between(size)
        shape = self._shape[left]
        if share:
            shape += share * (self._shape[left + 1] - shape)
        return math.exp(self._common + shape)

    def learn(self, size: float, measured_s: float, expected_s: float) -> None:
        """One step took `measured_s` where the curve alone says `expected_s`."""
        if measured_s <= 0.0 or expected_s <= 0.0:
            return
        now = self._clock()
        error = math.log(measured_s / expected_s) - math.log(self.factor(size))
        left, share = _between(size)
        if self._last is None:
            self._common += error  # where there is nothing yet, the first step says it all
        else:
            error = max(-_MOST, min(_MOST, error))
            self._common += error * max(1.0 - math.exp((self._last - now) / _MEMORY_S), 0.01)
            self._shape[left] += error * _SHAPE * (1.0 - share)
            if share:
                self._shape[left + 1] += error * _SHAPE * share
        self._last = now


def _between(size: float) -> tuple[int, float]:
    """The knot at or below a size, and the share of the next one, by logarithm.

    Worked example: 3 lies behind knot 1, which is 2, and 0.58 on the way to 4.
    """
    if size >= _KNOTS[-1]:
        return len(_KNOTS) - 1, 0.0
    left = max(bisect_right(_KNOTS, size) - 1, 0)
    return left, max(math.log2(max(size, 1.0) / _KNOTS[left]), 0.0) / math.log2(_KNOTS[left + 1] / _KNOTS[left])


class RunningTimes:
    """What the steps of an engine take: `truedraft.control.StepTimes`.

    Curves are read or measured when they are first asked for, so an engine whose controller never asks pays nothing.
    All that surrounds the forward in a step counts as a part of it, for more rows make more of that too.

    Args:
        costs: of the target.
        drafters: that may be asked about, by name.
        clock: seconds.
    """

    def __init__(
        self, costs: StepCosts, drafters: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._costs = costs
        self._drafters = drafters
        self._clock = clock
        self._steps = Corrected(clock)
        self._drafting = {name: Corrected(clock) for name in drafters}
        self._proposals: dict[tuple[str, int, bool], float] = {}  # seconds by drafter, depth, and whether greedy
        self._next = 0.0
        self._read_s: dict[str, float] = {}  # seconds of a token that a drafter catches up with
        self._forwards: dict[tuple[int, int, int], float] = {}  # seconds by rows, requests and context

    def step_s(self, rows: int, contexts: Sequence[int]) -> float:
        return self._forward_s(rows, contexts) * self._steps.factor(rows)

    def _forward_s(self, rows: int, contexts: Sequence[int]) -> float:
        """V by the curve, for contexts to the nearest 64 tokens of their mean."""
        requests = len(contexts)
        context = round(sum(contexts) / requests / 64) * 64
        key = rows, requests, context
        found = self._forwards.get(key)
        if found is None:
            found = self._forwards[key] = self._costs.forwards()(rows, [context] * requests)
        return found

    def drafting_s(self, drafter: str, requests: int, depth: int, greedy: bool) -> float:
        return self._proposals_s(drafter, requests, depth, greedy) * self._drafting[drafter].factor(requests)

    def _proposals_s(self, drafter: str, requests: int, depth: int, greedy: bool) -> float:
        key = drafter, depth, greedy
        found = self._proposals.get(key)
        if found is None:
            curve = self._costs.drafting(self._drafters[drafter], _GREEDY if greedy else _SAMPLED)
            found = self._proposals[key] = curve(depth)
        return found * (1.0 + _FURTHER_REQUEST * (requests - 1))

    def catch_up_s(self, drafter: str, behind: int) -> float:
        if behind <= 2:
            return 0.0
        if drafter not in self._read_s:
            self._read_s[drafter] = _READ_TOKEN * self._proposals_s(drafter, 1, 1, greedy=True)
        return (behind - 2) * self._read_s[drafter]

    def acceptance(self, drafter: str, view: RequestView) -> Sequence[float]:
        curve = self._drafters[drafter].acceptance_curve(view.params)
        return () if curve is None else curve.marginal_gains

    def measure(self, greedy: bool) -> None:
        self._forward_s(1, [0])
        for drafter in self._drafters:
            self._proposals_s(drafter, 1, 1, greedy)

    def observe(self, record: StepRecord) -> None:
        now = self._clock()
        if record.prefill or now < self._next or not self._forwards:  # who never asked needs no answers
            return
        self._next = now + _PAUSE_S
        measured = record.total_s - record.draft_s - record.decide_s
        self._steps.learn(record.rows, measured, self._forward_s(record.rows, record.contexts))
        greedy = all(step.greedy for step in record.requests)
        for each in record.drafting:
            self._observe_drafting(each, greedy)

    def _observe_drafting(self, spent: DraftTime, greedy: bool) -> None:
        if not spent.depth:
            return
        late = spent.behind - 2 * spent.requests
        if late <= 0:
            expected = self._proposals_s(spent.drafter, spent.requests, spent.depth, greedy)
            self._drafting[spent.drafter].learn(spent.requests, spent.seconds, expected)
        elif late >= 4:
            usual = self.drafting_s(spent.drafter, spent.requests, spent.depth, greedy)
            own = max(spent.seconds - usual, 0.0) / late
            before = self._read_s.get(spent.drafter, own)
            self._read_s[spent.drafter] = before + _LEARN * (own - before)
