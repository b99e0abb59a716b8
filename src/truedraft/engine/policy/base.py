"""The contract of a controller, and what it may ask about time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from truedraft.core.budget import Budget, Decision, RequestView
from truedraft.core.stats import StepRecord


class StepTimes(Protocol):
    """What the steps of an engine take on this machine, corrected by what its steps took lately."""

    def step_s(self, rows: int, contexts: Sequence[int], greedy: bool) -> float:
        """Seconds of a step, drafting apart: the forward, its verdicts, and all that surrounds them.

        Args:
            rows: that the target is fed, of all requests together; as many as requests is plain decoding.
            contexts: cached tokens of each request.
            greedy: whether the requests are greedy.
        """
        ...

    def drafting_s(self, drafter: str, requests: int, depth: float, greedy: bool) -> float:
        """Seconds of proposals of a drafter, with the usual catch-up.

        Args:
            drafter: by name.
            requests: that it drafts for together.
            depth: levels that the deepest proposal takes; no whole number where that hangs on guesses.
            greedy: whether the requests are greedy; others draw from distributions, which costs more.
        """
        ...

    def catch_up_s(self, drafter: str, behind: int) -> float:
        """Seconds that a drafter takes to read tokens that it has not read, beyond those of the last step."""
        ...

    def acceptance(self, drafter: str, view: RequestView) -> Sequence[float]:
        """Gains of a drafter's nodes that were measured before; empty where nobody did."""
        ...

    def observe(self, record: StepRecord, steps: int = 1) -> None:
        """A step was made, and took what its record says; it is the last of so many that were alike."""
        ...

    def ready(self, greedy: bool) -> bool:
        """Whether all of this can be told without measuring anything first, which goes on between steps."""
        ...

    def measure(self, greedy: bool) -> None:
        """Measure now what would be measured when it is first asked for."""
        ...


class Controller(ABC):
    """Decides which drafter drafts for each request in the next step, and how much: numbers in, budgets out.

    What it raises costs no answer: requests that it fails for go on undrafted.

    Attributes:
        weighs_costs: whether it chooses sizes by what they cost, so that nobody else need do so beforehand.
        takes_all_sizes: whether it drafts whatever a drafter can, pay or not, so that nobody should choose beforehand.
        rests: steps behind the next one in which it would decide the same, as long as the same requests run and, where
            that is to draft nothing, drafters find nothing new. The engine neither asks nor tells it anything
            of these.
    """

    weighs_costs: ClassVar[bool] = False
    takes_all_sizes: ClassVar[bool] = False
    rests: int = 0

    def begin(self, times: StepTimes) -> None:  # noqa: B027 - optional
        """An engine takes it on; one controller serves one engine."""

    def expect(self, survival: Mapping[str, Sequence[float]]) -> None:  # noqa: B027 - optional
        """What somebody measured beforehand, such as a plan; what is observed outweighs it soon.

        Args:
            survival: by drafter, the share of steps in which the first 1, 2, ... tokens of a chain are accepted.
        """

    @abstractmethod
    def decide(self, views: Sequence[RequestView]) -> Sequence[Decision]:
        """One decision for each request that may be drafted for; a budget of zero makes its step plain decoding."""

    def undrafted(self, request: int) -> str:
        """Why nothing was drafted for a request that ends now, by its id, in words."""
        return "no drafter proposed anything"

    def observe(self, record: StepRecord) -> None:  # noqa: B027 - optional
        """A step is over, whether anything was drafted in it or not."""


class FixedBudget(Controller):
    """Always the first drafter, with the same budget or its own limits.

    Args:
        budget: None takes the drafter's limits.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        drafters = (next(iter(view.limits.items())) for view in views)
        return [Decision(name, limits if self._budget is None else self._budget) for name, limits in drafters]
