"""The distribution of what is emitted is the target's, to 1e-12: every law of the lossless rules, each summed once.

By recursion over the kernels, whole steps after whole steps; by the batched `verify` that users run, on the CPU and as
on a device, at one noise value in every decision cell; and by a reference in exact fractions.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import small_worlds
import torch
from small_worlds import (
    A1,
    A2,
    A3,
    COUPLED,
    EXACT,
    F1,
    F2,
    FIXED,
    INDEPENDENT,
    NODES,
    STYLES,
    TWO_DRAFTERS,
    TWO_WITHOUT,
    W1,
    W2,
    W3,
    BlockReference,
    Choice,
    Plan,
    Prefix,
    Reference,
    World,
    both_ways,
    build,
    by_kernel,
    cell_probs,
    continued,
    gap,
    repeated,
)

from support.broken_rules import DrawsFromTarget, RemovesNothing
from truedraft.certify.cells import kernel_probs, step_probs
from truedraft.core.proposal import DrawKind
from truedraft.verification import ArgmaxRule, BlockVerification, CoupledSampling, Rule, SpeculativeSampling
from truedraft.verification.exact import PlannedDraw, distance, emitted_dist, target_dist
from truedraft.verification.rule import DrawnToken, JudgedRow

ALONE, BLOCK, SEEDED = SpeculativeSampling(), BlockVerification(), CoupledSampling()
C1, C2 = repeated(1, COUPLED), repeated(2, COUPLED)
MERGED = (Choice(0, INDEPENDENT), Choice(1, INDEPENDENT))
AFTER_FIXED = (Choice(0, FIXED), Choice(1, INDEPENDENT))
PLAIN, SOME = STYLES[:1], [("dense", "dense"), ("varied", "varied"), ("sparse", "dense")]

# ------------------------------------------------------------------------------- kernels

Law = tuple[int, tuple[Plan, ...], list[tuple[str, str]], int, int]
"""Vocabulary, plans by depth, styles of p and q, a token without drafts below it or -1, and tokens of an answer."""

NODE_LAWS: list[Law] = [(vocab, (node,), STYLES, -1, 1) for vocab in (2, 3, 4, 5) for node in NODES.values()]
CHAIN_LAWS: list[Law] = [
    (vocab, (plan,) * depth, STYLES if vocab < 4 and depth < 4 else SOME[:2], -1, length)
    for vocab, depth, length in [(2, 4, 5), (3, 3, 4), (3, 4, 4), (4, 3, 3), (5, 2, 3)]
    for plan in (A1, W1, F1)
]
TREE_LAWS: list[Law] = [
    *((2, (node, node), STYLES, -1, 3) for node in NODES.values()),
    *((3, (node, A2), STYLES, -1, 2) for node in NODES.values()),
]
MIXED_LAWS: list[Law] = [
    (vocab, plans, SOME, bare, length)
    for plans in [(W2, A1, W1), (A2, F2, A1), (F2, W2, A1), (TWO_DRAFTERS, W2), (W3, A2), (A3, W3)]
    for bare in (-1, 0)
    for vocab, length in [(3, 2), (2, 4)]
]
BLOCK_LAWS: list[Law] = [
    *((vocab, (A1,) * depth, STYLES, -1, length)
      for vocab, depth, length in [(5, 1, 2), (2, 4, 5), (3, 2, 4), (3, 3, 4), (3, 4, 5), (4, 3, 3), (5, 2, 3)]),
    *((vocab, plans, SOME, bare, length)
      for plans in [(A2, A1, A1), (A1, A1, A2), (A1, MERGED, A1), (F1, A1, A1), (A1, F2, A1), (A1, A1, F1),
                    (AFTER_FIXED, A1, A1)]
      for bare in (-1, 0)
      for vocab, length in [(2, 4), (3, 3)]),
]  # fmt: skip
COUPLED_LAWS: list[Law] = [
    *((vocab, (C1, C1), STYLES, -1, 3 if vocab < 4 else 2) for vocab in (2, 3, 4, 5)),
    *((vocab, ((*C2, Choice(1, COUPLED)),), STYLES, -1, 1) for vocab in (2, 3, 4, 5)),
]
GREEDY_LAWS: list[Law] = [(3, plans, [("one-hot", "dense")], -1, 3) for plans in [(), (A1, A1), (F2,), (C2, A1)]]


@pytest.mark.parametrize(
    ("rule", "laws"),
    [
        *((rule, laws) for rule in (ALONE, SEEDED) for laws in (NODE_LAWS, CHAIN_LAWS, TREE_LAWS)),
        (ALONE, MIXED_LAWS),
        (ALONE, [(5, (A1,) * 4, [("dense", "sparse")], -1, 5)]),
        (BLOCK, BLOCK_LAWS),
        (SEEDED, COUPLED_LAWS),
        (ArgmaxRule(), GREEDY_LAWS),
    ],
    ids=lambda each: each.name if isinstance(each, Rule) else f"{len(each)} laws",
)
def test_a_kernel_emits_the_targets_distribution(rule: Rule, laws: list[Law]) -> None:
    for vocab, plans, styles, bare, length in laws:
        for p, q in styles:
            assert by_kernel(rule, build("law", vocab, plans, p, q, bare), length) < EXACT, (plans, p, q, bare)


@pytest.mark.parametrize("rule", [ALONE, SEEDED], ids=lambda rule: rule.name)
def test_a_kernel_is_a_distribution_for_every_outcome_of_the_draws(rule: Rule) -> None:
    for node in NODES.values():
        world = build("kernel", 4, [node])
        plan = world.scheme((), ())
        for tokens in itertools.product(range(4), repeat=len(plan)):
            drawn = [DrawnToken(t, each.dist, each.q, each.kind) for t, each in zip(tokens, plan, strict=True)]
            taken = [(draw.dist, draw.token) for draw in drawn if draw.kind is DrawKind.WITHOUT_REPLACEMENT]
            if any(float(each.q[each.token]) == 0.0 for each in drawn) or len(set(taken)) < len(taken):
                continue
            outcomes = rule.outcomes([JudgedRow(world.target.probs(()), tuple(drawn))])
            assert all(outcome.probability >= 0.0 for outcome in outcomes)
            assert sum(outcome.probability for outcome in outcomes) == pytest.approx(1.0, abs=EXACT)
            assert {outcome.tokens[0] for outcome in outcomes if outcome.accepted} <= set(tokens)


def test_acceptance_of_one_draw_is_the_overlap_also_as_a_block_of_one() -> None:
    """alpha = sum min(p, q): 0.2 + 0.3 + 0.1 for these distributions; worked by hand."""
    p, q = torch.tensor([[0.2, 0.7, 0.1], [0.6, 0.3, 0.1]], dtype=torch.float64)
    accepted = 0.0
    for token in range(3):
        group = [JudgedRow(p, (DrawnToken(token, 0, q, INDEPENDENT),))]
        of_node = {(o.accepted, o.tokens): o.probability for o in ALONE.outcomes(group)}
        accepted += float(q[token]) * sum(mass for (count, _), mass in of_node.items() if count)
        for end in BLOCK.outcomes(group):
            assert end.probability == pytest.approx(of_node.get((end.accepted, end.tokens), 0.0), abs=EXACT)
    assert accepted == pytest.approx(0.6, abs=EXACT)


def test_a_row_that_mixes_kinds_of_one_distribution_is_exact() -> None:
    """An independent draw is from the stored distribution even after a draw from the same one without replacement."""
    for style in ("dense", "sparse"):
        world = build("one row", 3, [], style)

        def scheme(prefix: Prefix, drafted: Prefix, world: World = world) -> list[PlannedDraw]:
            kinds = [DrawKind.WITHOUT_REPLACEMENT, INDEPENDENT]
            return [] if drafted else [PlannedDraw(0, world.drafters[0].probs(prefix), kind) for kind in kinds]

        dist = emitted_dist(ALONE, world.target.probs, scheme, 1)
        assert distance(dist, target_dist(world.target.probs, 1)) < EXACT


def test_distance_and_target_distribution_by_hand() -> None:
    probs = {(): [0.25, 0.75], (0,): [1.0, 0.0], (1,): [0.5, 0.5]}
    dist = target_dist(lambda prefix: torch.tensor(probs[prefix], dtype=torch.float64), 2)
    assert dist == {(0, 0): 0.25, (1, 0): 0.375, (1, 1): 0.375}
    assert distance(dist, {(0, 0): 1.0}) == pytest.approx(0.75)
    assert distance({(0,): 0.5}, {(1,): 0.5}) == pytest.approx(0.5)


# ------------------------------------------------------------------------------- the batched verify, in every cell


def nodes(vocab: int, styles: list[tuple[str, str]]) -> list[World]:
    return [build(f"cells/{name}", vocab, [plan], p, q) for name, plan in NODES.items() for p, q in styles]


def chains(vocab: int, depth: int) -> list[World]:
    plans = [A1, W1, F1]
    worlds = [build("cells", vocab, [plan] * depth, p, q) for plan in plans for p, q in STYLES[:-1]]
    return [*worlds, build("cells", vocab, [plans[i % 3] for i in range(depth)], "varied", "varied")]


def trees(vocab: int, *laws: tuple[tuple[Plan, ...], str, str, int]) -> list[World]:
    return [build("tree", vocab, plans, p, q, bare) for plans, p, q, bare in laws]


CELLS: dict[str, tuple[Rule, list[World]]] = {
    "nodes, 2 tokens": (ALONE, nodes(2, STYLES)),
    "nodes, 3 tokens": (ALONE, nodes(3, STYLES[:4])),
    "nodes, 4 tokens": (ALONE, nodes(4, STYLES[1:2])),
    "nodes, 5 tokens": (ALONE, nodes(5, STYLES[1:2])),
    "chains, 2 tokens": (ALONE, chains(2, 4)),
    "chains, 3 tokens": (ALONE, chains(3, 3)),
    "chains, 4 tokens": (ALONE, chains(4, 2)),
    "chains, 5 tokens": (ALONE, chains(5, 2)),
    "trees, 2 tokens": (
        ALONE,
        trees(
            2,
            *(
                (plans, p, q, bare)
                for p, q in SOME[:2]
                for plans, bare in [
                    ((A2, A2), -1),
                    ((W2, W2, A1), 0),
                    ((F2, F2, F1), -1),
                    ((TWO_DRAFTERS, W1), -1),
                    ((NODES["all kinds"], A1, W1), 1),
                    ((), -1),
                ]
            ),
        ),
    ),
    "trees, 3 tokens": (
        ALONE,
        trees(
            3,
            ((A3, W1), "dense", "dense", 0),
            ((W3, A1), "dense", "dense", 1),
            ((W2, W2), "dense", "dense", -1),
            ((W2, F2), "sparse", "dense", -1),
            ((F2, W2), "dense", "dense", -1),
            ((W2, A1), "one-hot", "dense", -1),
            ((TWO_WITHOUT, F1), "dense", "dense", -1),
            ((), "dense", "dense", -1),
        ),
    ),
    "blocks, 2 tokens": (
        BLOCK,
        [
            *(build("block cells", 2, [A1] * 4, p, q) for p, q in STYLES),
            *trees(
                2,
                ((A2, A1, A1), "dense", "dense", -1),
                ((A1, A1, A2), "varied", "varied", -1),
                ((A1, MERGED, A1), "dense", "dense", 0),
            ),
        ],
    ),
    "blocks, 3 tokens": (
        BLOCK,
        [
            *(build("block cells", 3, [A1] * depth, p, q) for depth in (2, 3) for p, q in [*PLAIN, *SOME[1:2]]),
            *(build("block cells", 3, [A1] * 2, p, q) for p, q in STYLES),
            *trees(
                3,
                ((A1,) * 4, "dense", "dense", -1),
                ((A1,) * 3, "dense", "dense", 1),
                ((F1, A1, A1), "dense", "dense", -1),
                ((A1, F2, A1), "dense", "sparse", -1),
                ((A1, A1, F1), "sparse", "dense", 1),
                ((F2, F1), "dense", "dense", -1),
                ((), "dense", "dense", -1),
            ),
        ],
    ),
    "blocks, 4 tokens": (
        BLOCK,
        [
            *(build("block cells", 4, [A1] * 2, "dense", q) for q in ("dense", "sparse")),
            *trees(4, ((A1, F1, A1), "sparse", "dense", -1)),
        ],
    ),
    "blocks, 5 tokens": (
        BLOCK,
        trees(5, ((A1, A1), "dense", "dense", -1), ((F1, A1, A1), "dense", "dense", -1)),
    ),
}
"""Requests with different trees stand side by side in the batches of a law."""


@pytest.mark.parametrize("name", CELLS)
def test_in_every_decision_cell(name: str) -> None:
    rule, worlds = CELLS[name]
    groups = [world.every_proposal() for world in worlds]
    found = iter(cell_probs(both_ways(rule), [case for group in groups for case in group]))
    for world, group in zip(worlds, groups, strict=True):
        assert sum(case.probability for case in group) == pytest.approx(1.0, abs=EXACT)
        probs = [next(found) for _ in group]
        for case, dist in zip(group, probs, strict=True):
            assert gap(dist, kernel_probs(rule, case)) < EXACT
        step = step_probs(group, probs)
        assert continued(world, step) < EXACT
        if rule is ALONE:
            assert gap(step, Reference(world).step(())) < EXACT
        elif all(plan == A1 for plan in world.plans):
            assert gap(step, BlockReference(world).step(())) < EXACT


def test_a_device_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_worlds, "eagerly", lambda *given: [])
    with pytest.raises(AssertionError):
        cell_probs(both_ways(ALONE), build("noticed", 2, [A1]).every_proposal())


# ------------------------------------------------------------------------------- the reference in fractions

REFERENCE_WORLDS = {
    "chain": build("ref", 3, [A1, A1]),
    "chain with zeros": build("ref", 3, [A1, W1, A1], "varied", "varied"),
    "chain at temperature 0": build("ref", 3, [A1, A1], "one-hot", "dense"),
    "siblings with repeats": build("ref", 3, [A3, A1]),
    "siblings without replacement": build("ref", 4, [W3]),
    "tree without replacement": build("ref", 3, [W2, W2], "sparse", "dense"),
    "two drafters": build("ref", 2, [TWO_DRAFTERS, W2]),
    "all kinds": build("ref", 3, [NODES["all kinds"], F1]),
    "uneven": build("ref", 2, [W2, A2, A1], bare=1),
}
BLOCK_WORLDS = {
    "block": build("block ref", 2, [A1, A1, A1]),
    "uneven block": build("block ref", 2, [A1, A1, A1], bare=1),
    "block of equal distributions": build("block ref", 3, [A1, A1], "sparse", "equal"),
    "block with zeros": build("block ref", 3, [A1, A1], "varied", "varied"),
}


@pytest.mark.parametrize("name", [*REFERENCE_WORLDS, *BLOCK_WORLDS])
def test_the_reference_in_fractions_agrees(name: str) -> None:
    """Whole proposals, all decisions and whole steps in exact fractions, without the package's code."""
    world = (REFERENCE_WORLDS | BLOCK_WORLDS)[name]
    reference, rule = (BlockReference(world), BLOCK) if name in BLOCK_WORLDS else (Reference(world), ALONE)
    expected = reference.emitted(3)
    assert sum(expected.values()) == 1
    assert expected == reference.target(3)  # equal fractions: not an approximation
    assert gap(emitted_dist(rule, world.target.probs, world.scheme, 3), expected) < EXACT


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
        assert gap(emitted_dist(rule, world.target.probs, world.scheme, 2), reference.emitted(2)) < EXACT
    assert gap(wrong[0][1].emitted(2), reference.target(2)) > 0.01


# ------------------------------------------------------------------------------- blocks keep no fewer tokens


def mean_kept(step: dict[tuple[Prefix, int], Fraction]) -> Fraction:
    return sum((count * mass for (_, count), mass in step.items()), Fraction(0))


def test_the_papers_example() -> None:
    """Two tokens, p = (1/3, 2/3) and q = (2/3, 1/3) everywhere, chains of two: 10/9 tokens one by one, 11/9 jointly."""
    world = build("paper", 2, [A1, A1])
    for prefix in itertools.chain.from_iterable(itertools.product(range(2), repeat=n) for n in range(3)):
        world.target.weights(prefix)[:] = [1, 2]
        world.drafters[0].weights(prefix)[:] = [2, 1]
    assert mean_kept(Reference(world).step(())) == Fraction(10, 9)
    assert mean_kept(BlockReference(world).step(())) == Fraction(11, 9)
    for rule, kept in ((ALONE, 10 / 9), (BLOCK, 11 / 9)):
        cases = world.every_proposal()
        step = step_probs(cases, [kernel_probs(rule, case) for case in cases])
        assert sum(count * mass for (_, count), mass in step.items()) == pytest.approx(kept, abs=EXACT)


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
        gains.append(mean_kept(jointly) - mean_kept(alone))
    assert (max(gains) > Fraction(1, 100)) if depth > 1 else not any(gains)
