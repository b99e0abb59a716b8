"""Block verification: the drafted tokens of a chain are verified together, not one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from truedraft.core.noise import Purpose
from truedraft.core.proposal import DrawKind
from truedraft.errors import IncompatibleRuleError
from truedraft.verification.rule import HasKind, JudgedRow, Outcome
from truedraft.verification.speculative import HostWalk, SpeculativeSampling
from truedraft.verification.walk import Batch, Number, WalkPlan, either, is_joint, larger

_TINY = torch.finfo(torch.float64).tiny


class BlockHostWalk(HostWalk):
    """A walk that judges blocks together, and other tree rows draw by draw."""

    rule: BlockVerification

    def judge(self, row: int) -> list[int] | None:
        block = self.rule.group(self.proposal, row)
        if not is_joint(self.proposal.draws[row]):
            return super().judge(row)
        drawn = [self.proposal.draws[each][0] for each in block]
        weights = [1.0]
        for draw in drawn:
            weights.append(self.rule.weight(weights[-1], self.p_x(draw.child), self.q_x(draw)))
        kept = self._kept(block, weights)
        accepted = [draw.child for draw in drawn[:kept]]
        if kept == len(block):
            return accepted
        self.path += accepted
        self.row = block[kept]
        self.left = self.rule.rejected(*self._scaled(block[kept], weights[kept]))
        return None

    def _kept(self, block: Sequence[int], weights: Sequence[float]) -> int:
        for length in range(len(block), 0, -1):
            # The number is keyed by the last token of the prefix that it decides about.
            uniform = self.noise.uniform(Purpose.ACCEPT, len(self.path) + length - 1)
            # h <= w for every prefix, so most fail without reading a whole distribution.
            if uniform >= weights[length]:
                continue
            if length == len(block):
                return length
            mass = float(self.rule.beyond(*self._scaled(block[length], weights[length])))
            if uniform < self.rule.pass_probability(weights[length], mass):
                return length
        return 0

    def _scaled(self, row: int, weight: float) -> tuple[Tensor, Tensor]:
        return self.probs[row] * weight, self._drawn_from(self.proposal.draws[row][0], [])


class BlockVerification(SpeculativeSampling):
    """Accept the longest prefix of a block that passes as a whole; never shorter on average than token by token.

    Sun et al. 2403.10444, algorithm 2. A block is a path x_1 ... x_n of nodes with one independent draw each, x_i drawn
    from q_i where the target's distribution is p_i. Its *weights* are

        w_0 = 1,  w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)),

    and R_i = sum over tokens of max(0, w_i p_(i+1) - q_(i+1)) is the excess of p_(i+1), scaled by w_i, over q_(i+1).
    The prefix of length i < n passes with probability h_i = R_i / (R_i + 1 - w_i), the whole block with h_n = w_n, each
    decided by a separate number. The longest prefix that passes is accepted (h_0 = 1), and after i < n tokens one is
    recovered from norm(max(0, w_i p_(i+1) - q_(i+1))).

    It is lossless because a prefix x_1 ... x_i, once drafted, is accepted with probability w_i. At i = n that is h_n.
    If it holds for i + 1, more than i are accepted with the mean of w_(i+1) over x_(i+1), the sum of min(q_(i+1), w_i
    p_(i+1)), which is w_i - R_i; so i or more are accepted with w_i - R_i + (1 - w_i + R_i) h_i = w_i. And the next
    token is x with min(q(x), w_i p(x)) by acceptance and max(0, w_i p(x) - q(x)) by recovery, together w_i p(x). Token
    by token, the prefix is accepted with the product of min(1, p/q), which is never more than w_i.

    After a fully accepted block the walk continues as from the root. Deterministic candidates are judged one by one,
    because blocks do not help them: with q one-hot, w_i is the product of p(x), the same as token by token. The number
    of independent draws of a node must be fixed before the first of them is drawn.
    """

    name: ClassVar[str] = "block"
    host_walk: ClassVar[type[HostWalk]] = BlockHostWalk
    judges: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.INDEPENDENT, DrawKind.DETERMINISTIC})

    def check(self, kinds: Iterable[DrawKind], drafter: str) -> None:
        """Refuse draws without replacement, which are for nodes with several draws, and coupled draws.

        Raises:
            IncompatibleRuleError: names rule, drafter and the kinds in question, and the rule to use.
        """
        foreign = sorted(kind.value for kind in kinds if kind not in self.judges)
        if foreign:
            raise IncompatibleRuleError(
                f"rule {self.name!r} judges chains of independent draws, and drafter {drafter!r} makes "
                f"{', '.join(foreign)} draws; take the rule {SpeculativeSampling.name!r}, or draft one token at a node"
            )

    # The parts of the rule in addition to those of `SpeculativeSampling`. Tests break them one at a time.

    def weight(self, above: Number, p_x: Number, q_x: Number) -> Number:
        """w_i of a token; `above` is w_(i-1)."""
        return self.accept_probability(above * p_x, q_x)

    def beyond(self, p: Tensor, q: Tensor) -> Tensor:
        """R: the excess mass `[...]`, float64, of scaled distributions `[..., vocab]` over the draft's."""
        return (p - q).clamp_min_(0.0).sum(dim=-1, dtype=torch.float64)

    def pass_probability(self, weight: Number, mass: Number) -> Number:
        """h of a prefix of weight w, with excess `mass` R after it."""
        return either(weight >= 1.0, 1.0, mass / larger(mass + 1.0 - weight, _TINY))

    def first_stays(self, batch: Batch, p_x: Tensor, q_x: Tensor) -> Tensor:
        stays, blocks = super().first_stays(batch, p_x, q_x), _blocks(batch.plan)
        if blocks is None:
            return stays
        p_x, q_x = p_x[blocks.draws], q_x[blocks.draws]  # [blocks, tokens]
        weights = [torch.ones_like(p_x[:, 0])]  # w_0 to w_n, `[blocks]` each
        for place in range(p_x.shape[1]):
            weights.append(self.weight(weights[-1], p_x[:, place], q_x[:, place]))
        above, below = torch.stack(weights[:-1], dim=-1), torch.stack(weights[1:], dim=-1)  # [blocks, tokens]
        batch.weights = p_x.new_ones(len(batch.plan.depths))
        batch.weights[blocks.own] = above[blocks.block, blocks.place]
        kept = self._kept(batch, blocks, below)[blocks.block]
        stays[blocks.draws[blocks.block, blocks.place]] = blocks.place < kept
        return stays

    def _kept(self, batch: Batch, blocks: _Blocks, weights: Tensor) -> Tensor:
        """Number of accepted tokens, `[blocks]`; `weights` `[blocks, tokens]` are w_1 to w_n."""
        uniforms = batch.uniforms[batch.plan.draw_key[blocks.draws]]  # [blocks, tokens]
        rows = blocks.below.flatten()  # the next row determines whether a prefix passes
        mass = self.beyond(batch.target(rows), batch.draft(rows, self.removed)).view(weights.shape)
        passes = (uniforms < weights) & (blocks.is_last | (uniforms < self.pass_probability(weights, mass)))
        lengths = torch.arange(1, weights.shape[1] + 1, device=weights.device)
        return (lengths * (passes & blocks.is_filled)).amax(dim=-1)  # the longest that passes

    def joins(self, draws: Sequence[HasKind]) -> bool:
        return is_joint(draws)

    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        if not self.joins(group[0].draws):
            return super().outcomes(group)
        drawn = [row.draws[0] for row in group]
        tokens = tuple(draw.token for draw in drawn)
        weights = [1.0]
        for row, draw in zip(group, drawn, strict=True):
            weights.append(self.weight(weights[-1], float(row.p[draw.token]), float(draw.q[draw.token])))
        passes = min(1.0, float(weights[-1]))
        outcomes = [Outcome(passes, tokens, len(tokens))]
        reach = 1.0 - passes
        for length in range(len(tokens) - 1, -1, -1):
            q, weight = drawn[length].q, weights[length]
            p = group[length].p * weight
            passes = float(self.pass_probability(weight, float(self.beyond(p, q))))
            passes = 1.0 if length == 0 else min(1.0, float(weight), passes)
            outcomes.extend(
                Outcome(reach * passes * float(each), (*tokens[:length], token), length)
                for token, each in enumerate(self.rejected(p, q))
            )
            reach *= 1.0 - passes
        return outcomes


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a batch, stacked; shorter ones are padded with their last tree row."""

    draws: Tensor  # [blocks, tokens]: indices
    below: Tensor  # [blocks, tokens]: the next tree row in the block; the last row itself at the end
    is_filled: Tensor  # [blocks, tokens] bool: False for padding
    is_last: Tensor  # [blocks, tokens] bool: the last tree row of each
    own: Tensor  # [rows of blocks]: tree rows
    block: Tensor  # [rows of blocks]: index of the row's block
    place: Tensor  # [rows of blocks]: index of the row in its block


@lru_cache(maxsize=512)
def _blocks(plan: WalkPlan) -> _Blocks | None:
    joint = set(plan.joint)
    block_of: dict[int, list[int]] = {}  # by its last tree row so far
    for row in plan.joint:  # parents come before children
        block = block_of.pop(plan.parents[row], []) if plan.parents[row] in joint else []
        block_of[row] = [*block, row]
    blocks = list(block_of.values())
    if not blocks:
        return None
    width = max(map(len, blocks))
    rows = np.array([[*block, *block[-1:] * (width - len(block))] for block in blocks])
    lengths = np.array([len(block) for block in blocks])[:, None]
    is_filled = np.arange(width) < lengths
    of_block, place = is_filled.nonzero()
    draw_at = {row: draw for draw, row in enumerate(plan.draw_rows)}
    tables = (
        np.array([[draw_at[row] for row in own] for own in rows.tolist()]),
        np.concatenate([rows[:, 1:], rows[:, -1:]], axis=1),
        is_filled,
        np.arange(width) == lengths - 1,
        rows[is_filled],
        of_block,
        place,
    )
    return _Blocks(*map(plan.array, tables))
