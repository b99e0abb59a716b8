"""Lossy rules: what they accept beyond the target's distribution, and how far from it that takes each emitted token.

Two families. `LenientSampling` draws, as speculative sampling does. A `ThresholdAcceptance` draws nothing: a drafted
token stays where the target gives it enough, which is *typical acceptance*, and what lenience means at temperature 0.
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

import numpy as np
import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core import transfers
from truedraft.core.noise import Noise, Purpose
from truedraft.core.probs import most_likely, without_tokens
from truedraft.core.proposal import Draw, DrawKind, Proposal, drafted_tokens
from truedraft.core.transfers import Array
from truedraft.core.verdict import TokenDivergence, Verdict
from truedraft.errors import OptionError
from truedraft.verification.rule import Decided, DeviceVerdicts, JudgedSlot, Outcome, Rule
from truedraft.verification.speculative import SpeculativeSampling
from truedraft.verification.walk import Rows, WalkPlan, children_plan


class ThresholdAcceptance(Rule):
    """A node stays if the target's probability of its token passes a threshold, and all nodes above it stay.

    The deepest node that stays wins, among equally deep ones that with the largest product of probabilities, among
    equals the one proposed first. Its path is emitted, then the argmax of p behind it. No noise is used, and how a
    token was drafted plays no part: draws of every kind are judged.

    Given the candidates nothing is left to chance, so an emitted token x has a one-hot distribution, at a total
    variation of 1 - p(x) from p and a KL divergence of -log p(x)."""

    lossless: ClassVar[bool] = False
    by_groups: ClassVar[bool] = False
    judges: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)

    @abstractmethod
    def thresholds(self, probs: Tensor) -> Tensor:
        """What the probability of a child is compared with, `[rows]`, for each of the distributions `[rows, vocab]`."""

    @abstractmethod
    def stays(self, p_x: Array, thresholds: Array) -> Array:
        """Which tokens of target probability `p_x` pass, both float64."""

    def decide(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> Decided:
        """See `Rule.decide`. A greedy request is given distributions at temperature 1."""
        if not proposals:
            return DeviceVerdicts.of([])
        device, vocab = probs[0].device, probs[0].shape[-1]
        p, plan = Rows(probs, device), children_plan([own.tree.shape for own in proposals], device)
        best = transfers.as_array(torch.cat([most_likely(rows) for rows in probs]))  # [slots]
        largest = p.entries(plan.own, best, plan.slots)
        if not plan.drafts:
            return DeviceVerdicts(
                plan.roots, best, plan.first_slots, _divergence_of_choices(plan, plan.roots, largest, largest)
            )
        tokens = drafted_tokens([own.tree for own in proposals], vocab, device)
        given = transfers.full((len(plan.depths),), 1.0, device)  # of the token that leads to each slot
        given[plan.draw_child] = p.entries(plan.draw_slot, tokens[plan.draw_node], plan.draws)
        # Of slots with children alone, a request at a time: rows of many do not stay in the processor's cache.
        found = torch.cat([self.thresholds(rows[own]) for rows, own in zip(probs, plan.inner, strict=True)]).double()
        thresholds = largest * 0.0
        thresholds[plan.inner_slots] = transfers.as_array(found)
        paths = _paths(plan)
        ends = _deepest(plan, paths, self.stays(given, thresholds[paths.parents]), given)
        return DeviceVerdicts(ends, best[ends], plan.first_slots, _divergence_of_choices(plan, ends, given, largest))

    def outcomes(self, group: Sequence[JudgedSlot]) -> list[Outcome]:
        """It is certain how a slot ends; see `Rule.outcomes`.

        Of several that stay, this is the likeliest: right where nothing is drafted below them, or where at most one
        stays. In deeper trees the choice is by whole paths, which no kernel of one slot can know; there `verify`
        itself, which uses no noise, gives the distribution.
        """
        (slot,) = group
        least = np.float64(self.thresholds(slot.p[None]))
        p_x = [np.float64(slot.p[draw.token]) for draw in slot.draws]
        staying = [index for index, mass in enumerate(p_x) if self.stays(mass, least)]
        if not staying:
            return [Outcome(1.0, (int(most_likely(slot.p)),), accepted=0)]
        chosen = max(staying, key=lambda i: float(p_x[i]))
        return [Outcome(float(i == chosen), (draw.token,), 1) for i, draw in enumerate(slot.draws[: chosen + 1])]


class TypicalAcceptance(ThresholdAcceptance):
    """Keep a token x where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p in nats.

    Cai et al. 2401.10774 (Medusa), section on typical acceptance. The surer the target is, the more it asks of a
    token. Lossy: tokens that the target would seldom draw are emitted often, and those below the threshold never; where
    nothing stays, and behind what stays, comes the argmax. At temperature 0 it looks at p at temperature 1.

    Args:
        epsilon: a probability above which a token always stays, in (0, 1]; the published code's posterior_threshold.
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
        """The words that make this rule."""
        return f"{self.name},epsilon={self.epsilon:g},delta={self.delta:g}"

    def thresholds(self, probs: Tensor) -> Tensor:
        entropies = torch.special.entr(probs).sum(dim=-1)
        return (-entropies).exp_().mul_(self.delta).clamp_max_(self.epsilon)

    def stays(self, p_x: Array, thresholds: Array) -> Array:
        return p_x > thresholds


class LenientArgmax(ThresholdAcceptance):
    """Lenience at temperature 0: a token x stays where p(x) >= l max p, p at temperature 1.

    Args:
        lenience: l, above 0 and at most 1.

    Raises:
        OptionError: a lenience out of range.
    """

    name: ClassVar[str] = SpeculativeSampling.name

    def __init__(self, lenience: float) -> None:
        _check(lenience)
        self.lenience = lenience

    @property
    def spec(self) -> str:
        """The words that make this rule."""
        return f"{self.name},lenience={self.lenience:g}"

    def thresholds(self, probs: Tensor) -> Tensor:
        """The largest probability of each row; the factor l comes with the comparison, in float64."""
        return probs.amax(dim=-1)

    def stays(self, p_x: Array, thresholds: Array) -> Array:
        return p_x >= self.lenience * thresholds


@dataclass(frozen=True, slots=True)
class _Paths:
    """Where paths stand in the tables of a batch.

    Attributes:
        parents: `[slots]`: the slot above each; any of a root.
        above: `[slots, depth + 1]`: the slots from the root down to each, filled up with the slot itself.
        depths: `[slots]`.
        is_root: `[slots]` bool.
        places: `[slots]`: where each stands in a table `[requests, most slots]`.
        size: columns of that table.
    """

    parents: Array
    above: Array
    depths: Array
    is_root: Array
    places: Array
    size: int


@lru_cache(maxsize=512)
def _paths(plan: WalkPlan) -> _Paths:
    above: list[list[int]] = []
    for slot, parent in enumerate(plan.parents):
        above.append([*above[parent], slot] if parent >= 0 else [slot])
    longest, size = max(map(len, above)), max(plan.slots)
    filled = [[*own, *own[-1:] * (longest - len(own))] for own in above]
    places = [number * size + own for number, count in enumerate(plan.slots) for own in range(count)]
    return _Paths(
        parents=plan.array(np.array([max(parent, 0) for parent in plan.parents])),
        above=plan.array(np.array(filled)),
        depths=plan.array(np.array(plan.depths)),
        is_root=plan.array(np.array(plan.depths) == 0),
        places=plan.array(np.array(places)),
        size=size,
    )


def _deepest(plan: WalkPlan, paths: _Paths, stays: Array, p_x: Array) -> Array:
    """The deepest slot of each request to which a path of nodes that stay leads, `[requests]`.

    Among equally deep ones that with the largest product of probabilities, among equals the first.

    Args:
        plan: of the batch.
        paths: in its tables.
        stays: `[slots]` bool: of the node of each slot; anything for a root.
        p_x: `[slots]`: probability of its token.
    """
    reached = (stays | paths.is_root)[paths.above].all(-1)
    product = p_x * 0.0 + 1.0
    for column in range(1, paths.above.shape[1]):  # one after another, so that equal products are equal
        factor = p_x[paths.above[:, column]]
        product = product * transfers.where(paths.depths >= column, factor, product * 0.0 + 1.0)

    def by_request(values: Array) -> Array:
        """Values of slots in a table `[requests, most slots]`."""
        table = transfers.array(np.full(plan.requests * paths.size, -1.0), plan.device)
        table[paths.places] = values.double() if isinstance(values, Tensor) else values
        return table.reshape(plan.requests, paths.size)

    depths = by_request(transfers.where(reached, paths.depths, -1))
    deepest = depths == transfers.largest(depths)[:, None]
    products = transfers.where(deepest, by_request(product), -1.0)
    return plan.roots + transfers.first_true(products == transfers.largest(products)[:, None])


def _divergence_of_choices(plan: WalkPlan, ends: Array, given: Array, largest: Array) -> Array:
    """Total variation, KL and max p `[requests, tokens, 3]` of tokens at which nothing was left to chance.

    Args:
        plan: of the batch.
        ends: `[requests]`: where paths end; the argmax follows.
        given: `[slots]`: the target's probability of the token that leads to each slot.
        largest: `[slots]`: of the likeliest token there.
    """
    slots = _paths(plan).above[ends]  # [requests, tokens]
    p_x = largest[ends][:, None] + largest[slots] * 0.0
    p_x[:, :-1] = transfers.where(slots[:, 1:] != slots[:, :-1], given[slots[:, 1:]], p_x[:, :-1])
    return transfers.stack((1.0 - p_x, -transfers.log(p_x), largest[slots]))


class LenientSampling(SpeculativeSampling):
    """Speculative sampling that accepts x with probability min(1, p(x) / (l q(x))).

    Leviathan et al. 2211.17192, appendix on lenience. All else is speculative sampling: a rejection goes on with
    norm(max(0, p - q)). So no token is emitted with more than p(x) / l, over any number of draws at a node, drawn in
    any way; a deterministic candidate is accepted with min(1, p(x) / l). At l = 1 it is speculative sampling, and
    emits the target's distribution.

    Args:
        lenience: l, above 0 and at most 1; the smaller, the more is accepted.

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
        """The words that make this rule."""
        return f"{self.name},lenience={self.lenience:g}"

    @property
    def greedy_form(self) -> Rule:
        """At temperature 0: accept p(x) >= l max p, p at temperature 1."""
        return self._greedy_form

    def accept_probability(self, p_x: Array, q_x: Array) -> Array:
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


# ------------------------------------------------------------------------------- how far lenience is from the target
#
# The distribution of the token that lenience emits at a node, measured against the target's distribution there.
#
# The distribution is over all that chance decides at the node: the drafter's draws and the rule's own noise. With draws
# 1, 2, ... in their order, p_1 = p, and p_(i+1) and q_(i+1) what a rejection leaves of p_i and q_i, it is
#
#     sum_i reach_i stay_i + reach_end p_end,    stay_i = min(q_i, p_i / l),
#                                                reach_1 = 1,  reach_(i+1) = reach_i (1 - sum of stay_i over tokens),
#
# and for l = 1 it is p. Deterministic candidates are taken as given. Draws without replacement: q_(i+1) depends on
# which token was rejected, so one is drawn from the distribution of rejected tokens, norm(max(0, q_i - p_i / l)), with
# noise of its own. (The token that was really drafted would not do: where it was accepted it is no example of a
# rejected one.) The distribution is then an unbiased estimate, whose mean over that noise is the emitted distribution;
# its mean divergence from p is, if anything, too large, for both measures are convex.


@dataclass(frozen=True, slots=True)
class NodeDraw:
    """One draw, at the same place of several nodes.

    Attributes:
        dist: which of the node's distributions it was drawn from; draws of one distribution without replacement share
            removals.
        q: `[nodes, vocab]`: that distribution before any removal; one-hot for a deterministic candidate.
        kind: how it was drawn.
        uniform: `[nodes]` in (0, 1), float64: noise that draws a rejected token, where a later draw depends on it.
    """

    dist: int
    q: Tensor
    kind: DrawKind
    uniform: Tensor | None = None


def emitted_dist(p: Tensor, draws: Sequence[NodeDraw], lenience: float) -> Tensor:
    """The distribution `[nodes, vocab]` of the token emitted at nodes whose target distributions are `p` `[nodes,
    vocab]`.

    Args:
        p: target distributions.
        draws: those made at each node, in order; the nodes differ in their distributions alone.
        lenience: l in (0, 1].
    """
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
    """Total variation and KL (nats) of the emitted distribution where all draws of a node are deterministic, in closed
    form.

    Only the candidates' probabilities matter: whatever is left is emitted in proportion to p.

    Args:
        p_x: what the target gives to the candidates, each token once, in order.
        lenience: l in (0, 1].
    """
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
    """A node on an accepted path: where the distribution of one emitted token is measured."""

    proposal: Proposal
    draws: tuple[Draw, ...]
    p: Tensor  # [vocab]
    noise: Noise
    depth: int
    measures: list[float] = field(default_factory=list)

    @property
    def sampled(self) -> bool:
        return any(draw.kind is not DrawKind.DETERMINISTIC for draw in self.draws)

    @property
    def candidates(self) -> list[int]:
        """Tokens of the draws, each once, in order."""
        ids = self.proposal.tree.token_list
        return list(dict.fromkeys(ids[draw.child] for draw in self.draws))

    @property
    def likeness(self) -> tuple[object, ...]:
        """Nodes with one likeness are measured together: distributions of one width, and the same draws up to
        tokens."""
        rows = list(dict.fromkeys(draw.dist for draw in self.draws))
        return self.p.dtype, *((rows.index(draw.dist), draw.kind) for draw in self.draws)


def lenient_divergence(
    lenience: float,
    proposals: Sequence[Proposal],
    probs: Sequence[Tensor],
    noise: Sequence[Noise],
    paths: Sequence[Sequence[int]],
) -> list[tuple[TokenDivergence, ...]]:
    """For each request the divergence of every token on its accepted path, and of the token behind it.

    Args:
        lenience: l in (0, 1].
        proposals: of each request.
        probs: target distributions `[slots, vocab]` of each.
        noise: of each, at this step; used under keys that decide nothing else.
        paths: accepted nodes of each.
    """
    requests = [
        [_Node(proposal, proposal.draws[slot], rows[slot], own, depth) for depth, slot in enumerate(slots)]
        for proposal, rows, own, slots in zip(
            proposals, probs, noise, ([0, *(node + 1 for node in path)] for path in paths), strict=True
        )
    ]
    nodes = list(itertools.chain.from_iterable(requests))
    _measure(nodes, lenience)
    return [tuple(_divergence(node, lenience) for node in each) for each in requests]


def _divergence(node: _Node, lenience: float) -> TokenDivergence:
    largest, *rest = node.measures
    distance, kl = rest if node.sampled else divergence_of_candidates(rest, lenience)
    return TokenDivergence.of(distance, kl, largest)


def _measure(nodes: Sequence[_Node], lenience: float) -> None:
    """Give each node max p, then total variation and KL, or p of its candidates; all in one transfer."""
    alike: dict[tuple[object, ...], list[_Node]] = {}
    for node in nodes:
        if node.sampled:
            alike.setdefault(node.likeness, []).append(node)
    asked = [node for node in nodes if not node.sampled]
    wanted = [torch.cat([node.p.amax()[None], node.p[node.candidates]]) for node in asked]
    for group in alike.values():
        p = torch.stack([node.p for node in group])
        columns = (p.amax(dim=-1).double(), *_measures(emitted_dist(p, _stacked(group), lenience), p))
        asked += group
        wanted += torch.stack(columns, dim=-1).unbind()
    for node, numbers in zip(asked, transfers.fetch(wanted), strict=True):
        node.measures = numbers


def _measures(emitted: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Total variation and KL in nats, `[nodes]` float64 each, of emitted distributions against p, both `[nodes,
    vocab]`."""
    distance = 0.5 * (emitted - p).abs_().sum(dim=-1, dtype=torch.float64)
    ratio = emitted / p.clamp_min(torch.finfo(p.dtype).tiny)
    return distance, torch.special.xlogy(emitted, ratio).sum(dim=-1, dtype=torch.float64)


def _stacked(group: Sequence[_Node]) -> list[NodeDraw]:
    """The draws of alike nodes, side by side."""
    draws = group[0].draws
    rows = list(dict.fromkeys(draw.dist for draw in draws))
    stacked = []
    for place, draw in enumerate(draws):
        q = torch.stack([_dist_of(node, node.draws[place]) for node in group])
        uniform = None
        if _depends_on(draw, draws[place + 1 :]):
            # Index 0 draws the recovered token; those above it are not asked for elsewhere.
            numbers = [node.noise.uniform(Purpose.RECOVERED, node.depth, 1 + place) for node in group]
            uniform = torch.tensor(numbers, dtype=torch.float64).to(q.device, non_blocking=True)
        stacked.append(NodeDraw(rows.index(draw.dist), q, draw.kind, uniform))
    return stacked


def _depends_on(draw: Draw, later: Sequence[Draw]) -> bool:
    """Whether one of the later draws of a node is made from what a draw without replacement left of its
    distribution."""
    return draw.kind is DrawKind.WITHOUT_REPLACEMENT and any(
        each.dist == draw.dist and each.kind is draw.kind for each in later
    )


def _dist_of(node: _Node, draw: Draw) -> Tensor:
    """The distribution `[vocab]` that a draw came from."""
    if draw.dist < 0:
        one_hot = torch.zeros_like(node.p)
        one_hot[node.proposal.tree.token_list[draw.child]] = 1.0
        return one_hot
    assert node.proposal.probs is not None
    return node.proposal.probs[draw.dist].to(node.p)
