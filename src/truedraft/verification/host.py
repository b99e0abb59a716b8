"""Speculative sampling on the CPU: the walk reads each number when it needs it.

It makes the same decisions as the batched walk, by the same parts of the rule. The batched walk is slower on the CPU,
by 65 to 330 microseconds per step for one request, because of its operations on a few numbers and its index tables
(benchmarks/LOG.md, "One house"). On a device each read of this walk would wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.verdict import Verdict
from truedraft.verification.rule import verdict_at

if TYPE_CHECKING:
    from truedraft.verification.speculative import SpeculativeSampling

_CANDIDATES = {DrawKind.DETERMINISTIC}
_ENTRIES_TOGETHER = 1 << 16
"""Sums over this many entries fit the processor's cache; memory for larger ones is newly allocated each time."""


class HostWalk:
    """A walk down one proposal.

    Args:
        probs: the target's distributions `[rows, vocab]`.
        noise: of the request at this step.
        p_x: by node, from the original distributions.
        q_x: by node and number of its distribution, from the original distributions.

    Attributes:
        path: the accepted nodes.
        row: tree row where the walk ended.
        left: `[vocab]`: the distribution of the last token.
    """

    def __init__(
        self,
        rule: SpeculativeSampling,
        proposal: Proposal,
        probs: Tensor,
        noise: Noise,
        p_x: Sequence[float],
        q_x: dict[tuple[int, int], float],
    ) -> None:
        self.rule = rule
        self.proposal = proposal
        self.probs = probs
        self.noise = noise
        self.p_x = p_x
        self.q_x = q_x
        self.path: list[int] = []
        self.row = 0
        self.left: Tensor
        while (accepted := self.judge(self.row)) is not None:
            self.path += accepted
            self.row = self.path[-1] + 1

    @property
    def uniform(self) -> float:
        """The number that draws the last token."""
        purpose = Purpose.RECOVERED if self.proposal.draws[self.row] else Purpose.BONUS
        return self.noise.uniform(purpose, len(self.path))

    def judge(self, row: int) -> list[int] | None:
        """The nodes accepted from a tree row on; None, with `left` set, where the walk ends there."""
        draws = self.proposal.draws[row]
        if not draws:
            self.left = self.probs[row]
            return None
        if {draw.kind for draw in draws} == _CANDIDATES:
            return self._judge_candidates(row, draws)
        return self._judge_draws(row, draws)

    def _stays(self, index: int, p_x: float, q_x: float) -> bool:
        number = self.noise.uniform(Purpose.ACCEPT, len(self.path), index)
        return bool(number < self.rule.accept_probability(p_x, q_x))

    def _judge_candidates(self, row: int, draws: Sequence[Draw]) -> list[int] | None:
        """Judge deterministic draws: rejections only remove mass from p, so their total mass determines the rest."""
        ids = self.proposal.tree.host_ids
        excluded: dict[int, None] = {}
        taken = 0.0
        for index, draw in enumerate(draws):
            token, mass = ids[draw.child], self.p_x[draw.child]
            p_x = 0.0 if token in excluded else self.rule.left_of_candidate(mass, taken)  # 0: drafted twice
            if self._stays(index, p_x, 1.0):
                return [draw.child]
            if token not in excluded:
                excluded[token] = None
                taken += mass
        self.left = self.rule.rejected(self.probs[row], self._one_hot(*excluded))
        return None

    def _judge_draws(self, row: int, draws: Sequence[Draw]) -> list[int] | None:
        ids, p = self.proposal.tree.host_ids, self.probs[row]
        excluded: dict[int, list[int]] = {}  # tokens removed from distributions at this tree row, by distribution
        for index, draw in enumerate(draws):
            token = ids[draw.child]
            taken = excluded.get(draw.dist, []) if draw.kind is DrawKind.WITHOUT_REPLACEMENT else []
            q = self._drawn_from(draw, taken) if taken else None
            # Distributions are unchanged until the first draw was rejected.
            p_x = float(p[token]) if index else self.p_x[draw.child]
            q_x = 1.0 if draw.dist < 0 else float(q[token]) if q is not None else self.q_x[draw.child, draw.dist]
            if self._stays(index, p_x, q_x):
                return [draw.child]
            p = self.rule.rejected(p, self._drawn_from(draw, []) if q is None else q)
            if draw.kind is DrawKind.WITHOUT_REPLACEMENT:
                excluded[draw.dist] = [*taken, token]
        self.left = p
        return None

    def _drawn_from(self, draw: Draw, taken: Sequence[int]) -> Tensor:
        """The distribution of a draw, `[vocab]`, after other tokens were removed."""
        if draw.dist < 0:
            return self._one_hot(self.proposal.tree.host_ids[draw.child])
        assert self.proposal.probs is not None
        q = self.proposal.probs[draw.dist].to(self.probs.device)  # the draft may be on another device
        return self.rule.removed(q, torch.tensor(taken)) if taken else q

    def _one_hot(self, *tokens: int) -> Tensor:
        """1 at some tokens, `[vocab]`."""
        return torch.zeros_like(self.probs[0]).index_fill_(0, torch.tensor(tokens), 1.0)


def host_verdicts(
    rule: SpeculativeSampling, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]
) -> list[Verdict]:
    """The verdicts on a batch of at least one request; arguments as in `Rule.verify`."""
    walks = [
        rule.host_walk(rule, *each)
        for each in zip(proposals, probs, noise, *_first_looks(proposals, probs), strict=True)
    ]
    together = max(1, _ENTRIES_TOGETHER // probs[0].shape[-1])
    drawn = []
    for first in range(0, len(walks), together):
        group = walks[first : first + together]
        left = torch.stack([walk.left for walk in group])
        drawn.append(L.draw(left, torch.tensor([walk.uniform for walk in group], dtype=torch.float64)))
    tokens = (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).tolist()
    return [verdict_at(walk.proposal, walk.path, token) for walk, token in zip(walks, tokens, strict=True)]


def _first_looks(
    proposals: Sequence[Proposal], probs: Sequence[Tensor]
) -> tuple[list[list[float]], list[dict[tuple[int, int], float]]]:
    """p and q of all drafted tokens, from the original distributions, read together."""
    if not any(len(proposal.tree) for proposal in proposals):
        return [[] for _ in proposals], [{} for _ in proposals]
    tables: list[Tensor] = []
    places: list[list[int]] = []
    drawn: list[list[tuple[int, int]]] = []
    for proposal, own in zip(proposals, probs, strict=True):
        ids, vocab = proposal.tree.host_ids, own.shape[-1]
        tables.append(own)
        places.append([(parent + 1) * vocab + ids[node] for node, parent in enumerate(proposal.tree.shape.parents)])
        drawn.append([(draw.child, draw.dist) for draws in proposal.draws for draw in draws if draw.dist >= 0])
        tables.append(own if proposal.probs is None else proposal.probs)
        places.append([dist * vocab + ids[child] for child, dist in drawn[-1]])
    flat = torch.tensor(list(itertools.chain.from_iterable(places)))
    parts = zip(tables, flat.split([len(each) for each in places]), strict=True)
    taken = [table.take(part.to(table.device)).cpu().double() for table, part in parts if len(part)]
    numbers = iter((taken[0] if len(taken) == 1 else torch.cat(taken)).tolist())
    p_x: list[list[float]] = []
    q_x: list[dict[tuple[int, int], float]] = []
    for proposal, named in zip(proposals, drawn, strict=True):
        p_x.append(list(itertools.islice(numbers, len(proposal.tree))))
        q_x.append(dict(zip(named, itertools.islice(numbers, len(named)), strict=True)))
    return p_x, q_x
