"""Predicted gains of a plan's options: replayed tokens per call against measured costs.

    speed-up = tau V(1) / (V(nodes + 1) + draft cost)

for each request of a batch: V over the rows of all requests, both sums averaged over the replayed steps, because a
drafter that finds nothing to propose costs no rows. Further assumptions:

- All requests of a batch draft alike, at the plan's mean context.
- Drafting for n requests costs as n rows do: by the draft model's own V(n) / V(1); for heads by the target's; for a
  drafter that runs no model n times as much.
- The interval is that of tokens per call, by resampling prompts. Host work and verdicts are not included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from truedraft.core.intervals import Interval, ratio_over_prompts
from truedraft.core.theory import CostCurve, CostSurface, DraftCost, DraftPoint, TargetCost, predicted_speedup
from truedraft.errors import DataError
from truedraft.measure.walks import Walk
from truedraft.options import check_positive, record_of

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes for which a plan has curves."""
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
    """A drafter in a plan: its costs, and the gains of its sizes.

    Attributes:
        survival: for the largest size, the share of steps in which the first 1, 2, ... drafted tokens are accepted.
        cost: seconds of a proposal for one request, by its depth.
        growth: cost of a proposal for 1, 2, ... requests relative to one.
    """

    drafter: str
    name: str
    options: tuple[PlanOption, ...]
    survival: tuple[float, ...]
    cost: DraftCost
    growth: CostCurve
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
        key = rows, requests
        if key not in self._known:
            self._known[key] = self.forwards(rows * requests, [self.context] * requests)
        return self._known[key]

    def predict(self, drafting: Drafting, option: PlanOption, requests: int = 1) -> Prediction:
        plain_s = self.verify_s(1, requests)
        verify_s = sum(share * self.verify_s(nodes + 1, requests) for nodes, _, share in option.steps)
        draft_s = sum(share * drafting.seconds(depth, requests) for _, depth, share in option.steps)
        factor = predicted_speedup(1.0, plain_s, verify_s, draft_s)
        return Prediction(option, drafting, option.tokens_per_call.times(factor), verify_s + draft_s, plain_s)

    def best_of(self, drafting: Drafting, requests: int = 1) -> Prediction:
        return max(
            (self.predict(drafting, option, requests) for option in drafting.options),
            key=lambda each: each.speedup.value,
        )

    def break_even(self, drafting: Drafting, option: PlanOption, most: int = BATCHES[-1]) -> int | None:
        """The smallest batch in which an option is predicted to gain nothing; None where it gains up to `most`."""
        for requests in range(1, most + 1):
            if self.predict(drafting, option, requests).speedup.value <= 1.0:
                return requests
        return None


@dataclass(frozen=True)
class WhatIf:
    """Another machine, or another drafter.

    Attributes:
        bandwidth: factor of memory read speed. The seconds of a forward of one row are assumed to be reading, as is the
            extra time of longer contexts; the extra time of further rows is computing and does not change. For
            drafting, the time of reading its weights at the target's rate changes.

    Raises:
        OptionError: a factor that is not above 0.
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
        return dataclasses.replace(drafting, cost=DraftCost(points))


def options_of(walks: Sequence[Walk], words: Mapping[int, str]) -> tuple[list[PlanOption], tuple[float, ...]]:
    """Tokens per call of a candidate's sizes, and the largest one's survival by depth.

    Raises:
        DataError: no trace has a second token.
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
        kinds: dict[tuple[int, int], float] = {}
        for each in steps:
            rows = each.nodes[number], each.depths[number], each.visits[number]
            for nodes_there, depth, visits in zip(*(row.tolist() for row in rows), strict=True):
                kinds[nodes_there, depth] = kinds.get((nodes_there, depth), 0.0) + visits
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
