"""The contract of a controller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from truedraft.core.budget import Budget, Decision, RequestView
from truedraft.core.stats import StepRecord


class Controller(ABC):
    """Decides which drafter drafts for each request in the next step, and how much: numbers in, budgets out.

    What it raises costs no answer: requests that it fails for go on undrafted.
    """

    @abstractmethod
    def decide(self, views: Sequence[RequestView]) -> Sequence[Decision]:
        """One decision for each request that may be drafted for; a budget of zero makes its step plain decoding."""

    def observe(self, record: StepRecord) -> None:  # noqa: B027 - optional
        """A step is over, whether anything was drafted in it or not."""


class FixedBudget(Controller):
    """Always the same budget, or the drafter's own limits.

    Args:
        budget: None takes the drafter's limits.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        drafters = (next(iter(view.limits.items())) for view in views)
        return [Decision(name, limits if self._budget is None else self._budget) for name, limits in drafters]
