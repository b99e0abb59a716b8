"""What failed in an engine and was got over: counted, and told once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from truedraft.engine.request import Request


class Failures:
    """The failures of one engine's parts. They cost no answer, so nobody would see them if they were not told."""

    def __init__(self) -> None:
        self._warned = False

    def asked_again(self, requests: Sequence[Request], who: str, error: Exception) -> None:
        """Something failed for several requests together, and each is now asked for alone.

        Args:
            requests: each counts one recovery.
            who: what failed.
            error: how.
        """
        for request in requests:
            request.counters.recoveries += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{who} failed for {len(requests)} requests together ({told(error)}), so each was asked for alone, "
                "which is slow; stats.recoveries counts how often that happens in this engine",
                RuntimeWarning,
                stacklevel=2,
            )


def told(error: Exception) -> str:
    """An error in one sentence."""
    return f"{type(error).__name__}: {error}"
