"""How long a part of a certificate may take."""

from __future__ import annotations

import time


class Deadline:
    """A time from now.

    Args:
        seconds: until it is over.
    """

    def __init__(self, seconds: float) -> None:
        self._started = time.perf_counter()
        self._seconds = max(seconds, 1e-9)

    @property
    def fraction(self) -> float:
        """How much of the time is gone, at most 1."""
        return min(1.0, (time.perf_counter() - self._started) / self._seconds)

    @property
    def over(self) -> bool:
        """Whether it is over."""
        return self.fraction >= 1.0
