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
    """The work of a learner, over all heads and tenants.

    Attributes:
        promotions: how often a new head replaced the served one.
        rollbacks: how often the previous head was restored.
        trials: heads that were compared with the served one.
        version: of the served head, the highest of all.
        time_share: processor time spent on learning, as a share of the elapsed time.
        tokens_per_call_before: measured by replay, of the head that the last promotion replaced; None before any.
        tokens_per_call_after: of its replacement, on the same answers.
        failures: heads that no longer learn because something failed or the learner thread ended, and served versions
            that could not be saved in their folder; see the log.
    """

    promotions: int
    rollbacks: int
    trials: int
    version: int
    time_share: float
    answers_bytes: int
    tokens_per_call_before: float | None
    tokens_per_call_after: float | None
    failures: int


class EngineLearner(Protocol):
    """Trains drafters while an engine runs."""

    @property
    def status(self) -> LearnerStatus:
        """Its work so far."""

    def begin(self, engine: Engine) -> tuple[Drafter, Drafter]:
        """Called while an engine is made, when only its target, drafter and rule have been checked.

        Returns:
            The drafter to use from now on, and the watcher that observes every step.

        Raises:
            CompositionError: no drafter can learn.
        """

    def close(self) -> None:
        """Stop learning."""

    def changes(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """Called before each step: names of drafters with new weights, each with the function that sets them."""
