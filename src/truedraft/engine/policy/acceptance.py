"""Acceptance probabilities of drafted nodes: running shares of verdicts, over all requests together and for each.

A node's gain is its probability of acceptance, so the gains of all drafted nodes add up to the expected accepted
tokens. Older verdicts have exponentially less weight. A request's estimates are shrunk towards those of all requests.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence

from truedraft.core.budget import Budget
from truedraft.core.stats import DraftShare
from truedraft.core.theory.cost_curves import isotonic

UNKNOWN_RATE = 0.65
"""Acceptance of a drafted token without any verdict; a few verdicts outweigh it."""
LEAST_GAIN = 0.005
"""Nodes with a smaller gain are not considered."""
_WEIGHT = 4.0  # of the prior, in verdicts
_MEMORY, _OWN_MEMORY = 200.0, 12.0  # verdicts in which a weight decays by 1 / e, for all requests and for one
_FORGETS = 400.0  # steps without verdicts in which weights decay by 1 / e
_WEIGHTS = (4.0, 12.0, 48.0)  # possible weights of the pool in one request's estimates, in verdicts
_APART = 0.2  # standard deviation of rates between requests, until a request has verdicts of its own
_HOPE = 1.5  # standard errors above the estimate: discounted UCB (Garivier and Moulines, arXiv 0805.3415)
_MOST_HOPED = 4  # tokens of a chain
_LEARNING_RATE = 0.05


class Acceptance:
    """Estimated gains of one drafter's nodes, in the order in which a budget takes them.

    The rate of a place in a chain is conditional on acceptance of all places before it; in a tree it is the share of
    steps in which the node is accepted. A place that was seldom tried is expected to differ from its prior by the same
    factor as the others.

    Worked example: rates of 0.8 and 0.5 are gains of 0.8 and 0.4 of a chain, and of 0.8 and 0.5 of a tree.

    Args:
        prior: rates expected before any verdict: of a chain the last one holds for all later places, beyond those of a
            tree nothing is gained.
        pool: estimates of all requests, towards which these rates are shrunk; None: these are the pool.
    """

    def __init__(self, prior: Sequence[float], chain: bool, pool: Acceptance | None = None) -> None:
        self.chain = chain
        self._prior: list[float] = list(prior) if pool is None else pool._prior
        self._pool = pool
        self._keep = math.exp(-1.0 / (_MEMORY if pool is None else _OWN_MEMORY))
        self._accepted: list[float] = []
        self._tried: list[float] = []
        self._drafted: list[float] = []  # by place, of proposals that could have been as long
        self._drafts: list[float] = []  # these
        self._step = 0  # of the last verdict
        self._begun = 0  # requests with estimates of their own
        self._errors = [0.0] * len(_WEIGHTS)  # prediction errors of each weight for single requests
        self._weight = _WEIGHTS[0]  # the one with the least error
        self._known: list[float] = []  # rates of the first places, until the next verdict

    def of_one(self) -> Acceptance:
        self._begun += 1
        return Acceptance((), self.chain, self)

    def rates(self, count: int) -> list[float]:
        if self._pool is None:
            if len(self._known) < count:
                expected = self._prior[:count]
                expected += expected[-1:] * (count - len(expected)) if self.chain else []
                self._known = self._place_by_place(expected, _WEIGHT)
            return self._known[:count]
        expected, weight = self._pool.rates(count), self._pool._weight
        if self.chain:
            return self._place_by_place(expected, weight)
        # Nodes of a tree are accepted too seldom to estimate each from one request's verdicts.
        foreseen = sum(before * tried for before, tried in zip(expected, self._tried, strict=False))
        factor = (weight + sum(self._accepted)) / (weight + foreseen)
        return [min(before * factor, 1.0) for before in expected]

    def _place_by_place(self, expected: Sequence[float], weight: float) -> list[float]:
        seen = foreseen = weight
        found, known = [], len(self._tried)
        for place, before in enumerate(expected):
            rate = min(before * seen / foreseen, 1.0)
            if place < known:
                tried, accepted = self._tried[place], self._accepted[place]
                rate = (weight * rate + accepted) / (weight + tried)
                seen += accepted
                foreseen += before * tried
            found.append(rate)
        return found

    def gains(self, count: int) -> list[float]:
        """Gains of the first `count` nodes, fractions, not increasing; cut before nodes below `LEAST_GAIN`."""
        if self.chain:
            return _cut(itertools.accumulate(self.rates(count), operator.mul))
        return _cut(falling(self.rates(len(self._prior)))[:count])

    @property
    def optimism(self) -> float:
        """Factor on gains if the first node's rate is one standard error above its estimate by all requests.

        Drafts that are not made give no verdicts, so without it a few bad ones would keep a good drafter out.
        """
        rate, pool = self.rates(1)[0], self._pool or self
        doubt = _doubt(*pool._outlook(slice(0, 1), pool._step))
        if self._pool is not None:
            others = pool._begun > 1  # until then all verdicts are its own
            doubt = math.hypot(doubt, _APART * others) * pool._weight / (pool._weight + sum(self._tried[:1]))
        return min(rate + doubt, 1.0) / max(rate, 1e-9)

    def drafted(self, count: int) -> list[float]:
        """Shares of proposals of a chain that have a first, second, ... token, where the drafter may stop before."""
        if self._pool is None:
            survival = itertools.accumulate(self.rates(count)[: count - 1], operator.mul, initial=1.0)
            expected, weight = [math.sqrt(each) for each in survival], _WEIGHT
        else:
            expected, weight = self._pool.drafted(count), self._pool._weight
        pairs = zip(expected, self._drafted, self._drafts, strict=False)
        found = [(weight * before + drafted) / (weight + drafts) for before, drafted, drafts in pairs]
        return found + expected[len(found) :]

    def hoped(self, count: int, beyond: int, step: int) -> list[float]:
        """Gains with an upper confidence bound on the rates after the first `beyond` nodes. For a chain, and a tree of
        which nothing is drafted, the first node represents all.
        """
        rates, rest = self.rates(count), slice(beyond, count if beyond else 1)
        rate, verdicts = self._outlook(rest, step)
        hoped = min(rate + _HOPE * _doubt(rate, verdicts), 1.0)
        if self.chain:
            return _cut(itertools.accumulate([hoped] * min(count, _MOST_HOPED), operator.mul))
        factor = hoped / max(_mean(rates[rest]), 1e-9)
        return _cut(falling([*rates[:beyond], *(min(each * factor, 1.0) for each in rates[beyond:])]))

    def _outlook(self, places: slice, step: int) -> tuple[float, float]:
        if self._pool is None:
            expected, known = _mean(self._prior[places]), _WEIGHT
        else:
            expected, known = self._pool._outlook(places, step)
            known = min(known, self._pool._weight)
        tried = self._fresh(step) * sum(self._tried[places])
        accepted = self._fresh(step) * sum(self._accepted[places])
        return (known * expected + accepted) / (known + tried), known + tried

    def _fresh(self, step: int) -> float:
        return math.exp((self._step - step) / _FORGETS)

    def learn(self, share: DraftShare, step: int, most: int = 0) -> None:
        """Add the verdicts on a proposal. If it stopped by its probabilities before it had `most` tokens, and all were
        accepted, the next place counts as rejected.
        """
        stopped = share.depth < most and len(share.path) == share.depth
        judged = (share.judged if self.chain else share.nodes) + stopped
        if self._pool is not None and judged:
            self._pool._judge(self, 0 in share.path)
        for counts in (self._tried, self._accepted):
            counts += [0.0] * (judged - len(counts))
        for counts in (self._drafted, self._drafts):
            counts += [0.0] * (most - len(counts))
        # Places that were not tried decay as well, by steps, so that a few old verdicts do not keep a budget short. The
        # pool's do not, or any drafter that is not tried would look profitable after a while.
        keep = self._keep if self._pool is None else self._keep * self._fresh(step)
        self._tried = [keep * each + (place < judged) for place, each in enumerate(self._tried)]
        self._accepted = [keep * each for each in self._accepted]
        if most:
            self._drafted = [keep * each + (place < share.depth) for place, each in enumerate(self._drafted)]
            self._drafts = [keep * each + (place < most) for place, each in enumerate(self._drafts)]
        for place in share.path:
            self._accepted[place] += 1.0
        self._step = step
        self._known = []

    def _judge(self, one: Acceptance, accepted: bool) -> None:
        (rate,), own = self.rates(1), (sum(one._accepted[:1]), sum(one._tried[:1]))
        for number, weight in enumerate(_WEIGHTS):
            predicted = (weight * rate + own[0]) / (weight + own[1])
            self._errors[number] = self._keep * self._errors[number] + (predicted - accepted) ** 2
        self._weight = _WEIGHTS[self._errors.index(min(self._errors))]


def _doubt(rate: float, verdicts: float) -> float:
    """The standard error of a rate. One of 0 or 1 has the variance that one more, opposite verdict would give it."""
    return math.sqrt(max(rate * (1.0 - rate), 0.5 / (verdicts + 1.0)) / verdicts)


def falling(gains: Sequence[float]) -> list[float]:
    """The nearest non-increasing gains of equal sum (pool adjacent violators): 0.5, 0.1, 0.3 become 0.5, 0.2, 0.2."""
    return isotonic(gains[::-1])[::-1]


def _mean(rates: Sequence[float]) -> float:
    return sum(rates) / max(len(rates), 1)


def _cut(gains: Iterable[float]) -> list[float]:
    first, *others = gains
    return [first, *itertools.takewhile(lambda gain: gain >= LEAST_GAIN, others)]


class Odds:
    """Acceptance by a drafter's own token probability: logistic regression on its logit, by stochastic gradient."""

    def __init__(self) -> None:
        self.odds = (0.0, 1.0)

    def learn(self, share: DraftShare) -> None:
        for place, probability in enumerate(share.confidence):
            wrong = Budget(0, odds=self.odds).chance(probability) - (place < len(share.path))
            q = min(max(probability, 0.0025), 0.9975)
            first, slope = self.odds
            slope -= _LEARNING_RATE / 4.0 * wrong * math.log(q / (1.0 - q))
            self.odds = first - _LEARNING_RATE * wrong, min(max(slope, 0.1), 2.0)
