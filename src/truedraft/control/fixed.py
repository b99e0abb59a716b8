"""The simplest controller: always the same budget."""

from __future__ import annotations

from truedraft.control.base import Controller, Observation
from truedraft.core.budget import Budget


class FixedBudget(Controller):
    """Always the same budget, or the drafter's own limits.

    Args:
        budget: None takes the drafter's limits.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget

    def decide(self, observation: Observation) -> Budget:
        """The fixed budget."""
        return observation.limits if self._budget is None else self._budget
