"""The interface between an engine and a background learner; implemented in `truedraft.training.online`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from truedraft.drafters.base import Drafter
    from truedraft.engine.engine import Engine


@dataclass(frozen=True)
class LearnerStatus:
    """The work of a learner, over all heads and tenants."""

    promotions: int  # how often a new head replaced the served one
    rollbacks: int  # how often the previous head was restored
    trials: int  # heads that were compared with the served one
    version: int  # of the served head, the highest of all
    time_share: float  # processor time spent on learning, as a share of the elapsed time
    answers_bytes: int
    tokens_per_call_before: float | None  # by replay, of the head that the last promotion replaced; None before any
    tokens_per_call_after: float | None  # of its replacement, on the same answers
    failures: int  # heads that no longer learn, and served versions that could not be saved; see the log


class EngineLearner(Protocol):
    """Trains drafters while an engine runs."""

    @property
    def status(self) -> LearnerStatus:
        """Its work so far."""

    def begin(self, engine: Engine) -> tuple[Drafter, Drafter]:
        """Called while an engine is made; returns the drafter to use, and the watcher that observes every step."""

    def close(self) -> None:
        """Stop learning."""

    def changes(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """Called before each step: names of drafters with new weights, each with the function that sets them."""
