"""Verdicts: what a rule decided about a proposal."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from truedraft.core.divergence import TokenDivergence


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
        divergence: of a lossy rule, for each of `tokens`, how far its law was from the target's; None of a lossless
            one. It is a measurement, not a part of the decision, so verdicts that differ in it alone are equal.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    final: Origin
    divergence: tuple[TokenDivergence, ...] | None = field(default=None, compare=False)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Origin of each of `tokens`."""
        return (*(Origin.ACCEPTED for _ in self.path), self.final)[: len(self.tokens)]

    def cut(self, tokens: int) -> Verdict:
        """The verdict up to its first `tokens` tokens, where the target has no law for the next one."""
        divergence = None if self.divergence is None else self.divergence[:tokens]
        return Verdict(self.path[:tokens], self.tokens[:tokens], self.final, divergence)
