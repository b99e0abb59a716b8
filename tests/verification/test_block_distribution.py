"""Block verification is lossless, to 1e-12, keeps at least as much as token by token, and is caught when it is broken.

`BlockReference` says what it emits in exact fractions, without a line of the package's code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
import torch
from decision_cells import completed
from small_worlds import (
    A1,
    A2,
    F1,
    F2,
    FIXED,
    INDEPENDENT,
    STYLES,
    Choice,
    Prefix,
    Reference,
    RefTree,
    World,
    build,
    gap,
)
from torch import Tensor

from support.broken_rules import PassesByWeight
from truedraft.core.noise import Purpose
from truedraft.core.proposal import DrawKind
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling
from truedraft.verification.block import BlockHostWalk
from truedraft.verification.exact import distance, emitted_dist, target_dist
from truedraft.verification.rule import DrawnToken, JudgedRow, Outcome
from truedraft.verification.walk import Batch, Number

EXACT, CAUGHT = 1e-12, 0.01
RULE, ALONE = BlockVerification(), SpeculativeSampling()
MERGED = (Choice("a", INDEPENDENT), Choice("b", INDEPENDENT))
AFTER_FIXED = (Choice("a", FIXED), Choice("b", INDEPENDENT))


def gap_of(rule: Rule, world: World, length: int) -> float:
    dist = emitted_dist(rule, world.target.dist, world.scheme, length)
    return distance(dist, target_dist(world.target.dist, length))


# ------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize(
    ("vocab", "depth", "length"), [(5, 1, 2), (2, 4, 5), (3, 2, 4), (3, 3, 4), (3, 4, 5), (4, 3, 3), (5, 2, 3)]
)
def test_chains(vocab: int, depth: int, length: int) -> None:
    for p, q in STYLES:
        world = build("block", vocab, [A1] * depth, p, q)
        dist = emitted_dist(RULE, world.target.dist, world.scheme, length)
        assert sum(dist.values()) == pytest.approx(1.0, abs=EXACT)
        assert distance(dist, target_dist(world.target.dist, length)) < EXACT


def test_a_chain_of_four() -> None:
    assert gap_of(RULE, build("long", 3, [A1] * 4, "varied", "varied"), 5) < EXACT
    assert gap_of(RULE, build("long", 4, [A1] * 4, "dense", "sparse"), 4) < EXACT


@pytest.mark.parametrize(
    "plans",
    [(A2, A1, A1), (A1, A1, A2), (A1, MERGED, A1), (F1, A1, A1), (A1, F2, A1), (A1, A1, F1), (AFTER_FIXED, A1, A1)],
    ids=["2-1-1", "1-1-2", "1-merged-1", "fixed-1-1", "1-fixed-1", "1-1-fixed", "both-1-1"],
)
@pytest.mark.parametrize("bare", [-1, 0], ids=["even", "uneven"])
def test_blocks_between_other_draws(plans: tuple, bare: int) -> None:
    """Uneven: below one token nothing more is drafted, as after a draft that stops when it is unsure."""
    for p, q in [("dense", "dense"), ("varied", "varied"), ("sparse", "dense")]:
        assert gap_of(RULE, build("mixed", 2, plans, p, q, bare), 4) < EXACT
        assert gap_of(RULE, build("mixed", 3, plans, p, q, bare), 3) < EXACT


# ------------------------------------------------------------------------------- a reference in fractions


class BlockReference(Reference):
    """Every verdict on a chain: for each subset of prefixes that pass, the longest one."""

    def walk(self, prefix: Prefix, tree: RefTree) -> Iterator[tuple[Fraction, Prefix, int]]:
        chain, probs = [], [self.world.target.fractions(prefix)]
        while tree.drawn:
            ((choice, token),) = tree.drawn
            chain.append((token, self.dist_of(choice, prefix)))
            prefix, tree = (*prefix, token), tree.below[token]
            probs.append(self.world.target.fractions(prefix))
        weights = [Fraction(1)]
        for (token, q), p in zip(chain, probs, strict=False):
            weights.append(min(Fraction(1), weights[-1] * p[token] / q[token]))
        ends = [
            [max(Fraction(0), w * a - b) for a, b in zip(p, q, strict=True)]
            for w, p, (_, q) in zip(weights, probs, chain, strict=False)
        ]
        passes = []
        for w, rest in zip(weights[1:], ends[1:], strict=False):
            passes.append(sum(rest) / (sum(rest) + 1 - w) if w < 1 else Fraction(1))
        if chain:
            passes.append(weights[-1])
        for passed in itertools.product([True, False], repeat=len(chain)):
            mass = Fraction(1)
            for h, yes in zip(passes, passed, strict=True):
                mass *= h if yes else 1 - h
            if not mass:
                continue
            kept = max((i + 1 for i, yes in enumerate(passed) if yes), default=0)
            rest = ends[kept] if kept < len(chain) and sum(ends[kept]) else probs[kept]
            for token, share in enumerate(rest):
                if share:
                    yield mass * share / sum(rest), (*(t for t, _ in chain[:kept]), token), kept


REFERENCE_WORLDS = [
    build("block ref", 3, [A1, A1], "dense", "dense"),
    build("block ref", 2, [A1, A1, A1], "dense", "dense"),
    build("block ref", 3, [A1, A1], "varied", "varied"),
    build("block ref", 2, [A1, A1, A1], "dense", "dense", bare=1),
    build("block ref", 3, [A1, A1], "one-hot", "dense"),
    build("block ref", 3, [A1, A1], "sparse", "equal"),
]


@pytest.mark.parametrize("world", REFERENCE_WORLDS, ids=range(len(REFERENCE_WORLDS)))
def test_the_reference_in_fractions_agrees(world: World) -> None:
    reference = BlockReference(world)
    expected = reference.emitted(3)
    assert sum(expected.values()) == 1
    assert expected == reference.target(3)  # equal fractions: not an approximation
    assert gap(by_kernel(RULE, world), reference.step(())) < EXACT


def by_kernel(rule: BlockVerification, world: World) -> dict[tuple[Prefix, int], float]:
    """The distribution of (emitted tokens, accepted count) of one step whose tree is one chain, from the kernel of a
    block."""
    dist: dict[tuple[Prefix, int], float] = {}
    for probability, tree in Reference(world).trees((), ()):
        prefix: Prefix = ()
        probs, draws = [], []
        while tree.drawn:
            ((_, token),) = tree.drawn
            probs.append(world.target.dist(prefix))
            draws.append(DrawnToken(token, 0, world.drafters["a"].dist(prefix), INDEPENDENT))
            prefix, tree = (*prefix, token), tree.below[token]
        group = [JudgedRow(p, (draw,)) for p, draw in zip(probs, draws, strict=True)]
        if not group:
            group = [JudgedRow(world.target.dist(prefix), ())]
        for end in rule.outcomes(group):
            bonus = enumerate(world.target.dist(prefix).tolist())
            finals = {(token,): share for token, share in bonus} if end.continues else {(): 1.0}
            for final, share in finals.items():
                key = (*end.tokens, *final), end.accepted
                dist[key] = dist.get(key, 0.0) + float(probability) * end.probability * share
    return {key: mass for key, mass in dist.items() if mass > 0.0}


# ------------------------------------------------------------------------------- never fewer tokens


def expected(step: dict[tuple[Prefix, int], Fraction]) -> Fraction:
    return sum((count * mass for (_, count), mass in step.items()), Fraction(0))


def test_the_papers_example() -> None:
    """Two tokens, p = (1/3, 2/3) and q = (2/3, 1/3) everywhere, chains of two: 10/9 tokens one by one, 11/9 jointly."""
    world = build("paper", 2, [A1, A1])
    for prefix in itertools.chain.from_iterable(itertools.product(range(2), repeat=n) for n in range(3)):
        world.target.fix(prefix, [1, 2])
        world.drafters["a"].fix(prefix, [2, 1])
    assert expected(Reference(world).step(())) == Fraction(10, 9)
    assert expected(BlockReference(world).step(())) == Fraction(11, 9)
    step = by_kernel(RULE, world)
    assert sum(count * mass for (_, count), mass in step.items()) == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize(("vocab", "depth"), [(2, 1), (2, 3), (3, 2), (4, 2)])
def test_no_fewer_tokens_are_kept_than_token_by_token(vocab: int, depth: int) -> None:
    """In exact fractions, for each number of tokens: at least as many are kept at least as often."""
    gains = []
    for number, (p, q) in itertools.product(range(3), STYLES):
        world = build(f"gain {number}", vocab, [A1] * depth, p, q)
        alone, jointly = Reference(world).step(()), BlockReference(world).step(())
        for least in range(1, depth + 1):
            kept = [sum(mass for (_, count), mass in step.items() if count >= least) for step in (alone, jointly)]
            assert kept[0] <= kept[1]
        gains.append(expected(jointly) - expected(alone))
    assert (max(gains) > Fraction(1, 100)) if depth > 1 else not any(gains)


# ------------------------------------------------------------------------------- broken on purpose


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
            stays = self.rule.accept_probability(self.p_x[draw.child], self.q_x[draw.child, draw.dist])
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


BROKEN = [ResidualOfTheTarget(), ProductOfRatios(), NeverCapped(), PassesByWeight(), TokenByTokenButJointResidual()]
BROKEN_ON = build("block broken d", 3, [A1, A1])


@pytest.mark.parametrize("broken", BROKEN, ids=lambda rule: type(rule).__name__)
def test_a_broken_rule_is_caught_by_the_kernel(broken: BlockVerification) -> None:
    """The same rules are caught through the shipped `verify` by `test_block_cells`."""
    assert gap_of(RULE, BROKEN_ON, 3) < EXACT
    assert gap_of(broken, BROKEN_ON, 3) > CAUGHT


def test_completing_a_step_by_hand_is_exact() -> None:
    world = build("completed", 3, [A1, A1])
    assert gap(completed(by_kernel(RULE, world), world.target.dist, 3), target_dist(world.target.dist, 3)) < EXACT


def test_a_block_of_one_is_a_node() -> None:
    p, q = torch.tensor([[0.2, 0.7, 0.1], [0.6, 0.3, 0.1]], dtype=torch.float64)
    for token in range(3):
        draw = DrawnToken(token, 0, q, DrawKind.INDEPENDENT)
        of_node = {(o.accepted, o.tokens): o.probability for o in ALONE.outcomes([JudgedRow(p, (draw,))])}
        for end in RULE.outcomes([JudgedRow(p, (draw,))]):
            assert end.probability == pytest.approx(of_node.get((end.accepted, end.tokens), 0.0), abs=EXACT)
