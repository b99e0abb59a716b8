"""Predicted gains of a plan's options, alone and as load grows: replayed tokens per call against measured costs.

    speed-up = tau V(1) / (V(nodes + 1) + draft cost)

for each request of a batch: V over the rows of all requests, both sums averaged over the replayed steps, because a
drafter that finds nothing to propose costs no rows. Further assumptions:

- All requests of a batch draft alike, at the plan's mean context.
- Drafting for n requests costs as n rows do: by the draft model's own V(n) / V(1); for heads by the target's; for a
  drafter that runs no model n times as much.
- The interval is that of tokens per call, by resampling prompts. Host work and verdicts are not included.

A replica that always has n requests open answers, by Little's law, n / W(n) of them per second:

    W(n) = n P + (A - 1) S(n) / tau(n)

P is V(prompt), the seconds of reading a prompt while the others wait; A the tokens of an answer, where the first one
comes with its prompt; S(n) / tau(n) the seconds of a step over its emitted tokens per request, for the best size of the
best drafter at n, or for plain decoding. Nothing is simulated: neither arrivals nor queues are modelled.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from truedraft.core.intervals import Interval, ratio_over_prompts
from truedraft.core.theory import CostCurve, CostSurface, DraftCost, DraftPoint, TargetCost, predicted_speedup
from truedraft.errors import DataError
from truedraft.measure.walks import Walk
from truedraft.options import check_positive, check_whole, record_of

if TYPE_CHECKING:
    from truedraft.measure.plan import Plan

NONE = "none"
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # batch sizes for which a plan has curves
_LEAST_SHARE = 1e-4


@dataclass(frozen=True)
class PlanOption:
    """One size of one drafter; `steps` are drafted nodes, their depth, and the share of steps."""

    drafter: str
    nodes: int
    tokens_per_call: Interval
    steps: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Footprint:
    """Bytes of weights, of a cached token, and whether the weights are read for each level of drafting."""

    weights: int
    cached_token: int = 0
    each_token: bool = False

    def read(self, forwards: int, context_tokens: int) -> int:
        return forwards * self.weights + context_tokens * self.cached_token


@dataclass(frozen=True)
class Drafting:
    """A drafter in a plan: its costs, and the gains of its sizes."""

    drafter: str
    name: str
    options: tuple[PlanOption, ...]
    survival: tuple[float, ...]  # of the largest size: share of steps that accept the first 1, 2, ... drafted tokens
    cost: DraftCost  # seconds of a proposal for one request, by its depth
    growth: CostCurve  # cost of a proposal for 1, 2, ... requests relative to one
    memory: Footprint

    def seconds(self, depth: int, requests: int) -> float:
        """Seconds of drafting `depth` levels for `requests` requests; an empty proposal costs as depth 1."""
        return self.cost(max(1, depth)) * self.growth(requests)


@dataclass(frozen=True)
class Prediction:
    """Predicted gain of an option."""

    option: PlanOption
    drafting: Drafting
    speedup: Interval
    step_s: float
    plain_s: float


@dataclass
class Circumstance:
    """Conditions of a prediction."""

    forwards: TargetCost
    context: int
    _known: dict[tuple[int, int], float] = field(default_factory=dict)

    def verify_s(self, rows: int, requests: int) -> float:
        """V: seconds of a forward over `rows` rows for each of `requests` requests."""
        if (rows, requests) not in self._known:
            self._known[rows, requests] = self.forwards(rows * requests, [self.context] * requests)
        return self._known[rows, requests]

    def predict(self, drafting: Drafting, option: PlanOption, requests: int = 1) -> Prediction:
        plain_s = self.verify_s(1, requests)
        verify_s = sum(share * self.verify_s(nodes + 1, requests) for nodes, _, share in option.steps)
        draft_s = sum(share * drafting.seconds(depth, requests) for _, depth, share in option.steps)
        factor = predicted_speedup(1.0, plain_s, verify_s, draft_s)
        return Prediction(option, drafting, option.tokens_per_call.times(factor), verify_s + draft_s, plain_s)

    def best_of(self, drafting: Drafting, requests: int = 1) -> Prediction:
        found = (self.predict(drafting, option, requests) for option in drafting.options)
        return max(found, key=lambda each: each.speedup.value)

    def over_batches(self, found: Prediction, batches: Iterable[int] = BATCHES) -> Iterator[tuple[int, float]]:
        """The predicted speed-up of an option by the size of a batch."""
        return ((n, self.predict(found.drafting, found.option, n).speedup.value) for n in batches)

    def break_even(self, found: Prediction) -> int | None:
        return next((n for n, gain in self.over_batches(found, range(1, BATCHES[-1] + 1)) if gain <= 1.0), None)


@dataclass(frozen=True)
class WhatIf:
    """Another machine, with so many times the bandwidth of memory, or another drafter.

    The seconds of a forward of one row are assumed to be reading, as is the extra time of longer contexts; the extra
    time of further rows is computing and does not change. For drafting, the time of reading its weights at the target's
    rate changes. Raises OptionError for a factor that is not above 0.
    """

    bandwidth: float = 1.0
    draft_cost: float = 1.0

    def __post_init__(self) -> None:
        check_positive("bandwidth", self.bandwidth)
        check_positive("draft_cost", self.draft_cost)

    def forwards(self, cost: TargetCost) -> TargetCost:
        saved = cost.base.seconds[0] * (1.0 - 1.0 / self.bandwidth)
        base = CostCurve(cost.base.sizes, tuple(seconds - saved for seconds in cost.base.seconds))
        lines = tuple(tuple(each / self.bandwidth for each in line) for line in cost.attention.seconds)
        attention = CostSurface(cost.attention.rows, cost.attention.contexts, lines)
        return TargetCost(base, attention, cost.request_s, cost.settles_s / self.bandwidth)

    def drafting(self, drafting: Drafting, target: Footprint, cost: TargetCost) -> Drafting:
        rate = target.weights / cost.base.seconds[0] if target.weights and cost.base.seconds[0] > 0.0 else 0.0
        pass_s = drafting.memory.weights / rate if rate else 0.0

        def seconds(point: DraftPoint) -> float:
            read_s = min(point.seconds, pass_s * (point.depth if drafting.memory.each_token else 1))
            return (point.seconds - read_s * (1.0 - 1.0 / self.bandwidth)) * self.draft_cost

        points = tuple(DraftPoint(each.depth, each.nodes, seconds(each)) for each in drafting.cost.points)
        return replace(drafting, cost=DraftCost(points))


def options_of(walks: Sequence[Walk], words: Mapping[int, str]) -> tuple[list[PlanOption], tuple[float, ...]]:
    """Tokens per call of a candidate's sizes, and the largest one's survival by depth.

    Raises DataError if no trace has a second token.
    """
    walks = [walk for walk in walks if walk.tokens]
    if not walks:
        raise DataError("none of the answers has a second token, so there is nothing to plan; give other prompts")
    sizes = list(words)
    steps = [walk.steps(sizes) for walk in walks]
    tokens = [float(walk.tokens) for walk in walks]
    options = []
    for number, nodes in enumerate(sizes):
        calls = [float(each.calls[number]) for each in steps]
        kinds = defaultdict[tuple[int, int], float](float)
        for each in steps:
            rows = each.nodes[number], each.depths[number], each.visits[number]
            for nodes_there, depth, visits in zip(*(row.tolist() for row in rows), strict=True):
                kinds[nodes_there, depth] += visits
        total = sum(calls)
        shares = [(*kind, count / total) for kind, count in sorted(kinds.items()) if count / total > _LEAST_SHARE]
        options.append(PlanOption(words[nodes], nodes, ratio_over_prompts(tokens, calls), tuple(shares)))
    reached = [each.visits[-1] @ each.reach[-1] for each in steps]
    depth = max(map(len, reached))
    survival = sum(np.pad(each, (0, depth - len(each))) for each in reached) / sum(each.calls[-1] for each in steps)
    return options, tuple(float(share) for share in np.asarray(survival))


def prediction_record(found: Prediction) -> dict[str, Any]:
    """For JSON."""
    option = record_of(found.option, "drafter", "nodes", "tokens_per_call")
    return option | record_of(found, "speedup", "step_s", "plain_s")


_MILLI = 1e3
FILLED = 0.75  # planned utilisation of a replica, because requests do not arrive evenly; Ray aims at the same


@dataclass(frozen=True)
class Traffic:
    """Incoming requests; OptionError for a number out of range."""

    requests_per_s: float
    prompt: int  # tokens to process per request, without those of a cached prefix
    answer: int
    token_ms: float | None = None  # longest time per token; None is no bound

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
