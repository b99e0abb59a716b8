"""Systems that answer the same requests in turns, and the ratio of their times per emitted token with its interval.

A round is one pass over all groups of requests. An estimate is the geometric mean over rounds with Student's t as its
interval, or, where single turns may be far off, their median with a bootstrap's.

Rounds should lie apart: this kind of machine changes for half a minute at a time (plain decoding of the embedded target
was seen to go from 0.9 to 1.3 ms a token while speculation stayed as it was), and turns of one moment agree with each
other far better than with the next minute. So several contests are visited in turns.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from scipy import stats

from truedraft.measure.bench.runs import rotated

_DRAWS = 1_000
_LOW, _HIGH = 0.025, 0.975  # of a 95 % interval

Clock = Callable[[], float]
Middle = Callable[[Sequence[float]], tuple[float, float, float]]
"""The middle of some values, and its 95 % interval."""
Group = TypeVar("Group", contravariant=True)
"""Whatever systems answer together."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A system's answers to a group of requests."""

    token_ids: list[list[int]]
    prefill_s: float = 0.0
    alike: Sequence[int] = ()  # numbers of the requests that every system must answer alike

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Answering(Protocol[Group]):
    name: str

    def answer(self, group: Group) -> Answered: ...


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

    def log_ratio(self, of: str, over: str, *, decoding: bool = False) -> float:
        seconds = self.decode_s if decoding else self.per_token_s
        return math.log(seconds[over] / seconds[of])


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
        values = {"ratio": self.ratio, "low": self.low, "high": self.high, "half_width": self.half_width}
        known = math.isfinite(self.high)
        shown = {name: round(value, 4) if known or name == "ratio" else None for name, value in values.items()}
        return shown | {"turns": self.turns}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median of at least one value, by drawing values again (percentile bootstrap)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_DRAWS))
    return medians[round(_LOW * _DRAWS)], medians[round(_HIGH * _DRAWS)]


def middle_by_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, with the interval of Student's t; an infinite one of a single value."""
    middle = statistics.fmean(values)
    if len(values) < 2:
        return middle, -math.inf, math.inf
    half = float(stats.t.ppf(_HIGH, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return middle, middle - half, middle + half


def middle_by_median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, with the interval of a bootstrap; an infinite one of a single value."""
    interval = median_interval(values) if len(values) > 1 else (-math.inf, math.inf)
    return statistics.median(values), *interval


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
        by_round[turn.round].append(turn.log_ratio(of, over, decoding=decoding))
    return Estimate(*map(math.exp, middle([statistics.fmean(own) for own in by_round.values()])), len(turns))


def one_round(systems: Sequence[Answering[Group]], groups: Sequence[Group], number: int, clock: Clock) -> list[Turn]:
    """All groups once, by all systems; the one that goes first changes from group to group and from round to round."""
    turns = []
    for place, group in enumerate(groups):
        answers, seconds = {}, {}
        for system in rotated(systems, number + place):
            began = clock()
            answers[system.name] = system.answer(group)
            seconds[system.name] = clock() - began
        first, *others = (answers[system.name] for system in systems)
        pairs = [(first.token_ids[at], other.token_ids[at]) for other in others for at in first.alike]
        turns.append(
            Turn(
                number,
                {name: seconds[name] / answer.tokens for name, answer in answers.items()},
                {name: _decode_s(answer, seconds[name]) for name, answer in answers.items()},
                len(pairs),
                sum(one != other for one, other in pairs),
            )
        )
    return turns


def _decode_s(answer: Answered, seconds: float) -> float:
    return (seconds - answer.prefill_s) / max(answer.tokens - len(answer.token_ids), 1)
