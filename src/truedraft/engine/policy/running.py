"""Current step times: measured cost curves, corrected by the times of the engine's own steps."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from truedraft.core.budget import RequestView
from truedraft.core.params import SamplingParams
from truedraft.core.stats import DraftTime, StepRecord
from truedraft.core.theory import SETTLED, ForwardTable
from truedraft.drafters.base import Drafter
from truedraft.engine.policy.base import StepTimes
from truedraft.engine.policy.kept import CurveCheck, Growing, StepCosts
from truedraft.errors import TruedraftError

_log = logging.getLogger(__name__)
_LARGEST = 256  # largest size with a correction of its own
_STEPS, _FEWEST, _LONGEST_S = 15, 3, 4.0  # window that shows how busy the machine is: most steps, fewest steps, seconds
_BESIDE = 2  # drafted steps after a plain one for which that says how busy the machine is
_FADES_S = 5.0  # time in which a correction decays by 1 / e without new steps
_SHAPE, _SHAPE_BESIDE = 0.04, 0.1  # weight of one step in the correction of one size; where others of now are known
_FIRST_SHAPES = 4.0  # the n-th step of a size has a weight of 1 / (n + 3) at least, for the curve may be wrong there
_MOST = 0.5  # largest log ratio that one step counts for; more means that the system interrupted the step
_FURTHER_REQUEST = 0.2  # cost of a further request relative to the first, until measured
_READ_TOKEN = 0.05  # cost of catching up with a token relative to a proposal of one token, until measured
_LEARN = 0.2
_MEASURED = 0.5  # share of a step for deciding that is only reached where costs were measured in it
_AT_ONCE_S = 0.25  # most seconds of measuring between two steps, and most that may be saved up
_MEASURING_SHARE = 1.0  # of the time of steps, for measuring without which nothing can be drafted
_BETTER_SHARE = 0.005  # of the time of steps, for measuring that only improves known costs
_SOON = 4 * SETTLED  # plain steps after which the times of drafted steps are no longer comparable
_GREEDY, _SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


class Corrected:
    """A factor on a cost curve common to all sizes, with log `common`, and one per size that moves slowly. The common
    one is the median over the last few steps, so that an interrupted step has no effect.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, float]] = deque(maxlen=_STEPS)  # time, and log of measured / expected
        self.common = 0.0  # median of these logs
        self._shape = [0.0] * (_LARGEST.bit_length() + 1)  # at sizes of 1, 2, 4, ...
        self._learned = [0.0] * len(self._shape)  # steps, at these sizes

    def factor(self, size: float, otherwise: float = 0.0) -> float:
        """Measured over expected seconds at a size (rows or requests); fades to `otherwise`, a common log ratio."""
        if not self._recent:
            return math.exp(otherwise)
        fresh = math.exp(min(self._recent[-1][0] - self._clock(), 0.0) / _FADES_S)
        return math.exp(otherwise + fresh * (self.common - otherwise) + self._shape_at(size))

    def _shape_at(self, size: float) -> float:
        left, share = _between(size)
        return (1.0 - share) * self._shape[left] + share * self._shape[left + 1]

    @property
    def known(self) -> bool:
        return bool(self._recent)

    def learn(
        self, size: float, measured_s: float, expected_s: float, usual: bool = True, common: float | None = None
    ) -> None:
        """Add a step with `measured_s` and `expected_s`; only a usual one changes the factor of its size. `common` is
        what other steps of now say: with it what one size takes is not mistaken for a busier machine.
        """
        if measured_s <= 0.0 or expected_s <= 0.0:
            return
        now, recent = self._clock(), self._recent
        ratio = math.log(measured_s / expected_s) - self._shape_at(size)
        left, share = _between(size)
        if (recent and usual) or common is not None:
            rate, reference = (_SHAPE, self.common) if common is None else (_SHAPE_BESIDE, common)
            error = max(-_MOST, min(_MOST, ratio - reference))
            for place, part in ((left, 1.0 - share), (left + 1, share)):
                self._shape[place] += part * error * max(rate, 1.0 / (_FIRST_SHAPES + self._learned[place]))
                self._learned[place] += part
        recent.append((now, ratio))
        while len(recent) > _FEWEST and now - recent[0][0] > _LONGEST_S:
            recent.popleft()
        self.common = median(each[1] for each in recent)


def _between(size: float) -> tuple[int, float]:
    """The whole part of log2 of a size, and the rest: 1 and 0.58 for 3."""
    place = math.log2(min(max(size, 1.0), _LARGEST))
    return int(place), place - int(place)


class RunningTimes(StepTimes):
    """Step times of an engine, measured on first use. Everything around the forward counts as part of it."""

    def __init__(
        self, costs: StepCosts, drafters: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._costs = costs
        self._drafters = drafters
        self._clock = clock
        # Separately by whether anything is drafted and whether all requests are greedy: verdicts and host work differ,
        # and plain decoding must be compared by its own step times.
        self._steps: dict[tuple[bool, bool], Corrected] = {}
        self._plain_ratio: dict[bool, float] = {}  # log ratio of settled plain steps to drafted ones, by whether greedy
        self._drafting: dict[str, Corrected] = {}
        for name in (None, *drafters):
            self._renew(name)
        self._kind = False, False  # of the last step, key of `_steps`
        self._plain = self._drafted = 0  # consecutive plain steps, and drafted ones, up to the last one
        self._proposals: dict[tuple[str, int, bool], float] = {}  # seconds by drafter, depth, and whether greedy
        self._read_s: dict[str, float] = {}  # seconds per token of a drafter's catch-up
        self._growing: dict[bool, list[Growing[Any]]] = {}  # costs still being measured, by whether greedy
        self._held: Growing[Any] | None = None  # the one that holds memory for measuring
        self._left_out: set[str] = set()  # drafters with a cost that cannot be measured
        self._credit_s = {False: _AT_ONCE_S, True: 0.0}  # seconds for measuring, by whether all costs are known
        self._forward_s: ForwardTable
        self._check: CurveCheck
        self._forget()

    def step_s(self, rows: int, contexts: Sequence[int], greedy: bool) -> float:
        drafted = rows > len(contexts)
        otherwise = self._as_others(drafted, greedy)
        return self._forward_s(rows, contexts) * self._steps[drafted, greedy].factor(rows, otherwise)

    def _as_others(self, drafted: bool, greedy: bool) -> float:
        if (other := self._steps[not drafted, greedy]).known:
            difference = self._plain_ratio.get(greedy, 0.0)
            return other.common + (-difference if drafted else difference)
        return self._steps[drafted, not greedy].common

    def drafting_s(self, drafter: str, requests: int, depth: float, greedy: bool) -> float:
        return self._proposals_s(drafter, requests, depth, greedy) * self._drafting[drafter].factor(requests)

    def _proposals_s(self, drafter: str, requests: int, depth: float, greedy: bool) -> float:
        whole = int(depth)
        seconds, more = self._proposal_s(drafter, whole, greedy), depth - whole
        if more:  # an expected number of levels need not be whole
            seconds += more * (self._proposal_s(drafter, whole + 1, greedy) - seconds)
        return seconds * (1.0 + _FURTHER_REQUEST * (requests - 1))

    def _proposal_s(self, drafter: str, depth: int, greedy: bool) -> float:
        key = drafter, depth, greedy
        if key not in self._proposals:
            seconds = math.inf
            if drafter not in self._left_out:
                try:
                    params = _GREEDY if greedy else _SAMPLED
                    seconds = self._costs.drafting(self._drafters[drafter], params)(depth)
                except TruedraftError as error:
                    self._leave_out(drafter, error)
            self._proposals[key] = seconds
        return self._proposals[key]

    def catch_up_s(self, drafter: str, behind: int, greedy: bool) -> float:
        if behind <= 2:
            return 0.0
        if drafter not in self._read_s:
            self._read_s[drafter] = _READ_TOKEN * self._proposals_s(drafter, 1, 1, greedy)
        return (behind - 2) * self._read_s[drafter]

    def acceptance(self, drafter: str, view: RequestView) -> Sequence[float]:
        trees = self._drafters[drafter].trees
        curve = None if trees is None else trees.acceptance_curve(view.params)
        return () if curve is None else curve.marginal_gains

    def measure(self, greedy: bool) -> None:
        """Measure now what would be measured on first use."""
        self.rest()
        self._growing.pop(greedy, None)  # all costs are known after this, although some may be in doubt
        self._forward_s(1, [0])
        for drafter in self._drafters:
            self._proposals_s(drafter, 1, 1, greedy)

    def ready(self, greedy: bool) -> bool:
        if greedy not in self._growing:
            self.rest()
            fit = {name: each for name, each in self._drafters.items() if name not in self._left_out}
            found = self._costs.pieces(fit, _GREEDY if greedy else _SAMPLED, self._leave_out)
            shared = [each for each in self._pieces if each.name is None]
            self._growing[greedy] = [*shared, *(each for each in found if each.name or not shared)]
        return all(each.known for each in self._growing[greedy])

    def go_on(self, step_s: float) -> bool:
        """Continue measuring between steps for a share of the time; returns whether it measured or holds memory."""
        measured = False
        while pieces := self._pieces:
            known = all(each.known for each in pieces)
            share = _BETTER_SHARE if known else _MEASURING_SHARE
            self._credit_s[known], step_s = min(self._credit_s[known] + share * step_s, _AT_ONCE_S), 0.0
            if self._credit_s[known] <= 0.0:
                break
            measured = True
            began = self._clock()
            self._measure_on(pieces)
            self._credit_s[known] -= self._clock() - began
        return measured or self._held is not None

    def measure_one(self) -> bool:
        for greedy in (True, False):
            self.ready(greedy)
        pieces = self._pieces
        if pieces:
            self._measure_on(pieces)
        return bool(pieces)

    @property
    def _pieces(self) -> list[Growing[Any]]:
        return [each for those in self._growing.values() for each in those]

    def _measure_on(self, pieces: Sequence[Growing[Any]]) -> None:
        piece = min(pieces, key=lambda each: each.known)
        if piece is not self._held:  # the synthetic requests of two pieces have the same ids
            self.rest()
        self._held, known = piece, piece.known
        try:
            more = piece.go_on()
        except Exception as error:
            more = False
            if piece.name is None:
                _log.warning("what the target's steps cost could not be measured: %s", error)
            else:
                self._leave_out(piece.name, error)
        if not more:
            self.rest()
            for those in self._growing.values():
                those[:] = [each for each in those if each is not piece]
        if not more or piece.known != known:
            self._forget()
            self._renew(piece.name)

    def _leave_out(self, drafter: str, error: Exception) -> None:
        _log.warning("the drafter %r is left out, for what it costs could not be measured: %s", drafter, error)
        self._left_out.add(drafter)

    def _renew(self, name: str | None) -> None:
        """Drop the corrections of a drafter's costs, None for those of steps, for they are those of another curve."""
        if name is not None:
            self._drafting[name] = Corrected(self._clock)
            return
        for kind in itertools.product((False, True), (False, True)):
            self._steps[kind] = Corrected(self._clock)
        self._plain_ratio.clear()

    def _forget(self) -> None:
        self._proposals.clear()
        self._read_s.clear()
        self._forward_s = ForwardTable(lambda rows, contexts: self._costs.forwards()(rows, contexts))
        self._check = CurveCheck(self._forward_s, self._costs.judge)

    def rest(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def observe(self, record: StepRecord, steps: int = 1, decide_s: float = 0.0) -> None:
        rows, requests = record.rows, record.requests
        self._plain = 0 if record.prefill or rows > len(requests) else self._plain + steps
        used = len(self._forward_s) or self._proposals or self._read_s  # nothing to correct before first use
        if record.prefill or not record.settled or not used or record.decide_s > _MEASURED * record.total_s:
            return
        before, self._kind = self._kind, (rows > len(requests), all(step.greedy for step in requests))
        drafted, greedy = self._kind
        # Deciding counts as a cost of drafting: plain steps are decided many at once.
        measured = record.total_s - record.draft_s - record.decide_s + (decide_s if drafted else 0.0)
        expected_s = self._forward_s(rows, record.contexts)
        if not drafted:
            # Earlier steps may have left the processor's caches cold for some steps: a time between the cold and the
            # usual one is no reason for a correction.
            usual_s = measured / math.exp(self._as_others(drafted, greedy))
            expected_s = min(max(expected_s, usual_s), expected_s + self._costs.forwards().settling_s(self._plain - 1))
        # A step after one of another kind finds the processor's caches cold, and takes longer than usual.
        steps_of = self._steps[drafted, greedy]
        self._drafted = self._drafted + 1 if drafted else 0
        plain = self._steps[False, greedy]
        common = plain.common if 0 < self._drafted <= _BESIDE and plain.known else None
        steps_of.learn(rows, measured, expected_s, usual=self._kind == before, common=common)
        if SETTLED < self._plain <= _SOON and self._steps[True, greedy].known:
            self._plain_ratio[greedy] = max(-_MOST, min(_MOST, steps_of.common - self._steps[True, greedy].common))
        if drafted or self._plain > SETTLED:
            self._check(record)
        for each in record.drafting:
            self._observe_drafting(each, greedy)

    def _observe_drafting(self, spent: DraftTime, greedy: bool) -> None:
        if not spent.depth:
            return
        # Levels saved by a cascade's guesses are counted, so that they do not look like a less busy machine.
        levels = spent.depth if spent.levels is None else spent.levels
        late = spent.behind - 2 * spent.requests
        if late <= 0:
            expected = self._proposals_s(spent.drafter, spent.requests, levels, greedy)
            self._drafting[spent.drafter].learn(spent.requests, spent.seconds, expected)
        elif late >= 4:
            usual = self.drafting_s(spent.drafter, spent.requests, levels, greedy)
            own = max(spent.seconds - usual, 0.0) / late
            before = self._read_s.get(spent.drafter, own)
            self._read_s[spent.drafter] = before + _LEARN * (own - before)
