"""Controllers that know no costs: what other engines do, to compare with, and schedules written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from truedraft.control.base import Controller
from truedraft.core.budget import NO_DRAFT, Budget, Decision, RequestView
from truedraft.core.stats import StepRecord
from truedraft.errors import OptionError
from truedraft.options import check_whole


class AssistedHeuristic(Controller):
    """Two tokens more after a proposal that was accepted whole, one less after any other: transformers' heuristic.

    Of the first drafter, starting at 5, at least 1 and at most what the drafter's limits allow. A request follows its
    own verdicts alone, so two with one seed may run side by side (DESIGN section 2, predictable choice).

    Args:
        start: tokens drafted first.

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
    """Drafts until the drafter gave a token less than a threshold; that token stays, for it was drawn.

    Args:
        threshold: the drafter's probability of a token below which nothing is drafted behind it.

    Raises:
        OptionError: a threshold outside [0, 1].
    """

    def __init__(self, threshold: float = 0.4) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise OptionError(f"threshold must be a probability in [0, 1], got {threshold!r}", field="threshold")
        self._threshold = threshold

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        chosen = (next(iter(view.limits.items())) for view in views)
        return [Decision(name, replace(most, min_probability=self._threshold)) for name, most in chosen]


class Schedule(Controller):
    """Lengths by the number of requests that decode together, as written by hand.

    Worked example: {1: 4, 4: 2, 16: 0} drafts 4 tokens for 1 to 3 requests, 2 for 4 to 15, and none from 16 on.

    Args:
        lengths: tokens drafted by the first drafter, from so many requests on; below the least of them its limits.

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
        return [self._of(view, length) for view in views]

    def _of(self, view: RequestView, length: int | None) -> Decision:
        name, limits = next(iter(view.limits.items()))
        if length == 0:
            return Decision(name, NO_DRAFT, reason="schedule")
        return Decision(name, limits if length is None else _of_length(limits, length), reason="schedule")


def _of_length(limits: Budget, length: int) -> Budget:
    """A drafter's limits cut to paths of a length; of a tree also to so many nodes."""
    return replace(limits, depth=min(limits.depth, length), nodes=min(limits.nodes, length))
