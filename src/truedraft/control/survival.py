"""How likely drafted nodes are accepted: running estimates from verdicts, of a request and of all that may be pooled.

A node's gain is the probability that it is accepted, so gains of all drafted nodes add up to the tokens that drafting
brings. Estimates start from a prior and follow what is observed, older verdicts counting less and less. How sure they
are falls with every step in which nothing was tried, so that what stands still is tried again; how much to hope of what
is known little of, upper bounds or draws say.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Self

from truedraft.core.budget import Budget
from truedraft.core.stats import DraftShare

UNKNOWN_RATE = 0.65
"""Acceptance of a drafted token of which nobody knows anything; a few verdicts outweigh it."""
LEAST_GAIN = 0.02
"""Nodes that bring less are not looked at."""
_RATE = 0.05  # of learning odds
_FORGETS = 400.0  # steps without verdicts after which they count 1 / e as much for doubt


class Gains(ABC):
    """Estimated gains of one drafter's nodes, in the order in which a budget takes them.

    Args:
        prior: what is expected before anything is observed.
        weight: verdicts that the prior is worth.
        memory: verdicts after which one counts 1 / e as much.
        others: estimates to which these are drawn, in place of the prior.
    """

    def __init__(self, prior: Sequence[float], weight: float, memory: float, others: Self | None = None) -> None:
        self._prior = prior
        self._others = others
        self._weight = weight
        self._keep = math.exp(-1.0 / memory)
        self._accepted: list[float] = []
        self._tried: list[float] = []
        self._step = 0
        self._known: Sequence[float] = ()  # gains of the first nodes
        self._known_to = 0  # for so many they were worked out

    def gains(self, count: int) -> Sequence[float]:
        """Of the first `count` nodes, each a fraction, rising nowhere; cut before nodes that bring next to nothing."""
        if not self._tried and self._others is not None:
            return self._others.gains(count)
        if count > self._known_to:
            found = self._estimated(count)
            least = next((place for place, gain in enumerate(found) if gain < LEAST_GAIN), len(found))
            self._known, self._known_to = found[: max(least, 1)], count
        return self._known if count >= len(self._known) else self._known[:count]

    @abstractmethod
    def _estimated(self, count: int) -> list[float]:
        """Gains of the first `count` nodes, each a fraction, rising nowhere."""

    @abstractmethod
    def _verdicts(self, share: DraftShare) -> tuple[int, Collection[int]]:
        """How many places, from the first, a proposal tried, and which of them were accepted."""

    def learn(self, share: DraftShare, step: int, stopped: bool = False) -> None:
        """What became of a proposal.

        Args:
            share: of the drafter.
            step: number of the step, rising.
            stopped: whether it ended before its budget did, all of it being accepted. What was not drafted brought
                nothing, so it counts as if it had been rejected.
        """
        tried, accepted = self._verdicts(share)
        tried += stopped
        while len(self._tried) < tried:
            self._tried.append(0.0)
            self._accepted.append(0.0)
        # Places that were not tried are forgotten as well: few verdicts from long ago must not keep a budget short.
        self._tried = [self._keep * each for each in self._tried]
        self._accepted = [self._keep * each for each in self._accepted]
        for place in range(tried):
            self._tried[place] += 1.0
        for place in accepted:
            self._accepted[place] += 1.0
        self._step = step
        self._known_to = 0

    def doubt(self, step: int) -> float:
        """Standard error of the first node's gain at a step, a fraction."""
        first = self.gains(1)
        rate = first[0] if first else 0.0
        tried = self._tried[0] * math.exp((self._step - step) / _FORGETS) if self._tried else 0.0
        # A rate of 0 or 1 is doubted as if one more verdict had said otherwise.
        spread = max(rate * (1.0 - rate), 0.5 / (self._weight + tried + 1.0))
        return math.sqrt(spread / (self._weight + tried))

    def of_one(self, weight: float, memory: float) -> Self:
        """Estimates for one request, which start from these and follow them where it has no verdicts of its own."""
        return type(self)((), weight, memory, self)


class ChainGains(Gains):
    """Of a chain: the acceptance rate of each place, given that all before it were accepted.

    The prior has rates too, the last of them for all places that follow. A place is expected to be as much better or
    worse than its prior as the places before it were, so that a chain that is kept short shows what longer ones bring.

    Worked example: rates of 0.8 and 0.5 are gains of 0.8 and 0.4.
    """

    def rates(self, count: int) -> list[float]:
        """Acceptance rates of the first places."""
        prior, others = self._prior, self._others
        if others is not None:
            expected = others.rates(count)
        else:
            expected = [prior[min(place, len(prior) - 1)] for place in range(count)]
        measured_sum = expected_sum = self._weight
        found = []
        for place, before in enumerate(expected):
            tried, accepted = (self._tried[place], self._accepted[place]) if place < len(self._tried) else (0.0, 0.0)
            likely = min(before * measured_sum / expected_sum, 1.0)
            found.append((self._weight * likely + accepted) / (self._weight + tried))
            measured_sum += accepted
            expected_sum += before * tried
        return found

    def _estimated(self, count: int) -> list[float]:
        return list(itertools.accumulate(self.rates(count), operator.mul))

    def _verdicts(self, share: DraftShare) -> tuple[int, Collection[int]]:
        return share.judged, range(len(share.path))


class Odds:
    """How a drafter's own probability of a token tells its chance of being accepted, refitted with every verdict.

    Logistic regression on the logit of that probability, by stochastic gradient.
    """

    def __init__(self) -> None:
        self._odds = (0.0, 1.0)

    @property
    def odds(self) -> tuple[float, float]:
        """For `Budget.odds`."""
        return self._odds

    def learn(self, share: DraftShare) -> None:
        """What became of a chain."""
        for place, probability in enumerate(share.confidence):
            chance = Budget(0, odds=self._odds).chance(probability)
            q = min(max(probability, 0.0025), 0.9975)
            wrong = chance - (place < len(share.path))
            first, slope = self._odds
            logit = math.log(q / (1.0 - q))
            self._odds = first - _RATE * wrong, min(max(slope - _RATE / 4.0 * wrong * logit, 0.1), 2.0)


class TreeGains(Gains):
    """Of a tree: how often its first, second, ... node was accepted. Beyond the last of the prior nothing is gained."""

    def _estimated(self, count: int) -> list[float]:
        prior = self._prior[:count] if self._others is None else self._others.gains(count)
        tried, found = len(self._tried), []
        scale = self._scale(prior[:tried])
        lowest = 1.0
        for place, before in enumerate(prior):
            if place < tried:
                own = (self._weight * before + self._accepted[place]) / (self._weight + self._tried[place])
            else:
                own = min(before * scale, 1.0)
            lowest = min(lowest, own)
            found.append(lowest)
        return found

    def _scale(self, prior: Sequence[float]) -> float:
        """Measured over expected acceptance of the nodes that were tried; what was not is expected to bring as much."""
        expected = sum(before * tried for before, tried in zip(prior, self._tried, strict=False))
        measured = sum(self._accepted[: len(prior)])
        return (self._weight + measured) / (self._weight + expected)

    def _verdicts(self, share: DraftShare) -> tuple[int, Collection[int]]:
        return share.nodes, share.path


class Exploration(ABC):
    """What to hope of an uncertain acceptance rate. Hopes that turn out wrong are paid for out of a bounded credit."""

    @abstractmethod
    def hoped(self, rate: float, doubt: float) -> float:
        """The rate to hope for, from its estimate and standard error, fractions."""


class UpperBound(Exploration):
    """The estimate and so many standard errors: discounted UCB (Garivier and Moulines, arXiv 0805.3415).

    Args:
        width: standard errors.
    """

    def __init__(self, width: float = 1.5) -> None:
        self._width = width

    def hoped(self, rate: float, doubt: float) -> float:
        return min(1.0, rate + self._width * doubt)


class Thompson(Exploration):
    """A draw from a normal distribution about the estimate: discounted Thompson sampling.

    Args:
        seed: of the draws, which share nothing with the noise of requests.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def hoped(self, rate: float, doubt: float) -> float:
        return min(1.0, max(0.0, self._random.gauss(rate, doubt)))
