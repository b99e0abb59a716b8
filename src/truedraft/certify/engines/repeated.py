"""The same few prompts asked many times: what follows each beginning is counted, and bets are placed on the counts.

At a beginning that came n times, (counts + c p) / (n + c) is what the next token is expected to follow if the engine
has a distribution of its own there: a Dirichlet prior around p with c tokens' worth of trust. Whatever an engine does
to the joint distribution of the first tokens shows at some beginning, also where it is no known fault. The bets are the
same likelihood ratios as those on alternatives, with the same allowance for rounding.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import torch
from torch import Tensor

from truedraft.certify.e_process import log_mean
from truedraft.certify.engines.answer_probs import AnswerProbs

_TRUST = (15.0, 60.0, 250.0)
_SAME = (0.1, 0.4)
_FLOOR = 1e-4
_SUMMING = 1e-6


class Repeated:
    """Bets on counts behind equal beginnings, and on a token that the last answer had at the same place.

    The latter is what answers have in common that share their noise.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._last: dict[tuple[int, ...], int] = {}
        self._logs = torch.zeros(len(_TRUST) + len(_SAME), dtype=torch.float64)

    def add(self, answer: AnswerProbs) -> None:
        """Go on with an answer."""
        for place, token in enumerate(answer.tokens):
            beginning = (*answer.question.prompt, -1, *answer.tokens[:place])
            if bool(answer.gain[place].isfinite()) and not bool(answer.doubtful[place, token]):
                self._logs += self._of_counts(beginning, answer, place)
                self._last[beginning] = token
                self._counts[beginning][token] += 1

    def _of_counts(self, beginning: tuple[int, ...], answer: AnswerProbs, place: int) -> Tensor:
        """The steps of all bets at one token, of those that are not doubtful; they share the mass that p has there."""
        counts, p, token = self._counts[beginning], answer.probs[place], answer.tokens[place]
        total, gain = sum(counts.values()), float(answer.gain[place])
        steps = torch.zeros(len(_TRUST) + len(_SAME), dtype=torch.float64)
        if not total:
            return steps
        mass = float(p[~answer.doubtful[place]].sum())
        own = float(p[token]) or _FLOOR
        seen = torch.tensor(list(counts))
        shares = torch.tensor([mass * counts[one] / total for one in counts], dtype=torch.float64)
        distance = float((shares - p[seen]).clamp_min(0.0).sum())
        share = mass * counts[token] / total
        for number, trust in enumerate(_TRUST):
            steps[number] = _step(total / (total + trust), share / own, distance, gain)
        last = self._last[beginning]
        for number, weight in enumerate(_SAME, len(_TRUST)):
            steps[number] = _step(weight, mass * float(token == last) / own, mass - float(p[last]), gain)
        return steps

    @property
    def log_evidence(self) -> float:
        """Logarithm of the mean e-value so far."""
        return log_mean(self._logs)

    @property
    def log_shared(self) -> float:
        """The same of the bets that answers are alike."""
        return log_mean(self._logs[len(_TRUST) :])


def _step(weight: float, ratio: float, distance: float, gain: float) -> float:
    """One bet: the logarithm of the likelihood ratio, less what rounding may give it."""
    return math.log1p(weight * (ratio - 1.0)) - math.log1p(weight * gain * distance + _SUMMING)
