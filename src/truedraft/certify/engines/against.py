"""Two engines compared without anybody's weights: do they answer alike?

Pairs of answers to one prompt, one of each engine. If both draw from the same distribution, the two answers of a pair
may as well have come the other way round. So whoever guesses which is whose, from the pairs before, gains nothing on
average: 2 times the probability that was given to the right order is an e-value of a pair, and the product over pairs
an e-process, whatever the distributions are. It is assumed that each engine draws its answers independently of each
other: two that share their noise among their own answers in the same way may seem apart. The guess is made from counts
behind equal beginnings.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

_TRUST = (1.0, 4.0, 16.0, 64.0)
_BEGINNING, _ANYWHERE = 0, 1


class TwoSamples:
    """Guesses which answer is whose.

    Attributes:
        pairs: so far.
        different: pairs whose answers differ.
        most: the largest logarithm of the evidence at any time.
    """

    def __init__(self) -> None:
        self._counts: tuple[dict[tuple[int, ...], Counter[int]], ...] = (defaultdict(Counter), defaultdict(Counter))
        self._logs = torch.zeros(2 * len(_TRUST), dtype=torch.float64)
        self.pairs = self.different = 0
        self.most = 0.0

    def add(self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> None:
        """Guess a pair, then learn from it.

        Args:
            prompt: of both.
            one: the first engine's answer.
            other: the second's.
        """
        self.pairs += 1
        if list(one) != list(other):
            self.different += 1
            for row, trust in enumerate(_TRUST):
                for kind in (_BEGINNING, _ANYWHERE):
                    odds = self._odds(prompt, one, trust, kind) - self._odds(prompt, other, trust, kind)
                    # log(2 / (1 + exp(-odds))), without overflow
                    self._logs[2 * row + kind] += math.log(2.0) - math.log1p(math.exp(-abs(odds))) + min(0.0, odds)
            self.most = max(self.most, float(torch.logsumexp(self._logs, dim=0)) - math.log(len(self._logs)))
        for number, answer in enumerate((one, other)):
            for kind in (_BEGINNING, _ANYWHERE):
                for place, token in enumerate(answer):
                    self._counts[number][_node(prompt, answer[:place], kind)][token] += 1

    def _odds(self, prompt: Sequence[int], answer: Sequence[int], trust: float, kind: int) -> float:
        """How much likelier an answer is from the first engine than from the second: a logarithm."""
        found = 0.0
        for place, token in enumerate(answer):
            node = _node(prompt, answer[:place], kind)
            first, second = (counts[node] for counts in self._counts)
            n, m = sum(first.values()), sum(second.values())
            if not n + m:
                break
            both = (first[token] + second[token] + 0.5) / (n + m + 1.0)
            found += math.log((first[token] + trust * both) / (n + trust))
            found -= math.log((second[token] + trust * both) / (m + trust))
        return found

    @property
    def log10(self) -> float:
        """The most that the mean e-value ever came to, to the base ten."""
        return self.most / math.log(10.0)


def _node(prompt: Sequence[int], before: Sequence[int], kind: int) -> tuple[int, ...]:
    """What a token stands behind: the whole text, or its last token wherever that stands."""
    if kind == _BEGINNING:
        return (*prompt, -1, *before)
    return (before[-1] if before else prompt[-1],)
