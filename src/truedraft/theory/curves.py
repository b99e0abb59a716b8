"""Seconds as a function of size: measured points, monotone, linear in between and beyond the last."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from truedraft.errors import OptionError
from truedraft.theory.isotonic import isotonic, isotonic_grid
from truedraft.theory.records import numbers, record


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds by one size (rows, nodes, depth).

    Between points it is linear, below the first point it is level, beyond the last it goes on as between the last two
    (level if there is one point).

    Attributes:
        sizes: of the points, 0 or more, rising.
        seconds: at the points, 0 or more, not falling.

    Raises:
        OptionError: points that are none, or out of order.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what is no monotone curve."""
        _check_axis("sizes", self.sizes)
        _check_seconds(self.seconds, len(self.sizes))

    @classmethod
    def fit(cls, points: Iterable[tuple[float, float]]) -> CostCurve:
        """The curve nearest to measured (size, seconds); several of one size count as their mean.

        Raises:
            OptionError: no points, or negative or infinite ones.
        """
        by_size: dict[float, list[float]] = {}
        for size, seconds in points:
            by_size.setdefault(float(size), []).append(seconds)
        sizes = sorted(by_size)
        means = [fmean(by_size[size]) for size in sizes]
        if not all(map(math.isfinite, means)):
            raise OptionError(f"measured seconds must be finite, got {means}")
        return cls(tuple(sizes), tuple(isotonic(means)))

    def __call__(self, size: float) -> float:
        """Seconds at a size."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        right = min(bisect_right(sizes, size), len(sizes) - 1)
        return _line(sizes[right - 1], seconds[right - 1], sizes[right], seconds[right], size)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"sizes": list(self.sizes), "seconds": list(self.seconds)}

    @classmethod
    def from_dict(cls, data: object) -> CostCurve:
        """What `to_dict` gave.

        Raises:
            OptionError: the record is no curve.
        """
        fields = record(data, "a cost curve", ("sizes", "seconds"))
        return cls(numbers(fields["sizes"]), numbers(fields["seconds"]))


@dataclass(frozen=True, slots=True)
class CostSurface:
    """Seconds by rows and context, monotone in both; in each direction as a `CostCurve`.

    Beyond the last rows or context it goes on with the steepest last slope found at a smaller context or fewer rows,
    so that it stays monotone there too.

    Attributes:
        rows: 0 or more, rising.
        contexts: cached tokens, 0 or more, rising.
        seconds: `[rows][contexts]`, not falling along either axis.

    Raises:
        OptionError: points that are none, or out of order.
    """

    rows: tuple[float, ...]
    contexts: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Refuse what is no monotone grid."""
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
        """The monotone surface near measured seconds at (rows, context); every pair must have been measured.

        Raises:
            OptionError: a pair is missing, or seconds are infinite or negative.
        """
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
        """Seconds at a number of rows and a context."""
        inside_rows = min(rows, self.rows[-1])
        inside = self._along_contexts(inside_rows, min(context, self.contexts[-1]))
        more_context = max(0.0, context - self.contexts[-1]) * CostCurve(self.rows, self._context_slopes())(inside_rows)
        # The slope itself goes on with the context: rows and context multiply.
        more_rows = max(0.0, rows - self.rows[-1]) * CostCurve(self.contexts, self._row_slopes())(context)
        return inside + more_context + more_rows

    def _along_contexts(self, rows: float, context: float) -> float:
        # Both orders hold up to rounding; the fit mends the last bit.
        at_rows = [CostCurve(self.rows, column)(rows) for column in zip(*self.seconds, strict=True)]
        return CostCurve(self.contexts, tuple(isotonic(at_rows)))(context)

    def _context_slopes(self) -> tuple[float, ...]:
        """Seconds per further cached token beyond the last context, by rows."""
        return _running_largest([_last_slope(self.contexts, line) for line in self.seconds])

    def _row_slopes(self) -> tuple[float, ...]:
        """Seconds per further row beyond the last, by context."""
        columns = zip(*self.seconds, strict=True)
        return _running_largest([_last_slope(self.rows, column) for column in columns])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rows": list(self.rows),
            "contexts": list(self.contexts),
            "seconds": [list(line) for line in self.seconds],
        }

    @classmethod
    def from_dict(cls, data: object) -> CostSurface:
        """What `to_dict` gave.

        Raises:
            OptionError: the record is no surface.
        """
        fields = record(data, "a cost surface", ("rows", "contexts", "seconds"))
        if not isinstance(fields["seconds"], list):
            raise OptionError(f"the seconds of a cost surface must be a list of lists, got {fields['seconds']!r}")
        lines = tuple(numbers(line) for line in fields["seconds"])
        return cls(numbers(fields["rows"]), numbers(fields["contexts"]), lines)


def _line(x0: float, y0: float, x1: float, y1: float, x: float) -> float:
    # From the nearer end, so that both ends are met exactly.
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * (x - x0) if x - x0 <= x1 - x else y1 + slope * (x - x1)


def _last_slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    return (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0


def _running_largest(slopes: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(slopes[: place + 1]) for place in range(len(slopes)))


def _check_axis(name: str, sizes: Sequence[float]) -> None:
    falls = any(later <= earlier for earlier, later in itertools.pairwise(sizes))
    if not sizes or falls or not all(0.0 <= size < math.inf for size in sizes):
        raise OptionError(f"{name} of a cost curve must be rising numbers of 0 or more, got {list(sizes)}")


def _check_seconds(seconds: Sequence[float], count: int) -> None:
    falls = any(later < earlier for earlier, later in itertools.pairwise(seconds))
    if len(seconds) != count or falls or not all(0.0 <= each < math.inf for each in seconds):
        raise OptionError(f"a cost curve needs {count} seconds of 0 or more that never fall, got {list(seconds)}")
