"""Every look that a walk by blocks may take, worked out at once on the laws' device.

The weight of a block's prefix depends on its tokens alone, not on what is decided about it. So the target's laws can be
scaled first, all blocks of a batch side by side, and all else is what `EagerBatch` does with the scaled laws: at a slot
of a block its residual is that of the block, and the final token drawn from it is the one that ends a walk there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import Noise
from truedraft.core.proposals import Proposal
from truedraft.verification.block_looks import BlockParts, KnownBlockLooks, block_at, is_joint
from truedraft.verification.eager import EagerBatch
from truedraft.verification.looks import Look


@dataclass(slots=True)
class _Plan:
    """The slots of all blocks of a batch: first slots of the blocks, second slots, ..., longer blocks first.

    Slots are numbered through all requests, nodes and laws through those that have blocks.

    Attributes:
        proposals: those with blocks.
        slots: slots of the batch.
        nodes: those that carry the tokens drawn there.
        laws: the draft laws they were drawn from.
        counts: how many first slots there are, second slots, ...
    """

    proposals: list[Proposal] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    laws: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, proposals: Sequence[Proposal]) -> _Plan:
        """Find all blocks of a batch."""
        plan = cls()
        blocks: list[list[tuple[int, int, int]]] = []
        slot = node = law = 0
        for proposal in proposals:
            own = [block_at(proposal, first) for first in _first_slots(proposal)]
            for block in own:
                drawn = [(each, proposal.draws[each][0]) for each in block]
                blocks.append([(slot + each, node + draw.child, law + draw.law) for each, draw in drawn])
            if own:
                plan.proposals.append(proposal)
                node += len(proposal.tree)
                law += 0 if proposal.laws is None else len(proposal.laws)
            slot += len(proposal.draws)
        blocks.sort(key=len, reverse=True)
        for level in itertools.zip_longest(*blocks):
            there = [place for place in level if place is not None]
            plan.counts.append(len(there))
            for own_slot, own_node, own_law in there:
                plan.slots.append(own_slot)
                plan.nodes.append(own_node)
                plan.laws.append(own_law)
        return plan


def _first_slots(proposal: Proposal) -> list[int]:
    """Slots at which a block begins."""
    parents = (None, *proposal.tree.shape.parents)
    return [
        slot
        for slot, draws in enumerate(proposal.draws)
        if is_joint(draws) and ((parent := parents[slot]) is None or not is_joint(proposal.draws[parent + 1]))
    ]


class BlockBatch:
    """A batch that is being judged by blocks on its laws' device, without waiting for it.

    Args:
        parts: of the rule.
        proposals: at least one. An id outside the vocabulary is judged as its nearest in it.
        laws: for each request the target's laws `[slots, vocab]`, all on one device.
        noise: for each request the noise of this step.

    Attributes:
        wanted: what the host must read.
    """

    def __init__(
        self, parts: BlockParts, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]
    ) -> None:
        self._parts = parts
        self._proposals = proposals
        self._plan = _Plan.of(proposals)
        self.wanted: list[Tensor] = []
        if self._plan.slots:
            laws = self._scaled(torch.cat(list(laws))).split([len(own) for own in laws])
        self._own = len(self.wanted)
        self._eager = EagerBatch(parts, proposals, laws, noise)
        self.wanted += self._eager.wanted

    def _scaled(self, p: Tensor) -> Tensor:
        """The target's laws `[slots, vocab]`, scaled by the weights of the slots of blocks; notes what is wanted."""
        plan, parts, device = self._plan, self._parts, p.device
        slots, nodes, rows = transfers.upload([*plan.slots, *plan.nodes, *plan.laws], device).chunk(3)
        tokens = self._tokens(device).clamp(0, p.shape[-1] - 1)[nodes]
        q = torch.cat([own.laws.to(device) for own in plan.proposals if own.laws is not None])
        p_x, q_x = p[slots, tokens].double(), q[rows, tokens].double()
        weight = torch.ones(plan.counts[0], dtype=torch.float64, device=device)
        above = []  # of the first slots, the second slots, ...
        for ps, qs in zip(p_x.split(plan.counts), q_x.split(plan.counts), strict=True):
            above.append(weight[: len(ps)])
            weight = parts.weights(above[-1], ps, qs)
        weights = torch.ones(len(p), dtype=torch.float64, device=device).index_copy_(0, slots, torch.cat(above))
        scaled = parts.scaled(p, weights[:, None])
        self.wanted += [p_x, q_x, parts.beyond(scaled.index_select(0, slots), q.index_select(0, rows))]
        return scaled

    def _tokens(self, device: torch.device) -> Tensor:
        """The drafted tokens of all requests with blocks, `[nodes]`."""
        trees = [proposal.tree for proposal in self._plan.proposals]
        return torch.cat(
            [transfers.upload(tree.token_list, device) if tree.is_known else tree.tokens.to(device) for tree in trees]
        )

    def looks(self, numbers: Sequence[Sequence[float]]) -> list[KnownBlockLooks]:
        """What the walks look at, from the numbers in `wanted`."""
        found: dict[int, tuple[Look, float]] = {}  # by slot of the batch
        if self._own:
            p_x, q_x, masses = numbers[: self._own]
            found = {slot: ((p, q), mass) for slot, p, q, mass in zip(self._plan.slots, p_x, q_x, masses, strict=True)}
        looks, start = [], 0
        for proposal, known in zip(self._proposals, self._eager.looks(numbers[self._own :]), strict=True):
            slots = range(len(proposal.draws))
            looks.append(KnownBlockLooks(known, {slot: found[start + slot] for slot in slots if start + slot in found}))
            start += len(slots)
        return looks
