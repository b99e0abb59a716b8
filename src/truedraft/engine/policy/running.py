"""What steps take right now: measured curves, held to the times of the steps that an engine makes."""

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
from truedraft.engine.policy.kept import CurveCheck, Growing, StepCosts
from truedraft.errors import TruedraftError

_log = logging.getLogger(__name__)
_LARGEST = 256  # size of which something is known apart
_STEPS, _FEWEST, _LONGEST_S = 15, 3, 4.0  # that say how busy the machine is: at most, at least, and for how long
_FADES_S = 5.0  # in which what was measured counts 1 / e as much, where nothing more was
_SHAPE = 0.04  # share by which one step moves what holds for one size
_MOST = 0.5  # log ratio that one step may count for; beyond it lies a step that the system interrupted
_FURTHER_REQUEST = 0.2  # of a proposal for one request, until more were drafted for together
_READ_TOKEN = 0.05  # of a proposal of one token, until a drafter caught up with something
_LEARN = 0.2
_MEASURED = 0.5  # share of a step that deciding takes only where something was measured for it
_AT_ONCE_S = 0.25  # that measuring may take before an answer goes on, and most that it may save up
_MEASURING_SHARE = 1.0  # of the time of steps that measuring takes beside them, where nothing could be drafted before
_BETTER_SHARE = 0.02  # where only something better is found
_SOON = 4 * SETTLED  # plain steps within which what drafted steps take is still known
_GREEDY, _SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


class Corrected:
    """How measured seconds stand to a curve: a part that all sizes share, and one for each size that moves slowly.

    The shared part is the median over the last few steps, so that a step which the system interrupted says nothing and
    a machine that became slower is known after some steps.

    Args:
        clock: seconds.

    Attributes:
        common: log of measured over expected seconds that all sizes share.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, float]] = deque(maxlen=_STEPS)  # when, and log of measured / expected
        self.common = 0.0  # their median
        self._shape = [0.0] * (_LARGEST.bit_length() + 1)  # at sizes of 1, 2, 4, ...

    def factor(self, size: float, otherwise: float = 0.0) -> float:
        """Measured over expected seconds at a size (rows, or requests).

        Args:
            size: of what is asked about.
            otherwise: log of what sizes have in common where nothing was measured for long, so that nothing is thought
                slow for ever that nobody tries any more.
        """
        if not self._recent:
            return math.exp(otherwise)
        fresh = math.exp(min(self._recent[-1][0] - self._clock(), 0.0) / _FADES_S)
        return math.exp(otherwise + fresh * (self.common - otherwise) + self._shape_at(size))

    def _shape_at(self, size: float) -> float:
        left, share = _between(size)
        return (1.0 - share) * self._shape[left] + share * self._shape[left + 1]

    @property
    def known(self) -> bool:
        """Whether any step was looked at."""
        return bool(self._recent)

    def learn(self, size: float, measured_s: float, expected_s: float, usual: bool = True) -> None:
        """One step took `measured_s` where the curve alone says `expected_s`.

        Args:
            size: of it.
            measured_s: seconds.
            expected_s: seconds.
            usual: whether it may say something of this size alone.
        """
        if measured_s <= 0.0 or expected_s <= 0.0:
            return
        now, recent = self._clock(), self._recent
        ratio = math.log(measured_s / expected_s) - self._shape_at(size)
        left, share = _between(size)
        if recent and usual:
            error = max(-_MOST, min(_MOST, ratio - self.common)) * _SHAPE
            self._shape[left] += error * (1.0 - share)
            self._shape[left + 1] += error * share
        recent.append((now, ratio))
        while len(recent) > _FEWEST and now - recent[0][0] > _LONGEST_S:
            recent.popleft()
        self.common = median(each[1] for each in recent)


def _between(size: float) -> tuple[int, float]:
    """The logarithm of a size to base 2: its whole part, and the rest.

    Worked example: 3 lies 0.58 of the way from 2, which is 1, to 4.
    """
    place = math.log2(min(max(size, 1.0), _LARGEST))
    return int(place), place - int(place)


class RunningTimes:
    """What the steps of an engine take: `truedraft.engine.policy.StepTimes`.

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
        # Apart, whether anything is drafted and whether all is greedy: verdicts and the host's work differ, and what is
        # compared with plain decoding must be what plain decoding took itself.
        self._steps = {kind: Corrected(clock) for kind in itertools.product((False, True), repeat=2)}
        self._drafting = {name: Corrected(clock) for name in drafters}
        self._kind = False, False  # of the last step, as in `_steps`
        self._plain = 0  # steps in a row, the last one among them
        self._apart: dict[bool, float] = {}  # log ratio of settled plain steps to drafted ones, by whether greedy
        self._proposals: dict[tuple[str, int, bool], float] = {}  # seconds by drafter, depth, and whether greedy
        self._read_s: dict[str, float] = {}  # seconds of a token that a drafter catches up with
        self._growing: dict[bool, list[Growing[Any]]] = {}  # what is still measured, by whether greedy
        self._held: Growing[Any] | None = None  # what holds memory to be measured on
        self._left_out: set[str] = set()  # drafters whose cost cannot be measured
        self._credit_s = _AT_ONCE_S
        self._forward_s: ForwardTable
        self._check: CurveCheck
        self._forget()

    def step_s(self, rows: int, contexts: Sequence[int], greedy: bool) -> float:
        drafted = rows > len(contexts)
        otherwise = self._as_others(drafted, greedy)
        return self._forward_s(rows, contexts) * self._steps[drafted, greedy].factor(rows, otherwise)

    def _as_others(self, drafted: bool, greedy: bool) -> float:
        """What steps of a kind have in common until one was made, and where the last one was long ago: a log ratio."""
        if (other := self._steps[not drafted, greedy]).known:
            apart = self._apart.get(greedy, 0.0)
            return other.common + (-apart if drafted else apart)
        return self._steps[drafted, not greedy].common

    def drafting_s(self, drafter: str, requests: int, depth: float, greedy: bool) -> float:
        return self._proposals_s(drafter, requests, depth, greedy) * self._drafting[drafter].factor(requests)

    def _proposals_s(self, drafter: str, requests: int, depth: float, greedy: bool) -> float:
        whole = int(depth)
        seconds, more = self._proposal_s(drafter, whole, greedy), depth - whole
        if more:  # levels that are expected are no whole number
            seconds += more * (self._proposal_s(drafter, whole + 1, greedy) - seconds)
        return seconds * (1.0 + _FURTHER_REQUEST * (requests - 1))

    def _proposal_s(self, drafter: str, depth: int, greedy: bool) -> float:
        key = drafter, depth, greedy
        found = self._proposals.get(key)
        if found is None:
            found = self._proposals[key] = self._measured_s(drafter, depth, greedy)
        return found

    def _measured_s(self, drafter: str, depth: int, greedy: bool) -> float:
        if drafter in self._left_out:
            return math.inf
        try:
            return self._costs.drafting(self._drafters[drafter], _GREEDY if greedy else _SAMPLED)(depth)
        except TruedraftError as error:
            self._leave_out(drafter, error)
            return math.inf

    def catch_up_s(self, drafter: str, behind: int) -> float:
        if behind <= 2:
            return 0.0
        if drafter not in self._read_s:
            self._read_s[drafter] = _READ_TOKEN * self._proposals_s(drafter, 1, 1, greedy=True)
        return (behind - 2) * self._read_s[drafter]

    def acceptance(self, drafter: str, view: RequestView) -> Sequence[float]:
        trees = self._drafters[drafter].trees
        curve = None if trees is None else trees.acceptance_curve(view.params)
        return () if curve is None else curve.marginal_gains

    def measure(self, greedy: bool) -> None:
        self.rest()
        self._growing.pop(greedy, None)  # it is known behind this, and at most in doubt
        self._forward_s(1, [0])
        for drafter in self._drafters:
            self._proposals_s(drafter, 1, 1, greedy)

    def ready(self, greedy: bool) -> bool:
        if greedy not in self._growing:
            self.rest()
            fit = {name: each for name, each in self._drafters.items() if name not in self._left_out}
            found = self._costs.pieces(fit, _GREEDY if greedy else _SAMPLED, self._leave_out)
            shared = [each for those in self._growing.values() for each in those if each.name is None]
            self._growing[greedy] = [*shared, *(each for each in found if each.name or not shared)]
        return all(each.known for each in self._growing[greedy])

    def go_on(self, step_s: float) -> bool:
        """Between steps, measure on for a share of the time, if somebody asked whether this is ready.

        Args:
            step_s: seconds that the last step took.

        Returns:
            Whether anything was measured, or holds memory to be measured on.
        """
        measured = False
        while pieces := [each for those in self._growing.values() for each in those]:
            share = _BETTER_SHARE if all(each.known for each in pieces) else _MEASURING_SHARE
            self._credit_s, step_s = min(self._credit_s + share * step_s, _AT_ONCE_S), 0.0
            if self._credit_s <= 0.0:
                break
            measured = True
            began = self._clock()
            self._measure_on(min(pieces, key=lambda each: each.known))
            self._credit_s -= self._clock() - began
        return measured or self._held is not None

    def measure_one(self) -> bool:
        """Measure one thing more; returns whether there is more."""
        for greedy in (True, False):
            self.ready(greedy)
        pieces = [each for those in self._growing.values() for each in those]
        if pieces:
            self._measure_on(min(pieces, key=lambda each: each.known))
        return len(pieces) > 0

    def _measure_on(self, piece: Growing[Any]) -> None:
        if piece is not self._held:  # made-up requests of two would be taken for one
            self.rest()
        self._held, known = piece, piece.known
        more = self._measured_on(piece)
        if not more:
            self.rest()
            for those in self._growing.values():
                those[:] = [each for each in those if each is not piece]
        if not more or piece.known != known:
            self._forget()

    def _measured_on(self, piece: Growing[Any]) -> bool:
        """Whether there is more to measure."""
        try:
            return piece.go_on()
        except Exception as error:
            if piece.name is None:
                _log.warning("what the target's steps cost could not be measured: %s", error)
            else:
                self._leave_out(piece.name, error)
            return False

    def _leave_out(self, drafter: str, error: Exception) -> None:
        """Others can draft."""
        _log.warning("the drafter %r is left out, for what it costs could not be measured: %s", drafter, error)
        self._left_out.add(drafter)

    def _forget(self) -> None:
        """What was asked for is asked again, for there is something better now."""
        self._proposals.clear()
        self._read_s.clear()
        self._forward_s = ForwardTable(lambda rows, contexts: self._costs.forwards()(rows, contexts))
        self._check = CurveCheck(self._forward_s, self._costs.judge)

    def rest(self) -> None:
        """Nothing is measured for now: give back what that holds."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def observe(self, record: StepRecord, steps: int = 1) -> None:
        rows, requests = record.rows, record.requests
        self._plain = 0 if record.prefill or rows > len(requests) else self._plain + steps
        asked = len(self._forward_s) or self._proposals or self._read_s  # who never did needs no answers
        if record.prefill or not record.settled or not asked or record.decide_s > _MEASURED * record.total_s:
            return
        before, self._kind = self._kind, (rows > len(requests), all(step.greedy for step in requests))
        drafted, greedy = self._kind
        # Deciding is a price of drafting: plain steps are decided for long beforehand.
        measured = record.total_s - record.draft_s - (0.0 if drafted else record.decide_s)
        expected_s = self._forward_s(rows, record.contexts)
        if not drafted:
            # What came before may have left the processor's caches cold for some steps, or not: seconds in between say
            # nothing new.
            usual_s = measured / math.exp(self._as_others(drafted, greedy))
            expected_s = min(max(expected_s, usual_s), expected_s + self._costs.forwards().settling_s(self._plain - 1))
        # A step behind one of another kind finds the processor's caches cold, and takes longer than among its own.
        steps_of = self._steps[drafted, greedy]
        steps_of.learn(rows, measured, expected_s, usual=self._kind == before)
        if SETTLED < self._plain <= _SOON and self._steps[True, greedy].known:
            self._apart[greedy] = max(-_MOST, min(_MOST, steps_of.common - self._steps[True, greedy].common))
        if drafted or self._plain > SETTLED:
            self._check(record)
        for each in record.drafting:
            self._observe_drafting(each, greedy)

    def _observe_drafting(self, spent: DraftTime, greedy: bool) -> None:
        if not spent.depth:
            return
        # How much a cascade's guesses saved was counted, so it is no part of how busy the machine is.
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
