"""Systems that answer the same requests in turns, until the interval of their ratio is narrow.

The ratio of a turn is that of the times per emitted token. A round is one pass over all groups of requests; the first
warms up and is dropped for all systems. The estimate is the geometric mean over rounds with Student's t as its
interval, or, where single turns may be far off, their median with a bootstrap's.

Rounds of one cell should lie apart: this kind of machine changes for half a minute at a time (plain decoding of the
embedded target was seen to go from 0.9 to 1.3 ms a token while speculation stayed as it was), and turns of one moment
agree with each other far better than with the next minute. So several cells are visited in turns.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from truedraft.measure.bench.runs import rotated

_DRAWS = 1_000
_LOW, _HIGH = 0.025, 0.975  # of a 95 % interval

Clock = Callable[[], float]
Group = TypeVar("Group")
"""Whatever systems answer together."""
_Asked = TypeVar("_Asked", contravariant=True)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median of at least one value, by drawing values again (percentile bootstrap)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_DRAWS))
    return medians[round(_LOW * _DRAWS)], medians[round(_HIGH * _DRAWS)]


@dataclass(frozen=True, slots=True)
class Answered:
    """A system's answers to a group of requests."""

    token_ids: list[list[int]]
    prefill_s: float = 0.0
    alike: Sequence[int] = ()  # numbers of the requests that every system must answer alike

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Answering(Protocol[_Asked]):
    name: str

    def answer(self, group: _Asked) -> Answered: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One group answered by all systems, one after the other.

    Attributes:
        round: its number.
        per_token_s: of each system, seconds of the whole answer per emitted token.
        decode_s: of each system, likewise behind the prompt.
        compared: answers that had to be those of the first system.
        different: those that were not identical.
    """

    round: int
    per_token_s: Mapping[str, float]
    decode_s: Mapping[str, float]
    compared: int = 0
    different: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of speeds (geometric mean) with its 95 % interval."""

    ratio: float
    low: float
    high: float
    turns: int

    @property
    def half_width(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2

    def as_dict(self) -> dict[str, Any]:
        if not math.isfinite(self.high):
            return {"ratio": round(self.ratio, 4), "low": None, "high": None, "half_width": None, "turns": self.turns}
        values = {"ratio": self.ratio, "low": self.low, "high": self.high, "half_width": self.half_width}
        return {name: round(value, 4) for name, value in values.items()} | {"turns": self.turns}


Middle = Callable[[Sequence[float]], tuple[float, float, float]]
"""The middle of some values, and its 95 % interval."""


def middle_by_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, with the interval of Student's t; an infinite one of a single value."""
    middle = statistics.fmean(values)
    if len(values) < 2:
        return middle, -math.inf, math.inf
    half = student_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return middle, middle - half, middle + half


def middle_by_median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, with the interval of a bootstrap; an infinite one of a single value."""
    interval = median_interval(values) if len(values) > 1 else (-math.inf, math.inf)
    return statistics.median(values), *interval


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by bisection over the angle atan(t / sqrt(freedom)).

    Within it lies a closed form's share of the mass (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """

    def within(angle: float) -> float:
        odd, total = freedom % 2, 0.0
        term = math.cos(angle) ** odd
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
        share = math.sin(angle) * total
        return 2.0 / math.pi * (angle + share) if odd else share

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < _HIGH - _LOW else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def estimate(
    turns: Sequence[Turn], of: str, over: str, *, decoding: bool = False, middle: Middle = middle_by_mean
) -> Estimate:
    """How much faster one system is than another: above 1, it is.

    Args:
        turns: at least one, of whole rounds.
        of: name of the system.
        over: name of the one that it is held against.
        decoding: of the time behind the prompts.
        middle: of the rounds, each the mean of its turns' logarithms.
    """
    by_round: dict[int, list[float]] = defaultdict(list)
    for turn in turns:
        by_round[turn.round].append(_log_ratio(turn, of, over, decoding))
    ratio, low, high = middle([statistics.fmean(own) for own in by_round.values()])
    return Estimate(math.exp(ratio), math.exp(low), math.exp(high), len(turns))


def _log_ratio(turn: Turn, of: str, over: str, decoding: bool = False) -> float:
    seconds = turn.decode_s if decoding else turn.per_token_s
    return math.log(seconds[over] / seconds[of])


def ratios(turns: Sequence[Turn], of: str, over: str) -> list[float]:
    return [round(math.exp(_log_ratio(turn, of, over)), 4) for turn in turns]


@dataclass(frozen=True, slots=True)
class Stop:
    """When turns are over.

    Attributes:
        sure_above: where the whole interval is above this, `half_width` times the ratio will do: it lies so far above
            its bar that more turns would change no verdict.
        half_width: of the interval, that is wanted.
        least_rounds: behind the warm-up.
    """

    sure_above: float = math.inf
    half_width: float = 0.02
    least_rounds: int = 5

    def status(self, estimates: Sequence[Estimate], rounds: int, took_s: float, most_s: float) -> str | None:
        """ "reached", "far above", "missed" for want of time, or None where it goes on."""
        enough = rounds >= self.least_rounds
        if enough and all(each.half_width <= self.half_width for each in estimates):
            return "reached"
        if enough and all(self._far(each) for each in estimates):
            return "far above"
        return "missed" if took_s >= most_s and rounds > 1 else None

    def _far(self, each: Estimate) -> bool:
        if each.half_width <= self.half_width:
            return True
        return each.low > self.sure_above and each.half_width <= self.half_width * each.ratio


@dataclass(slots=True)
class Measured:
    """What came of taking turns.

    Attributes:
        turns: all that count.
        status: see `Stop.status`.
        rounds: that count.
        seconds: that all took, warm-up included.
    """

    turns: list[Turn] = field(default_factory=list)
    status: str = "missed"
    rounds: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 1),
            "greedy_compared": sum(turn.compared for turn in self.turns),
            "greedy_different": sum(turn.different for turn in self.turns),
        }


class Contest(Generic[Group]):
    """Systems that take turns, a round at a visit.

    Args:
        systems: with different names.
        groups: of requests, answered one after the other in each round.
        pairs: names of systems, each with the one that it is held against.
        stop: when it is over.
        clock: seconds.
        middle: see `estimate`.
    """

    def __init__(
        self,
        systems: Sequence[Answering[Group]],
        groups: Sequence[Group],
        pairs: Sequence[tuple[str, str]],
        stop: Stop,
        clock: Clock = time.perf_counter,
        middle: Middle = middle_by_mean,
    ) -> None:
        self.pairs, self.measured = list(pairs), Measured()
        self._systems, self._groups, self._stop, self._clock = systems, groups, stop, clock
        self._next, self._middle = 0, middle

    @property
    def estimates(self) -> list[Estimate]:
        return [estimate(self.measured.turns, *pair, middle=self._middle) for pair in self.pairs]

    def visit(self, most_s: float) -> bool:
        """One more round; returns whether it was the last."""
        found, began = self.measured, self._clock()
        turns = one_round(self._systems, self._groups, self._next, self._clock)
        found.seconds += self._clock() - began
        self._next += 1
        if self._next == 1:
            return False  # it warmed up
        found.turns += turns
        found.rounds += 1
        status = self._stop.status(self.estimates, found.rounds, found.seconds, most_s)
        found.status = status or found.status
        return status is not None


class Visited(Protocol):
    def visit(self, most_s: float) -> bool: ...


def take_turns(contests: Iterable[Visited], seconds: float, clock: Clock = time.perf_counter) -> None:
    end = clock() + seconds
    left = list(contests)
    while left and clock() < end:
        left = [contest for contest in left if not contest.visit(seconds)]


def one_round(systems: Sequence[Answering[Group]], groups: Sequence[Group], number: int, clock: Clock) -> list[Turn]:
    """All groups once, by all systems; the one that goes first changes from group to group and from round to round."""
    turns = []
    for place, group in enumerate(groups):
        answers, seconds = {}, {}
        for system in rotated(systems, number + place):
            began = clock()
            answers[system.name] = system.answer(group)
            seconds[system.name] = clock() - began
        compared, different = _differences([answers[system.name] for system in systems])
        turns.append(
            Turn(
                number,
                {name: seconds[name] / answer.tokens for name, answer in answers.items()},
                {name: _decode_s(answer, seconds[name]) for name, answer in answers.items()},
                compared,
                different,
            )
        )
    return turns


def _decode_s(answer: Answered, seconds: float) -> float:
    return (seconds - answer.prefill_s) / max(answer.tokens - len(answer.token_ids), 1)


def _differences(answers: Sequence[Answered]) -> tuple[int, int]:
    first = answers[0]
    pairs = [(first.token_ids[place], other.token_ids[place]) for other in answers[1:] for place in first.alike]
    return len(pairs), sum(one != other for one, other in pairs)
