"""Whether one module brings more than another: bets on the differences of replayed answers.

For differences D_1, D_2, ... in [-1, 1] whose mean, given those before, is 0 or less, the product of (1 + b_i D_i) is a
supermartingale for any bets b_i in [0, 1) that follow from what came before D_i. By Ville's inequality it ever reaches
1/a with probability a at most, however often and whenever one looks (Waudby-Smith and Ramdas, arXiv 2010.09686,
section 4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from torch import nn

from truedraft.training.online.traffic import Answered

_UNIT = 0.1
"""Guesses kept at a place that a difference counts as 1; a larger one counts as no more, so no one answer decides."""
_MOST_BET, _MEMORY = 0.8, 0.95  # and what a difference counts for the next bets, for each that came behind it
OWN = 8  # answers that a candidate itself has to be better on
_numbers = itertools.count()


class Candidate:
    """A module whose replays are kept with the answers, by a number that no other one has.

    Args:
        module: in evaluation mode, in the dtype in which it is served.
        version: its number as one that is served, 0 for the one that all began with.
    """

    def __init__(self, module: nn.Module, version: int = 0) -> None:
        self.module = module
        self.version = version
        self.number = next(_numbers)


def tokens_per_call(candidate: Candidate, answers: Iterable[Answered]) -> float | None:
    """Of the answers that it was replayed on; None where there are none."""
    found = [answer.scores[candidate.number] for answer in answers if candidate.number in answer.scores]
    calls = sum(each.calls for each in found)
    return sum(each.tokens for each in found) / calls if calls else None


def tokens_a_place(candidate: Candidate, answers: Iterable[Answered]) -> float:
    """Tokens for a call, by calls that begin at every place of answers that it was replayed on; 1 without any."""
    found = [answer.scores[candidate.number] for answer in answers]
    return 1.0 + sum(each.kept for each in found) / max(sum(each.tokens for each in found), 1)


class GainTest:
    """Evidence that differences are above 0 on average.

    The bet is the mean of the differences before it by the mean of their squares, which makes the product grow about as
    fast as any (2010.09686, appendix B.3); so next to nothing is at stake where there is no gain.

    Attributes:
        now: the logarithm of the evidence.
        most: the largest that it ever was.
    """

    def __init__(self) -> None:
        self.now = self.most = 0.0
        self._sum, self._squares = 0.1, 1.0  # so the first bet is 0.1

    def see(self, difference: float) -> None:
        """Bet on one more, cut to [-1, 1]."""
        cut = max(-1.0, min(1.0, difference))
        bet = max(0.0, min(self._sum / self._squares, _MOST_BET))
        self.now += math.log1p(bet * cut)
        self.most = max(self.most, self.now)
        self._sum = _MEMORY * self._sum + cut
        self._squares = _MEMORY * self._squares + cut * cut

    def sure(self, level: float) -> bool:
        """Whether it ever was enough for an error of probability `level`."""
        return self.most >= -math.log(level)


class Comparison:
    """A module and one that may take its place, held to each other on answers as they come, each answer once.

    A later candidate may go on where one was: which one plays is known before an answer is looked at, so evidence
    that there is a gain is evidence that some of them had one.

    Args:
        new: is asked whether it brings more.
        old: than this one.
        level: probability of saying so where none does.
        seen: numbers of the answers that do not count; those that are seen are added.

    Attributes:
        new: that plays now.
        old: as given.
        count: answers that were seen.
        own: answers that `new` was seen on.
    """

    def __init__(self, new: Candidate, old: Candidate, level: float, seen: set[int]) -> None:
        self.old = old
        self.count = 0
        self._level = level
        self._gain, self._loss = GainTest(), GainTest()
        self._seen = seen
        self.renew(new)

    def renew(self, new: Candidate) -> None:
        """Let another one play from now on."""
        self.new, self.own, self._own_gain = new, 0, 0.0

    def waiting(self, answers: Iterable[Answered]) -> list[Answered]:
        """Those that were not seen yet."""
        return [each for each in answers if each.number not in self._seen]

    def see(self, answer: Answered) -> None:
        """Take an answer that both were replayed on."""
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
        """Whether there surely is one that brings more, and the one that plays does so far."""
        return self._gain.sure(self._level) and self.own >= OWN and self._own_gain > 0.0

    @property
    def loses(self) -> bool:
        """Whether they surely bring less."""
        return self._loss.sure(self._level)
