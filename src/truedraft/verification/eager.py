"""Every look that a walk may take, and every token that may end it, worked out at once on the laws' device.

Which draw a walk looks at next depends on numbers that only the device has. But what it would see there does not: a
draw is looked at only if all draws before it at its node were rejected, so p and q are known for that case, and so is
the token that ends the walk where none stays. All of it is batched over the nodes of all requests: first draws first,
then second draws, and so on. The operations and the noise are those of the walk that looks as it goes, row by row, so
the verdicts are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.core import laws as L
from truedraft.core import transfers
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposals import Draw, DrawKind, Proposal
from truedraft.verification.looks import Look, Parts, looks_at_candidates, only_candidates


@dataclass(frozen=True, slots=True)
class KnownLooks:
    """What was worked out for one request, on the host.

    Attributes:
        parts: of the rule.
        proposal: what is looked at.
        finals: for each slot the token that ends a walk there.
        p_x: for each slot whose draws are all deterministic, the target's untouched probability of each draw.
        sampled: for each other slot with draws, the looks at them.
    """

    parts: Parts
    proposal: Proposal
    finals: list[int]
    p_x: dict[int, list[float]]
    sampled: dict[int, list[Look]]

    def node(self, slot: int) -> Iterator[Look]:
        """See `Looks.node`."""
        if slot not in self.p_x:
            return iter(self.sampled.get(slot, ()))
        tokens = [self.proposal.tree.token_list[draw.child] for draw in self.proposal.draws[slot]]
        return looks_at_candidates(self.parts, tokens, self.p_x[slot])


@dataclass(slots=True)
class _Round:
    """The draws of one number at all sampled nodes, those from a law first; each list has an entry for each of them.

    Attributes:
        rows: of the table of sampled nodes; those of deterministic draws come last.
        nodes: drafted nodes of the batch that carry the drawn tokens, in the same order.
        laws: rows of the table of draft laws, for the draws from a law.
        removes: places in `laws` whose law a later draw will find without the token.
    """

    rows: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    laws: list[int] = field(default_factory=list)
    removes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """Where in the tables everything of a batch is. Slots, nodes and laws are numbered through all requests.

    Attributes:
        leaves: slots without draws.
        fixed: slots with deterministic draws only.
        fixed_nodes: their draws' nodes, slot by slot.
        sampled: all other slots, the rows of the table of sampled nodes.
        laws: draft laws that the table of draft laws holds. A law that loses tokens at a node has a row for itself.
        rounds: first draws, second draws, ...
        uniforms: for each slot the number that draws its final token.
    """

    leaves: list[int] = field(default_factory=list)
    fixed: list[int] = field(default_factory=list)
    fixed_nodes: list[list[int]] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    laws: list[int] = field(default_factory=list)
    rounds: list[_Round] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, proposals: Sequence[Proposal], noise: Sequence[Noise]) -> _Plan:
        """Go through all draws of a batch."""
        plan = cls()
        node = law = 0
        for proposal, own in zip(proposals, noise, strict=True):
            for draws, depth in zip(proposal.draws, (0, *proposal.tree.shape.depths), strict=True):
                plan._add(draws, node, law)
                plan.uniforms.append(own.uniform(Purpose.RECOVERED if draws else Purpose.BONUS, depth))
            node += len(proposal.tree)
            law += 0 if proposal.laws is None else len(proposal.laws)
        return plan

    @property
    def padded_nodes(self) -> list[int]:
        """`fixed_nodes` in one list. Slots are filled up with their first: taken out twice is taken out once."""
        width = max(map(len, self.fixed_nodes), default=0)
        return [node for nodes in self.fixed_nodes for node in (*nodes, *nodes[:1] * (width - len(nodes)))]

    @property
    def lists(self) -> list[list[int]]:
        """All lists of places in tables."""
        tables = [self.leaves, self.fixed, self.sampled, self.laws]
        return [*tables, *(each for own in self.rounds for each in (own.rows, own.nodes, own.laws, own.removes))]

    def _add(self, draws: Sequence[Draw], first_node: int, first_law: int) -> None:
        """Add the next slot, of a request whose nodes and laws begin at the given numbers."""
        slot = len(self.uniforms)
        if not draws:
            self.leaves.append(slot)
        elif only_candidates(draws):
            self.fixed.append(slot)
            self.fixed_nodes.append([first_node + draw.child for draw in draws])
        else:
            self._add_sampled(draws, len(self.sampled), first_node, first_law)
            self.sampled.append(slot)

    def _add_sampled(self, draws: Sequence[Draw], row: int, first_node: int, first_law: int) -> None:
        while len(self.rounds) < len(draws):
            self.rounds.append(_Round())
        own: dict[tuple[int, DrawKind], int] = {}  # rows in the table of draft laws
        for index, draw in enumerate(draws):
            judged, node = self.rounds[index], first_node + draw.child
            if draw.kind is DrawKind.DETERMINISTIC:
                judged.rows.append(row)
                judged.nodes.append(node)
                continue
            key = draw.law, draw.kind
            if key not in own:
                own[key] = len(self.laws)
                self.laws.append(first_law + draw.law)
            # The draws from a law come first, so that one list of places serves them and the laws.
            place = len(judged.laws)
            judged.rows.insert(place, row)
            judged.nodes.insert(place, node)
            judged.laws.append(own[key])
            if draw.kind is DrawKind.WITHOUT_REPLACEMENT and any((d.law, d.kind) == key for d in draws[index + 1 :]):
                judged.removes.append(place)


class EagerBatch:
    """A batch that is being judged on its laws' device, without waiting for it.

    Args:
        parts: of the rule.
        proposals: at least one. An id outside the vocabulary is judged as its nearest in it.
        laws: for each request the target's laws `[slots, vocab]`, all on one device.
        noise: for each request the noise of this step.

    Attributes:
        wanted: what the host must read.
    """

    def __init__(
        self, parts: Parts, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]
    ) -> None:
        self._parts = parts
        self._proposals = proposals
        self._plan = plan = _Plan.of(proposals, noise)
        self._device = laws[0].device
        self._p = torch.cat(list(laws))  # [slots, vocab]
        known = [token for own in proposals if own.tree.is_known for token in own.tree.token_list]
        lists = [known, plan.padded_nodes, *plan.lists]
        block = transfers.upload(list(itertools.chain(*lists)), self._device)
        given, self._fixed_nodes, *places = block.split([len(each) for each in lists])
        self._places = {id(own): at for own, at in zip(plan.lists, places, strict=True)}
        self._tokens = self._drafted(given)  # [nodes]
        self.wanted: list[Tensor] = []
        self.wanted.append(self._finals([self._judge_fixed(), self._judge_sampled()]))

    def _drafted(self, given: Tensor) -> Tensor:
        """The drafted tokens of all requests; `given` are those that the host knows."""
        parts, start = [], 0
        for tree in (proposal.tree for proposal in self._proposals):
            if tree.is_known:
                parts.append(given[start : start + len(tree)])
                start += len(tree)
            else:
                parts.append(tree.tokens.to(self._device))
        return torch.cat(parts).clamp(0, self._p.shape[-1] - 1)

    def _judge_fixed(self) -> Tensor:
        """What is left of the laws of nodes whose draws are all deterministic, `[nodes, vocab]`."""
        plan = self._plan
        p = self._p.index_select(0, self._at(plan.fixed))
        if not plan.fixed:
            return p
        tokens = self._tokens[self._fixed_nodes].view(len(plan.fixed), -1)
        self.wanted.append(p.gather(-1, tokens))
        return self._parts.rejected_candidate(p, tokens)

    def _judge_sampled(self) -> Tensor:
        """The same of all other nodes that have draws."""
        plan = self._plan
        p = self._p.index_select(0, self._at(plan.sampled))
        if not plan.rounds:
            return p
        tables = [own.laws.to(self._device) for own in self._proposals if own.laws is not None]
        q = torch.cat(tables).index_select(0, self._at(plan.laws))
        p = p.to(torch.promote_types(p.dtype, q.dtype))
        for judged in plan.rounds:
            self._judge_round(judged, p, q)
        return p

    def _judge_round(self, judged: _Round, p: Tensor, q: Tensor) -> None:
        """Look at one draw of each node, and reject it: `p` and `q` are changed in place."""
        rows, tokens = self._at(judged.rows), self._tokens[self._at(judged.nodes)][:, None]
        left = p.index_select(0, rows)
        self.wanted.append(left.gather(-1, tokens))
        sampled = len(judged.laws)
        if sampled:
            places = self._at(judged.laws)
            drawn_from = q.index_select(0, places)
            self.wanted.append(drawn_from.gather(-1, tokens[:sampled]))
            p.index_copy_(0, rows[:sampled], self._parts.rejected(left[:sampled], drawn_from))
            if judged.removes:
                among = self._at(judged.removes)
                q.index_copy_(0, places[among], self._parts.removed(drawn_from[among], tokens[among]))
        if sampled < len(judged.rows):
            p.index_copy_(0, rows[sampled:], self._parts.rejected_candidate(left[sampled:], tokens[sampled:]))

    def _finals(self, left: Sequence[Tensor]) -> Tensor:
        """Draw the token that would end a walk at each slot, `[slots]`; `left` are the laws of those with draws."""
        plan = self._plan
        leaves = self._p.index_select(0, self._at(plan.leaves))
        order = [*plan.leaves, *plan.fixed, *plan.sampled]
        uniforms = transfers.upload([plan.uniforms[slot] for slot in order], self._device, torch.float64)
        return L.draw(torch.cat([leaves, *left]), uniforms)

    def _at(self, places: list[int]) -> Tensor:
        """One of the plan's lists on the device: all of them were uploaded together."""
        return self._places[id(places)]

    def looks(self, numbers: Sequence[Sequence[float]]) -> list[KnownLooks]:
        """What the walks look at, from the numbers in `wanted`."""
        plan, read = self._plan, iter(numbers)
        p_x: dict[int, list[float]] = {}  # by slot of the batch
        if plan.fixed:
            found = next(read)
            width = len(found) // len(plan.fixed)
            for row, (slot, nodes) in enumerate(zip(plan.fixed, plan.fixed_nodes, strict=True)):
                p_x[slot] = list(found[row * width : row * width + len(nodes)])
        sampled: dict[int, list[Look]] = {slot: [] for slot in plan.sampled}
        for judged in plan.rounds:
            ps = next(read)
            qs = next(read) if judged.laws else ()
            one_hot = [1.0] * (len(ps) - len(qs))
            for row, p, q in zip(judged.rows, ps, (*qs, *one_hot), strict=True):
                sampled[plan.sampled[row]].append((p, q))
        order = [*plan.leaves, *plan.fixed, *plan.sampled]
        finals = dict(zip(order, (int(token) for token in next(read)), strict=True))
        return self._of_requests(finals, p_x, sampled)

    def _of_requests(
        self, finals: dict[int, int], p_x: dict[int, list[float]], sampled: dict[int, list[Look]]
    ) -> list[KnownLooks]:
        """Share out what was found by slots of the batch among the requests, by slots of their own."""
        looks, start = [], 0
        for proposal in self._proposals:
            slots = range(len(proposal.draws))
            looks.append(
                KnownLooks(
                    self._parts,
                    proposal,
                    [finals[start + slot] for slot in slots],
                    {slot: p_x[start + slot] for slot in slots if start + slot in p_x},
                    {slot: sampled[start + slot] for slot in slots if start + slot in sampled},
                )
            )
            start += len(slots)
        return looks
