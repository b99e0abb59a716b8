"""Whether one head brings more than another: bets on the differences of replayed answers.

For differences D_1, D_2, ... in [-1, 1] whose mean, given those before, is 0 or less, the product of (1 + b D_i) is a
supermartingale for every b in (0, 1), and so is the mean of several. By Ville's inequality it ever reaches 1/a with
probability a at most, however often and whenever one looks (Waudby-Smith and Ramdas, arXiv 2010.09686, section 4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from truedraft.certify.e_process import EProcess
from truedraft.heads import VectorHead
from truedraft.learning.traffic import Answered

_BETS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
_UNIT = 0.25
"""Guesses kept at a place that a difference counts as 1; a larger one counts as no more, so no one answer decides."""
ENOUGH, _MOST = 12, 48  # answers that say a little, and all
_numbers = itertools.count()


class Candidate:
    """A head whose replays are kept with the answers, by a number that no other one has.

    Args:
        head: in evaluation mode, in the dtype in which it is served.
        version: its number as one that is served, 0 for the one that all began with.
    """

    def __init__(self, head: VectorHead, version: int = 0) -> None:
        self.head = head
        self.version = version
        self.number = next(_numbers)


def tokens_per_call(candidate: Candidate, answers: Iterable[Answered]) -> float | None:
    """Of the answers that it was replayed on; None where there are none."""
    found = [answer.scores[candidate.number] for answer in answers if candidate.number in answer.scores]
    calls = sum(each.calls for each in found)
    return sum(each.tokens for each in found) / calls if calls else None


class GainTest:
    """Evidence that differences are above 0 on average.

    Attributes:
        count: differences so far.
    """

    def __init__(self) -> None:
        self._logs = {str(bet): 0.0 for bet in _BETS}
        self._evidence = EProcess(**dict.fromkeys(self._logs, 1.0))
        self.count = 0

    def see(self, difference: float) -> None:
        """Bet on one more, cut to [-1, 1]."""
        cut = max(-1.0, min(1.0, difference))
        self.count += 1
        for bet in _BETS:
            self._logs[str(bet)] += math.log1p(bet * cut)
        self._evidence.see(self._logs, self.count)

    @property
    def now(self) -> float:
        """The logarithm of the evidence as it is now."""
        return self._evidence.mean(self._logs)

    def sure(self, level: float) -> bool:
        """Whether it ever was enough for an error of probability `level`."""
        return self._evidence.most >= -math.log(level)


class Comparison:
    """Two heads, held to each other on answers as they come, each answer once.

    Args:
        new: is asked whether it brings more.
        old: than this one.
        level: probability of saying so where it does not.

    Attributes:
        new: as given.
        old: as given.
    """

    def __init__(self, new: Candidate, old: Candidate, level: float) -> None:
        self.new, self.old = new, old
        self._level = level
        self._gain, self._loss = GainTest(), GainTest()
        self._seen: set[int] = set()

    def skip(self, answers: Iterable[Answered]) -> None:
        """These do not count."""
        self._seen.update(each.number for each in answers)

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

    @property
    def count(self) -> int:
        """Answers that were seen."""
        return self._gain.count

    @property
    def gains(self) -> bool:
        """Whether the new one surely brings more."""
        return self._gain.sure(self._level)

    @property
    def hopeless(self) -> bool:
        """Whether the evidence is not on its way to be enough by answer number `_MOST`: a later head is tried then.

        Where one bet fits, it has a share of the stakes at first, and has to make up for the others'.
        """
        shares = math.log(len(_BETS))
        needed = (shares - math.log(self._level)) * min(self.count / _MOST, 1.0) - shares
        return self.count >= ENOUGH and not self.gains and self._gain.now < needed

    @property
    def loses(self) -> bool:
        """Whether it surely brings less."""
        return self._loss.sure(self._level)


def trial_level(level: float, number: int) -> float:
    """Of trial number 1, 2, ... since the last promotion: together they err with probability `level` at most.

    Worked example: 1 / (1 * 2) + 1 / (2 * 3) + 1 / (3 * 4) + ... = 1.
    """
    return level / (number * (number + 1))
