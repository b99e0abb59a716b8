"""What an engine asks of what learns beside it; `truedraft.learning` has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from truedraft.drafters.base import Drafter
    from truedraft.engine.engine import Engine


class EngineLearner(Protocol):
    """Trains what drafts while an engine runs."""

    def begin(self, engine: Engine) -> tuple[Drafter, Drafter]:
        """An engine is made, its target, drafter and rule checked and nothing else.

        Returns:
            What drafts from now on, and what is told of every step.

        Raises:
            CompositionError: nothing that drafts can learn.
        """

    def changes(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """Asked before each step: names of drafters whose weights change now, each with what changes them."""
