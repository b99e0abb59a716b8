"""Lenience: accept drafted tokens more often than losslessness allows, within a bound. Lossy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from truedraft.core.noise import Noise
from truedraft.core.proposals import Proposal
from truedraft.core.verdicts import Verdict
from truedraft.errors import OptionError
from truedraft.verification.divergence import lenient_divergence
from truedraft.verification.rule import Rule
from truedraft.verification.speculative import SpeculativeSampling
from truedraft.verification.threshold import ThresholdAcceptance


class LenientSampling(SpeculativeSampling):
    """Speculative sampling that accepts x with probability min(1, p(x) / (l q(x))).

    Leviathan et al. 2211.17192, appendix on lenience. All else is speculative sampling: a rejection goes on with
    norm(max(0, p - q)). So no token is emitted with more than p(x) / l, over any number of draws at a node, drawn in
    any way; a deterministic candidate is accepted with min(1, p(x) / l). At l = 1 it is speculative sampling, and
    emits the target's law.

    Args:
        lenience: l, above 0 and at most 1; the smaller, the more is accepted.

    Raises:
        OptionError: a lenience out of range.
    """

    lossless: ClassVar[bool] = False

    def __init__(self, lenience: float) -> None:
        _check(lenience)
        self.lenience = lenience
        self._greedy_form = LenientArgmax(lenience)

    @property
    def spec(self) -> str:
        """The words that make this rule."""
        return f"{self.name},lenience={self.lenience:g}"

    @property
    def greedy_form(self) -> Rule:
        """At temperature 0: accept p(x) >= l max p, p at temperature 1."""
        return self._greedy_form

    def accept_probability(self, p_x: float, q_x: float) -> float:
        """Probability that a token drawn with probability `q_x` stays where the target gives it `p_x`."""
        if p_x <= 0.0:
            return 0.0
        return 1.0 if p_x >= self.lenience * q_x else p_x / (self.lenience * q_x)

    def verify(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        """Judge a batch of proposals, and measure each token's divergence; see `Rule.verify`."""
        verdicts = super().verify(proposals, laws, noise)
        measured = lenient_divergence(self.lenience, proposals, laws, noise, [verdict.path for verdict in verdicts])
        return [dataclasses.replace(verdict, divergence=each) for verdict, each in zip(verdicts, measured, strict=True)]


class LenientArgmax(ThresholdAcceptance):
    """Lenience at temperature 0: a token x stays where p(x) >= l max p, p at temperature 1.

    Args:
        lenience: l, above 0 and at most 1.

    Raises:
        OptionError: a lenience out of range.
    """

    name: ClassVar[str] = SpeculativeSampling.name

    def __init__(self, lenience: float) -> None:
        _check(lenience)
        self.lenience = lenience

    @property
    def spec(self) -> str:
        """The words that make this rule."""
        return f"{self.name},lenience={self.lenience:g}"

    def thresholds(self, laws: Tensor) -> Tensor:
        """The largest probability of each row; the factor l comes with the comparison, in float64."""
        return laws.amax(dim=-1)

    def stays(self, p_x: float, threshold: float) -> bool:
        """At least l times the largest probability."""
        return p_x >= self.lenience * threshold


def _check(lenience: float) -> None:
    if not 0.0 < lenience <= 1.0:
        raise OptionError(f"lenience must be above 0 and at most 1, got {lenience:g}; 1 is lossless")
