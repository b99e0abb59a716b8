"""Costs of a target's forward and of a drafter's proposal, in seconds: monotone curves fitted to measured points."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median
from typing import NamedTuple

from truedraft.errors import OptionError
from truedraft.options import check_not_negative, check_whole

_MOST_SHAPES = 4096  # cached values of V
SETTLED = 40
"""Plain steps in a row after which their time is constant."""
_SETTLING = 12.0  # time constant in steps


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds by one size (rows, nodes, depth).

    Linear between points, constant below the first point, and with the last slope beyond the last. Sizes ascend and
    seconds never descend; both are 0 or more.

    Raises:
        OptionError: no points, or unordered ones.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis("sizes", self.sizes)
        _check_seconds(self.seconds, len(self.sizes))

    @classmethod
    def fit(cls, points: Iterable[tuple[float, float]]) -> CostCurve:
        """The monotone curve nearest to measured (size, seconds), equal sizes as their mean; OptionError if invalid."""
        by_size: dict[float, list[float]] = {}
        for size, seconds in points:
            by_size.setdefault(float(size), []).append(seconds)
        sizes = sorted(by_size)
        means = [fmean(by_size[size]) for size in sizes]
        if not all(map(math.isfinite, means)):
            raise OptionError(f"measured seconds must be finite, got {means}")
        return cls(tuple(sizes), tuple(isotonic(means)))

    def __call__(self, size: float) -> float:
        return _between_points(self.sizes, self.seconds, size)


@dataclass(frozen=True, slots=True)
class CostSurface:
    """Seconds by rows and context, monotone in both; in each direction as a `CostCurve`.

    Beyond the last rows or context it continues with the steepest last slope at any smaller context or fewer rows, so
    that it stays monotone there too. `seconds` are `[rows][contexts]`, not descending along either axis.

    Raises:
        OptionError: no points, or unordered ones.
    """

    rows: tuple[float, ...]
    contexts: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_axis("rows", self.rows)
        _check_axis("contexts", self.contexts)
        if len(self.seconds) != len(self.rows):
            raise OptionError(f"{len(self.rows)} sizes of rows need as many lines of seconds, got {len(self.seconds)}")
        for line in self.seconds:
            _check_seconds(line, len(self.contexts))
        for column in zip(*self.seconds, strict=True):
            _check_seconds(column, len(self.rows))

    @classmethod
    def fit(cls, cells: Mapping[tuple[int, int], float]) -> CostSurface:
        """The monotone surface near seconds at (rows, context); OptionError if a pair is missing or a time invalid."""
        rows = sorted({row for row, _ in cells})
        contexts = sorted({context for _, context in cells})
        missing = [(row, context) for row in rows for context in contexts if (row, context) not in cells]
        if missing:
            raise OptionError(f"a cost surface needs a measurement at every (rows, context), {missing[0]} has none")
        if not all(map(math.isfinite, cells.values())):
            raise OptionError("measured seconds must be finite")
        grid = isotonic_grid([[cells[row, context] for context in contexts] for row in rows])
        return cls(tuple(map(float, rows)), tuple(map(float, contexts)), tuple(map(tuple, grid)))

    def __call__(self, rows: float, context: float) -> float:
        inside_rows, columns = min(rows, self.rows[-1]), list(zip(*self.seconds, strict=True))
        # Both orders hold up to rounding; the fit mends the last bit.
        at_rows = isotonic([_between_points(self.rows, column, inside_rows) for column in columns])
        seconds = _between_points(self.contexts, at_rows, min(context, self.contexts[-1]))
        if context > self.contexts[-1]:
            slopes = _largest_last_slopes(self.contexts, self.seconds)
            seconds += (context - self.contexts[-1]) * _between_points(self.rows, slopes, inside_rows)
        if rows > self.rows[-1]:
            # The slope itself is extrapolated over the context: rows and context multiply.
            slopes = _largest_last_slopes(self.rows, columns)
            seconds += (rows - self.rows[-1]) * _between_points(self.contexts, slopes, context)
        return seconds


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """Seconds of one measured forward over 2 or more requests of one row each, with equal numbers of cached tokens."""

    requests: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TargetCost:
    """V(rows, contexts): seconds of one packed forward of a target.

    V = base(rows of all requests) + sum over the requests of attention(its rows, its context) + (requests - 1) *
    request_s. V never decreases when rows are added or a context grows.

    Attributes:
        base: by rows, for one request at the smallest measured context.
        attention: additional seconds of a request by its rows and context; 0 at the smallest context.
        request_s: seconds per request beyond the first.
        settles_s: seconds that a forward with one row per request saves after many such forwards, because caches of the
            processor stay warm. V is for that state; other forwards never reach it.
    """

    base: CostCurve
    attention: CostSurface
    request_s: float
    settles_s: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative("request_s", self.request_s)
        check_not_negative("settles_s", self.settles_s)

    @classmethod
    def fit(cls, single: Mapping[tuple[int, int], float], batches: Sequence[BatchPoint] = ()) -> TargetCost:
        """The monotone model nearest to measured seconds.

        Args:
            single: seconds of a forward of one request by (rows, context), for every pair of some rows and contexts.
            batches: forwards of several requests; without any, a further request costs only its rows and attention.

        Raises:
            OptionError: a pair is missing, or there is none.
        """
        if not single:
            raise OptionError("the cost of a target needs at least one measured forward, got none")
        smallest = min(context for _, context in single)
        base = CostCurve.fit((rows, seconds) for (rows, context), seconds in single.items() if context == smallest)
        more = {(rows, context): max(0.0, seconds - base(rows)) for (rows, context), seconds in single.items()}
        more |= {(rows, context): 0.0 for rows, context in more if context == smallest}
        unbatched = cls(base, CostSurface.fit(more), 0.0)
        extra = [
            (point.seconds - unbatched(point.requests, [point.context] * point.requests)) / (point.requests - 1)
            for point in batches
        ]
        return cls(base, unbatched.attention, max(0.0, median(extra)) if extra else 0.0)

    def __call__(self, rows: int, contexts: Sequence[int]) -> float:
        """Seconds of a forward of `rows` tokens, shared evenly by requests with these `contexts`; or OptionError."""
        if not contexts:
            raise OptionError("a forward needs the context of at least one request, got none")
        check_whole("rows", rows, least=len(contexts))
        each = rows / len(contexts)
        attention = sum(count * self.attention(each, context) for context, count in Counter(contexts).items())
        unsettled_s = self.base(rows) + attention + (len(contexts) - 1) * self.request_s
        return unsettled_s - self.settles_s if rows == len(contexts) else unsettled_s

    def settling_s(self, steps: int) -> float:
        """Upper bound of the seconds beyond V that a plain forward takes after `steps` others; decreasing.

        Worked example: of 2 ms that are saved in the end, the first takes 2 ms longer, and the 13th 0.74 ms.
        """
        return self.settles_s * math.exp(-steps / _SETTLING)


class ForwardTable:
    """V(rows, contexts) in seconds, cached for 4,096 shapes, with the mean context rounded to 64 tokens."""

    def __init__(self, forward_s: Callable[[int, Sequence[int]], float]) -> None:
        self._known = lru_cache(_MOST_SHAPES)(lambda rows, count, each: forward_s(rows, [each] * count))

    def __call__(self, rows: int, contexts: Sequence[int]) -> float:
        requests = len(contexts)
        return self._known(rows, requests, round(sum(contexts) / requests / 64) * 64)

    def __len__(self) -> int:
        return self._known.cache_info().currsize


class DraftPoint(NamedTuple):
    """Measured seconds of `propose` and `observe`, catch-up included; depth and nodes are 1 or more."""

    depth: int
    nodes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of one proposal for one request, catch-up included, from one point per depth; 0 without points."""

    points: tuple[DraftPoint, ...]

    def __post_init__(self) -> None:
        for point in self.points:
            check_whole("depth", point.depth, least=1)
            check_whole("nodes", point.nodes, least=1)
            check_not_negative("seconds", point.seconds)
        depths = [point.depth for point in self.points]
        if depths != sorted(set(depths)):
            raise OptionError(f"the depths of a draft cost must rise, got {depths}")

    def __call__(self, depth: int) -> float:
        """Seconds of a proposal of this depth, of the drafter's own width; 0 for depth 0. OptionError below 0."""
        check_whole("depth", depth, least=0)
        return self._curve([(point.depth, point.seconds) for point in self.points], depth)

    def guessed(self, share: float, longest: int) -> DraftCost:
        """The cost by length of a cascade's chains, where a `share` of the tokens after the first take no level.

        Worked example: levels of 2 ms, a share of one half. A chain of 5 takes 3 levels, 6 ms.
        """
        points = []
        for length in range(1, longest + 1):
            levels = length - share * (length - 1)
            whole = int(levels)
            seconds = self(whole) + (levels - whole) * (self(whole + 1) - self(whole))
            points.append(DraftPoint(length, length, seconds))
        return DraftCost(tuple(points))

    def of_nodes(self, nodes: int) -> float:
        """Seconds of a proposal with this many nodes, in the drafter's shape; 0 for none. OptionError below 0."""
        check_whole("nodes", nodes, least=0)
        deepest = {point.nodes: point.seconds for point in self.points}
        return self._curve(list(deepest.items()), nodes)

    def _curve(self, points: Sequence[tuple[int, float]], size: int) -> float:
        return CostCurve.fit(points)(size) if points and size else 0.0


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence with the least squared distance, by pooling adjacent violators.

    Worked example: 1, 3, 2, 4 becomes 1, 2.5, 2.5, 4.
    """
    pools: list[tuple[float, int]] = []  # sum and count
    for value in values:
        total, count = float(value), 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            before, others = pools.pop()
            total, count = total + before, count + others
        pools.append((total, count))
    fitted: list[float] = []
    for total, count in pools:
        # Rounding must not undo what the pooling did.
        level = max(total / count, fitted[-1] if fitted else total / count)
        fitted.extend([level] * count)
    return fitted


def isotonic_grid(grid: Sequence[Sequence[float]]) -> list[list[float]]:
    """A grid made non-decreasing along both axes: pooled along the second, then the first, which keeps the order."""
    rows = [isotonic(row) for row in grid]
    columns = [isotonic(column) for column in zip(*rows, strict=True)]
    fitted = [list(row) for row in zip(*columns, strict=True)]
    for row in fitted:
        for place in range(1, len(row)):
            row[place] = max(row[place], row[place - 1])  # only rounding
    return fitted


def _between_points(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    if size <= sizes[0] or len(sizes) == 1:
        return seconds[0]
    right = min(bisect_right(sizes, size), len(sizes) - 1)
    return _line(sizes[right - 1], seconds[right - 1], sizes[right], seconds[right], size)


def _line(x0: float, y0: float, x1: float, y1: float, x: float) -> float:
    # From the nearer end, so that both ends are met exactly.
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * (x - x0) if x - x0 <= x1 - x else y1 + slope * (x - x1)


def _largest_last_slopes(sizes: Sequence[float], lines: Sequence[Sequence[float]]) -> list[float]:
    """For each line of seconds the steepest last slope of it and those before it."""
    if len(sizes) == 1:
        return [0.0] * len(lines)
    return list(itertools.accumulate(((line[-1] - line[-2]) / (sizes[-1] - sizes[-2]) for line in lines), max))


def _check_axis(name: str, sizes: Sequence[float]) -> None:
    falls = any(later <= earlier for earlier, later in itertools.pairwise(sizes))
    if not sizes or falls or not all(0.0 <= size < math.inf for size in sizes):
        raise OptionError(f"{name} of a cost curve must be rising numbers of 0 or more, got {list(sizes)}")


def _check_seconds(seconds: Sequence[float], count: int) -> None:
    falls = any(later < earlier for earlier, later in itertools.pairwise(seconds))
    if len(seconds) != count or falls or not all(0.0 <= each < math.inf for each in seconds):
        raise OptionError(f"a cost curve needs {count} seconds of 0 or more that never fall, got {list(seconds)}")
