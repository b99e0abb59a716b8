"""Whether one module gives more tokens per call than another: bets on the differences of replayed answers.

For differences D_1, D_2, ... in [-1, 1] with a conditional mean of 0 or less, given those before, the product of (1 +
b_i D_i) is a supermartingale for any bets b_i in [0, 1) that depend only on what came before D_i. By Ville's inequality
it ever reaches 1/a with probability a at most, however often and whenever one looks (Waudby-Smith and Ramdas, arXiv
2010.09686, section 4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from torch import nn

from truedraft.training.online.traffic import Answered

_UNIT = 0.1
"""Kept guesses per place that count as a difference of 1; larger ones count as 1, so that no single answer decides."""
_MOST_BET, _MEMORY = 0.8, 0.95  # largest bet; decay of a difference's weight in later bets
OWN = 8  # least answers on which a candidate itself has to be better
_numbers = itertools.count()


class Candidate:
    """A module in evaluation mode and its served dtype, with replays that are stored with the answers under a unique
    number.

    `version` is its number as a served module, 0 for the original.
    """

    def __init__(self, module: nn.Module, version: int = 0) -> None:
        self.module = module
        self.version = version
        self.number = next(_numbers)


def tokens_per_call(candidate: Candidate, answers: Iterable[Answered]) -> float | None:
    """Mean over the answers that it was replayed on; None where there are none."""
    found = [answer.scores[candidate.number] for answer in answers if candidate.number in answer.scores]
    calls = sum(each.calls for each in found)
    return sum(each.tokens for each in found) / calls if calls else None


def tokens_a_place(candidate: Candidate, answers: Iterable[Answered]) -> float:
    """Tokens per call, for calls that begin at every place of answers that it was replayed on; 1 without any."""
    found = [answer.scores[candidate.number] for answer in answers]
    return 1.0 + sum(each.kept for each in found) / max(sum(each.tokens for each in found), 1)


class GainTest:
    """Evidence that differences are above 0 on average; `now` and `most` are its logarithm and the maximum of that so
    far.

    The bet is the mean of the earlier differences over the mean of their squares, with which the product grows nearly
    as fast as possible (2010.09686, appendix B.3); without a gain the bets are almost 0.
    """

    def __init__(self) -> None:
        self.now = self.most = 0.0
        self._sum, self._squares = 0.1, 1.0  # so the first bet is 0.1

    def see(self, difference: float) -> None:
        """Bet on one more difference, cut to [-1, 1]."""
        cut = max(-1.0, min(1.0, difference))
        bet = max(0.0, min(self._sum / self._squares, _MOST_BET))
        self.now += math.log1p(bet * cut)
        self.most = max(self.most, self.now)
        self._sum = _MEMORY * self._sum + cut
        self._squares = _MEMORY * self._squares + cut * cut

    def sure(self, level: float) -> bool:
        """Whether the evidence was ever enough for an error of probability `level`."""
        return self.most >= -math.log(level)


class Comparison:
    """Compares a served module `old` and a candidate `new` on answers as they come, each answer once.

    A later candidate may continue an earlier one's comparison: the candidate is chosen before an answer is read, so
    evidence of a gain is evidence that some of them had one.

    Args:
        level: probability of a false gain where no candidate has one.
        seen: numbers of the answers that do not count; new ones are added.

    Attributes:
        count: answers compared so far.
        own: answers compared with the current `new`.
    """

    def __init__(self, new: Candidate, old: Candidate, level: float, seen: set[int]) -> None:
        self.old = old
        self.count = 0
        self._level = level
        self._gain, self._loss = GainTest(), GainTest()
        self._seen = seen
        self.renew(new)

    def renew(self, new: Candidate) -> None:
        self.new, self.own, self._own_gain = new, 0, 0.0

    def waiting(self, answers: Iterable[Answered]) -> list[Answered]:
        """The answers that were not compared yet."""
        return [each for each in answers if each.number not in self._seen]

    def see(self, answer: Answered) -> None:
        self._seen.add(answer.number)
        new, old = answer.scores[self.new.number], answer.scores[self.old.number]
        if new.tokens:
            difference = (new.kept - old.kept) / new.tokens / _UNIT
            self._gain.see(difference)
            self._loss.see(-difference)
            self.count += 1
            self.own += 1
            self._own_gain += difference

    @property
    def gains(self) -> bool:
        """Whether some candidate is surely better, and the current one is better so far."""
        return self._gain.sure(self._level) and self.own >= OWN and self._own_gain > 0.0

    @property
    def loses(self) -> bool:
        """Whether they are surely worse."""
        return self._loss.sure(self._level)
