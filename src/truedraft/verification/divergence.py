"""The law of the token that lenience emits at a node, measured against the target's law there.

The law is over all that chance decides at the node: the drafter's draws and the rule's own noise. With draws 1, 2, ...
in their order, p_1 = p, and p_(i+1) and q_(i+1) what a rejection leaves of p_i and q_i, it is

    sum_i reach_i stay_i + reach_end p_end,    stay_i = min(q_i, p_i / l),
                                               reach_1 = 1,  reach_(i+1) = reach_i (1 - sum of stay_i over tokens),

and for l = 1 it is p. Deterministic candidates are taken as given. Draws without replacement: q_(i+1) depends on
which token was rejected, so one is drawn from the law of rejected tokens, norm(max(0, q_i - p_i / l)), with noise of
its own. (The token that was really drafted would not do: where it was accepted it is no example of a rejected one.)
The law is then an unbiased estimate, whose mean over that noise is the emitted law; its mean divergence from p is, if
anything, too large, for both measures are convex.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.core import laws as L
from truedraft.core import transfers
from truedraft.core.divergence import TokenDivergence
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposals import Draw, DrawKind, Proposal
from truedraft.core.removal import without_tokens


@dataclass(frozen=True, slots=True)
class NodeDraw:
    """One draw, at the same place of several nodes.

    Attributes:
        law: which of the node's laws it was drawn from; draws of one law without replacement share removals.
        q: `[nodes, vocab]`: that law before any removal; one-hot for a deterministic candidate.
        kind: how it was drawn.
        uniform: `[nodes]` in (0, 1), float64: noise that draws a rejected token, where a later draw depends on it.
    """

    law: int
    q: Tensor
    kind: DrawKind
    uniform: Tensor | None = None


def emitted_law(p: Tensor, draws: Sequence[NodeDraw], lenience: float) -> Tensor:
    """The law `[nodes, vocab]` of the token emitted at nodes whose target laws are `p` `[nodes, vocab]`.

    Args:
        p: target laws.
        draws: those made at each node, in order; the nodes differ in their laws alone.
        lenience: l in (0, 1].
    """
    law = torch.zeros_like(p)
    reach = torch.ones_like(p[:, :1])
    left = p
    reduced: dict[int, Tensor] = {}
    least = max(lenience, torch.finfo(p.dtype).tiny)  # a number that this dtype rounds to 0 would make 0 / 0
    for draw in draws:
        q = reduced.get(draw.law, draw.q) if draw.kind is DrawKind.WITHOUT_REPLACEMENT else draw.q
        stay = torch.minimum(q, left / least)
        law += reach * stay
        reach = (reach * (1.0 - stay.sum(dim=-1, keepdim=True))).clamp_min_(0.0)
        if draw.uniform is not None:
            rejected = L.draw(q - stay, draw.uniform).clamp_max_(q.shape[-1] - 1)  # of no mass only where reach is 0
            reduced[draw.law] = without_tokens(q, rejected[:, None])
        left = L.residual(left, q)
    return law + reach * left


def divergence_of_candidates(p_x: Sequence[float], lenience: float) -> tuple[float, float]:
    """Total variation and KL (nats) of the emitted law where all draws of a node are deterministic, in closed form.

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
    """A node on an accepted path: where the law of one emitted token is measured."""

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
        """Nodes with one likeness are measured together: laws of one width, and the same draws up to tokens."""
        rows = list(dict.fromkeys(draw.law for draw in self.draws))
        return self.p.dtype, *((rows.index(draw.law), draw.kind) for draw in self.draws)


def lenient_divergence(
    lenience: float,
    proposals: Sequence[Proposal],
    laws: Sequence[Tensor],
    noise: Sequence[Noise],
    paths: Sequence[Sequence[int]],
) -> list[tuple[TokenDivergence, ...]]:
    """For each request the divergence of every token on its accepted path, and of the token behind it.

    Args:
        lenience: l in (0, 1].
        proposals: of each request.
        laws: target laws `[slots, vocab]` of each.
        noise: of each, at this step; used under keys that decide nothing else.
        paths: accepted nodes of each.
    """
    requests = [
        [_Node(proposal, proposal.draws[slot], rows[slot], own, depth) for depth, slot in enumerate(slots)]
        for proposal, rows, own, slots in zip(
            proposals, laws, noise, ([0, *(node + 1 for node in path)] for path in paths), strict=True
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
        columns = (p.amax(dim=-1).double(), *_measures(emitted_law(p, _stacked(group), lenience), p))
        asked += group
        wanted += torch.stack(columns, dim=-1).unbind()
    for node, numbers in zip(asked, transfers.fetch(wanted), strict=True):
        node.measures = numbers


def _measures(emitted: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Total variation and KL in nats, `[nodes]` float64 each, of emitted laws against p, both `[nodes, vocab]`."""
    distance = 0.5 * (emitted - p).abs_().sum(dim=-1, dtype=torch.float64)
    ratio = emitted / p.clamp_min(torch.finfo(p.dtype).tiny)
    return distance, torch.special.xlogy(emitted, ratio).sum(dim=-1, dtype=torch.float64)


def _stacked(group: Sequence[_Node]) -> list[NodeDraw]:
    """The draws of alike nodes, side by side."""
    draws = group[0].draws
    rows = list(dict.fromkeys(draw.law for draw in draws))
    stacked = []
    for place, draw in enumerate(draws):
        q = torch.stack([_law_of(node, node.draws[place]) for node in group])
        uniform = None
        if _depends_on(draw, draws[place + 1 :]):
            # Index 0 draws the recovered token; those above it are not asked for elsewhere.
            numbers = [node.noise.uniform(Purpose.RECOVERED, node.depth, 1 + place) for node in group]
            uniform = torch.tensor(numbers, dtype=torch.float64).to(q.device, non_blocking=True)
        stacked.append(NodeDraw(rows.index(draw.law), q, draw.kind, uniform))
    return stacked


def _depends_on(draw: Draw, later: Sequence[Draw]) -> bool:
    """Whether one of the later draws of a node is made from what a draw without replacement left of its law."""
    return draw.kind is DrawKind.WITHOUT_REPLACEMENT and any(
        each.law == draw.law and each.kind is draw.kind for each in later
    )


def _law_of(node: _Node, draw: Draw) -> Tensor:
    """The law `[vocab]` that a draw came from."""
    if draw.law < 0:
        one_hot = torch.zeros_like(node.p)
        one_hot[node.proposal.tree.token_list[draw.child]] = 1.0
        return one_hot
    assert node.proposal.laws is not None
    return node.proposal.laws[draw.law].to(node.p)
