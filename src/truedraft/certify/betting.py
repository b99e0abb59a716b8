"""Tests that may be looked at at any time: bets against the target's law, token by token.

For sets S_1, S_2, ... of tokens, each fixed before its token is seen, let X_i = 1 if token i lies in S_i, and p_i what
the target's law gives to S_i after the text before it. If the tokens follow that law, then for every l

    product over i of exp(l X_i) / (1 + p_i (exp(l) - 1))

is a martingale that starts at 1: the wealth of somebody who bets on the set (l > 0) or against it (l < 0) at fair odds.
So is the mean over several l. By Ville's inequality it ever reaches 1/a with probability a at most, whatever the laws,
the number of tokens and the moment at which one stops: 1 / wealth is a p-value, without any approximation. Where
token i may be off by rounding, |true p_i - p_i| <= e, odds for p_i + e (or p_i - e) keep that true.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_STAKES = tuple(sign * 2.0**power for sign in (1, -1) for power in range(3, -8, -1))
_SUMMING = 2e-5
"""How far a sum of float32 probabilities may be off."""
POWER = 0.99
"""A smallest detectable deviation is found with this probability."""
_ROUNDS = 8
POWER_SIGMAS = 2.3263478740408408  # of the normal distribution, for POWER


@dataclass(frozen=True, slots=True)
class TestResult:
    """What came of one test.

    Attributes:
        name: of the sets.
        tokens: how many were tested.
        expected: sum of the sets' probabilities.
        observed: tokens in their sets.
        variance: sum of p_i (1 - p_i).
        p_value: of "all tokens follow the target's law", for this test alone.
        allowance: how far the law of a token may be off by rounding.
    """

    name: str
    tokens: int
    expected: float
    observed: int
    variance: float
    p_value: float
    allowance: float = 0.0

    @property
    def excess(self) -> float:
        """How much more of a token's law lies in the sets than should, a fraction; negative if less."""
        return (self.observed - self.expected) / self.tokens if self.tokens else 0.0

    def smallest_detectable(self, false_alarm: float) -> float:
        """The excess that this test, done at this level, finds with probability `POWER`, by the normal approximation.

        Args:
            false_alarm: level of this test, for instance the whole probability over the number of tests.
        """
        if not self.tokens:
            return 1.0
        target = math.log(len(_STAKES) / false_alarm)
        needed = min(target / stake + stake * self.variance / 2 for stake in _STAKES if stake > 0)
        excess, variance = 0.0, self.variance
        for _ in range(_ROUNDS):
            excess = (needed + POWER_SIGMAS * math.sqrt(variance)) / self.tokens
            # Moved probabilities vary otherwise: p (1 - p) grows by the excess at most, and never beyond 1/4.
            variance = max(self.variance, min(self.tokens / 4, self.variance + excess * self.tokens))
        return min(1.0, excess + self.allowance)

    def least_excess(self, sigmas: float) -> float:
        """How far the law is off at the least: the excess, so many standard deviations nearer to 0."""
        if not self.tokens:
            return 0.0
        # Of tokens that the law hardly gives, those that came vary more than those that should have.
        spread = math.sqrt(max(self.variance, self.observed))
        return max(0.0, abs(self.excess) - sigmas * spread / self.tokens)


class Bets:
    """Several tests over one stream of tokens.

    Args:
        names: of the tests.
        allowance: e, how far the law of a token may be off by rounding (total variation). Where it is a mean over
            tokens and no bound for each, the p-values hold to first order in the stakes.
    """

    def __init__(self, names: Sequence[str], allowance: float = 0.0) -> None:
        self._names = list(names)
        self._allowance = allowance + _SUMMING
        self._stakes = torch.tensor(_STAKES, dtype=torch.float64)
        self._wealth = torch.zeros(len(_STAKES), len(self._names), dtype=torch.float64)  # logs
        self._sums = torch.zeros(4, len(self._names), dtype=torch.float64)  # tokens, expected, observed, variance

    def add(self, chances: Tensor, hits: Tensor) -> None:
        """Bet on more tokens.

        Args:
            chances: `[tokens, tests]`, float64: what the target's law gives to each token's set; negative where a test
                is not about this token.
            hits: `[tokens, tests]`, bool: whether the token lies in the set.
        """
        about = chances >= 0.0
        p, x = chances.clamp(0.0, 1.0), (hits & about).double()
        for row, stake in enumerate(_STAKES):
            odds = (p + math.copysign(self._allowance, stake)).clamp_(0.0, 1.0)
            gain = stake * x - torch.log1p(odds * math.expm1(stake))
            self._wealth[row] += (gain * about).sum(dim=0)
        p = p * about
        self._sums += torch.stack([about.double().sum(0), p.sum(0), x.sum(0), (p * (1.0 - p)).sum(0)])

    def results(self) -> list[TestResult]:
        """What came of each test so far."""
        logs = torch.logsumexp(self._wealth, dim=0) - math.log(len(_STAKES))
        found = []
        for name, log, (tokens, expected, observed, variance) in zip(
            self._names, logs.tolist(), self._sums.T.tolist(), strict=True
        ):
            p_value = math.exp(-max(log, 0.0))
            found.append(TestResult(name, int(tokens), expected, int(observed), variance, p_value, self._allowance))
        return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): rejecting those below a keeps the probability of any false alarm below a.

    Worked example: of 0.01, 0.04 and 0.02 the smallest is tripled, the next doubled: 0.03, 0.04 and 0.04.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    reached = 0.0
    for rank, i in enumerate(order):
        reached = max(reached, min(1.0, p_values[i] * (len(order) - rank)))
        adjusted[i] = reached
    return adjusted
