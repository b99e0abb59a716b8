"""What an engine asks of what learns beside it; `truedraft.training.online` has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from truedraft.drafters.base import Drafter
    from truedraft.engine.engine import Engine


@dataclass(frozen=True)
class LearnerStatus:
    """What a learner did, over all heads and tenants.

    Attributes:
        promotions: how often a head took the place of the one that was served.
        rollbacks: how often it gave it back.
        trials: heads that were held to the one that was served.
        version: of the head that is served, the highest of all.
        time_share: processor time that was spent on it, of the time that passed.
        answers_bytes: of memory that answers take.
        tokens_per_call_before: by replay, of the head that the last promotion replaced; None where there was none.
        tokens_per_call_after: of the one that replaced it, on the same answers.
        failures: heads that learn no more, for something failed or the thread that learns ended, and versions that are
            served and could not be noted in their folder; the log says what.
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
    """Trains what drafts while an engine runs."""

    @property
    def status(self) -> LearnerStatus:
        """What it did so far."""

    def begin(self, engine: Engine) -> tuple[Drafter, Drafter]:
        """An engine is made, its target, drafter and rule checked and nothing else.

        Returns:
            What drafts from now on, and what is told of every step.

        Raises:
            CompositionError: nothing that drafts can learn.
        """

    def close(self) -> None:
        """Learn no more."""

    def changes(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """Asked before each step: names of drafters whose weights change now, each with what changes them."""
