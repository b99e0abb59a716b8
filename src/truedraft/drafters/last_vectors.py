"""What drafters with heads keep of each request: the vector from which its last token was drawn."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from truedraft.drafters.base import DraftRequest, StepOutcome


class LastVectors:
    """For each request the vector that entered the target's LM head and gave its last token.

    Args:
        width: entries of a vector that heads read; behind them there are the zeros of a padded target.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._of: dict[int, Tensor | None] = {}

    def begin(self, request: DraftRequest) -> None:
        """A request starts; its first vector comes with the end of its prompt."""
        self._of[request.id] = None

    def get(self, request: DraftRequest) -> Tensor | None:
        """The vector `[width]`; None where there is none yet."""
        return self._of.get(request.id)

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        """A step is over: keep the vectors at the ends of the accepted paths."""
        for request, outcome in zip(batch, outcomes, strict=True):
            if outcome.hidden is None:
                self._of[request.id] = None
                continue
            # A copy: the next forward may write over the rows, and one row should not hold on to all of them.
            self._of[request.id] = outcome.hidden[-1, : self._width].clone()

    @property
    def holding(self) -> Collection[int]:
        """Ids of requests that there is something of."""
        return self._of.keys()

    def end(self, request: DraftRequest) -> None:
        """A request is over."""
        self._of.pop(request.id, None)
