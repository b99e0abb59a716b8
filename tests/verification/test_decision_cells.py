"""What is summed is what users run: the batched `verify`, at one noise value in every decision cell."""

from __future__ import annotations

import math

import pytest
import torch
from decision_cells import BELOW_ONE, cell_probs, completed, kernel_dist, run, step_dist
from small_worlds import (
    A1,
    A2,
    A3,
    F1,
    F2,
    NODES,
    STYLES,
    TWO_DRAFTERS,
    W1,
    W2,
    W3,
    Case,
    Reference,
    World,
    build,
    every_proposal,
    gap,
)

from truedraft.core.noise import Purpose
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.verdict import Origin, Verdict
from truedraft.verification import SpeculativeSampling
from truedraft.verification.exact import target_dist

EXACT = 1e-12
RULE = SpeculativeSampling()


def judged(worlds: list[World]) -> list[tuple[World, list[Case], list[dict[Verdict, float]]]]:
    """Every proposal of every world, all in the same batches: requests with different trees, side by side."""
    cases = [every_proposal(world) for world in worlds]
    probs = cell_probs(RULE, [case for group in cases for case in group])
    found = []
    start = 0
    for world, group in zip(worlds, cases, strict=True):
        found.append((world, group, probs[start : start + len(group)]))
        start += len(group)
    return found


def assert_exact(worlds: list[World]) -> None:
    for world, cases, probs in judged(worlds):
        assert sum(case.probability for case in cases) == pytest.approx(1.0, abs=EXACT)
        for case, dist in zip(cases, probs, strict=True):
            assert gap(dist, kernel_dist(RULE, case)) < EXACT
        step = step_dist(cases, probs)
        assert gap(step, Reference(world).step(())) < EXACT
        length = len(world.plans) + 1
        assert gap(completed(step, world.target.dist, length), target_dist(world.target.dist, length)) < EXACT


@pytest.mark.parametrize("vocab", [2, 3, 4, 5])
def test_one_node_of_every_kind_in_one_batch(vocab: int) -> None:
    styles = STYLES[:4] if vocab < 4 else STYLES[1:2]
    assert_exact([build(f"cells/{name}", vocab, [plan], p, q) for name, plan in NODES.items() for p, q in styles])


@pytest.mark.parametrize(("vocab", "depth"), [(2, 4), (3, 3), (4, 2), (5, 2)])
def test_chains_of_every_kind_in_one_batch(vocab: int, depth: int) -> None:
    plans = [A1, W1, F1]
    worlds = [build("cells", vocab, [plan] * depth, p, q) for plan in plans for p, q in STYLES if (p, q) != STYLES[-1]]
    alternating = [plans[i % 3] for i in range(depth)]
    assert_exact([*worlds, build("cells", vocab, alternating, "varied", "varied")])


def test_trees_of_every_kind_in_one_batch_over_two_tokens() -> None:
    worlds = [
        build(f"tree/{name}", 2, plans, p, q, bare)
        for p, q in [("dense", "dense"), ("varied", "varied")]
        for name, plans, bare in [
            ("independent", (A2, A2), -1),
            ("without", (W2, W2, A1), 0),
            ("fixed", (F2, F2, F1), -1),
            ("two drafters", (TWO_DRAFTERS, W1), -1),
            ("all kinds", (NODES["all kinds"], A1, W1), 1),
            ("plain", (), -1),
        ]
    ]
    assert_exact(worlds)


def test_trees_of_every_kind_in_one_batch_over_three_tokens() -> None:
    worlds = [
        build("tree", 3, plans, p, q, bare)
        for plans, p, q, bare in [
            ((A3, W1), "dense", "dense", 0),
            ((W3, A1), "dense", "dense", 1),
            ((W2, W2), "dense", "dense", -1),
            ((W2, F2), "sparse", "dense", -1),
            ((F2, W2), "dense", "dense", -1),
            ((W2, A1), "one-hot", "dense", -1),
            ((NODES["two drafters without replacement"], F1), "dense", "dense", -1),
        ]
    ]
    assert_exact(worlds)


def test_a_batch_answers_as_each_request_alone() -> None:
    worlds = [build("alone", 3, plans, "dense", "dense") for plans in [(A1, A1), (W2, F1), (), (TWO_DRAFTERS,)]]
    cases = [case for world in worlds for case in every_proposal(world)][::3]
    keys = [(purpose, depth, index) for purpose in list(Purpose) for depth in range(3) for index in range(3)]
    generator = torch.Generator().manual_seed(5)
    scripts = [
        dict(zip(keys, torch.rand(len(keys), generator=generator, dtype=torch.float64).tolist(), strict=True))
        for _ in cases
    ]
    together = run(RULE, cases, scripts)
    alone = [run(RULE, [case], [script])[0] for case, script in zip(cases, scripts, strict=True)]
    assert together == alone
    assert len({verdict for verdict, _ in together}) > 10


def test_the_first_token_is_kept_exactly_below_its_acceptance_probability() -> None:
    """u < p/q keeps, u = p/q does not: the cell [0, p/q) has the acceptance probability as its width."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    case = Case(1.0, Proposal.chain(torch.tensor([0]), q), p)
    key, last = (Purpose.ACCEPT, 0, 0), (Purpose.BONUS, 1, 0)
    below = math.nextafter(0.5, 0.0)
    (kept, _), (gone, _) = run(RULE, [case, case], [{key: below, last: 0.0}, {key: 0.5}])
    assert kept == Verdict((0,), (0, 0), Origin.BONUS)
    assert gone == Verdict((), (1,), Origin.RECOVERED)  # norm(max(0, p - q)) is all on token 1


def test_equal_distributions_accept_everything_and_disjoint_distributions_nothing() -> None:
    dist = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    other = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    equal = Case(1.0, Proposal.chain(torch.tensor([0]), dist), dist.expand(2, 2))
    apart = Case(1.0, Proposal.chain(torch.tensor([0]), one), other.expand(2, 2))
    key = (Purpose.ACCEPT, 0, 0)
    (kept, _), (gone, _) = run(RULE, [equal, apart], [{key: BELOW_ONE}, {key: 0.0}])
    assert kept.path == (0,)
    assert gone == Verdict((), (1,), Origin.RECOVERED)


def test_keys_asked_for_are_those_of_the_walk_and_never_the_drafters() -> None:
    """Which key decides what is part of the contract: a drafter's own draws use Purpose.DRAFT. None is asked twice."""
    world = build("keys", 3, [W2, A1], "dense", "dense")
    cases = every_proposal(world)
    for (verdict, asked), case in zip(run(RULE, cases, [{}] * len(cases)), cases, strict=True):
        depth = len(verdict.path)
        final = Purpose.BONUS if verdict.final is Origin.BONUS else Purpose.RECOVERED
        expected = []
        for level, row in enumerate([0, *(node + 1 for node in verdict.path)]):
            draws = case.proposal.draws[row]
            judged = sum(key[0] is Purpose.ACCEPT and key[1] == level for key in asked)
            assert (judged == len(draws)) if level == depth else (draws[judged - 1].child == verdict.path[level])
            expected += [(Purpose.ACCEPT, level, index) for index in range(judged)]
        assert asked == [*expected, (final, depth, 0)]


def test_temperature_zero_follows_the_argmax_whatever_the_noise() -> None:
    """Target and draft greedy: the walk follows the child that carries the argmax, for every noise value."""
    for world in [build("greedy", 3, plans, "one-hot", "dense") for plans in [(A2, A1), (W3, W1), (F2, F2)]]:
        best = lambda prefix, world=world: int(world.target.dist(prefix).argmax())  # noqa: E731
        cases = every_proposal(world)
        for case, dist in zip(cases, cell_probs(RULE, cases), strict=True):
            answers = {verdict.tokens for verdict in dist}
            longest = max(answers, key=len)
            for i, token in enumerate(longest):
                assert token == best(longest[:i])
            if all(draw.kind is DrawKind.DETERMINISTIC for draws in case.proposal.draws for draw in draws):
                assert len(dist) == 1  # nothing is left to chance


def test_verify_changes_nothing_it_was_given() -> None:
    world = build("pure", 3, [W3, A2], "dense", "dense")
    cases = every_proposal(world)[:40]
    before = [(case.probs.clone(), case.proposal.probs.clone()) for case in cases if case.proposal.probs is not None]
    first = run(RULE, cases, [{}] * len(cases))
    assert run(RULE, cases, [{}] * len(cases)) == first
    for case, (probs, drafted) in zip(cases, before, strict=True):
        assert torch.equal(case.probs, probs)
        assert torch.equal(case.proposal.probs, drafted)
