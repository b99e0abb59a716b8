"""Systems that answer the same requests in turns, until the interval of their ratio is narrow.

The ratio of a turn is that of the times per emitted token. A round is one pass over all groups of requests; the first
warms up and is dropped for all systems. The estimate is the geometric mean over turns, each group with the same weight,
and its interval is that of Student's t from what the rounds of one group differ by: groups differ in how well they can
be guessed, which is not noise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deciding_sets import Asked
from scipy import stats

HALF_WIDTH = 0.02
_LEAST_ROUNDS = 2  # behind the warm-up
_LEAST_TURNS = 12
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

    def answer(self, group: Sequence[Asked], number: int) -> Answered:
        """Answer a group in the round of this number."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One group answered by all systems, one after the other.

    Attributes:
        group: its number.
        per_token_s: of each system, seconds of the whole answer per emitted token.
        decode_s: of each system, likewise behind the prompt.
        compared: greedy answers that could be compared with the first system's.
        different: those that were not identical.
    """

    group: int
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
        turns: at least one.
        of: name of the system.
        over: name of the one that it is held against.
        decoding: of the time behind the prompts.
    """
    by_group: dict[int, list[float]] = defaultdict(list)
    for turn in turns:
        by_group[turn.group].append(_log_ratio(turn, of, over, decoding))
    means = [sum(own) / len(own) for own in by_group.values()]
    middle = sum(means) / len(means)
    free = len(turns) - len(by_group)
    if free < 1:
        return Estimate(math.exp(middle), 0.0, math.inf, len(turns))
    squares = sum((value - mean) ** 2 for own, mean in zip(by_group.values(), means, strict=True) for value in own)
    variance = squares / free * sum(1 / len(own) for own in by_group.values()) / len(means) ** 2
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, free)) * math.sqrt(variance)
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
        most_s: seconds, after which it counts as missed.
        sure_above: a cell whose whole interval is above this is also done with a half-width of 2 % of its ratio: it
            lies so far above its bar that more turns would change no verdict. It is told apart in the tables.
    """

    most_s: float
    sure_above: float = 1.10

    def status(self, estimates: Sequence[Estimate], rounds: int, took_s: float) -> str | None:
        """ "reached", "far above", "missed", or None where it goes on."""
        enough = rounds >= _LEAST_ROUNDS and min(each.turns for each in estimates) >= _LEAST_TURNS
        if enough and all(each.half_width <= HALF_WIDTH for each in estimates):
            return "reached"
        if enough and all(self._far(each) for each in estimates):
            return "far above"
        return "missed" if took_s >= self.most_s else None

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


def take_turns(
    systems: Sequence[System],
    groups: Sequence[Sequence[Asked]],
    pairs: Sequence[tuple[str, str]],
    stop: Stop,
    clock: Clock,
) -> Measured:
    """Round after round until all pairs' ratios are known well enough, or the time is over.

    Args:
        systems: with different names.
        groups: of requests, answered one after the other in each round.
        pairs: names of systems, each with the one that it is held against.
        stop: when that is.
        clock: seconds.
    """
    found, began = Measured(), clock()
    for number in range(1_000):
        turns = one_round(systems, groups, number, clock)
        found.seconds = clock() - began
        if number == 0:
            continue  # it warmed up
        found.turns += turns
        found.rounds = number
        status = stop.status([estimate(found.turns, *pair) for pair in pairs], number, found.seconds)
        if status is not None:
            found.status = status
            break
    return found


def one_round(systems: Sequence[System], groups: Sequence[Sequence[Asked]], number: int, clock: Clock) -> list[Turn]:
    """All groups once, by all systems; the one that goes first changes from group to group and from round to round."""
    turns = []
    for place, group in enumerate(groups):
        first = (number + place) % len(systems)
        answers, seconds = {}, {}
        for system in (*systems[first:], *systems[:first]):
            began = clock()
            answers[system.name] = system.answer(group, number)
            seconds[system.name] = clock() - began
        compared, different = _differences([answers[system.name] for system in systems], group)
        turns.append(
            Turn(
                place,
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
