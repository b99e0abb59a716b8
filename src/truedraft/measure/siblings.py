"""Acceptance of sampled drafts along a trace: single draws, several chains, and trees.

Given the trace's token x at a position, with target distribution p and draft distribution q, this is the probability
that x was a drafted token that the rule accepted, over everything that may be drawn there. A_j(x) is the probability
that the j-th draw is x and the first that is accepted, by recursive rejection: with p_1 = p and
p_(j+1) = norm(max(0, p_j - q_j)),

    A_j(x) = R_j E min(p_j(x), q_j(x)),   R_(j+1) = R_j (1 - sum of min(p_j, q_j)),   R_1 = 1,

and the sum over j is divided by p(x), because x is given; acceptance at one position is independent of acceptance at
another, given the text. One draw gives A_1(x) / p(x) = min(1, q(x) / p(x)). Independent draws have q_j = q, so the sum
is exact. Without replacement q_j has lost the rejected tokens, each drawn from norm(max(0, q_j - p_j)): the mean over
those is estimated from a few samples, which leaves the expected calls of an answer unbiased, because no position counts
twice in one way to decode it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from truedraft.core.intervals import Numbers
from truedraft.core.proposal import DrawKind
from truedraft.core.rank_tree import RankPath, RankTree
from truedraft.core.theory import replay_factor
from truedraft.drafters.base import Drafter

_TINY = 1e-300
_REJECTED = 4  # sampled sequences of rejected draws at one position


def draws_several(drafter: Drafter) -> bool:
    """Whether sampled requests get several draws at one position with known acceptance along a trace."""
    several = {DrawKind.INDEPENDENT}, {DrawKind.WITHOUT_REPLACEMENT}
    return len(drafter.branching) > 0 and drafter.limits.width > 1 and set(drafter.kinds) in several


class Draws(ABC):
    """The draws of a drafter along one trace, position by position."""

    def __init__(self) -> None:
        self._places: list[Numbers] = []

    def note(self, p_x: float, p: Tensor | None, q: Tensor | None, token: int) -> None:
        """Add a position.

        Args:
            p_x: the target's probability of the trace's token; 0 if rounding lost it.
            p: `[vocab]`: the target's distribution, needed for several draws.
            q: `[vocab]`: the draft's distribution; None where nothing was drawn.
        """
        self._places.append(self._nothing() if q is None else self._factors(p_x, p, q, token))

    @abstractmethod
    def _nothing(self) -> Numbers: ...
    @abstractmethod
    def _factors(self, p_x: float, p: Tensor | None, q: Tensor, token: int) -> Numbers: ...
    @abstractmethod
    def survival(self, place: int, depth: int) -> Numbers:
        """The probability `[depth]` that a step accepts its first 1, 2, ... tokens; by ranks `[nodes + 1, depth]`."""


class ChainDraws(Draws):
    """Several independent chains; the state is the number of chains that match the trace so far. If the j-th of m draws
    is x and accepted, none before it was x; each of the m - j after it is x with probability q(x).
    """

    def __init__(self, chains: int) -> None:
        super().__init__()
        self._chains = chains

    def _nothing(self) -> Numbers:
        return np.zeros((self._chains + 1, self._chains + 1))

    def _factors(self, p_x: float, p: Tensor | None, q: Tensor, token: int) -> Numbers:
        """`[chains + 1, chains + 1]`: probability that x is accepted and n chains match it, of m before."""
        assert p is not None
        accepted = _accepted(p, q, token, self._chains) / max(p_x, float(p[token]), _TINY)
        share = min(1.0, float(q[token]))
        found = self._nothing()
        for came in range(1, self._chains + 1):
            for draw in range(came):
                left = came - draw - 1
                for more in range(left + 1):
                    chance = math.comb(left, more) * share**more * (1.0 - share) ** (left - more)
                    found[came, 1 + more] += accepted[draw] * chance
        return found

    def survival(self, place: int, depth: int) -> Numbers:
        state = np.zeros(self._chains + 1)
        state[-1] = 1.0
        found = []
        for factors in self._places[place : place + depth]:
            state = state @ factors
            found.append(state.sum())
        return np.array(found)


class TreeDraws(Draws):
    """Draws without replacement, with a fixed number per node of a depth or by ranks; one per node is a chain.

    Args:
        branching: draws per node at depth 0, 1, ...; with `ranks` the most.
        ranks: the draws of the largest tree, the best ones first; None is the same number at every node of a depth.
    """

    def __init__(self, branching: Sequence[int], seed: int, ranks: RankTree | None = None) -> None:
        super().__init__()
        self._branching, self._ranks = branching, ranks
        self._random = np.random.default_rng(abs(seed))

    def _nothing(self) -> Numbers:
        return np.zeros(max(self._branching))

    def _factors(self, p_x: float, p: Tensor | None, q: Tensor, token: int) -> Numbers:
        """`[draws]`: probability that x is accepted as one of the first 1, 2, ... draws."""
        if max(self._branching) == 1:  # which needs no whole distribution
            return np.array([replay_factor(min(p_x, 1.0), min(float(q[token]), 1.0)) if p_x > 0.0 else 1.0])
        assert p is not None
        accepted = _accepted(p, q, token, max(self._branching), self._random)
        return np.cumsum(accepted) / max(p_x, float(p[token]), _TINY)

    def survival(self, place: int, depth: int) -> Numbers:
        places = self._places[place : place + depth]
        if self._ranks is None:
            return np.cumprod([each[width - 1] for each, width in zip(places, self._branching, strict=False)])
        return self._by_nodes(places)

    def _by_nodes(self, places: Sequence[Numbers]) -> Numbers:
        """`[nodes + 1, depth]`: survival with the first 0, 1, ... draws; a node's is the product along its path."""
        assert self._ranks is not None
        chances = [np.diff(each, prepend=0.0) for each in places]
        found = np.zeros((len(self._ranks) + 1, len(places)))
        accepted: dict[RankPath, float] = {(): 1.0}
        for number, path in enumerate(self._ranks.paths, 1):
            found[number] = found[number - 1]
            if len(path) <= len(places):
                accepted[path] = accepted[path[:-1]] * chances[len(path) - 1][path[-1]]
                found[number, len(path) - 1] += accepted[path]
        return found


def draws_of(drafter: Drafter, seed: int) -> Draws:
    """How a drafter draws for sampled requests; `seed` is that of sampled rejected draws."""
    if not draws_several(drafter):
        return TreeDraws((1,) * max(1, drafter.limits.depth), seed)
    if drafter.kinds == {DrawKind.INDEPENDENT}:
        return ChainDraws(drafter.branching[0])
    return TreeDraws(drafter.branching, seed, drafter.ranks)


def _accepted(p: Tensor, q: Tensor, token: int, draws: int, random: np.random.Generator | None = None) -> Numbers:
    """A_j of a token for each draw, `[draws]`, without replacement with `random`."""
    rows = 1 if random is None else _REJECTED
    left = np.repeat(p.double().cpu().numpy()[None], rows, axis=0)  # p_j, `[rows, vocab]`
    drawn = np.repeat(q.double().cpu().numpy()[None], rows, axis=0)  # q_j
    reach, found = np.ones(rows), np.zeros(draws)
    for number in range(draws):
        found[number] = (reach * np.minimum(left[:, token], drawn[:, token])).mean()
        beyond = (drawn - left).clip(min=0.0)
        reach = reach * beyond.sum(axis=1)
        left = _scaled((left - drawn).clip(min=0.0), left)
        if random is not None and number + 1 < draws:
            cumulative = beyond.cumsum(axis=1)
            at = random.random(rows) * cumulative[:, -1]
            sampled = (cumulative <= at[:, None]).sum(axis=1).clip(max=drawn.shape[1] - 1)
            drawn[np.arange(rows), sampled] = 0.0
            drawn = _scaled(drawn, np.zeros_like(drawn))
    return found


def _scaled(weights: Numbers, otherwise: Numbers) -> Numbers:
    mass = weights.sum(axis=1, keepdims=True)
    return np.where(mass > 0.0, weights / np.where(mass > 0.0, mass, 1.0), otherwise)
