"""Lenience: no token gets more than p(x) / l, whatever is drafted; l = 1 is the lossless rule."""

from __future__ import annotations

import math

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
    F3,
    NODES,
    STYLES,
    W1,
    W2,
    W3,
    Case,
    World,
    build,
    cell_probs,
    gap,
    run,
)

from truedraft.certify.cells import BELOW_ONE, completed, kernel_probs, step_probs
from truedraft.core import transfers
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.core.verdict import Origin, Verdict
from truedraft.errors import IncompatibleRuleError, OptionError
from truedraft.verification import LenientSampling, Rule, SpeculativeSampling
from truedraft.verification.exact import distance, emitted_dist, target_dist
from truedraft.verification.lossy import LenientArgmax
from truedraft.verification.rule import DrawnToken, JudgedRow

SHARES = [0.9, 0.5, 0.1]
Dist = dict[tuple[int, ...], float]


def largest_excess(world: World, dist: Dist, lenience: float) -> float:
    """How far the distribution of any token, given the tokens before it, exceeds p(x) / l, weighted by what comes
    before."""
    reached: Dist = {}
    for answer, mass in dist.items():
        for end in range(len(answer) + 1):
            reached[answer[:end]] = reached.get(answer[:end], 0.0) + mass
    return max(
        mass - reached[answer[:-1]] * float(world.target.probs(answer[:-1])[answer[-1]]) / lenience
        for answer, mass in reached.items()
        if answer
    )


def by_kernel(rule: Rule, world: World, length: int) -> Dist:
    return emitted_dist(rule, world.target.probs, world.scheme, length)


def by_cells(rule: Rule, world: World) -> Dist:
    """One step of the batched `verify`, in every decision cell; then the target itself goes on."""
    cases = world.every_proposal()
    return completed(step_probs(cases, cell_probs(rule, cases)), world.target.probs, len(world.plans) + 1)


# ------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("lenience", SHARES)
@pytest.mark.parametrize("node", NODES)
def test_the_bound_at_one_node_with_up_to_four_draws(node: str, lenience: float) -> None:
    for vocab in (2, 3, 5):
        for p, q in STYLES:
            world = build(f"node/{node}", vocab, [NODES[node]], p, q)
            dist = by_kernel(LenientSampling(lenience), world, 1)
            assert sum(dist.values()) == pytest.approx(1.0, abs=EXACT)
            assert largest_excess(world, dist, lenience) < EXACT


@pytest.mark.parametrize("lenience", SHARES)
@pytest.mark.parametrize(
    "plans",
    [(A1, A1, A1), (W1, F1, A1), (A2, A1), (W2, W2), (F2, F2), (F3, F2), (W3, A2), (A3, W1)],
    ids=["chain", "mixed", "ind2-ind", "wor2-wor2", "fixed2-fixed2", "medusa", "wor3-ind2", "ind3-wor"],
)
def test_the_bound_over_chains_and_trees(plans: tuple, lenience: float) -> None:
    for p, q in [("dense", "dense"), ("varied", "varied"), ("sparse", "dense")]:
        world = build("lenient", 3, plans, p, q)
        dist = by_kernel(LenientSampling(lenience), world, 3)
        assert sum(dist.values()) == pytest.approx(1.0, abs=EXACT)
        assert largest_excess(world, dist, lenience) < EXACT


@pytest.mark.parametrize(
    "plans", [(A1, A1), (W2, A1), (F2, F1), (A2,), (W3,), (NODES["all kinds"],)], ids=lambda plans: str(len(plans[0]))
)
def test_the_bound_of_the_batched_verify_in_every_decision_cell(plans: tuple) -> None:
    rule = LenientSampling(0.4)
    world = build("lenient cells", 3, plans)
    cases = world.every_proposal()
    for case, dist in zip(cases, cell_probs(rule, cases), strict=True):
        assert gap(dist, kernel_probs(rule, case)) < EXACT
    dist = by_cells(rule, world)
    assert sum(dist.values()) == pytest.approx(1.0, abs=EXACT)
    assert largest_excess(world, dist, 0.4) < EXACT
    assert gap(dist, target_dist(world.target.probs, len(plans) + 1)) > CAUGHT  # it is lossy


def test_the_bound_is_reached_and_a_rule_that_breaks_it_is_caught() -> None:
    """A candidate with p(x) = 0.1 is emitted with 0.2 at l = 1/2; accepted always, with 1."""

    class AcceptsAlways(LenientSampling):
        def accept_probability(self, p_x: float, q_x: float) -> float:
            return 1.0

    world = build("reached", 2, [F1])
    world.target.weights(())[:] = [1, 9]
    world.drafters[0].weights(())[:] = [2, 1]
    assert by_kernel(LenientSampling(0.5), world, 1)[(0,)] == pytest.approx(0.2, abs=EXACT)
    assert largest_excess(world, by_kernel(LenientSampling(0.5), world, 1), 0.5) == pytest.approx(0.0, abs=EXACT)
    assert largest_excess(world, by_kernel(AcceptsAlways(0.5), world, 1), 0.5) > 0.5
    assert largest_excess(world, by_cells(AcceptsAlways(0.5), world), 0.5) > 0.5


# ------------------------------------------------------------------------------- what l means


@pytest.mark.parametrize("plans", [(A1, A1), (W2, W1), (F2, A1), (NODES["all kinds"],)], ids=["a", "w", "f", "all"])
def test_at_one_it_is_speculative_sampling(plans: tuple) -> None:
    world = build("one", 3, plans)
    lossless, lenient = SpeculativeSampling(), LenientSampling(1.0)
    cases = world.every_proposal()
    assert cell_probs(lenient, cases) == cell_probs(lossless, cases)
    assert distance(by_kernel(lenient, world, 2), target_dist(world.target.probs, 2)) < EXACT


def test_less_lenience_accepts_less() -> None:
    world = build("order", 4, [A1, A1])
    probs = [by_kernel(LenientSampling(lenience), world, 2) for lenience in (0.05, 0.3, 0.7, 1.0)]
    distances = [distance(dist, target_dist(world.target.probs, 2)) for dist in probs]
    assert distances == sorted(distances, reverse=True) and distances[0] > CAUGHT > EXACT > distances[-1]


def test_a_token_stays_exactly_below_its_acceptance_probability() -> None:
    """p = 0.2, q = 0.8, l = 1/2: accepted with 0.2 / 0.4; what a rejection leaves is what it always leaves."""
    p = torch.tensor([[0.2, 0.8], [0.5, 0.5]], dtype=torch.float64)
    case = Case(1.0, Proposal.chain(torch.tensor([0]), torch.tensor([[0.8, 0.2]], dtype=torch.float64)), p)
    key = (Purpose.ACCEPT, 0, 0)
    below = math.nextafter(0.5, 0.0)
    (kept, _), (gone, _) = run(LenientSampling(0.5), [case, case], [{key: below}, {key: 0.5}])
    assert kept.path == (0,)
    assert gone == Verdict((), (1,), Origin.RECOVERED)


def test_a_forbidden_token_never_stays() -> None:
    rule = LenientSampling(1e-9)
    assert rule.accept_probability(0.0, 0.5) == 0.0 and rule.accept_probability(0.0, 0.0) == 0.0
    assert rule.accept_probability(1e-6, 1.0) == 1.0


@pytest.mark.parametrize("lenience", [0.0, -0.5, 1.5, math.nan])
def test_a_lenience_out_of_range_is_refused(lenience: float) -> None:
    for rule in (LenientSampling, LenientArgmax):
        with pytest.raises(OptionError, match="lenience must be above 0 and at most 1, got"):
            rule(lenience)


def test_it_judges_what_speculative_sampling_judges() -> None:
    rule = LenientSampling(0.5)
    rule.check([DrawKind.INDEPENDENT, DrawKind.WITHOUT_REPLACEMENT, DrawKind.DETERMINISTIC], "x")
    with pytest.raises(IncompatibleRuleError, match="cannot judge coupled draws"):
        rule.check([DrawKind.COUPLED], "x")
    assert not rule.lossless and rule.spec == "speculative,lenience=0.5"


# ------------------------------------------------------------------------------- at temperature 0


def test_at_temperature_zero_what_is_near_the_largest_stays() -> None:
    probs = torch.tensor([[0.4, 0.2, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)
    rule = LenientSampling(0.5).greedy_form
    chain = Proposal.deterministic(TokenTree.chain([1, 1]))  # 0.2 >= 0.5 * 0.4, twice
    noise = [KeyedNoise(1, 0, 0)]
    assert rule.verify([chain], [probs], noise) == [Verdict((0, 1), (1, 1, 0), Origin.BONUS)]
    stricter = LenientSampling(0.51).greedy_form
    assert stricter.verify([chain], [probs], noise) == [Verdict((), (0,), Origin.RECOVERED)]
    outcomes = rule.outcomes(
        [JudgedRow(probs[0], tuple(DrawnToken(t, -1, probs[0], DrawKind.DETERMINISTIC) for t in (3, 1)))]
    )
    assert [(each.tokens, each.accepted) for each in outcomes if each.probability] == [((1,), 1)]
    assert rule.judges == frozenset(DrawKind) and not rule.lossless


def test_at_temperature_zero_a_strict_lenience_follows_the_argmax() -> None:
    rule = LenientSampling(BELOW_ONE).greedy_form
    for world in (build("strict", 4, plans, "dense", "dense") for plans in [(F2, F1), (A1, A1), (W2, A1)]):
        for case in world.every_proposal():
            verdict = rule.verify([case.proposal], [case.probs], [KeyedNoise(1, 0, 0)])[0]
            rows = (0, *(node + 1 for node in verdict.path))
            largest = [float(case.probs[row].max()) for row in rows]
            assert [float(case.probs[s, t]) for s, t in zip(rows, verdict.tokens, strict=True)] == largest


def test_the_form_at_temperature_zero_is_one_object() -> None:
    rule = LenientSampling(0.5)
    assert rule.greedy_form is rule.greedy_form  # requests of one rule are judged together
    assert rule.greedy_form.options(SamplingParams()) == SamplingParams(temperature=1.0)


def test_a_device_gives_the_same_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked out for all walks at once, or looked at as the walk goes."""
    rule = LenientSampling(0.4)
    for plans in [(A2, A1), (W3, A1), (F3, F2), (NODES["all kinds"],)]:
        cases = build("device", 3, plans).every_proposal()[::7]
        noise = [KeyedNoise(i, 5, 1) for i in range(len(cases))]
        asked = [case.proposal for case in cases], [case.probs for case in cases], noise
        here = rule.verify(*asked)
        with monkeypatch.context() as patch:
            patch.setattr(transfers, "waits", lambda device: True)
            there = rule.verify(*asked)
        assert there == here and [each.divergence for each in there] == [each.divergence for each in here]
