"""Verdicts: what a rule decided about a proposal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Origin(Enum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one proposal: the accepted path, then one more token from the target.

    Attributes:
        path: accepted nodes, from the root's child down.
        tokens: the path's tokens and the final token: what is emitted. The final one is missing where the target has
            no law.
        final: RECOVERED when draws were rejected at the end of the path, BONUS when there were none to judge.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    final: Origin

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Origin of each of `tokens`."""
        return (*(Origin.ACCEPTED for _ in self.path), self.final)[: len(self.tokens)]
