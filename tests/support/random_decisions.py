"""A controller that decides at random: any drafters, merged in any order, any budgets."""

from __future__ import annotations

import random
from collections.abc import Sequence

from truedraft.core.budget import NO_DRAFT
from truedraft.engine.policy import Budget, Controller, Decision, RequestView


class RandomDecisions(Controller):
    """Each drafter drafts or not, with a budget within its limits, and several are merged.

    Args:
        seed: of the choices.
        merges: whether several may draft for one request.
    """

    def __init__(self, seed: int = 0, *, merges: bool = True) -> None:
        self._random = random.Random(seed)
        self._merges = merges

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        return [self._one(view) for view in views]

    def _one(self, view: RequestView) -> Decision:
        names = self._random.sample(list(view.limits), self._random.randint(0, len(view.limits)))
        parts = [Decision(name, self._budget(view.limits[name])) for name in names]
        if not parts:
            return Decision(next(iter(view.limits)), NO_DRAFT)
        return Decision(parts[0].drafter, parts[0].budget, tuple(parts[1:]) if self._merges else ())

    def _budget(self, limits: Budget) -> Budget:
        most = self._random.randint(0, limits.depth)
        return Budget(most, limits.width, self._random.randint(0, limits.nodes))
