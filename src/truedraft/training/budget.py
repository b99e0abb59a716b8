"""Wall time: what is done in how many minutes, where these are given, and how long things take in words."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from truedraft.errors import OptionError

WRITTEN, TRAINED = 0.4, 0.75
"""Shares of a budget: by then the target has written, and training is over; the rest is for measuring."""
_MARGIN = 0.9  # of the time for steps: now and then something is measured between them


class TimeBudget:
    """The minutes that a whole command may take, counted from when this is made.

    Args:
        minutes: None is as long as it takes.
        clock: seconds.

    Raises:
        OptionError: minutes is no number above 0.
    """

    def __init__(self, minutes: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if minutes is not None and not 0.0 < minutes < math.inf:
            raise OptionError(f"must be a number above 0, got {minutes}", field="minutes")
        self.minutes = minutes
        self._clock = clock
        self._began = clock()

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self.minutes is not None

    def left_s(self, share: float = 1.0) -> float:
        """Seconds until a share of the budget is spent, 0 at the least; without a limit infinitely many."""
        if self.minutes is None:
            return math.inf
        return max(0.0, self._began + share * self.minutes * 60.0 - self._clock())

    def over(self, share: float = 1.0) -> bool:
        """Whether a share of the budget is spent."""
        return self.left_s(share) <= 0.0

    def steps(self, most: int, step_s: float) -> int:
        """Training steps of so many seconds that fit, 1 at the least and `most` at the most."""
        left_s = self.left_s(TRAINED)
        return most if left_s == math.inf else max(1, min(most, int(_MARGIN * left_s / max(step_s, 1e-9))))


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.1f} seconds"
