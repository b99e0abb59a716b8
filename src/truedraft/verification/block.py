"""Block verification: the drafted tokens of a chain are judged together, not one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposals import DrawKind, Proposal
from truedraft.core.verdicts import Origin, Verdict
from truedraft.errors import IncompatibleRuleError
from truedraft.verification.block_batch import BlockBatch
from truedraft.verification.block_looks import BlockLooks, HostBlockLooks, block_at, is_joint
from truedraft.verification.deferred import Numbers, Prepared
from truedraft.verification.looks import host_looks
from truedraft.verification.rule import HasKind, JudgedSlot, Outcome
from truedraft.verification.speculative import SpeculativeSampling, Walk, _draw_finals


class BlockVerification(SpeculativeSampling):
    """Keep the longest prefix of a block that passes as a whole; never shorter on average than token by token.

    Sun et al. 2403.10444, algorithm 2. A block is a path x_1 ... x_n of nodes with one independent draw each, x_i
    drawn from q_i where the target's law is p_i. Its *weights* are

        w_0 = 1,  w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)),

    and R_i = sum over tokens of max(0, w_i p_(i+1) - q_(i+1)) is what p_(i+1), scaled by w_i, has beyond q_(i+1). The
    prefix of length i < n passes with probability h_i = R_i / (R_i + 1 - w_i), the whole block with h_n = w_n, each by
    a number of its own; the longest that passes is kept (h_0 = 1), and behind i < n tokens comes one recovered from
    norm(max(0, w_i p_(i+1) - q_(i+1))).

    Why it is lossless: a prefix x_1 ... x_i, once drafted, is kept with probability w_i. At i = n that is h_n. If it
    holds for i + 1, more than i are kept with the mean of w_(i+1) over x_(i+1), the sum of min(q_(i+1), w_i p_(i+1)),
    which is w_i - R_i; so i or more are kept with w_i - R_i + (1 - w_i + R_i) h_i = w_i. And the next token is x with
    min(q(x), w_i p(x)) by acceptance and max(0, w_i p(x) - q(x)) by recovery, together w_i p(x). Token by token, the
    prefix is kept with the product of min(1, p/q), which is never more than w_i.

    A block ends below its last node, and all its tokens kept, the walk goes on there as from the root: with a bonus
    token, or with draws that are judged one after another as by `SpeculativeSampling`. So are deterministic candidates,
    for which nothing is to be gained: with q one-hot, w_i is the product of p(x), the same as token by token. How many
    independent draws a node has must be settled before the first of them is drawn; chains, and merged chains, are so.
    """

    name: ClassVar[str] = "block"
    judges: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.INDEPENDENT, DrawKind.DETERMINISTIC})

    def check(self, kinds: Iterable[DrawKind], drafter: str) -> None:
        """Refuse a drafter whose kinds of draws this rule cannot judge.

        Draws without replacement are for nodes with several draws, which are no block.

        Raises:
            IncompatibleRuleError: names rule, drafter and the kinds in question, and the rule to take.
        """
        foreign = sorted(kind.value for kind in kinds if kind not in self.judges)
        if foreign:
            raise IncompatibleRuleError(
                f"rule {self.name!r} judges chains of independent draws, and drafter {drafter!r} makes "
                f"{', '.join(foreign)} draws; take the rule {SpeculativeSampling.name!r}, or draft one token at a node"
            )

    # The further parts of the rule, beside those of `SpeculativeSampling`. Tests break them one at a time.

    def weight(self, above: float, p_x: float, q_x: float) -> float:
        """w_i of a token with target probability `p_x` and draft probability `q_x`; `above` is w_(i-1)."""
        return self.accept_probability(above * p_x, q_x)

    def weights(self, above: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
        """The same for several tokens, `[tokens]` float64 each, without a look at the numbers; to the same bits."""
        scaled = above * p_x
        # 0 / 0 is replaced: a token that the target forbids never stays, whatever its q.
        ratio = torch.where(scaled >= q_x, torch.ones_like(scaled), scaled / q_x)
        return torch.where(scaled <= 0.0, torch.zeros_like(scaled), ratio)

    def scaled(self, p: Tensor, weight: Tensor) -> Tensor:
        """The target's laws `[..., vocab]` times weights `[..., 1]`, in the laws' dtype."""
        return p * weight.to(p.dtype)

    def beyond(self, p: Tensor, q: Tensor) -> Tensor:
        """R: the mass `[...]`, float64, that scaled laws `[..., vocab]` have beyond the draft's."""
        return (p - q).clamp_min_(0.0).sum(dim=-1, dtype=torch.float64)

    def pass_probability(self, weight: float, mass: float) -> float:
        """h of a prefix of weight w, behind which the target has `mass` R beyond the draft."""
        return 1.0 if weight >= 1.0 else mass / (mass + 1.0 - weight)

    def verify_here(
        self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]
    ) -> list[Verdict]:
        """Judge a batch, looking at laws as they are needed; see `Rule.verify`."""
        looks = [HostBlockLooks(self, own) for own in host_looks(self, proposals, laws)]
        walks = [self._walk_blocks(*each) for each in zip(proposals, looks, noise, strict=True)]
        finals = _draw_finals(walks, [own.left for own in looks], noise)
        return [walk.verdict(proposal, token) for walk, proposal, token in zip(walks, proposals, finals, strict=True)]

    def prepare(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> Prepared:
        """All that any walk could look at, and the token that would end it at each slot; see `DeferredRule.prepare`."""
        batch = BlockBatch(self, proposals, laws, noise)

        def conclude(numbers: Numbers) -> list[Verdict]:
            verdicts = []
            for proposal, looks, own in zip(proposals, batch.looks(numbers), noise, strict=True):
                walk = self._walk_blocks(proposal, looks, own)
                verdicts.append(walk.verdict(proposal, looks.finals[walk.slot]))
            return verdicts

        return Prepared(batch.wanted, conclude)

    def _walk_blocks(self, proposal: Proposal, looks: BlockLooks, noise: Noise) -> Walk:
        """Walk from the root down, by blocks and by nodes with other draws, until something is rejected."""
        path: list[int] = []
        slot = 0
        while True:
            block = block_at(proposal, slot)
            if block:
                weights = self._weights(block, looks)
                kept = self._kept(block, weights, looks, noise, len(path))
                path += (proposal.draws[each][0].child for each in block[:kept])
                if kept < len(block):
                    looks.end(block[kept], weights[kept])
                    return Walk(tuple(path), block[kept], Origin.RECOVERED)
                slot = path[-1] + 1
                continue
            child = self.accepted_child(proposal, slot, looks, noise, len(path))
            if child is None:
                return Walk(tuple(path), slot, Origin.RECOVERED if proposal.draws[slot] else Origin.BONUS)
            path.append(child)
            slot = child + 1

    def _weights(self, block: Sequence[int], looks: BlockLooks) -> list[float]:
        """w_0 to w_n of a block."""
        drawn = (looks.drawn(slot) for slot in block)
        return list(itertools.accumulate(drawn, lambda above, look: self.weight(above, *look), initial=1.0))

    def _kept(self, block: Sequence[int], weights: Sequence[float], looks: BlockLooks, noise: Noise, depth: int) -> int:
        """How many tokens of a block are kept, whose first decides the token at `depth`; the longest prefix first."""
        for length in range(len(block), 0, -1):
            # The number is keyed by the last token of the prefix that it lets pass or not.
            uniform = noise.uniform(Purpose.ACCEPT, depth + length - 1)
            # h <= w for every prefix, so most that fail do so without a look at a whole row.
            if uniform >= weights[length]:
                continue
            if length == len(block):
                return length
            if uniform < self.pass_probability(weights[length], looks.mass(block[length], weights[length])):
                return length
        return 0

    def joins(self, draws: Sequence[HasKind]) -> bool:
        return is_joint(draws)

    def outcomes(self, group: Sequence[JudgedSlot]) -> list[Outcome]:
        if not self.joins(group[0].draws):
            return super().outcomes(group)
        drawn = [slot.draws[0] for slot in group]
        tokens = tuple(draw.token for draw in drawn)
        looks = (
            (float(slot.p[draw.token]), float(draw.q[draw.token])) for slot, draw in zip(group, drawn, strict=True)
        )
        weights = list(itertools.accumulate(looks, lambda above, look: self.weight(above, *look), initial=1.0))
        passes = min(1.0, weights[-1])
        outcomes = [Outcome(passes, tokens, len(tokens))]
        reach = 1.0 - passes
        for length in range(len(tokens) - 1, -1, -1):
            q = drawn[length].q
            p = self.scaled(group[length].p, torch.tensor(weights[length], dtype=torch.float64))
            mass = float(self.beyond(p, q))
            passes = 1.0 if length == 0 else min(1.0, weights[length], self.pass_probability(weights[length], mass))
            outcomes.extend(
                Outcome(reach * passes * float(each), (*tokens[:length], token), length)
                for token, each in enumerate(self.rejected(p, q))
            )
            reach *= 1.0 - passes
        return outcomes
