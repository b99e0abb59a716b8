"""Rules broken on purpose: each must be caught, by the kernel's recursion and through the shipped `verify`.

Every world here is also judged by the rule that is not broken, which passes to 1e-12: the worlds have the power.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from small_worlds import (
    A1,
    A2,
    A3,
    CAUGHT,
    EXACT,
    F1,
    F2,
    NODES,
    W2,
    W3,
    World,
    build,
    by_kernel,
    by_verify,
    cell_probs,
    eagerly,
    gap,
)
from test_device import KINDS, batch, block_batch
from torch import Tensor

from support.broken_rules import (
    AcceptsAlways,
    AcceptsWithoutRatio,
    DrawsFromTarget,
    JudgesAnotherDist,
    PassesByWeight,
    RemovesNothing,
    hiding,
)
from truedraft.certify.cells import kernel_probs
from truedraft.core.noise import Purpose
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling
from truedraft.verification.block import BlockHostWalk
from truedraft.verification.rule import JudgedRow, Outcome
from truedraft.verification.walk import Batch, Number


class ForgetsWhatLeft(SpeculativeSampling):
    """Judges each of several candidates as if those before it had not been rejected."""

    def left_of_candidate(self, p_x: Number, taken: Number) -> Number:
        return p_x


class RestsOnlyTheToken(SpeculativeSampling):
    """After a rejection takes only the rejected token out of p, as is right for one-hot distributions alone."""

    def rejected(self, p: Tensor, q: Tensor) -> Tensor:
        rest = p * (q < p)
        mass = rest.sum(dim=-1, keepdim=True)
        return torch.where(mass > 0, rest / mass, p)


class RemovesWithoutScaling(SpeculativeSampling):
    """q is not renormalised after a removal."""

    def removed(self, q: Tensor, tokens: Tensor) -> Tensor:
        return q.scatter(-1, tokens, 0.0)


class ResidualOfTheTarget(BlockVerification):
    """Recovers from norm(max(0, p - q)), as if nothing had been scaled."""

    def rejected(self, p: Tensor, q: Tensor) -> Tensor:
        mass = p.sum(dim=-1, keepdim=True)
        return super().rejected(p / torch.where(mass > 0, mass, 1.0), q)


class ProductOfRatios(BlockVerification):
    """Caps each ratio at 1 and not their running product: the weights of token by token."""

    def weight(self, above: Number, p_x: Number, q_x: Number) -> Number:
        return above * self.accept_probability(p_x, q_x)


class NeverCapped(BlockVerification):
    """A running product above 1 is kept for later tokens."""

    def weight(self, above: Number, p_x: Number, q_x: Number) -> Number:
        return above * p_x / (q_x + 1e-300)


class TokenByTokenWalk(BlockHostWalk):
    def _kept(self, block: Sequence[int], weights: Sequence[float]) -> int:
        for place, row in enumerate(block):
            draw = self.proposal.draws[row][0]
            stays = self.rule.accept_probability(self.p_x(draw.child), self.q_x(draw))
            if self.noise.uniform(Purpose.ACCEPT, len(self.path) + place) >= stays:
                return place
        return len(block)


class TokenByTokenButJointResidual(BlockVerification):
    """Accepts token by token, and recovers from the residual of the block."""

    host_walk = TokenByTokenWalk

    def _kept(self, batch: Batch, blocks: object, weights: Tensor) -> Tensor:
        stays = SpeculativeSampling.first_stays(self, batch, *batch.first_looks())
        alone = stays[blocks.draws] & blocks.is_filled  # type: ignore[attr-defined]
        return alone.long().cumprod(dim=-1).sum(dim=-1)

    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        if not group[0].draws:
            return super().outcomes(group)
        outcomes, reach, weight = [], 1.0, 1.0
        tokens = tuple(row.draws[0].token for row in group)
        for length, row in enumerate(group):
            (draw,) = row.draws
            p_x, q_x = float(row.p[draw.token]), float(draw.q[draw.token])
            keep = self.accept_probability(p_x, q_x)
            rest = self.rejected(weight * row.p, draw.q)
            rest = rest / rest.sum()
            outcomes += [
                Outcome(reach * (1 - keep) * float(x), (*tokens[:length], token), length)
                for token, x in enumerate(rest)
            ]
            reach, weight = reach * keep, self.weight(weight, p_x, q_x)
        return [*outcomes, Outcome(reach, tokens, len(tokens))]


BROKEN: list[tuple[Rule, World]] = [
    *((rule, build("broken", 3, [A1, A1])) for rule in
      (AcceptsAlways(), AcceptsWithoutRatio(), DrawsFromTarget(), JudgesAnotherDist())),
    (AcceptsAlways(), build("broken", 3, [F1, F1])),
    (AcceptsAlways(), build("broken", 3, [W2])),
    (DrawsFromTarget(), build("broken", 4, [F2])),
    (DrawsFromTarget(), build("broken", 3, [A2, A1])),
    (RestsOnlyTheToken(), build("broken", 5, [A1, A1])),
    (RemovesWithoutScaling(), build("broken", 3, [W3])),
    (RemovesWithoutScaling(), build("broken two", 4, [W2])),
    (RemovesNothing(), build("broken", 3, [W2, A1])),
    (RemovesNothing(), build("broken", 4, [NODES["sampled, then fixed"]])),
    (JudgesAnotherDist(), build("broken", 3, [A3])),
    (JudgesAnotherDist(), build("broken", 4, [W2])),
    *((rule, build("block broken d", 3, [A1, A1])) for rule in
      (ResidualOfTheTarget(), ProductOfRatios(), NeverCapped(), PassesByWeight(), TokenByTokenButJointResidual())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "world"), BROKEN, ids=[f"{type(rule).__name__}-{i}" for i, (rule, _) in enumerate(BROKEN)]
)
def test_a_broken_rule_is_caught_by_the_kernel_and_by_verify(broken: Rule, world: World) -> None:
    right = BlockVerification() if isinstance(broken, BlockVerification) else SpeculativeSampling()
    for judge in (by_kernel, by_verify):
        assert judge(right, world) < EXACT
        assert judge(broken, world) > CAUGHT


@pytest.mark.parametrize(
    ("rule", "plans"),
    [
        (hiding(SpeculativeSampling, accept_probability=lambda self, p_x, q_x: 1.1 * p_x / (q_x + 1e-300)), [A1]),
        (
            hiding(
                SpeculativeSampling,
                accept_probability=lambda self, p_x, q_x: 0.9 * SpeculativeSampling().accept_probability(p_x, q_x),
            ),
            [A1],
        ),
        (hiding(SpeculativeSampling, rejected=lambda self, p, q: p), [A1]),
        (hiding(SpeculativeSampling, removed=lambda self, q, tokens: q), [W2]),
        (ForgetsWhatLeft(), [F2]),
        (
            hiding(
                BlockVerification,
                pass_probability=lambda self, weight, mass: 0.9 * BlockVerification().pass_probability(weight, mass),
            ),
            [A1, A1],
        ),
    ],
    ids=["accepts more", "accepts less", "residual", "removal", "candidates", "block"],
)
def test_a_kernel_that_hides_what_verify_does_is_caught(rule: Rule, plans: list) -> None:
    """An exact kernel beside a broken `verify`: the cells are measured, so they differ from the kernel."""
    world = build("hidden", 3, plans)
    cases = world.every_proposal()
    gaps = [gap(dist, kernel_probs(rule, case)) for case, dist in zip(cases, cell_probs(rule, cases), strict=True)]
    assert max(gaps) > CAUGHT
    assert by_kernel(rule, world) < EXACT
    assert by_verify(rule, world) > CAUGHT / 2


class AllRemoved(SpeculativeSampling):
    def removed(self, q: Tensor, tokens: Tensor) -> Tensor:
        return torch.zeros_like(q)


class NothingLeaves(SpeculativeSampling):
    def left_of_candidate(self, p_x: Number, taken: Number) -> Number:
        return p_x * (taken == 0.0)


def test_a_broken_part_breaks_the_walks_of_cpu_and_device_alike() -> None:
    """The parts that define the rule are those that are used: with a broken one the verdicts are others."""
    drawn, fixed = (batch(200, vocab=9, seed=5, of=[KINDS[kind]]) for kind in (1, 2))
    blocks = block_batch(150, 5)
    broken: list[tuple[Rule, tuple]] = [
        (DrawsFromTarget(), drawn), (DrawsFromTarget(), fixed), (AllRemoved(), drawn),
        (NothingLeaves(), fixed), (AcceptsAlways(), drawn),
        *((rule, blocks) for rule in (ResidualOfTheTarget(), PassesByWeight(), TokenByTokenButJointResidual())),
    ]  # fmt: skip
    for rule, given in broken:
        right = BlockVerification() if isinstance(rule, BlockVerification) else SpeculativeSampling()
        verdicts = eagerly(rule, *given)
        assert verdicts == rule.verify(*given)
        assert verdicts != right.verify(*given), rule
