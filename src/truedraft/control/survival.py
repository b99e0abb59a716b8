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
LEAST_GAIN = 0.005
"""Nodes that bring less are not looked at."""
_WEIGHTS = (3.0, 12.0, 48.0)  # verdicts that what is known of all requests may be worth for one of them
_RATE = 0.05  # of learning odds
_FORGETS = 400.0  # steps without verdicts after which they count 1 / e as much for what may be hoped


class Gains(ABC):
    """Estimated gains of one drafter's nodes, in the order in which a budget takes them.

    Args:
        prior: what is expected before anything is observed.
        weight: verdicts that the prior is worth.
        memory: verdicts after which one counts 1 / e as much.
        others: estimates to which these are drawn, in place of the prior; they also know how strongly.
    """

    def __init__(self, prior: Sequence[float], weight: float, memory: float, others: Self | None = None) -> None:
        self._prior = prior
        self._others = others
        self._own_weight = weight
        self._errors = [0.0] * len(_WEIGHTS)  # of what estimates for one would have foretold, by weight
        self._of_all = _WEIGHTS[0]  # that with the least error
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

    @property
    def first(self) -> float:
        """The first node's gain, without a look at the others."""
        others, weight = self._others, self._weight
        expected = others.first if others is not None else (self._prior[0] if len(self._prior) else UNKNOWN_RATE)
        if not self._tried:
            return expected
        return (weight * expected + self._accepted[0]) / (weight + self._tried[0])

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
        # So is what became of one request long ago, for which others stand; all of them together are not, or whatever
        # nobody tries would seem worth drafting after a while.
        keep = self._keep if self._others is None else self._keep * self._fresh(step)
        self._tried = [keep * each for each in self._tried]
        self._accepted = [keep * each for each in self._accepted]
        for place in range(tried):
            self._tried[place] += 1.0
        for place in accepted:
            self._accepted[place] += 1.0
        self._step = step
        self._known_to = 0

    def outlook(self, step: int) -> tuple[float, float]:
        """The first node's gain at a step, a fraction, and its standard error.

        Verdicts fade with the steps since the last one, toward what was expected before there were any: what was of no
        use long ago may have become another since.
        """
        fresh = self._fresh(step)
        tried, accepted = (fresh * self._tried[0], fresh * self._accepted[0]) if self._tried else (0.0, 0.0)
        weight, others = self._own_weight, self._others
        if others is not None:
            expected, _ = others.outlook(step)
            weight += (self._weight - weight) * others._fresh(step)
        else:
            expected = self._prior[0] if len(self._prior) else UNKNOWN_RATE
        known = weight + tried
        rate = (weight * expected + accepted) / known
        # A rate of 0 or 1 is doubted as if one more verdict had said otherwise.
        return rate, math.sqrt(max(rate * (1.0 - rate), 0.5 / (known + 1.0)) / known)

    def beyond(self, nodes: int, count: int, step: int) -> tuple[float, float]:
        """The mean gain of the places from `nodes` to `count` at a step, a fraction, and its standard error."""
        pool = self if self._others is None else self._others
        fresh, prior = pool._fresh(step), pool._estimated(count)[nodes:]
        tried = fresh * sum(pool._tried[nodes:count])
        accepted = fresh * sum(pool._accepted[nodes:count])
        expected = sum(prior) / len(prior) if prior else 0.0
        known = pool._own_weight + tried
        rate = (pool._own_weight * expected + accepted) / known
        return rate, math.sqrt(max(rate * (1.0 - rate), 0.5 / (known + 1.0)) / known)

    def _fresh(self, step: int) -> float:
        """How much verdicts count at a step."""
        return math.exp((self._step - step) / _FORGETS)

    def of_one(self, memory: float) -> Self:
        """Estimates for one request, which start from these and follow them where it has no verdicts of its own."""
        return type(self)((), _WEIGHTS[0], memory, self)

    @property
    def _weight(self) -> float:
        """Verdicts that the prior is worth, or the others are: as many as foretold best how requests fare."""
        return self._own_weight if self._others is None else self._others._of_all

    def judge(self, one: Self, share: DraftShare) -> None:
        """Take note what estimates for a request would have foretold of a proposal's first node, were they drawn here.

        Where requests are alike what one of them adds is noise, and where they are not it is all that counts.

        Worked example: of all requests half are accepted, of this one 3 of 3 were. With a weight of 3 that is 0.75,
        with one of 12 it is 0.6 and with one of 48 it is 0.53; if the next one is rejected the last is least wrong.
        """
        tried, accepted = self._verdicts(share)
        if not tried:
            return
        came, rate = float(0 in accepted), self.first
        own_tried, own_accepted = (one._tried[0], one._accepted[0]) if one._tried else (0.0, 0.0)
        for number, weight in enumerate(_WEIGHTS):
            foretold = (weight * rate + own_accepted) / (weight + own_tried)
            self._errors[number] = self._keep * self._errors[number] + (foretold - came) ** 2
        self._of_all = _WEIGHTS[self._errors.index(min(self._errors))]


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
        weight = measured_sum = expected_sum = self._weight
        found = []
        for before, tried, accepted in zip(expected, self._tried, self._accepted, strict=False):
            likely = min(before * measured_sum / expected_sum, 1.0)
            found.append((weight * likely + accepted) / (weight + tried))
            measured_sum += accepted
            expected_sum += before * tried
        scale = measured_sum / expected_sum
        found += [min(before * scale, 1.0) for before in expected[len(found) :]]
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
    """Of a tree: how often its first, second, ... node was accepted. Beyond the last of the prior nothing is gained.

    Where a node is accepted more often than one before it, both count with their mean: a budget that takes the later
    one takes the other too, and what they bring together stays right.

    Worked example: shares of 0.5, 0.1 and 0.3 are gains of 0.5, 0.2 and 0.2.
    """

    def _estimated(self, count: int) -> list[float]:
        prior = self._prior[:count] if self._others is None else self._others.gains(count)
        tried = len(self._tried)
        scale = self._scale(prior[:tried])
        found = [
            (self._weight * before + self._accepted[place]) / (self._weight + self._tried[place])
            if place < tried
            else min(before * scale, 1.0)
            for place, before in enumerate(prior)
        ]
        return _falling(found)

    def _scale(self, prior: Sequence[float]) -> float:
        """Measured over expected acceptance of the nodes that were tried; what was not is expected to bring as much."""
        expected = sum(before * tried for before, tried in zip(prior, self._tried, strict=False))
        measured = sum(self._accepted[: len(prior)])
        return (self._weight + measured) / (self._weight + expected)

    def _verdicts(self, share: DraftShare) -> tuple[int, Collection[int]]:
        return share.nodes, share.path


def _falling(gains: Sequence[float]) -> list[float]:
    """The nearest gains that rise nowhere: means of runs, with the same sums (pool adjacent violators)."""
    runs: list[tuple[float, int]] = []
    for gain in gains:
        total, count = gain, 1
        while runs and runs[-1][0] * count < total * runs[-1][1]:
            before, places = runs.pop()
            total, count = total + before, count + places
        runs.append((total, count))
    return [total / count for total, count in runs for _ in range(count)]


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
