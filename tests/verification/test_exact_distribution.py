"""The distribution of what is emitted is the target's, to 1e-12, for every kind of draw, chain and tree."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from small_worlds import (
    A1,
    A2,
    A3,
    COUPLED,
    F1,
    F2,
    NODES,
    STYLES,
    TWO_DRAFTERS,
    W1,
    W2,
    W3,
    Choice,
    Reference,
    World,
    build,
    gap,
    repeated,
)

from support.broken_rules import DrawsFromTarget, RemovesNothing
from truedraft.core.proposal import DrawKind
from truedraft.verification import ArgmaxRule, CoupledSampling, Rule, SpeculativeSampling
from truedraft.verification.exact import PlannedDraw, distance, emitted_dist, target_dist
from truedraft.verification.rule import DrawnToken, JudgedRow

EXACT = 1e-12
RULES = [SpeculativeSampling(), CoupledSampling()]
C1, C2 = repeated(1, COUPLED), repeated(2, COUPLED)


def emitted(rule: Rule, world: World, length: int) -> dict[tuple[int, ...], float]:
    return emitted_dist(rule, world.target.dist, world.scheme, length)


def assert_exact(rule: Rule, world: World, length: int) -> None:
    dist = emitted(rule, world, length)
    assert sum(dist.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance(dist, target_dist(world.target.dist, length)) < EXACT


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("vocab", [2, 3, 4, 5])
def test_one_node_with_up_to_four_draws(rule: Rule, node: str, vocab: int) -> None:
    for p, q in STYLES:
        assert_exact(rule, build(f"node/{node}", vocab, [NODES[node]], p, q), 1)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", ["independent", "without", "fixed"])
@pytest.mark.parametrize(("vocab", "depth", "length"), [(2, 4, 5), (3, 3, 4), (3, 4, 4), (4, 3, 3), (5, 2, 3)])
def test_chains(rule: Rule, kind: str, vocab: int, depth: int, length: int) -> None:
    plan = {"independent": A1, "without": W1, "fixed": F1}[kind]
    styles = STYLES if vocab < 4 and depth < 4 else [("dense", "dense"), ("varied", "varied")]
    for p, q in styles:
        assert_exact(rule, build("chain", vocab, [plan] * depth, p, q), length)


def test_a_chain_of_four_over_five_tokens() -> None:
    assert_exact(SpeculativeSampling(), build("long", 5, [A1] * 4, "dense", "sparse"), 5)
    assert_exact(SpeculativeSampling(), build("long", 5, [A1] * 4, "varied", "dense"), 4)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("node", NODES)
def test_trees_of_depth_two(rule: Rule, node: str) -> None:
    for p, q in STYLES:
        assert_exact(rule, build(f"tree/{node}", 2, [NODES[node], NODES[node]], p, q), 3)
        assert_exact(rule, build(f"tree/{node}", 3, [NODES[node], A2], p, q), 2)


@pytest.mark.parametrize(
    "plans",
    [(W2, A1, W1), (A2, F2, A1), (F2, W2, A1), (TWO_DRAFTERS, W2), (W3, A2), (A3, W3)],
    ids=["wor-ind-wor", "ind-fixed-ind", "fixed-wor-ind", "merged-wor", "wor3-ind2", "ind3-wor3"],
)
@pytest.mark.parametrize("bare", [-1, 0], ids=["even", "uneven"])
def test_trees_that_mix_kinds_by_depth(plans: tuple, bare: int) -> None:
    for p, q in [("dense", "dense"), ("varied", "varied"), ("sparse", "dense")]:
        assert_exact(SpeculativeSampling(), build("mix", 3, plans, p, q, bare), 2)
        assert_exact(SpeculativeSampling(), build("mix", 2, plans, p, q, bare), 4)


def test_the_argmax_is_the_distribution_of_greedy_requests() -> None:
    for plans in ([], [A1, A1], [F2], [C2, A1]):
        assert_exact(ArgmaxRule(), build("greedy", 3, plans, "one-hot", "dense"), 3)


@pytest.mark.parametrize("vocab", [2, 3, 4, 5])
def test_coupled_draws_under_the_coupled_rule(vocab: int) -> None:
    for p, q in STYLES:
        assert_exact(CoupledSampling(), build("coupled", vocab, [C1, C1], p, q), 3 if vocab < 4 else 2)
        assert_exact(CoupledSampling(), build("coupled", vocab, [(*C2, Choice("b", COUPLED))], p, q), 1)


# ------------------------------------------------------------------------------- an independent reference

REFERENCE_WORLDS = {
    "chain": build("ref", 3, [A1, A1], "dense", "dense"),
    "chain with zeros": build("ref", 3, [A1, W1, A1], "varied", "varied"),
    "chain at temperature 0": build("ref", 3, [A1, A1], "one-hot", "dense"),
    "siblings with repeats": build("ref", 3, [A3, A1], "dense", "dense"),
    "siblings without replacement": build("ref", 4, [W3], "dense", "dense"),
    "tree without replacement": build("ref", 3, [W2, W2], "sparse", "dense"),
    "two drafters": build("ref", 2, [TWO_DRAFTERS, W2], "dense", "dense"),
    "all kinds": build("ref", 3, [NODES["all kinds"], F1], "dense", "dense"),
    "uneven": build("ref", 2, [W2, A2, A1], "dense", "dense", bare=1),
}


@pytest.mark.parametrize("name", REFERENCE_WORLDS)
def test_the_reference_in_fractions_agrees(name: str) -> None:
    """Whole proposals, all decisions and whole steps in exact fractions, without the package's code."""
    world = REFERENCE_WORLDS[name]
    reference = Reference(world)
    expected = reference.emitted(3)
    assert sum(expected.values()) == 1
    assert expected == reference.target(3)  # equal fractions: not an approximation
    assert gap(emitted(SpeculativeSampling(), world, 3), expected) < EXACT


class AcceptsHalf(SpeculativeSampling):
    def accept_probability(self, p_x: float, q_x: float) -> float:
        return 0.5


@pytest.mark.parametrize("name", ["chain", "siblings with repeats", "tree without replacement", "all kinds"])
def test_the_reference_also_predicts_what_wrong_rules_emit(name: str) -> None:
    """Agreement above is no accident of both being exact: wrong parts give the same wrong distribution on both
    sides."""
    world = REFERENCE_WORLDS[name]
    wrong = [
        (AcceptsHalf(), Reference(world, accept=lambda p_x, q_x: Fraction(1, 2))),
        (DrawsFromTarget(), Reference(world, rejected=lambda p, q: p)),
        (RemovesNothing(), Reference(world, take_out=lambda q, token: q)),
    ]
    for rule, reference in wrong:
        assert gap(emitted(rule, world, 2), reference.emitted(2)) < EXACT
    assert gap(wrong[0][1].emitted(2), reference.target(2)) > 0.01


# ------------------------------------------------------------------------------- the kernel by itself


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("node", NODES)
def test_the_kernel_is_a_distribution_for_every_outcome_of_the_draws(rule: Rule, node: str) -> None:
    world = build(f"kernel/{node}", 4, [NODES[node]], "dense", "dense")
    p, plan = world.target.dist(()), world.scheme((), ())
    for tokens in itertools.product(range(4), repeat=len(plan)):
        drawn = [DrawnToken(t, each.dist, each.q, each.kind) for t, each in zip(tokens, plan, strict=True)]
        if any(float(each.q[each.token]) == 0.0 for each in drawn) or _repeats_what_was_taken(drawn):
            continue
        outcomes = rule.outcomes([JudgedRow(p, tuple(drawn))])
        assert all(outcome.probability >= 0.0 for outcome in outcomes)
        assert sum(outcome.probability for outcome in outcomes) == pytest.approx(1.0, abs=EXACT)
        assert {outcome.tokens[0] for outcome in outcomes if outcome.accepted} <= set(tokens)


def _repeats_what_was_taken(drawn: list[DrawnToken]) -> bool:
    taken = [(draw.dist, draw.token) for draw in drawn if draw.kind is DrawKind.WITHOUT_REPLACEMENT]
    return len(set(taken)) < len(taken)


def test_expected_acceptance_of_one_draw_is_the_overlap() -> None:
    """alpha = sum min(p, q): 0.2 + 0.3 + 0.1 for these distributions; worked by hand."""
    p, q = torch.tensor([[0.2, 0.7, 0.1], [0.6, 0.3, 0.1]], dtype=torch.float64)
    rule = SpeculativeSampling()
    accepted = sum(
        float(q[x])
        * sum(
            o.probability
            for o in rule.outcomes([JudgedRow(p, (DrawnToken(x, 0, q, DrawKind.INDEPENDENT),))])
            if o.accepted
        )
        for x in range(3)
    )
    assert accepted == pytest.approx(0.6, abs=EXACT)


def test_distance_and_target_distribution_by_hand() -> None:
    probs = {(): [0.25, 0.75], (0,): [1.0, 0.0], (1,): [0.5, 0.5]}
    dist = target_dist(lambda prefix: torch.tensor(probs[prefix], dtype=torch.float64), 2)
    assert dist == {(0, 0): 0.25, (1, 0): 0.375, (1, 1): 0.375}
    assert distance(dist, {(0, 0): 1.0}) == pytest.approx(0.75)
    assert distance({(0,): 0.5}, {(1,): 0.5}) == pytest.approx(0.5)


def test_a_row_that_mixes_kinds_at_one_node_is_still_exact() -> None:
    """An independent draw is from the stored distribution even after a draw from the same one without replacement."""
    for p, q in [("dense", "dense"), ("sparse", "dense")]:
        target, draft = build("one row", 3, [], p, q).target, build("one row", 3, [], p, q).drafters["a"]

        def scheme(prefix: tuple, drafted: tuple, draft=draft) -> list[PlannedDraw]:
            dist = draft.dist(prefix)
            kinds = [DrawKind.WITHOUT_REPLACEMENT, DrawKind.INDEPENDENT]
            return [] if drafted else [PlannedDraw(0, dist, kind) for kind in kinds]

        dist = emitted_dist(SpeculativeSampling(), target.dist, scheme, 1)
        assert distance(dist, target_dist(target.dist, 1)) < EXACT
