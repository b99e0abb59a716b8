"""Controllers that use no costs: heuristics of other engines, for comparison, and hand-written schedules."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from truedraft.core.budget import NO_DRAFT, Budget, Decision, RequestView
from truedraft.core.stats import StepRecord
from truedraft.engine.policy.base import Controller
from truedraft.errors import OptionError
from truedraft.options import check_whole


class AssistedHeuristic(Controller):
    """Two tokens more after a proposal that was accepted entirely, one less after any other: transformers' heuristic.

    Uses the first drafter, with at least 1 token and at most its limits. Each request has its own length.

    Raises:
        OptionError: a start below 1.
    """

    def __init__(self, start: int = 5) -> None:
        self._start = check_whole("start", start, least=1)
        self._lengths: dict[int, int] = {}

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        decisions = []
        for view in views:
            name, limits = next(iter(view.limits.items()))
            length = min(self._lengths.get(view.id, self._start), limits.depth)
            nodes = min(limits.nodes, length) if limits.width == 1 else limits.nodes
            decisions.append(Decision(name, replace(limits, depth=length, nodes=nodes), reason="heuristic"))
        return decisions

    def observe(self, record: StepRecord) -> None:
        lengths = {}
        for step in record.requests:
            length = self._lengths.get(step.id, self._start)
            if step.shares:
                whole = len(step.shares[0].path) == step.depth
                length = length + 2 if whole else max(1, length - 1)
            lengths[step.id] = length
        self._lengths = lengths  # of those that still run


class ConfidenceStop(Controller):
    """Drafts until a token's draft probability is below a threshold in [0, 1]; that token is kept: it was sampled.

    Raises:
        OptionError: another threshold.
    """

    def __init__(self, threshold: float = 0.4) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise OptionError(f"threshold must be a probability in [0, 1], got {threshold!r}", field="threshold")
        self._threshold = threshold

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        chosen = (next(iter(view.limits.items())) for view in views)
        return [Decision(name, replace(most, min_probability=self._threshold)) for name, most in chosen]


class Schedule(Controller):
    """Draft lengths by the number of decoding requests: {1: 4, 4: 2, 16: 0} drafts 4 tokens for 1 to 3 requests, 2 for
    4 to 15, and none from 16 on. Below the smallest number the first drafter's limits apply.

    Raises:
        OptionError: no lengths, requests below 1, or a length below 0.
    """

    def __init__(self, lengths: Mapping[int, int]) -> None:
        if not lengths:
            raise OptionError("a schedule needs a length for at least one number of requests, got none")
        self._steps = sorted(
            (check_whole("requests", requests, least=1), check_whole("length", length, least=0))
            for requests, length in lengths.items()
        )

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        length = next((each for least, each in reversed(self._steps) if len(views) >= least), None)
        firsts = (next(iter(view.limits.items())) for view in views)
        return [Decision(name, _of_length(limits, length), reason="schedule") for name, limits in firsts]


class RoundRobin(Controller):
    """Every drafter in turn, then pairs with merged proposals, then none: for tests that must cover all cases.

    Budgets rotate as well: the drafter's limits, one token, half. The place in this cycle depends on a request's own
    number of steps.

    Worked example: of a and b the steps draft a whole, one token of b, half of a with half of b after it, nothing, one
    token of a, and so on, the second time round with a after b.
    """

    takes_all_sizes: ClassVar[bool] = True

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        return [self._of(view) for view in views]

    def _of(self, view: RequestView) -> Decision:
        names = list(view.limits)
        if len(names) == 1:
            return Decision(names[0], view.limits[names[0]], reason="in turn")
        pairs = list(itertools.combinations(names, 2))
        order = [*((name,) for name in names), *pairs, ()]
        round_, place = divmod(view.counters.target_calls, len(order))
        size = 0 if self._whole else round_ + place
        chosen = order[place][::-1] if round_ % 2 else order[place]
        parts = [Decision(name, _sized(view.limits[name], size), reason="in turn") for name in chosen]
        return replace(parts[0], merged=tuple(parts[1:])) if parts else Decision(names[0], NO_DRAFT, reason="in turn")


def _sized(limits: Budget, number: int) -> Budget:
    length = (limits.depth, 1, (limits.depth + 1) // 2)[number % 3]
    return limits if length == limits.depth else _of_length(limits, length)


def _of_length(limits: Budget, length: int | None) -> Budget:
    if not length:
        return limits if length is None else NO_DRAFT
    return replace(limits, depth=min(limits.depth, length), nodes=min(limits.nodes, length))
