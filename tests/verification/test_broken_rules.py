"""Rules broken on purpose: each must be caught, by the kernel's recursion and through the shipped `verify`.

Every world here is also judged by the rule that is not broken, which passes to 1e-12: the worlds have the power.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

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
    Case,
    Key,
    Prefix,
    ScriptedNoise,
    World,
    build,
    by_kernel,
    by_verify,
    cell_probs,
    continued,
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
)
from truedraft.certify.cells import kernel_probs, step_probs
from truedraft.core.noise import Purpose
from truedraft.core.proposal import Proposal
from truedraft.verification import BlockVerification, CoupledSampling, Rule, SpeculativeSampling
from truedraft.verification.block import BlockHostWalk
from truedraft.verification.exact import target_dist
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


def honest(rule: type[SpeculativeSampling], **wrong: Callable) -> SpeculativeSampling:
    """A rule with a wrong part, whose kernel says what the right rule does."""
    kernel = rule()
    return type("Hides", (rule,), {**wrong, "outcomes": lambda self, group: kernel.outcomes(group)})()


@pytest.mark.parametrize(
    ("rule", "plans"),
    [
        (honest(SpeculativeSampling, accept_probability=lambda self, p_x, q_x: 1.1 * p_x / (q_x + 1e-300)), [A1]),
        (honest(SpeculativeSampling, rejected=lambda self, p, q: p), [A1]),
        (honest(SpeculativeSampling, removed=lambda self, q, tokens: q), [W2]),
        (ForgetsWhatLeft(), [F2]),
        (
            honest(
                BlockVerification,
                pass_probability=lambda self, weight, mass: 0.9 * BlockVerification().pass_probability(weight, mass),
            ),
            [A1, A1],
        ),
    ],
    ids=["acceptance", "residual", "removal", "candidates", "block"],
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


# ------------------------------------------------------------------------------- one key for two decisions


class OneKey:
    """Noise in which several decisions read one number."""

    def __init__(self, noise: ScriptedNoise, same_as: Callable[[Key], Key]) -> None:
        self._noise, self._same_as = noise, same_as

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return self._noise.script[self._same_as((purpose, depth, index))]

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> None:
        return None


ACCEPT, RECOVERED, BONUS = (Purpose.ACCEPT, 0, 0), (Purpose.RECOVERED, 0, 0), (Purpose.BONUS, 1, 0)


def error_on_a_grid(
    world: World, keys: Sequence[Key], sides: Sequence[int], same_as: Callable[[Key], Key] = lambda key: key
) -> float:
    """Distance of the first token from the target, with the noise at `keys` on a grid and at others 1/2."""
    ticks = [[(i + 0.5) / side for i in range(side)] for side in sides]
    grid = list(itertools.product(*ticks))
    dist: dict[Prefix, float] = {}
    for case in world.every_proposal():
        scripts = [{RECOVERED: 0.5, BONUS: 0.5, **dict(zip(keys, numbers, strict=True))} for numbers in grid]
        noise = [OneKey(ScriptedNoise(script), same_as) for script in scripts]
        for verdict in SpeculativeSampling().verify([case.proposal] * len(grid), [case.probs] * len(grid), noise):
            dist[verdict.tokens[:1]] = dist.get(verdict.tokens[:1], 0.0) + case.probability / len(grid)
    return gap(dist, target_dist(world.target.probs, 1))


def test_acceptance_and_recovered_token_on_one_key_are_caught() -> None:
    """Given a rejection u is in [p/q, 1): the residual's first tokens would never be drawn."""
    world = build("key", 3, [A1])
    assert error_on_a_grid(world, [ACCEPT], [2000], lambda key: ACCEPT) > CAUGHT
    assert error_on_a_grid(world, [ACCEPT, RECOVERED], [50, 50]) < 0.006, "the grid itself is fine enough"


def test_two_draws_of_one_node_on_one_key_are_caught() -> None:
    """The second sibling is judged with a number that is known to be large: it is accepted too rarely."""
    world, second = build("siblings", 3, [A2]), (Purpose.ACCEPT, 0, 1)
    world.target.weights(())[:] = [10, 7, 3]
    world.drafters[0].weights(())[:] = [1, 3, 6]  # after token 2 is rejected, p is (8/9, 1/9, 0) and then (1, 0, 0)
    shared = error_on_a_grid(world, [ACCEPT], [400], lambda key: ACCEPT if key[0] is Purpose.ACCEPT else key)
    assert shared > 2 * CAUGHT
    assert error_on_a_grid(world, [ACCEPT, second], [40, 40]) < CAUGHT / 2


def test_draft_and_acceptance_on_one_key_are_caught() -> None:
    """The number that drew the token also judges it."""
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.8]], dtype=torch.float64)
    first: dict[tuple[int, ...], float] = {}
    grid = [((i + 0.5) / 200, (j + 0.5) / 10) for i in range(200) for j in range(10)]
    proposals = [Proposal.chain(torch.tensor([int(u >= 0.2)]), q) for u, _ in grid]
    noise = [ScriptedNoise({ACCEPT: u, RECOVERED: v}) for u, v in grid]
    for verdict in SpeculativeSampling().verify(proposals, [p] * len(grid), noise):
        first[verdict.tokens[:1]] = first.get(verdict.tokens[:1], 0.0) + 1 / len(grid)
    assert gap(first, {(0,): 0.5, (1,): 0.5}) > CAUGHT


# ------------------------------------------------------------------------------- predictable choice


def test_dropping_drawn_tokens_by_their_probability_is_caught() -> None:
    """Not the rule but the drafter is broken here: a token that was drawn and found unlikely is not shown."""
    world = build("dropped", 3, [A1])
    hidden = []
    for case in world.every_proposal():
        token = case.proposal.tree.host_ids[0]
        dropped = float(case.proposal.probs[0, token]) < 0.4
        hidden.append(Case(case.probability, Proposal.empty(), case.probs[:1]) if dropped else case)
    assert any(not len(case.proposal.tree) for case in hidden) and any(len(case.proposal.tree) for case in hidden)
    assert continued(world, step_probs(hidden, cell_probs(SpeculativeSampling(), hidden))) > CAUGHT


def test_a_coupled_rule_that_judges_by_the_draft_distribution_is_caught() -> None:
    class FollowsDraft(CoupledSampling):
        def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
            (row,) = group
            return super().outcomes([JudgedRow(row.draws[0].q if row.draws else row.p, row.draws)])

    world = build("coupled", 3, [A1, A1])
    assert by_kernel(CoupledSampling(), world) < EXACT
    assert by_kernel(FollowsDraft(), world) > CAUGHT
