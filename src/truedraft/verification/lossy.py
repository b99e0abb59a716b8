"""Lossy rules: what they accept beyond the target's distribution, and the divergence of each emitted token from it.

`LenientSampling` draws, like speculative sampling. A `ThresholdAcceptance` draws nothing: *typical acceptance*, and
lenience at temperature 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core import transfers
from truedraft.core.noise import Noise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.probs import most_likely, without_tokens
from truedraft.core.proposal import Draw, DrawKind, Proposal, drafted_tokens
from truedraft.core.tree import TreeShape
from truedraft.core.verdict import Divergence, Verdict
from truedraft.errors import OptionError
from truedraft.verification.rule import BatchVerdicts, JudgedRow, Outcome, Rule, verdict_at
from truedraft.verification.speculative import SpeculativeSampling
from truedraft.verification.walk import Number

_UNCUT = SamplingParams(temperature=1.0)


class ThresholdAcceptance(Rule):
    """Accepts a node if the target's probability of its token passes a threshold, and all nodes above it are accepted.

    The deepest accepted node wins, among equally deep ones that with the largest product of probabilities, then the
    first. After its path the argmax of p is emitted. It uses no noise, and verifies draws of every kind.

    Given the candidates, an emitted token x has a one-hot distribution, at a total variation of 1 - p(x) from p and a
    KL divergence of -log p(x).
    """

    lossless: ClassVar[bool] = False
    by_groups: ClassVar[bool] = False
    judges: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)

    @property
    def prefers(self) -> frozenset[DrawKind]:
        """The draft's most likely tokens pass a threshold more often than its samples."""
        return frozenset({DrawKind.DETERMINISTIC, DrawKind.COUPLED})

    def options(self, params: SamplingParams) -> SamplingParams:
        """At temperature 0 p is one-hot, where lenience has no effect: then p at temperature 1, without truncation."""
        return _UNCUT if params.greedy else params

    @abstractmethod
    def thresholds(self, probs: Tensor) -> Tensor:
        """Thresholds `[rows]` for the children at distributions `[rows, vocab]`."""

    @abstractmethod
    def stays(self, p_x: float, threshold: float) -> bool:
        """Whether a token of target probability `p_x` passes."""

    def accept(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        best, numbers = [], []
        for proposal, p in zip(proposals, probs, strict=True):
            own = most_likely(p)  # [rows]
            best.append(own)
            numbers.append(p.gather(1, own[:, None])[:, 0].double())
            if len(proposal.tree):
                # Entropies only of tree rows with children: they cost as much as the distributions.
                inner, parents = _inner_rows(proposal.tree.shape, p.device)
                tokens = drafted_tokens([proposal.tree], p.shape[-1], p.device)
                numbers += (self.thresholds(p[inner]).double(), p[parents, tokens].double())
        return BatchVerdicts((*best, *numbers), self._verdicts)

    def _verdicts(self, proposals: Sequence[Proposal], numbers: Sequence[Sequence[float]]) -> list[Verdict]:
        """The verdicts from the most likely token of each tree row of each request, then float64 numbers per request.

        These are the probabilities of those tokens, and, where it has nodes, the thresholds of the tree rows with
        children and the target's probability of each node's token.
        """
        best, others = numbers[: len(proposals)], iter(numbers[len(proposals) :])
        verdicts = []
        for proposal, tokens in zip(proposals, best, strict=True):
            shape, largest = proposal.tree.shape, next(others)
            thresholds, p_x = (next(others), next(others)) if len(shape) else ((), ())
            path = self._deepest(shape, thresholds, p_x)
            rows = [0, *(node + 1 for node in path)]
            verdict = verdict_at(proposal, path, int(tokens[rows[-1]]))
            given = [*(p_x[node] for node in path), largest[rows[-1]]]
            divergence = tuple(map(Divergence.of_choice, given, (largest[row] for row in rows)))
            verdicts.append(dataclasses.replace(verdict, divergence=divergence))
        return verdicts

    def _deepest(self, shape: TreeShape, thresholds: Sequence[float], p_x: Sequence[float]) -> tuple[int, ...]:
        least = dict(zip((row for row, nodes in enumerate(shape.children) if nodes), thresholds, strict=True))
        reached = {-1: (0, 1.0)}  # depth and product of probabilities, by node
        for node, parent in enumerate(shape.parents):
            if parent in reached and self.stays(p_x[node], least[parent + 1]):
                depth, product = reached[parent]
                reached[node] = depth + 1, product * p_x[node]
        return shape.path(max(reached, key=lambda node: reached[node]))

    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        """The outcome of a tree row is deterministic: of several accepted tokens the most likely.

        Exact where nothing is drafted below them, or where at most one is accepted. In deeper trees the choice is among
        whole paths; there `verify`, which uses no noise, gives the distribution.
        """
        (row,) = group
        least = float(self.thresholds(row.p[None]))
        p_x = [float(row.p[draw.token]) for draw in row.draws]
        staying = [index for index, mass in enumerate(p_x) if self.stays(mass, least)]
        if not staying:
            return [Outcome(1.0, (int(most_likely(row.p)),), accepted=0)]
        chosen = max(staying, key=lambda i: p_x[i])
        return [Outcome(float(i == chosen), (draw.token,), 1) for i, draw in enumerate(row.draws[: chosen + 1])]


class TypicalAcceptance(ThresholdAcceptance):
    """Accept a token x where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p in nats.

    Cai et al. 2401.10774 (Medusa), section on typical acceptance. Lossy: tokens below the threshold are never accepted;
    after the accepted tokens the argmax is emitted. At temperature 0 it uses p at temperature 1.

    Args:
        epsilon: a probability above which a token is always accepted, in (0, 1]; the published code's
            posterior_threshold.
        delta: above 0; the published code's posterior_alpha, there the square root of epsilon.

    Raises:
        OptionError: a value out of range.
    """

    name: ClassVar[str] = "typical"

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not 0.0 < epsilon <= 1.0:
            raise OptionError(f"epsilon must be above 0 and at most 1, got {epsilon:g}")
        if not 0.0 < delta < math.inf:
            raise OptionError(f"delta must be above 0 and finite, got {delta:g}")
        self.epsilon = epsilon
        self.delta = delta

    @property
    def spec(self) -> str:
        return f"{self.name},epsilon={self.epsilon:g},delta={self.delta:g}"

    def thresholds(self, probs: Tensor) -> Tensor:
        entropies = torch.special.entr(probs).sum(dim=-1)
        return (-entropies).exp_().mul_(self.delta).clamp_max_(self.epsilon)

    def stays(self, p_x: float, threshold: float) -> bool:
        return p_x > threshold


class LenientArgmax(ThresholdAcceptance):
    """Lenience l at temperature 0: accept a token x where p(x) >= l max p, p at temperature 1, with l in (0, 1].

    Raises:
        OptionError: a lenience out of range.
    """

    name: ClassVar[str] = SpeculativeSampling.name

    def __init__(self, lenience: float) -> None:
        _check(lenience)
        self.lenience = lenience

    @property
    def spec(self) -> str:
        return f"{self.name},lenience={self.lenience:g}"

    def thresholds(self, probs: Tensor) -> Tensor:
        return probs.amax(dim=-1)

    def stays(self, p_x: float, threshold: float) -> bool:
        return p_x >= self.lenience * threshold


@lru_cache(maxsize=1024)
def _inner_rows(shape: TreeShape, device: torch.device) -> tuple[Tensor, Tensor]:
    inner = [row for row, nodes in enumerate(shape.children) if nodes]
    return transfers.upload(inner, device), transfers.upload([parent + 1 for parent in shape.parents], device)


class LenientSampling(SpeculativeSampling):
    """Speculative sampling that accepts x with probability min(1, p(x) / (l q(x))), with l in (0, 1].

    Leviathan et al. 2211.17192, appendix on lenience. A rejection continues with norm(max(0, p - q)), so no token is
    emitted with more than p(x) / l, over any number of draws at a node; a deterministic candidate is accepted with
    min(1, p(x) / l). At l = 1 it is speculative sampling.

    Raises:
        OptionError: a lenience out of range.
    """

    lossless: ClassVar[bool] = False

    def __init__(self, lenience: float) -> None:
        _check(lenience)
        self.lenience = lenience
        self._greedy_form = LenientArgmax(lenience)

    @property
    def spec(self) -> str:
        return f"{self.name},lenience={self.lenience:g}"

    @property
    def greedy_form(self) -> Rule:
        return self._greedy_form

    def accept_probability(self, p_x: Number, q_x: Number) -> Number:
        return super().accept_probability(p_x, self.lenience * q_x)

    def measured(
        self,
        verdicts: list[Verdict],
        proposals: Sequence[Proposal],
        probs: Sequence[Tensor],
        noise: Sequence[Noise],
    ) -> list[Verdict]:
        found = lenient_divergence(self.lenience, proposals, probs, noise, [verdict.path for verdict in verdicts])
        return [dataclasses.replace(verdict, divergence=each) for verdict, each in zip(verdicts, found, strict=True)]


def _check(lenience: float) -> None:
    if not 0.0 < lenience <= 1.0:
        raise OptionError(f"lenience must be above 0 and at most 1, got {lenience:g}; 1 is lossless")


# ------------------------------------------------------------------------------- the divergence of lenience
#
# The distribution of the token that lenience emits at a node, measured against the target's distribution there.
#
# It is over the drafter's draws at the node and the rule's own noise. With draws 1, 2, ... in their order, p_1 = p, and
# p_(i+1) and q_(i+1) what a rejection leaves of p_i and q_i, it is
#
#     sum_i reach_i stay_i + reach_end p_end,    stay_i = min(q_i, p_i / l),
#                                                reach_1 = 1,  reach_(i+1) = reach_i (1 - sum of stay_i over tokens),
#
# and for l = 1 it is p. Deterministic candidates are fixed. Draws without replacement: q_(i+1) depends on which token
# was rejected, so one is drawn from the distribution of rejected tokens, norm(max(0, q_i - p_i / l)), with separate
# noise. (The drafted token cannot be used: where it was accepted it is not a rejected one.) The result is then an
# unbiased estimate of the emitted distribution; its mean divergence from p is, if anything, too large, because both
# measures are convex.


@dataclass(frozen=True, slots=True)
class NodeDraw:
    """One draw, at the same place of several nodes."""

    dist: int  # draws of one distribution without replacement share removals
    q: Tensor  # [nodes, vocab], before any removal; one-hot for a deterministic candidate
    kind: DrawKind
    uniform: Tensor | None = None  # [nodes] in (0, 1): draws a rejected token, where a later draw depends on it


def lenient_dist(p: Tensor, draws: Sequence[NodeDraw], lenience: float) -> Tensor:
    """The distribution `[nodes, vocab]` of the token emitted at nodes that differ only in distributions."""
    dist = torch.zeros_like(p)
    reach = torch.ones_like(p[:, :1])
    left = p
    reduced: dict[int, Tensor] = {}
    least = max(lenience, torch.finfo(p.dtype).tiny)  # a number that this dtype rounds to 0 would make 0 / 0
    for draw in draws:
        q = reduced.get(draw.dist, draw.q) if draw.kind is DrawKind.WITHOUT_REPLACEMENT else draw.q
        stay = torch.minimum(q, left / least)
        dist += reach * stay
        reach = (reach * (1.0 - stay.sum(dim=-1, keepdim=True))).clamp_min_(0.0)
        if draw.uniform is not None:
            rejected = L.draw(q - stay, draw.uniform).clamp_max_(q.shape[-1] - 1)  # of no mass only where reach is 0
            reduced[draw.dist] = without_tokens(q, rejected[:, None])
        left = L.residual(left, q)
    return dist + reach * left


def divergence_of_candidates(p_x: Sequence[float], lenience: float) -> tuple[float, float]:
    """Total variation and KL (nats) where a node's draws are distinct candidates with target probabilities `p_x`."""
    distance, kl, reach, left = 0.0, 0.0, 1.0, 1.0
    for mass in p_x:
        bound = left * lenience  # 0 where both are next to nothing
        share = 0.0 if mass <= 0.0 or left <= 0.0 else 1.0 if mass >= bound else mass / bound
        emitted = reach * share
        distance += abs(emitted - mass)
        kl += emitted * math.log(emitted / mass) if emitted > 0.0 else 0.0
        reach, left = reach - emitted, max(left - mass, 0.0)
    distance += abs(reach - left)
    kl += reach * math.log(reach / left) if reach > 0.0 and left > 0.0 else 0.0
    return 0.5 * distance, kl


@dataclass(slots=True)
class _Node:
    proposal: Proposal
    draws: tuple[Draw, ...]
    p: Tensor  # [vocab]
    noise: Noise
    depth: int
    divergence: Divergence = field(init=False)

    @property
    def sampled(self) -> bool:
        return any(draw.kind is not DrawKind.DETERMINISTIC for draw in self.draws)

    @property
    def candidates(self) -> list[int]:
        ids = self.proposal.tree.host_ids
        return list(dict.fromkeys(ids[draw.child] for draw in self.draws))

    @property
    def likeness(self) -> tuple[object, ...]:
        """Nodes with equal values are measured together: equal dtypes, and equal draws up to tokens."""
        dists = list(dict.fromkeys(draw.dist for draw in self.draws))
        return self.p.dtype, *((dists.index(draw.dist), draw.kind) for draw in self.draws)


def lenient_divergence(
    lenience: float,
    proposals: Sequence[Proposal],
    probs: Sequence[Tensor],
    noise: Sequence[Noise],
    paths: Sequence[Sequence[int]],
) -> list[tuple[Divergence, ...]]:
    """For each request the divergence of every token on its accepted path, and of the token after it; one transfer."""
    requests = [
        [_Node(proposal, proposal.draws[row], table[row], own, depth) for depth, row in enumerate(rows)]
        for proposal, table, own, rows in zip(
            proposals, probs, noise, ([0, *(node + 1 for node in path)] for path in paths), strict=True
        )
    ]
    alike: dict[tuple[object, ...], list[_Node]] = {}
    measured: list[_Node] = []
    for node in itertools.chain.from_iterable(requests):
        (alike.setdefault(node.likeness, []) if node.sampled else measured).append(node)
    # Max p, then p of the candidates, or total variation and KL.
    tensors = [torch.cat([node.p.amax()[None], node.p[node.candidates]]) for node in measured]
    for group in alike.values():
        p = torch.stack([node.p for node in group])
        emitted = lenient_dist(p, _stacked(group), lenience)
        distance = 0.5 * (emitted - p).abs_().sum(dim=-1, dtype=torch.float64)
        ratio = emitted / p.clamp_min(torch.finfo(p.dtype).tiny)
        kl = torch.special.xlogy(emitted, ratio).sum(dim=-1, dtype=torch.float64)
        measured += group
        tensors += torch.stack((p.amax(dim=-1).double(), distance, kl), dim=-1).unbind()
    for node, (largest, *rest) in zip(measured, transfers.fetch(tensors), strict=True):
        off, kl_nats = rest if node.sampled else divergence_of_candidates(rest, lenience)
        node.divergence = Divergence.of_token(off, kl_nats, largest)
    return [tuple(node.divergence for node in each) for each in requests]


def _stacked(group: Sequence[_Node]) -> list[NodeDraw]:
    draws = group[0].draws
    dists = list(dict.fromkeys(draw.dist for draw in draws))
    stacked = []
    for place, draw in enumerate(draws):
        q = torch.stack([_dist_of(node, node.draws[place]) for node in group])
        uniform = None
        again = any(each.dist == draw.dist and each.kind is draw.kind for each in draws[place + 1 :])
        if again and draw.kind is DrawKind.WITHOUT_REPLACEMENT:
            # Index 0 draws the recovered token; indices above it are not used elsewhere.
            numbers = [node.noise.uniform(Purpose.RECOVERED, node.depth, 1 + place) for node in group]
            uniform = torch.tensor(numbers, dtype=torch.float64).to(q.device, non_blocking=True)
        stacked.append(NodeDraw(dists.index(draw.dist), q, draw.kind, uniform))
    return stacked


def _dist_of(node: _Node, draw: Draw) -> Tensor:
    if draw.dist < 0:
        one_hot = torch.zeros_like(node.p)
        one_hot[node.proposal.tree.host_ids[draw.child]] = 1.0
        return one_hot
    assert node.proposal.probs is not None
    return node.proposal.probs[draw.dist].to(node.p)
