"""The controller interface, and the step times available to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from truedraft.core.budget import Budget, Decision, RequestView
from truedraft.core.stats import StepRecord


class StepTimes(ABC):
    """Step times of an engine on this machine, corrected by its latest steps."""

    @abstractmethod
    def step_s(self, rows: int, contexts: Sequence[int], greedy: bool) -> float:
        """Seconds of a step without drafting: the forward over `rows` input rows, the verdicts and all host work."""

    @abstractmethod
    def drafting_s(self, drafter: str, requests: int, depth: float, greedy: bool) -> float:
        """Seconds of a drafter's proposals with the usual catch-up; `depth` may be a mean of levels."""

    def catch_up_s(self, drafter: str, behind: int, greedy: bool) -> float:
        """Seconds of a drafter to process `behind` unread tokens, beyond those of the last step."""
        return 0.0

    def acceptance(self, drafter: str, view: RequestView) -> Sequence[float]:
        """Measured gains of a drafter's nodes; empty without a measurement."""
        return ()

    def ready(self, greedy: bool) -> bool:
        """Whether all times are known without measuring first; measuring continues between steps."""
        return True

    def observe(self, record: StepRecord, steps: int = 1, decide_s: float = 0.0) -> None:  # noqa: B027 - optional
        """Record a step, the last of `steps` equal ones; `decide_s` is the mean time of deciding per step."""


class Controller(ABC):
    """Decides which drafter drafts for each request in the next step, and how much: numbers in, budgets out.

    An error that it raises fails no answer: its requests continue without drafts.

    Attributes:
        weighs_costs: whether it chooses sizes by their costs, so that they need not be chosen beforehand.
        takes_all_sizes: whether it uses all sizes of a drafter, also unprofitable ones, so that none should be chosen.
        rests: steps after the next one with the same decision, as long as the same requests run and drafters find the
            same for most of them, or nothing new where that is to draft nothing. In these steps the engine does not
            call `decide`, and `observe` only where something is drafted.
    """

    weighs_costs: ClassVar[bool] = False
    takes_all_sizes: ClassVar[bool] = False
    rests: int = 0

    def begin(self, times: StepTimes) -> None:  # noqa: B027 - optional
        """Called when an engine starts to use it; one controller serves one engine."""

    def expect(self, survival: Mapping[str, Sequence[float]]) -> None:  # noqa: B027 - optional
        """Called with earlier measurements: by drafter the share of steps that accept the first 1, 2, ... tokens."""

    @abstractmethod
    def decide(self, views: Sequence[RequestView]) -> Sequence[Decision]:
        """One decision for each request that may be drafted for; a zero budget is plain decoding."""

    def undrafted(self, request: int) -> str:
        """Why nothing was drafted for a request that ends now, by its id, in words."""
        return "no drafter proposed anything"

    def observe(self, record: StepRecord) -> None:  # noqa: B027 - optional
        """Called after a step, with or without drafts."""


class FixedBudget(Controller):
    """Always the first drafter, with the same budget; None for its own limits."""

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        drafters = (next(iter(view.limits.items())) for view in views)
        return [Decision(name, limits if self._budget is None else self._budget) for name, limits in drafters]
