"""Speculative sampling with one part broken: tests of what must notice plant these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from truedraft.core.proposal import Proposal
from truedraft.verification import BlockVerification, SpeculativeSampling
from truedraft.verification.rule import BatchVerdicts, JudgedRow, Outcome
from truedraft.verification.walk import Number


class AcceptsAlways(SpeculativeSampling):
    def accept_probability(self, p_x: Number, q_x: Number) -> Number:
        return p_x * 0.0 + 1.0


class AcceptsWithoutRatio(SpeculativeSampling):
    """Accepts with p(x) alone, as if every candidate had been chosen and not drawn."""

    def accept_probability(self, p_x: Number, q_x: Number) -> Number:
        return p_x


class DrawsFromTarget(SpeculativeSampling):
    """After a rejection draws from p instead of the residual."""

    def rejected(self, p: Tensor, q: Tensor) -> Tensor:
        return p


class RemovesNothing(SpeculativeSampling):
    """Draws without replacement are judged as if they had been put back."""

    def removed(self, q: Tensor, tokens: Tensor) -> Tensor:
        return q


class JudgesAnotherDist(SpeculativeSampling):
    """Judges against a flatter distribution than the one the token was drawn from, as a drafter's stale logits would
    give."""

    @staticmethod
    def _other(dist: Tensor) -> Tensor:
        flat = dist.sqrt()
        return flat / flat.sum(dim=-1, keepdim=True)

    def accept(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence) -> BatchVerdicts:
        wrong = [replace(p, probs=None if p.probs is None else self._other(p.probs)) for p in proposals]
        return super().accept(wrong, probs, noise)

    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        (row,) = group
        wrong = tuple(replace(d, q=self._other(d.q) if d.dist >= 0 else d.q) for d in row.draws)
        return super().outcomes([JudgedRow(row.p, wrong)])


class PassesByWeight(BlockVerification):
    """Each prefix passes with its weight, not with h."""

    def pass_probability(self, weight: Number, mass: Number) -> Number:
        return weight


def hiding(rule: type[SpeculativeSampling], **wrong: Callable) -> SpeculativeSampling:
    """A rule with wrong parts, whose kernel says what the right rule does."""
    kernel = rule()
    return type("Hides", (rule,), {**wrong, "outcomes": lambda self, group: kernel.outcomes(group)})()
