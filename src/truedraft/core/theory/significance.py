"""Multiple testing."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): rejecting those below a keeps the probability of any false alarm below a.

    Worked example: of 0.01, 0.04 and 0.02 the smallest is tripled, the next doubled: 0.03, 0.04 and 0.04.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    reached = 0.0
    for rank, i in enumerate(order):
        reached = max(reached, min(1.0, p_values[i] * (len(order) - rank)))
        adjusted[i] = reached
    return adjusted
