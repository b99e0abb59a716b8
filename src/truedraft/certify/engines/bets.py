"""Bets against the hypothesis that an engine's tokens follow the target: products of likelihood ratios.

For an alternative a and a weight w, fixed before the token is seen, (1 - w) p + w a over p is a likelihood ratio. Its
mean is 1 if the token follows p. If it follows a p' whose log-probabilities lie within r of p's, its mean is at most
1 + 2 w sinh(r) TV(a, p): sum (p' - p)(a/p - 1) is largest where p' is e^r p above and e^-r p below, and both sides of
a/p - 1 have the mass TV(a, p) under p. Divided by that, the products are e-processes (Ville): the mean over
alternatives and weights ever reaches 1/a with probability a at most, whenever one stops. Of alternatives the product
is largest, in the long run, for the one nearest to what the engine does: so it names the fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.certify.engines.alternatives import Alternative
from truedraft.certify.engines.law import Law

WEIGHTS = (0.03, 0.1, 0.3, 0.6, 0.9, 0.99)
_FLOOR = 1e-4
"""Probability below which a ratio does not grow: so one token on a filter's edge does not decide alone."""
_FORBIDDEN = 1e-6
"""Mass that a sound engine may have where p has none."""
_SUMMING = 1e-6


@dataclass(frozen=True, slots=True)
class Bet:
    """What came of one alternative.

    Attributes:
        name: of the alternative.
        fault: that it stands for.
        log_evidence: logarithm of its e-value.
        weight: the part of tokens for which it did best.
        mean_tv: mean total variation between p and what that part would make of it.
    """

    name: str
    fault: str
    log_evidence: float
    weight: float
    mean_tv: float


class Bets:
    """Bets on several alternatives over one stream of tokens.

    Args:
        alternatives: at least one.
    """

    def __init__(self, alternatives: Sequence[Alternative]) -> None:
        self._alternatives = list(alternatives)
        self._logs = torch.zeros(len(self._alternatives), len(WEIGHTS), dtype=torch.float64)
        self._far = torch.zeros(len(self._alternatives), dtype=torch.float64)
        self._tokens = 0

    def add(self, law: Law, drafts: Mapping[str, Tensor]) -> Tensor:
        """Go on with the tokens of an answer.

        Args:
            law: of the answer.
            drafts: by name the draft's distributions `[tokens, vocab]`; a row without mass is no draft.

        Returns:
            The logarithm of the mean e-value behind each of these tokens, `[tokens]`.
        """
        tokens = torch.tensor(list(law.tokens))[:, None]
        p = law.probs
        own = p.gather(-1, tokens)[:, 0]
        forbidden = p == 0.0
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        steps = []
        for number, alternative in enumerate(self._alternatives):
            a = alternative.probs(law, drafts)
            distance = 0.5 * (a - p).abs().sum(dim=-1)
            ratio = a.gather(-1, tokens)[:, 0] / own.clamp_min(_FLOOR)
            # What is below the floor, or forbidden, is paid for less than it may come.
            allowed = 2.0 * math.sinh(law.slack) * distance + _FORBIDDEN / _FLOOR * (a * forbidden).sum(dim=-1)
            step = torch.log1p(weights * (ratio - 1.0)[:, None]) - torch.log1p(weights * allowed[:, None] + _SUMMING)
            step[~law.sure] = 0.0
            steps.append(step)
            self._far[number] += float((distance * law.sure).sum())
        self._tokens += int(law.sure.sum())
        reached = self._logs + torch.stack(steps, dim=1).cumsum(dim=0)  # [tokens, alternatives, weights]
        if len(law.tokens):
            self._logs = reached[-1].clone()
        return torch.logsumexp(reached.flatten(1), dim=-1) - math.log(self._logs.numel())

    @property
    def log_evidence(self) -> float:
        """Logarithm of the mean e-value so far."""
        return float(torch.logsumexp(self._logs.flatten(), dim=0)) - math.log(self._logs.numel())

    def results(self) -> list[Bet]:
        """What came of each alternative, the most convincing first."""
        each = torch.logsumexp(self._logs, dim=-1) - math.log(len(WEIGHTS))
        found = []
        for number, alternative in enumerate(self._alternatives):
            weight = WEIGHTS[int(self._logs[number].argmax())]
            far = weight * float(self._far[number]) / max(self._tokens, 1)
            found.append(Bet(alternative.name, alternative.fault, float(each[number]), weight, far))
        return sorted(found, key=lambda bet: -bet.log_evidence)
