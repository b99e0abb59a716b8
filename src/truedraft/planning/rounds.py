"""Measure many things in turn until the time is up, so that a slow moment of the machine meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from truedraft.errors import OptionError

Key = TypeVar("Key", bound=Hashable)
Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with measurements done, all measurements planned, and a label."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        budget_s: seconds after which no further round starts.
        least_rounds: that are run whatever they take.
        most_rounds: after which it is enough.

    Raises:
        OptionError: a negative budget, or rounds below 1 or out of order.
    """

    budget_s: float = 6.0
    least_rounds: int = 3
    most_rounds: int = 25

    def __post_init__(self) -> None:
        """Refuse what measures nothing."""
        if not self.budget_s >= 0.0 or not 1 <= self.least_rounds <= self.most_rounds:
            raise OptionError(f"0 <= budget_s and 1 <= least_rounds <= most_rounds must hold, got {self}")


def in_rounds(
    keys: Sequence[Key],
    measure: Callable[[Key, int], None],
    effort: Effort,
    progress: Progress | None,
    label: str,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Call `measure(key, round)` for all keys, round after round, each round beginning at another key.

    Round -1 comes first, to warm up; its results should be dropped.

    Args:
        keys: what to measure.
        measure: measures one and keeps the result itself.
        effort: when to stop.
        progress: told after each measurement; when time is up before all rounds are run, the rest counts as done.
        label: for `progress`.
        clock: seconds.

    Returns:
        Rounds that were run, the first not counted.
    """
    total = len(keys) * (effort.most_rounds + 1)
    started = clock()
    rounds = 0
    for number in range(-1, effort.most_rounds):
        if number >= effort.least_rounds and clock() - started > effort.budget_s:
            break
        for place in range(len(keys)):
            measure(keys[(place + number) % len(keys)], number)
            if progress is not None:
                progress((number + 1) * len(keys) + place + 1, total, label)
        rounds = number + 1
    if progress is not None and rounds < effort.most_rounds:
        progress(total, total, label)
    return rounds
