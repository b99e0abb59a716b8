"""How likely drafted nodes are accepted: running shares of verdicts, of all requests together and of each.

A node's gain is the probability that it is accepted, so the gains of all drafted nodes add up to the tokens that
drafting brings. Older verdicts count less and less. A request's estimates are drawn to those of all requests.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence

from truedraft.core.budget import Budget
from truedraft.core.stats import DraftShare

UNKNOWN_RATE = 0.65
"""Acceptance of a drafted token of which nobody knows anything; a few verdicts outweigh it."""
LEAST_GAIN = 0.005
"""Nodes that bring less are not looked at."""
_WEIGHT = 4.0  # verdicts that what was known before counts as
_MEMORY, _OWN_MEMORY = 200.0, 12.0  # verdicts after which one counts 1 / e as much, of all requests and of one
_FORGETS = 400.0  # steps without verdicts after which they count 1 / e as much
_WEIGHTS = (4.0, 12.0, 48.0)  # verdicts that what is known of all requests may count as for one of them
_HOPE = 1.5  # standard errors above the estimate: discounted UCB (Garivier and Moulines, arXiv 0805.3415)
_MOST_HOPED = 4  # tokens of a chain
_LEARNING_RATE = 0.05


class Acceptance:
    """Estimated gains of one drafter's nodes, in the order in which a budget takes them.

    Of a chain the rate of a place is that at which it is accepted where all before it were; of a tree the share of
    steps in which the node is. A place that was seldom tried is expected to be as much better or worse than before as
    the others were, so what is kept short shows what more would bring.

    Worked example: rates of 0.8 and 0.5 are gains of 0.8 and 0.4 of a chain, and of 0.8 and 0.5 of a tree.

    Args:
        prior: rates that are expected before any verdict: of a chain the last one holds for all places that follow,
            beyond those of a tree nothing is gained.
        chain: whether nodes stand in a line.
        pool: of all requests, to which this request's rates are drawn; None: these are of all.
    """

    def __init__(self, prior: Sequence[float], chain: bool, pool: Acceptance | None = None) -> None:
        self.chain = chain
        self._prior: list[float] = list(prior) if pool is None else pool._prior
        self._pool = pool
        self._keep = math.exp(-1.0 / (_MEMORY if pool is None else _OWN_MEMORY))
        self._accepted: list[float] = []
        self._tried: list[float] = []
        self._step = 0  # of the last verdict
        self._errors = [0.0] * len(_WEIGHTS)  # of what each weight would have foretold of one request
        self._weight = _WEIGHTS[0]  # that with the least
        self._known: list[float] = []  # rates of the first places, until the next verdict

    def of_one(self) -> Acceptance:
        """Estimates of one request, which start from these."""
        return Acceptance((), self.chain, self)

    def rates(self, count: int) -> list[float]:
        """Of the first places; fewer where a tree has no more."""
        if self._pool is None:
            if len(self._known) < count:
                expected = self._prior[:count]
                expected += expected[-1:] * (count - len(expected)) if self.chain else []
                self._known = self._place_by_place(expected, _WEIGHT)
            return self._known[:count]
        expected, weight = self._pool.rates(count), self._pool._weight
        if self.chain:
            return self._place_by_place(expected, weight)
        # Nodes of a tree are accepted too seldom for one request's verdicts to say anything of each.
        foreseen = sum(before * tried for before, tried in zip(expected, self._tried, strict=False))
        factor = (weight + sum(self._accepted)) / (weight + foreseen)
        return [min(before * factor, 1.0) for before in expected]

    def _place_by_place(self, expected: Sequence[float], weight: float) -> list[float]:
        """Rates by each place's verdicts and, of what these leave open, by those on the places before it."""
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
        """Of the first `count` nodes, each a fraction, rising nowhere; cut before nodes that bring next to nothing."""
        if self.chain:
            return _cut(itertools.accumulate(self.rates(count), operator.mul))
        return _cut(falling(self.rates(len(self._prior)))[:count])

    def hoped(self, count: int, beyond: int, step: int) -> list[float]:
        """The same, hoping that nodes behind the first `beyond` are as good as the verdicts on them still allow.

        Verdicts fade with the steps since the last one: what was of no use long ago may have become another since. Of a
        chain, and of a tree of which nothing is drafted, the first node stands for all.
        """
        rates, behind = self.rates(count), slice(beyond, count if beyond else 1)
        rate, verdicts = self._outlook(behind, step)
        # A rate of 0 or 1 is doubted as if one more verdict had said otherwise.
        doubt = math.sqrt(max(rate * (1.0 - rate), 0.5 / (verdicts + 1.0)) / verdicts)
        hoped = min(rate + _HOPE * doubt, 1.0)
        if self.chain:
            return _cut(itertools.accumulate([hoped] * min(count, _MOST_HOPED), operator.mul))
        factor = hoped / max(_mean(rates[behind]), 1e-9)
        return _cut(falling([*rates[:beyond], *(min(each * factor, 1.0) for each in rates[beyond:])]))

    def _outlook(self, places: slice, step: int) -> tuple[float, float]:
        """The mean rate of places at a step, and how many verdicts it stands on, prior included."""
        if self._pool is None:
            expected, known = _mean(self._prior[places]), _WEIGHT
        else:
            expected, known = self._pool._outlook(places, step)
            known = min(known, self._pool._weight)
        tried = self._fresh(step) * sum(self._tried[places])
        accepted = self._fresh(step) * sum(self._accepted[places])
        return (known * expected + accepted) / (known + tried), known + tried

    def _fresh(self, step: int) -> float:
        """How much verdicts count at a step."""
        return math.exp((self._step - step) / _FORGETS)

    def learn(self, share: DraftShare, step: int, stopped: bool = False) -> None:
        """What became of a proposal.

        Args:
            share: of the drafter.
            step: number of the step, rising.
            stopped: whether it ended before its budget did, all of it being accepted. What was not drafted brought
                nothing, so it counts as if it had been rejected.
        """
        judged = (share.judged if self.chain else share.nodes) + stopped
        if self._pool is not None and judged:
            self._pool._judge(self, 0 in share.path)
        self._tried += [0.0] * (judged - len(self._tried))
        self._accepted += [0.0] * (judged - len(self._accepted))
        # Places that were not tried are forgotten as well: few verdicts from long ago must not keep a budget short. So
        # is what became of one request long ago, for which others stand; all of them together are not, or whatever
        # nobody tries would seem worth drafting after a while.
        keep = self._keep if self._pool is None else self._keep * self._fresh(step)
        self._tried = [keep * each + (place < judged) for place, each in enumerate(self._tried)]
        self._accepted = [keep * each for each in self._accepted]
        for place in share.path:
            self._accepted[place] += 1.0
        self._step = step
        self._known = []

    def _judge(self, one: Acceptance, accepted: bool) -> None:
        """Take note of what each weight of these estimates would have foretold of a request's first node.

        Where requests are alike what one of them adds is noise, and where they are not it is all that counts.

        Worked example: of all requests half are accepted, of this one 3 of 3 were. With a weight of 4 that is 0.71,
        with one of 48 it is 0.53; if the next one is rejected the latter is less wrong.
        """
        (rate,), own = self.rates(1), (sum(one._accepted[:1]), sum(one._tried[:1]))
        for number, weight in enumerate(_WEIGHTS):
            foretold = (weight * rate + own[0]) / (weight + own[1])
            self._errors[number] = self._keep * self._errors[number] + (foretold - accepted) ** 2
        self._weight = _WEIGHTS[self._errors.index(min(self._errors))]


def falling(gains: Sequence[float]) -> list[float]:
    """The nearest gains that rise nowhere: means of runs, with the same sums (pool adjacent violators).

    Where a node is accepted more often than one before it, both count with their mean: a budget that takes the later
    one takes the other too, and what they bring together stays right.

    Worked example: 0.5, 0.1 and 0.3 become 0.5, 0.2 and 0.2.
    """
    runs: list[tuple[float, int]] = []
    for gain in gains:
        total, count = gain, 1
        while runs and runs[-1][0] * count < total * runs[-1][1]:
            before, places = runs.pop()
            total, count = total + before, count + places
        runs.append((total, count))
    return [total / count for total, count in runs for _ in range(count)]


def _mean(rates: Sequence[float]) -> float:
    return sum(rates) / max(len(rates), 1)


def _cut(gains: Iterable[float]) -> list[float]:
    first, *others = gains
    return [first, *itertools.takewhile(lambda gain: gain >= LEAST_GAIN, others)]


class Odds:
    """How a drafter's own probability of a token tells its chance of being accepted, refitted with every verdict.

    Logistic regression on the logit of that probability, by stochastic gradient.

    Attributes:
        odds: for `Budget.odds`.
    """

    def __init__(self) -> None:
        self.odds = (0.0, 1.0)

    def learn(self, share: DraftShare) -> None:
        """What became of a chain."""
        for place, probability in enumerate(share.confidence):
            wrong = Budget(0, odds=self.odds).chance(probability) - (place < len(share.path))
            q = min(max(probability, 0.0025), 0.9975)
            first, slope = self.odds
            slope -= _LEARNING_RATE / 4.0 * wrong * math.log(q / (1.0 - q))
            self.odds = first - _LEARNING_RATE * wrong, min(max(slope, 0.1), 2.0)
