"""Measured costs made monotone: more work never costs less."""

from __future__ import annotations

from collections.abc import Sequence


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence with the least squared distance, by pooling adjacent violators.

    Values that rise stay as they are; a run that falls becomes its mean.

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
    """A grid made non-decreasing along both axes: pooled along the second, then along the first.

    Pooling keeps an order between sequences, so the second pass does not undo the first.
    """
    rows = [isotonic(row) for row in grid]
    columns = [isotonic(column) for column in zip(*rows, strict=True)]
    fitted = [list(row) for row in zip(*columns, strict=True)]
    for row in fitted:
        for place in range(1, len(row)):
            row[place] = max(row[place], row[place - 1])  # rounding alone
    return fitted
