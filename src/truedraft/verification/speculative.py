"""Speculative sampling along chains and trees, by recursive rejection."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core import laws as L
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposals import Draw, DrawKind, Proposal
from truedraft.core.verdicts import Origin, Verdict
from truedraft.verification.rule import DrawnToken, NodeOutcome, Rule


@dataclass(slots=True)
class _Walk:
    """How far the walk down one proposal has come: the accepted path, and the law of the token that ends it."""

    path: list[int]
    law: Tensor  # [vocab]
    final: Origin
    depth: int


class SpeculativeSampling(Rule):
    """Accept a drafted x with probability min(1, p(x)/q(x)); on rejection go on with norm(max(0, p - q)).

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318. With several draws at a node they are judged
    in order, each against what the rejections before it left of p (SpecInfer 2305.09781; RSD 2402.14160); drawn
    without replacement, q loses each rejected token and is renormalised. A deterministic candidate was drawn from
    a one-hot law. When no draw stays, the token is drawn from what is left of p: *recovered*; where there was
    nothing to judge it is a *bonus*. At temperature 0 the same rule accepts exactly the argmax.
    """

    name: ClassVar[str] = "speculative"
    lossless: ClassVar[bool] = True
    judges: ClassVar[frozenset[DrawKind]] = frozenset(
        {DrawKind.INDEPENDENT, DrawKind.WITHOUT_REPLACEMENT, DrawKind.DETERMINISTIC}
    )

    # The four parts of the rule. Tests break them one at a time, and must notice.

    def accept_probability(self, p_x: float, q_x: float) -> float:
        """Probability that a token drawn with probability `q_x` stays where the target gives it `p_x`."""
        if p_x <= 0.0:
            return 0.0  # also where q_x is 0: a token that the target forbids never stays
        return 1.0 if p_x >= q_x else p_x / q_x

    def rejected(self, p: Tensor, q: Tensor) -> Tensor:
        """What is left of the target's law `[vocab]` after a draw from `q` was rejected."""
        return L.residual(p, q)

    def rejected_candidate(self, p: Tensor, token: int) -> Tensor:
        """The same for a deterministic candidate: `rejected` with q one-hot at `token`."""
        return L.residual_of_candidate(p, token)

    def removed(self, q: Tensor, token: int) -> Tensor:
        """The draft's law `[vocab]` after `token` was taken out of it, without replacement."""
        return L.without(q, token)

    def verify(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        """Judge a batch of proposals; see `Rule.verify`."""
        looks = _first_looks(list(zip(proposals, laws, noise, strict=True)))
        walks = [self._walk(*each) for each in zip(proposals, looks, noise, strict=True)]
        finals = _draw_finals(walks, noise)
        verdicts = []
        for proposal, walk, token in zip(proposals, walks, finals, strict=True):
            ids = proposal.tree.token_list
            verdicts.append(Verdict(tuple(walk.path), (*(ids[node] for node in walk.path), token), walk.final))
        return verdicts

    def _walk(self, proposal: Proposal, judged: _FirstLook, noise: Noise) -> _Walk:
        """Walk from the root down, accepting one child at each node, until no draw of a node stays."""
        path: list[int] = []
        slot = 0
        while True:
            draws = proposal.draws[slot]
            accepted, law = self._judge_node(draws, judged, slot, noise, depth=len(path))
            if accepted is None:
                return _Walk(path, law, Origin.RECOVERED if draws else Origin.BONUS, len(path))
            path.append(accepted)
            slot = accepted + 1

    def _judge_node(
        self, draws: Sequence[Draw], judged: _FirstLook, slot: int, noise: Noise, depth: int
    ) -> tuple[int | None, Tensor]:
        """The accepted child of one node, or None with what is left of the node's law `[vocab]`."""
        p = judged.laws[slot]
        reduced: dict[int, Tensor] = {}  # laws that lost tokens at this node, by row
        fresh = True
        for index, draw in enumerate(draws):
            token = judged.tokens[draw.child]
            if fresh:
                p_x, q_x = judged.p_x[draw.child], judged.q_of(draw)
            else:
                p_x = float(p[token])
                q_x = float(reduced[draw.law][token]) if _is_reduced(draw, reduced) else judged.q_of(draw)
            if noise.uniform(Purpose.ACCEPT, depth, index) < self.accept_probability(p_x, q_x):
                return draw.child, p
            fresh = False
            p = self._after_rejection(p, draw, token, judged, reduced)
        return None, p

    def _after_rejection(
        self, p: Tensor, draw: Draw, token: int, judged: _FirstLook, reduced: dict[int, Tensor]
    ) -> Tensor:
        if draw.kind is DrawKind.DETERMINISTIC:
            return self.rejected_candidate(p, token)
        q = reduced[draw.law] if _is_reduced(draw, reduced) else judged.q_row(draw)
        if draw.kind is DrawKind.WITHOUT_REPLACEMENT:
            reduced[draw.law] = self.removed(q, token)
        return self.rejected(p, q)

    def outcomes(self, p: Tensor, draws: Sequence[DrawnToken]) -> list[NodeOutcome]:
        """How a node ends, given the tokens drawn there; see `Rule.outcomes`."""
        outcomes = []
        reach = 1.0
        reduced: dict[int, Tensor] = {}
        for draw in draws:
            q = reduced[draw.law] if _is_reduced(draw, reduced) else draw.q
            accept = self.accept_probability(float(p[draw.token]), float(q[draw.token]))
            outcomes.append(NodeOutcome(reach * accept, draw.token, accepted=True))
            reach *= 1.0 - accept
            if reach == 0.0:
                return outcomes
            p = self.rejected(p, q)
            if draw.kind is DrawKind.WITHOUT_REPLACEMENT:
                reduced[draw.law] = self.removed(q, draw.token)
        outcomes.extend(NodeOutcome(reach * float(mass), token, accepted=False) for token, mass in enumerate(p))
        return outcomes


def _is_reduced(draw: Draw | DrawnToken, reduced: dict[int, Tensor]) -> bool:
    """Whether earlier draws of this node took tokens out of the law that this one was drawn from."""
    return draw.kind is DrawKind.WITHOUT_REPLACEMENT and draw.law in reduced


@dataclass(slots=True)
class _FirstLook:
    """p and q of every drafted token of one request, on the host.

    Most nodes are judged by their first draw, against the untouched laws; only a rejection needs whole rows.
    """

    proposal: Proposal
    laws: Tensor  # [slots, vocab]
    tokens: list[int]
    p_x: list[float]  # by node
    q_x: dict[tuple[int, int], float]  # by node and row of its law

    def q_of(self, draw: Draw) -> float:
        """Probability that the draft's untouched law gave the drawn token."""
        return 1.0 if draw.law < 0 else self.q_x[draw.child, draw.law]

    def q_row(self, draw: Draw) -> Tensor:
        """The draft's untouched law `[vocab]`; the draft may live on another device."""
        assert self.proposal.laws is not None
        return self.proposal.laws[draw.law].to(self.laws.device)


def _first_looks(requests: Sequence[tuple[Proposal, Tensor, Noise]]) -> list[_FirstLook]:
    """Fetch p and q of all drafted tokens of a batch in one transfer."""
    wanted: list[tuple[Tensor, list[int]]] = []  # tables `[rows, vocab]`, and places in them
    drawn_from: list[list[tuple[int, int]]] = []
    for proposal, laws, _ in requests:
        tokens, vocab = proposal.tree.token_list, laws.shape[-1]
        slots = [parent + 1 for parent in proposal.tree.shape.parents]
        wanted.append((laws, [slot * vocab + token for slot, token in zip(slots, tokens, strict=True)]))
        drawn = [(draw.child, draw.law) for draws in proposal.draws for draw in draws if draw.law >= 0]
        if drawn and proposal.laws is not None:
            vocab = proposal.laws.shape[-1]
            wanted.append((proposal.laws, [law * vocab + tokens[child] for child, law in drawn]))
        drawn_from.append(drawn)
    found = iter(_fetch(wanted))
    looks = []
    for (proposal, laws, _), drawn in zip(requests, drawn_from, strict=True):
        p_x = list(itertools.islice(found, len(proposal.tree)))
        q_x = dict(zip(drawn, itertools.islice(found, len(drawn)), strict=True))
        looks.append(_FirstLook(proposal, laws, proposal.tree.token_list, p_x, q_x))
    return looks


def _fetch(wanted: Sequence[tuple[Tensor, list[int]]]) -> list[float]:
    """Entries of several tables at flat places, one table behind the other."""
    wanted = [(table, places) for table, places in wanted if places]
    if not wanted:
        return []
    device = wanted[0][0].device
    counts = [len(places) for _, places in wanted]
    # Not blocking: so few numbers are copied before the call returns, and the device is waited for only at the end.
    flat = torch.tensor([place for _, places in wanted for place in places]).to(device, non_blocking=True)
    entries = [
        table.take(part.to(table.device)).to(device)
        for (table, _), part in zip(wanted, flat.split(counts), strict=True)
    ]
    found: list[float] = torch.cat(entries).tolist()
    return found


def _draw_finals(walks: Sequence[_Walk], noise: Sequence[Noise]) -> list[int]:
    """Draw the token that ends each walk, for the whole batch at once."""
    if not walks:
        return []
    purposes = {Origin.RECOVERED: Purpose.RECOVERED, Origin.BONUS: Purpose.BONUS}
    uniforms = [each.uniform(purposes[walk.final], walk.depth) for walk, each in zip(walks, noise, strict=True)]
    laws = torch.stack([walk.law for walk in walks])
    numbers = torch.tensor(uniforms, dtype=torch.float64).to(laws.device, non_blocking=True)
    tokens: list[int] = L.draw(laws, numbers).tolist()
    return tokens
