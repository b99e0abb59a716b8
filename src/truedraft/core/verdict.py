"""Verdicts: a rule's decision about a proposal, and the divergence of a lossy rule from the target. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum

from truedraft.core.sums import summed


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence of emitted tokens' distributions, each given the text before it, from the target's p at their places.

    Of one token, or the sums over all tokens of a lossy rule, the prefill's token included.

    Attributes:
        total_variation: half the L1 distance of the two distributions, a fraction.
        kl: KL(emitted distribution || p), in nats.
        total_variation_greedy: total variation of greedy decoding, with its one-hot distribution: 1 - max p.
        kl_greedy: KL of greedy decoding: -log max p, in nats.
    """

    tokens: int = 0
    total_variation: float = 0.0
    kl: float = 0.0
    total_variation_greedy: float = 0.0
    kl_greedy: float = 0.0

    @classmethod
    def of_token(cls, total_variation: float, kl: float, largest_p: float) -> Divergence:
        """Of one token, from the two measures and max p; rounding below 0 counts as 0."""
        return cls(1, max(total_variation, 0.0), max(kl, 0.0), *_of_a_point(largest_p))

    @classmethod
    def of_choice(cls, p_x: float, largest_p: float) -> Divergence:
        """Of a deterministic choice: a one-hot distribution at a token of probability `p_x`, above 0."""
        return cls(1, *_of_a_point(p_x), *_of_a_point(largest_p))

    @classmethod
    def of(cls, tokens: Collection[Divergence]) -> Divergence:
        measures = cls.__slots__[1:]
        return cls(len(tokens), *(math.fsum(getattr(each, name) for each in tokens) for name in measures))

    __add__ = summed


def _of_a_point(p_x: float) -> tuple[float, float]:
    return max(1.0 - p_x, 0.0), max(-math.log(p_x), 0.0)


class Origin(Enum):
    """How an emitted token was obtained."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one proposal: the accepted path, then one more token from the target.

    Attributes:
        path: accepted nodes, from the root's child down.
        tokens: emitted: the path's tokens and the final token. The final one is missing where the target has no
            distribution.
        final: RECOVERED when draws were rejected at the end of the path, BONUS when there were none to judge.
        divergence: of a lossy rule, one for each of `tokens`; None of a lossless one. It is a measurement, not a part
            of the decision, so verdicts that differ only in it are equal.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    final: Origin
    divergence: tuple[Divergence, ...] | None = field(default=None, compare=False)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return ((Origin.ACCEPTED,) * len(self.path) + (self.final,))[: len(self.tokens)]

    def within(self, nodes: Collection[int]) -> Verdict:
        """The verdict up to its first token outside some nodes, which is then the final one.

        Worked example: of the path (0, 2, 5) within the nodes 0 and 5 the path (0,) is left, and two tokens.
        """
        place = next((place for place, node in enumerate(self.path) if node not in nodes), None)
        return self if place is None else replace(self.cut(place + 1), path=self.path[:place], final=Origin.BONUS)

    def cut(self, tokens: int) -> Verdict:
        """The verdict up to its first `tokens` tokens, where the target has no distribution for the next one."""
        divergence = None if self.divergence is None else self.divergence[:tokens]
        return Verdict(self.path[:tokens], self.tokens[:tokens], self.final, divergence)
