"""Systems that answer the same requests in turns, until the interval of their ratio is narrow.

The ratio of a turn is that of the times per emitted token. A round is one pass over all groups of requests; the first
warms up and is dropped for all systems. The estimate is the geometric mean over rounds, and its interval is Student's t
over their means. Rounds of one cell should lie apart: this kind of machine changes for half a minute at a time (plain
decoding of the embedded target was seen to go from 0.9 to 1.3 ms a token while speculation stayed as it was), and turns
of one moment agree with each other far better than with the next minute. So several cells are visited in turns.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deciding_sets import Asked
from scipy import stats

HALF_WIDTH = 0.02
_LEAST_ROUNDS = 5  # behind the warm-up
_CONFIDENCE = 0.95

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Answered:
    """What a system made of a group.

    Attributes:
        token_ids: of each request.
        prefill_s: of its time, the steps that read a part of a prompt.
    """

    token_ids: list[list[int]]
    prefill_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Emitted, of all requests."""
        return sum(map(len, self.token_ids))


class System(Protocol):
    """Whatever answers."""

    name: str

    def answer(self, group: Sequence[Asked]) -> Answered:
        """Answer a group together."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One group answered by all systems, one after the other.

    Attributes:
        round: its number.
        per_token_s: of each system, seconds of the whole answer per emitted token.
        decode_s: of each system, likewise behind the prompt.
        compared: greedy answers that could be compared with the first system's.
        different: those that were not identical.
    """

    round: int
    per_token_s: Mapping[str, float]
    decode_s: Mapping[str, float]
    compared: int = 0
    different: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of speeds with its 95 % interval.

    Attributes:
        ratio: geometric mean.
        low: of the interval.
        high: likewise.
        turns: that it is from.
    """

    ratio: float
    low: float
    high: float
    turns: int

    @property
    def half_width(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2

    def as_dict(self) -> dict[str, Any]:
        """For the file; without an interval where there are too few turns for one."""
        if not math.isfinite(self.high):
            return {"ratio": round(self.ratio, 4), "low": None, "high": None, "half_width": None, "turns": self.turns}
        values = {"ratio": self.ratio, "low": self.low, "high": self.high, "half_width": self.half_width}
        return {name: round(value, 4) for name, value in values.items()} | {"turns": self.turns}


def estimate(turns: Sequence[Turn], of: str, over: str, *, decoding: bool = False) -> Estimate:
    """How much faster one system is than another: above 1, it is.

    Args:
        turns: at least one, of whole rounds.
        of: name of the system.
        over: name of the one that it is held against.
        decoding: of the time behind the prompts.
    """
    by_round: dict[int, list[float]] = defaultdict(list)
    for turn in turns:
        by_round[turn.round].append(_log_ratio(turn, of, over, decoding))
    means = [statistics.fmean(own) for own in by_round.values()]
    middle = statistics.fmean(means)
    if len(means) < 2:
        return Estimate(math.exp(middle), 0.0, math.inf, len(turns))
    error = statistics.stdev(means) / math.sqrt(len(means))
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, len(means) - 1)) * error
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half), len(turns))


def _log_ratio(turn: Turn, of: str, over: str, decoding: bool = False) -> float:
    seconds = turn.decode_s if decoding else turn.per_token_s
    return math.log(seconds[over] / seconds[of])


def ratios(turns: Sequence[Turn], of: str, over: str) -> list[float]:
    """Of each turn, rounded for the file."""
    return [round(math.exp(_log_ratio(turn, of, over)), 4) for turn in turns]


@dataclass(frozen=True, slots=True)
class Stop:
    """When a cell is done.

    Attributes:
        sure_above: a cell whose whole interval is above this is also done with a half-width of 2 % of its ratio: it
            lies so far above its bar that more turns would change no verdict. It is told apart in the tables.
    """

    sure_above: float = 1.10

    def status(self, estimates: Sequence[Estimate], rounds: int, took_s: float, most_s: float) -> str | None:
        """ "reached", "far above", "missed" for want of time, or None where it goes on."""
        enough = rounds >= _LEAST_ROUNDS
        if enough and all(each.half_width <= HALF_WIDTH for each in estimates):
            return "reached"
        if enough and all(self._far(each) for each in estimates):
            return "far above"
        return "missed" if took_s >= most_s and rounds > 1 else None

    def _far(self, each: Estimate) -> bool:
        if each.half_width <= HALF_WIDTH:
            return True
        return each.low > self.sure_above and each.half_width <= HALF_WIDTH * each.ratio


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
        """For the file."""
        return {
            "status": self.status,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 1),
            "greedy_compared": sum(turn.compared for turn in self.turns),
            "greedy_different": sum(turn.different for turn in self.turns),
        }


class Contest:
    """Systems that take turns, a round at a visit.

    Args:
        systems: with different names.
        groups: of requests, answered one after the other in each round.
        pairs: names of systems, each with the one that it is held against.
        stop: when it is over.
        clock: seconds.
    """

    def __init__(
        self,
        systems: Sequence[System],
        groups: Sequence[Sequence[Asked]],
        pairs: Sequence[tuple[str, str]],
        stop: Stop,
        clock: Clock,
    ) -> None:
        self.pairs, self.measured = list(pairs), Measured()
        self._systems, self._groups, self._stop, self._clock = systems, groups, stop, clock
        self._next = 0

    def visit(self, most_s: float) -> bool:
        """One more round; returns whether it was the last.

        Args:
            most_s: seconds of all visits together, after which the cell counts as missed.
        """
        found, began = self.measured, self._clock()
        turns = one_round(self._systems, self._groups, self._next, self._clock)
        found.seconds += self._clock() - began
        self._next += 1
        if self._next == 1:
            return False  # it warmed up
        found.turns += turns
        found.rounds += 1
        estimates = [estimate(found.turns, *pair) for pair in self.pairs]
        status = self._stop.status(estimates, found.rounds, found.seconds, most_s)
        found.status = status or found.status
        return status is not None


def one_round(systems: Sequence[System], groups: Sequence[Sequence[Asked]], number: int, clock: Clock) -> list[Turn]:
    """All groups once, by all systems; the one that goes first changes from group to group and from round to round."""
    turns = []
    for place, group in enumerate(groups):
        first = (number + place) % len(systems)
        answers, seconds = {}, {}
        for system in (*systems[first:], *systems[:first]):
            began = clock()
            answers[system.name] = system.answer(group)
            seconds[system.name] = clock() - began
        compared, different = _differences([answers[system.name] for system in systems], group)
        turns.append(
            Turn(
                number,
                {name: seconds[name] / answer.tokens for name, answer in answers.items()},
                {name: _decode_s(answer, seconds[name], len(group)) for name, answer in answers.items()},
                compared,
                different,
            )
        )
    return turns


def _decode_s(answer: Answered, seconds: float, requests: int) -> float:
    """Per token that came behind the prompt, where the first one of each request is not counted."""
    return (seconds - answer.prefill_s) / max(answer.tokens - requests, 1)


def _differences(answers: Sequence[Answered], group: Sequence[Asked]) -> tuple[int, int]:
    greedy = [place for place, asked in enumerate(group) if asked.params.greedy]
    pairs = [(answers[0].token_ids[place], other.token_ids[place]) for other in answers[1:] for place in greedy]
    return len(pairs), sum(one != other for one, other in pairs)
