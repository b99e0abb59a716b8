"""The contract of a controller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from truedraft.core.budget import Budget
from truedraft.core.counters import Counters


@dataclass(frozen=True, slots=True)
class Observation:
    """What a controller may look at before a step.

    Attributes:
        limits: the drafter's own upper limits.
        requests: requests in this step.
        counters: counts of the request so far.
    """

    limits: Budget
    requests: int
    counters: Counters


class Controller(ABC):
    """Decides how much is drafted for a request in the next step, or nothing at all."""

    @abstractmethod
    def decide(self, observation: Observation) -> Budget:
        """The budget of the next step; `NO_DRAFT` makes it plain decoding."""

    def observe(self, counters: Counters, draft_s: float, target_s: float) -> None:  # noqa: B027 - optional
        """A step is over: what it counted, and the seconds that drafting and the target took."""
