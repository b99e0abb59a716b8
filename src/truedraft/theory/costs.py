"""What a forward of the target and a proposal of a drafter cost, in seconds, from measured points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from truedraft.errors import OptionError
from truedraft.theory.arguments import check_not_negative, check_whole
from truedraft.theory.curves import CostCurve, CostSurface
from truedraft.theory.records import record


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """One measured forward over several requests of one row and equal context.

    Attributes:
        requests: 2 or more; so many rows, too.
        context: cached tokens of each.
        seconds: of the forward.
    """

    requests: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TargetCost:
    """V(rows, contexts): seconds of one packed forward of a target.

    V = base(rows of all requests) + sum over the requests of attention(its rows, its context) + (requests - 1) *
    request_s. The weights are read once for all rows, the cached keys and values by each request for itself. It never
    falls when rows are added or a context grows.

    Attributes:
        base: by rows, for one request at the smallest context that was measured.
        attention: what a request adds to that by its rows and its context; 0 at the smallest context.
        request_s: what each request beyond the first adds by being there.
    """

    base: CostCurve
    attention: CostSurface
    request_s: float

    def __post_init__(self) -> None:
        """Refuse a negative share."""
        check_not_negative("request_s", self.request_s)

    @classmethod
    def fit(cls, single: Mapping[tuple[int, int], float], batches: Sequence[BatchPoint] = ()) -> TargetCost:
        """The monotone model nearest to measured seconds.

        Args:
            single: seconds of a forward of one request by (rows, context), for every pair of some rows and contexts.
            batches: forwards of several requests; without any, a further request costs its rows and attention only.

        Raises:
            OptionError: a pair is missing, or there is none.
        """
        if not single:
            raise OptionError("the cost of a target needs at least one measured forward, got none")
        smallest = min(context for _, context in single)
        base = CostCurve.fit((rows, seconds) for (rows, context), seconds in single.items() if context == smallest)
        more = {(rows, context): max(0.0, seconds - base(rows)) for (rows, context), seconds in single.items()}
        more |= {(rows, context): 0.0 for rows, context in more if context == smallest}
        alone = cls(base, CostSurface.fit(more), 0.0)
        extra = [
            (point.seconds - alone(point.requests, [point.context] * point.requests)) / (point.requests - 1)
            for point in batches
        ]
        return cls(base, alone.attention, max(0.0, median(extra)) if extra else 0.0)

    def __call__(self, rows: int, contexts: Sequence[int]) -> float:
        """Seconds of a forward.

        Args:
            rows: tokens that are fed, of all requests together; shared evenly among them.
            contexts: cached tokens of each request before the forward.

        Raises:
            OptionError: no request, or fewer rows than requests.
        """
        if not contexts:
            raise OptionError("a forward needs the context of at least one request, got none")
        check_whole("rows", rows, lowest=len(contexts))
        each = rows / len(contexts)
        attention = sum(self.attention(each, context) for context in contexts)
        return self.base(rows) + attention + (len(contexts) - 1) * self.request_s

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"base": self.base.to_dict(), "attention": self.attention.to_dict(), "request_s": self.request_s}

    @classmethod
    def from_dict(cls, data: object) -> TargetCost:
        """What `to_dict` gave.

        Raises:
            OptionError: the record is no cost of a target.
        """
        fields = record(data, "the cost of a target", ("base", "attention", "request_s"))
        base, attention = CostCurve.from_dict(fields["base"]), CostSurface.from_dict(fields["attention"])
        return cls(base, attention, fields["request_s"])


@dataclass(frozen=True, slots=True)
class DraftPoint:
    """Measured proposals of one depth.

    Attributes:
        depth: length of the longest path, 1 or more.
        nodes: drafted nodes, 1 or more.
        seconds: of `propose`, catch-up with the last step's tokens included, and of `observe`.
    """

    depth: int
    nodes: int
    seconds: float

    def __post_init__(self) -> None:
        """Refuse what was not measured."""
        check_whole("depth", self.depth, lowest=1)
        check_whole("nodes", self.nodes, lowest=1)
        check_not_negative("seconds", self.seconds)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of one proposal of a drafter for one request, catch-up included.

    Attributes:
        points: measured, one for each depth, in rising order; none for a drafter that never drafts.
    """

    points: tuple[DraftPoint, ...]

    def __post_init__(self) -> None:
        """Refuse depths out of order."""
        depths = [point.depth for point in self.points]
        if depths != sorted(set(depths)):
            raise OptionError(f"the depths of a draft cost must rise, got {depths}")

    def __call__(self, depth: int) -> float:
        """Seconds of a proposal of this depth, as wide as the drafter makes it; 0 for none.

        Raises:
            OptionError: a negative depth.
        """
        check_whole("depth", depth, lowest=0)
        return self._curve([(point.depth, point.seconds) for point in self.points], depth)

    def of_nodes(self, nodes: int) -> float:
        """Seconds of a proposal with so many nodes, in the shape in which the drafter adds them; 0 for none.

        A drafter with a limit on nodes may fill it at several depths; the deepest is what it proposes.

        Raises:
            OptionError: a negative number of nodes.
        """
        check_whole("nodes", nodes, lowest=0)
        deepest = {point.nodes: point.seconds for point in self.points}
        return self._curve(list(deepest.items()), nodes)

    def _curve(self, points: Sequence[tuple[int, float]], size: int) -> float:
        return CostCurve.fit(points)(size) if points and size else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"points": [[point.depth, point.nodes, point.seconds] for point in self.points]}

    @classmethod
    def from_dict(cls, data: object) -> DraftCost:
        """What `to_dict` gave.

        Raises:
            OptionError: the record is no cost of a drafter.
        """
        points = record(data, "the cost of a drafter", ("points",))["points"]
        if not isinstance(points, list) or not all(isinstance(each, list) and len(each) == 3 for each in points):
            raise OptionError(f"the points of a draft cost are lists of depth, nodes and seconds, got {points!r}")
        return cls(tuple(DraftPoint(*each) for each in points))
