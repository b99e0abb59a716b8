"""Counts of what was decided in the steps of an engine, and the resulting speed-up, from step records.

`Decisions` is a listener of an engine (`engine.listeners.append(decisions)`), or is built from kept records. Steps with
a part of a prompt are left out; those that were not settled (`StepRecord.settled`) are counted without their seconds.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from truedraft.core.budget import Decision
from truedraft.core.intervals import Numbers, resampled
from truedraft.core.stats import PROBE, RequestStep, StepRecord
from truedraft.core.sums import summed
from truedraft.core.theory import ForwardTable
from truedraft.options import record_of

PLAIN = "plain"
"""Name of decisions to draft nothing; `PROBE` is the name of steps made to learn from, with any drafter."""
END, NOT_ASKED = "end", "not asked"
"""Why nothing was drafted: no token could follow a draft; or there was no drafter, or all failed."""

ForwardSeconds: TypeAlias = Callable[[int, Sequence[int]], float]
"""V: seconds of a target forward by its number of rows and the cached tokens of each request."""

_MOST = 512  # stretches
_SHOWN = 128  # stretches in a record
_ENOUGH_PLAIN = 16  # plain steps needed to estimate the time of one
_LEAST_BLOCKS, _MOST_BLOCKS = 6, 64  # of the bootstrap
_DRAWS = 2000
_COUNTS = ("steps", "drafted", "accepted", "emitted", "seconds")  # in records
_PER_STEP = ("drafted_per_step", "acceptance", "expected_per_step", "emitted_per_step")


def what_was_decided(step: RequestStep) -> str:
    """Names of the drafters that were to draft, joined by "+"; or "plain", "probe"."""
    decision = step.decision
    if decision is None:
        return PLAIN
    if decision.reason == PROBE:
        return PROBE
    return PLAIN if decision.is_zero else "+".join(part.drafter for part in decision.parts)


def why(decision: Decision | None) -> str:
    """The reason of a decision in a word or two; "" where its controller gave none."""
    if decision is None:
        return NOT_ASKED
    cut_to_nothing = decision.budget.depth == 0 and decision.budget.nodes > 0
    return END if cut_to_nothing and decision.is_zero else decision.reason


@dataclass(slots=True)
class Tally:
    """Counts of equal decisions, each step once per request; drafting is charged to the requests drafted for."""

    steps: int = 0
    drafted: int = 0  # nodes
    accepted: int = 0
    emitted: int = 0  # tokens, with those that ended an answer, so that plain decoding has exactly one per step
    foreseen: float = 0.0  # expected tokens
    foreseen_steps: int = 0  # steps with an expectation
    seconds: float = 0.0  # of settled steps
    reasons: dict[str, int] = field(default_factory=dict)

    def count(self, step: RequestStep, seconds: float) -> None:
        self.steps += 1
        self.drafted += step.nodes
        self.accepted += step.accepted
        self.emitted += step.emitted + step.stop_tokens
        self.seconds += seconds
        reason = why(step.decision)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if step.decision is not None and step.decision.expected_tokens is not None and reason != END:
            self.foreseen += step.decision.expected_tokens
            self.foreseen_steps += 1

    __add__ = summed

    @property
    def drafted_per_step(self) -> float:
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def expected_per_step(self) -> float | None:
        return self.foreseen / self.foreseen_steps if self.foreseen_steps else None

    @property
    def emitted_per_step(self) -> float:
        return self.emitted / self.steps if self.steps else 0.0


@dataclass(slots=True)
class StepWindow:
    """Counts of consecutive steps with all their requests; seconds, and V, are of settled steps."""

    steps: int = 0
    decisions: dict[str, int] = field(default_factory=dict)
    drafted: int = 0  # nodes
    accepted: int = 0
    emitted: int = 0  # tokens
    seconds: float = 0.0
    bare_s: float = 0.0  # without drafting and deciding
    curve_s: float = 0.0  # V of the steps
    plain_curve_s: float = 0.0  # V of the plain steps that would have emitted as many tokens
    plain_steps: int = 0
    plain_s: float = 0.0  # of the plain steps, without drafting and deciding
    plain_steps_curve_s: float = 0.0  # V of the plain steps

    __add__ = summed

    @property
    def requests(self) -> int:
        return sum(self.decisions.values())


@dataclass(frozen=True, slots=True)
class Speedup:
    """An estimated factor over plain decoding with its 95 % interval, None with too few steps."""

    factor: float
    low: float | None
    high: float | None
    by_plain_steps: bool

    def describe(self) -> str:
        interval = "too few steps for an interval"
        if self.low is not None and self.high is not None:
            interval = f"95 % interval {self.low:.2f} to {self.high:.2f}"
        basis = "this run's plain steps" if self.by_plain_steps else "the cost curve, held to this run's steps"
        return f"estimated speed-up over plain decoding: {self.factor:.2f} ({interval}), by {basis}"


class Decisions:
    """Counts the decisions of an engine's steps; its size does not grow with their number.

    Args:
        forward_s: V of the target, for the speed-up; None uses only the run's plain steps.
        request: id of the only request to count; None counts all.
    """

    def __init__(self, forward_s: ForwardSeconds | None = None, request: int | None = None) -> None:
        self.tallies: dict[str, Tally] = {}
        self.stretches: list[StepWindow] = []
        self._forward_s = forward_s
        self._request = request
        self._curve_s = ForwardTable(forward_s or (lambda rows, contexts: 1.0))
        self._in_each = 1  # steps in each

    @classmethod
    def of(
        cls, records: Iterable[StepRecord], forward_s: ForwardSeconds | None = None, request: int | None = None
    ) -> Decisions:
        decisions = cls(forward_s, request)
        for record in records:
            decisions(record)
        return decisions

    def __call__(self, record: StepRecord) -> None:
        if record.prefill or not record.requests:
            return
        own: Sequence[int] = range(len(record.requests))
        if self._request is not None:
            if self._request not in record.numbers:
                return  # the request to count took no part
            own = [record.numbers[self._request]]
        counts: dict[str, int] = {}
        for number in own:
            step = record.requests[number]
            what = what_was_decided(step)
            counts[what] = counts.get(what, 0) + 1
            seconds = record.seconds_of_each[number] if record.settled else 0.0
            self.tallies.setdefault(what, Tally()).count(step, seconds)
        made = self._window(record, [record.requests[number] for number in own], counts)
        if self.stretches and self.stretches[-1].steps < self._in_each:
            self.stretches[-1] += made
        else:
            self.stretches.append(made)
            self._keep_bounded()

    def _window(self, record: StepRecord, own: Sequence[RequestStep], counts: dict[str, int]) -> StepWindow:
        emitted = sum(step.emitted + step.stop_tokens for step in own)
        window = StepWindow(1, counts, sum(step.nodes for step in own), sum(step.accepted for step in own), emitted)
        if not record.settled:
            return window
        window.seconds = record.total_s
        window.bare_s = max(record.total_s - record.draft_s - record.decide_s, 0.0)
        window.curve_s = plain_s = self._curve_s(record.rows, record.contexts)
        if record.nodes:
            plain_s = self._curve_s(len(record.requests), record.contexts)
        else:
            window.plain_steps, window.plain_s, window.plain_steps_curve_s = 1, window.bare_s, window.curve_s
        window.plain_curve_s = emitted / max(len(own), 1) * plain_s
        return window

    def _keep_bounded(self) -> None:
        while len(self.stretches) > _MOST:
            self.stretches = _joined(self.stretches, 2)
            self._in_each *= 2

    def __add__(self, other: Decisions) -> Decisions:
        found = Decisions(self._forward_s)
        found.tallies = summed(self.tallies, other.tallies)
        found.stretches = [*self.stretches, *other.stretches]
        found._in_each = max(self._in_each, other._in_each)
        found._keep_bounded()
        return found

    @property
    def steps(self) -> int:
        """Steps, each counted once per request."""
        return sum(each.steps for each in self.tallies.values())

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.tallies.values())

    @property
    def drafted(self) -> int:
        return sum(each.drafted for each in self.tallies.values())

    @property
    def ordered(self) -> dict[str, Tally]:
        last = {PLAIN: 1, PROBE: 2}
        return dict(sorted(self.tallies.items(), key=lambda each: last.get(each[0], 0)))

    def timeline(self, most: int) -> list[StepWindow]:
        return _joined(self.stretches, -(-len(self.stretches) // most)) if self.stretches else []

    def estimate(self) -> Speedup | None:
        """The estimated factor over plain decoding, without its interval, which takes milliseconds; None if unknown."""
        by_plain_steps = sum(each.plain_steps for each in self.stretches) >= _ENOUGH_PLAIN
        if not self.drafted or not (by_plain_steps or self._forward_s is not None):
            return None
        factor = float(_factors(self._sums(by_plain_steps).sum(axis=0)))
        return Speedup(factor, None, None, by_plain_steps) if np.isfinite(factor) else None

    def speedup(self) -> Speedup | None:
        """`estimate` with an interval by a bootstrap over blocks of consecutive steps."""
        found = self.estimate()
        if found is None:
            return None
        # Blocks, because neighbouring steps are correlated: a drafter that found a passage to copy will find it again.
        steps, sums = sum(each.steps for each in self.stretches), self._sums(found.by_plain_steps)
        length = max(round(steps ** (1 / 3) / self._in_each), -(-len(sums) // _MOST_BLOCKS), 1)
        blocks = np.add.reduceat(sums, range(0, len(sums), length))
        if len(blocks) < _LEAST_BLOCKS:
            return found
        interval = resampled(blocks.T, _factors, _DRAWS)
        return replace(found, low=interval.low, high=interval.high) if np.isfinite(interval.low) else found

    def _sums(self, by_plain_steps: bool) -> Numbers:
        scale = ("plain_s", "plain_steps_curve_s") if by_plain_steps else ("bare_s", "curve_s")
        return np.array(
            [[getattr(each, name) for name in ("seconds", "plain_curve_s", *scale)] for each in self.stretches]
        )

    def as_dict(self, most: int = _SHOWN) -> dict[str, Any]:
        """For records: sums, derived rates, and a timeline of at most `most` windows."""
        speedup = self.speedup()
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "speedup": None if speedup is None else record_of(speedup),
            "decided": [
                {"name": name, "share": self.share(each), "time_share": self.time_share(each)}
                | record_of(each, *_COUNTS, *_PER_STEP, "reasons")
                for name, each in self.ordered.items()
            ],
            "timeline": [record_of(each, *_COUNTS, "decisions") for each in self.timeline(most)] if most else [],
        }

    def share(self, tally: Tally) -> float:
        return tally.steps / self.steps if self.steps else 0.0

    def time_share(self, tally: Tally) -> float:
        return tally.seconds / self.seconds if self.seconds else 0.0


def _joined(stretches: Sequence[StepWindow], count: int) -> list[StepWindow]:
    parts = (stretches[first : first + count] for first in range(0, len(stretches), count))
    return [functools.reduce(operator.add, part) for part in parts]


def _factors(sums: Numbers) -> Numbers:
    """Speed-ups from sums `[4, ...]`; not finite where a draw of blocks has no plain step."""
    measured_s, plain_curve_s, seconds, curve_s = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(plain_curve_s * seconds / curve_s / measured_s)
