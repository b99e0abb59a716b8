"""What a walk down a proposal looks at: the target's and the draft's probability of one draw after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from truedraft.core.proposals import Draw, DrawKind, Proposal
from truedraft.verification.rule import DrawnToken

Look = tuple[float, float]
"""p(x) and q(x) of a drawn token x, after what the rejections before it at its node left of both laws."""


class Parts(Protocol):
    """What a rule does to laws at one node; see `SpeculativeSampling`, which says what each is."""

    def rejected(self, p: Tensor, q: Tensor) -> Tensor: ...
    def rejected_candidate(self, p: Tensor, tokens: Tensor) -> Tensor: ...
    def left_of_candidate(self, p_x: float, taken: float) -> float: ...
    def removed(self, q: Tensor, tokens: Tensor) -> Tensor: ...


class Looks(Protocol):
    """Looks at one request's proposal."""

    def node(self, slot: int) -> Iterator[Look]:
        """Look at the draws of a slot, in order. Asking for the next says that the one before was rejected."""
        ...


def only_candidates(draws: Sequence[Draw]) -> bool:
    """Whether all draws of a slot are deterministic."""
    for draw in draws:  # noqa: SIM110 - all() over a generator costs several times as much, at every node
        if draw.kind is not DrawKind.DETERMINISTIC:
            return False
    return True


def is_reduced(draw: Draw | DrawnToken, reduced: Iterable[int]) -> bool:
    """Whether earlier draws of a node took tokens out of the law that this one was drawn from, a row of `reduced`."""
    return draw.kind is DrawKind.WITHOUT_REPLACEMENT and draw.law in reduced


def looks_at_candidates(parts: Parts, tokens: Sequence[int], p_x: Sequence[float]) -> Iterator[Look]:
    """Look at deterministic draws of one node, by host arithmetic alone.

    Rejected candidates only leave p, so what is left of it for another one follows from the mass that has left.

    Args:
        parts: of the rule.
        tokens: of the draws.
        p_x: the target's probability of each, before anything was rejected.
    """
    gone: set[int] = set()
    taken = 0.0
    for token, mass in zip(tokens, p_x, strict=True):
        if token in gone:  # drafted twice
            yield 0.0, 1.0
            continue
        yield parts.left_of_candidate(mass, taken), 1.0
        gone.add(token)
        taken += mass


@dataclass(slots=True)
class HostLooks:
    """Looks as they are needed, at laws that the host can read.

    Most nodes are judged by their first draw, against the untouched laws; only a rejection needs whole rows.

    Attributes:
        parts: of the rule.
        proposal: what is looked at.
        laws: `[slots, vocab]`.
        p_x: by node, from the untouched laws.
        q_x: by node and row of its law, from the untouched laws.
        left: `[vocab]`: the law of the token that ends the walk, once all draws of a node were rejected.
    """

    parts: Parts
    proposal: Proposal
    laws: Tensor
    p_x: list[float]
    q_x: dict[tuple[int, int], float]
    left: Tensor = field(init=False)

    def node(self, slot: int) -> Iterator[Look]:
        """See `Looks.node`."""
        draws = self.proposal.draws[slot]
        if not draws:
            self.left = self.laws[slot]
            return iter(())
        return self._candidates(slot, draws) if only_candidates(draws) else self._draws(slot, draws)

    def _candidates(self, slot: int, draws: Sequence[Draw]) -> Iterator[Look]:
        tokens = [self.proposal.tree.token_list[draw.child] for draw in draws]
        yield from looks_at_candidates(self.parts, tokens, [self.p_x[draw.child] for draw in draws])
        self.left = self.parts.rejected_candidate(self.laws[slot], torch.tensor(tokens))

    def _draws(self, slot: int, draws: Sequence[Draw]) -> Iterator[Look]:
        tokens = self.proposal.tree.token_list
        # Until the first draw was rejected no law is touched.
        yield self.p_x[draws[0].child], self._first_q(draws[0])
        reduced: dict[int, Tensor] = {}  # laws that lost tokens at this node, by row
        p = self._after_rejection(self.laws[slot], draws[0], tokens[draws[0].child], reduced)
        for draw in draws[1:]:
            token = tokens[draw.child]
            q_x = float(reduced[draw.law][token]) if is_reduced(draw, reduced) else self._first_q(draw)
            yield float(p[token]), q_x
            p = self._after_rejection(p, draw, token, reduced)
        self.left = p

    def _first_q(self, draw: Draw) -> float:
        """Probability that the draft's untouched law gave the drawn token."""
        return 1.0 if draw.law < 0 else self.q_x[draw.child, draw.law]

    def _after_rejection(self, p: Tensor, draw: Draw, token: int, reduced: dict[int, Tensor]) -> Tensor:
        if draw.kind is DrawKind.DETERMINISTIC:
            return self.parts.rejected_candidate(p, torch.tensor([token]))
        if is_reduced(draw, reduced):
            q = reduced[draw.law]
        else:
            assert self.proposal.laws is not None
            q = self.proposal.laws[draw.law].to(p.device)  # the draft may live on another device
        if draw.kind is DrawKind.WITHOUT_REPLACEMENT:
            reduced[draw.law] = self.parts.removed(q, torch.tensor([token]))
        return self.parts.rejected(p, q)


def host_looks(parts: Parts, proposals: Sequence[Proposal], laws: Sequence[Tensor]) -> list[HostLooks]:
    """Begin to look at a batch: p and q of all drafted tokens, from the untouched laws, in one transfer."""
    wanted: list[tuple[Tensor, list[int]]] = []  # tables `[rows, vocab]`, and places in them
    drawn_from: list[list[tuple[int, int]]] = []
    for proposal, own in zip(proposals, laws, strict=True):
        tokens, vocab = proposal.tree.token_list, own.shape[-1]
        slots = [parent + 1 for parent in proposal.tree.shape.parents]
        wanted.append((own, [slot * vocab + token for slot, token in zip(slots, tokens, strict=True)]))
        drawn = [(draw.child, draw.law) for draws in proposal.draws for draw in draws if draw.law >= 0]
        if drawn and proposal.laws is not None:
            vocab = proposal.laws.shape[-1]
            wanted.append((proposal.laws, [law * vocab + tokens[child] for child, law in drawn]))
        drawn_from.append(drawn)
    found = iter(_entries(wanted))
    looks = []
    for proposal, own, drawn in zip(proposals, laws, drawn_from, strict=True):
        p_x = list(itertools.islice(found, len(proposal.tree)))
        q_x = dict(zip(drawn, itertools.islice(found, len(drawn)), strict=True))
        looks.append(HostLooks(parts, proposal, own, p_x, q_x))
    return looks


def _entries(wanted: Sequence[tuple[Tensor, list[int]]]) -> list[float]:
    """Entries of several tables at flat places, one table behind the other."""
    wanted = [(table, places) for table, places in wanted if places]
    if not wanted:
        return []
    device = wanted[0][0].device
    counts = [len(places) for _, places in wanted]
    flat = torch.tensor([place for _, places in wanted for place in places])
    entries = [
        table.take(part.to(table.device)).to(device)
        for (table, _), part in zip(wanted, flat.split(counts), strict=True)
    ]
    found: list[float] = torch.cat(entries).tolist()
    return found
