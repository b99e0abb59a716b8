"""Gain of drafting as load grows, and the number of replicas needed: closed forms over a plan's curves.

A replica that always has n requests open answers, by Little's law, n / W(n) of them per second:

    W(n) = n P + (A - 1) S(n) / tau(n)

P is V(prompt), the seconds of reading a prompt while the others wait; A the tokens of an answer, where the first one
comes with its prompt; S(n) / tau(n) the seconds of a step over its emitted tokens per request, for the best size of the
best drafter at n, or for plain decoding. Nothing is simulated: neither arrivals nor queues are modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from truedraft.measure.plan import NONE, Plan
from truedraft.measure.predictions import WhatIf
from truedraft.options import check_positive, check_whole

_MILLI = 1e3
FILLED = 0.75
"""Planned utilisation of a replica, because requests do not arrive evenly; Ray aims at the same."""


@dataclass(frozen=True)
class Traffic:
    """Incoming requests.

    Attributes:
        prompt: tokens to process per request, without those of a cached prefix.
        token_ms: longest time per token; None is no bound.

    Raises:
        OptionError: a number that is out of range.
    """

    requests_per_s: float
    prompt: int
    answer: int
    token_ms: float | None = None

    def __post_init__(self) -> None:
        check_positive("load", self.requests_per_s)
        check_whole("prompt_tokens", self.prompt, least=1)
        check_whole("answer_tokens", self.answer, least=2)
        if self.token_ms is not None:
            check_positive("token_ms", self.token_ms)

    @classmethod
    def of(
        cls, plan: Plan, requests_per_s: float, prompt: int | None, answer: int | None, token_ms: float | None
    ) -> Traffic:
        """Prompts and answers of the plan's mean lengths, where none are given."""
        after_first = plan.tokens / plan.prompts
        prompt = max(1, round(plan.context - after_first / 2)) if prompt is None else prompt
        return cls(requests_per_s, prompt, 1 + round(after_first) if answer is None else answer, token_ms)


@dataclass(frozen=True)
class Way:
    """A replica with a constant number of open requests; `token_ms` includes prompts that are read in between."""

    drafter: str
    requests_per_s: float
    tokens_per_s: float
    token_ms: float


@dataclass(frozen=True)
class Level:
    """A replica with a constant number of open requests; `ratio` is tokens per second, best over plain."""

    requests: int
    rows: int
    plain: Way
    best: Way
    ratio: float


@dataclass(frozen=True)
class Replicas:
    """Number of replicas that answer the load."""

    count: int
    requests: int
    way: Way


def levels(plan: Plan, traffic: Traffic, most: int, what_if: WhatIf | None = None) -> list[Level]:
    """A replica with 1, 2, ... `most` requests open; the traffic's mean context replaces the plan's."""
    what_if, context = what_if or WhatIf(), round(traffic.prompt + traffic.answer / 2)
    there = replace(plan, context=context)
    prompt_s = what_if.forwards(plan.forwards)(traffic.prompt, [0])

    def way(drafter: str, requests: int, token_s: float) -> Way:
        waited_s = token_s + (requests - 1) * prompt_s / (traffic.answer - 1)
        rate = requests / (prompt_s + (traffic.answer - 1) * waited_s)
        return Way(drafter, rate, rate * traffic.answer, _MILLI * waited_s)

    found = []
    for requests in range(1, most + 1):
        first = there.best(requests, what_if)[0]
        plain = way(NONE, requests, first.plain_s)
        gains = first.speedup.value > 1.0
        best = way(first.option.drafter, requests, first.plain_s / first.speedup.value) if gains else plain
        rows = max(nodes for nodes, _, _ in first.option.steps) + 1 if gains else 1
        found.append(Level(requests, requests * rows, plain, best, best.tokens_per_s / plain.tokens_per_s))
    return found


def stops_to_pay(found: Sequence[Level]) -> int | None:
    """Fewest open requests from which drafting gains nothing; None where it gains up to the last level."""
    last = max((level.requests for level in found if level.best.drafter != NONE), default=0)
    return None if last == found[-1].requests else last + 1


def replicas(ways: Sequence[Way], traffic: Traffic) -> Replicas | None:
    """The fewest replicas that answer the load; None where a token takes too long even with few open requests."""
    fast = [way for way in ways if traffic.token_ms is None or way.token_ms <= traffic.token_ms]
    if not fast:
        return None
    most = max(way.requests_per_s for way in fast)
    count = math.ceil(traffic.requests_per_s / (FILLED * most))
    requests = next(n for n, way in enumerate(ways, 1) if way.requests_per_s >= traffic.requests_per_s / count)
    return Replicas(count, requests, ways[requests - 1])


def load_record(found: Sequence[Level], traffic: Traffic) -> dict[str, Any]:
    """For JSON."""
    needed = {name: replicas([getattr(level, name) for level in found], traffic) for name in ("plain", "best")}
    return {
        **asdict(traffic),
        "filled": FILLED,
        "levels": [asdict(level) for level in found],
        "stops_to_pay": stops_to_pay(found),
        "replicas": {name: None if each is None else asdict(each) for name, each in needed.items()},
    }
