"""The measured distribution of an emitted token, against the exact distribution by recursion over the rule's kernel."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from small_worlds import A1, A2, A3, EXACT, F1, F3, FIXED, NODES, STYLES, W1, W2, W3, WITHOUT, World, build
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.core.verdict import Origin, Verdict
from truedraft.verification import LenientSampling, SpeculativeSampling
from truedraft.verification.exact import PlannedDraw, emitted_dist
from truedraft.verification.lossy import NodeDraw, divergence_of_candidates, lenient_dist


def exact_dist(world: World, lenience: float) -> Tensor:
    """By the kernel, over all draws of the drafter and all noise of the rule."""
    dist = emitted_dist(LenientSampling(lenience), world.target.probs, world.scheme, 1)
    return torch.tensor([dist.get((token,), 0.0) for token in range(world.target.vocab)], dtype=torch.float64)


def measured_dist(p: Tensor, plan: list[PlannedDraw], lenience: float, noise: dict[int, float] | None = None) -> Tensor:
    """By the shipped function, for one node; `noise` by place of the draw."""
    draws = []
    for place, each in enumerate(plan):
        number = (noise or {}).get(place)
        uniform = None if number is None else torch.tensor([number], dtype=torch.float64)
        draws.append(NodeDraw(each.dist, each.q[None], each.kind, uniform))
    return lenient_dist(p[None], draws, lenience)[0]


def total_variation(p: Tensor, q: Tensor) -> float:
    return float(L.total_variation(p, q))


def kl(p: Tensor, q: Tensor) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True) if a > 0)


# ------------------------------------------------------------------------------- the distribution


@pytest.mark.parametrize("lenience", [1e-40, 1e-50, 5e-324])
def test_next_to_no_lenience_still_measures_numbers(lenience: float) -> None:
    """float32 rounds such numbers to 0, and tokens without mass made 0 / 0 of it."""
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.2, 0.5, 0.3]])
    dist = lenient_dist(p, [NodeDraw(0, q, DrawKind.INDEPENDENT)], lenience)
    assert dist[0].tolist() == pytest.approx([0.2 + 0.3, 0.5, 0.0])  # what the draft gives to no token of p is rejected
    distance, divergence = divergence_of_candidates([0.75, 0.0, 0.25 - 1e-6], lenience)
    assert distance == pytest.approx(0.25) and divergence == pytest.approx(-math.log(0.75))


@pytest.mark.parametrize("lenience", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("plan", [A1, A3, F1, F3, W1, NODES["two drafters"]], ids=["a", "aaa", "f", "fff", "w", "aba"])
def test_the_measured_distribution_is_the_emitted_one(plan: tuple, lenience: float) -> None:
    for p, q in STYLES:
        world = build("measured", 4, [plan], p, q)
        dist = measured_dist(world.target.probs(()), world.scheme((), ()), lenience)
        assert total_variation(dist, exact_dist(world, lenience)) < EXACT


def mean_over_noise(p: Tensor, plan: list[PlannedDraw], lenience: float) -> Tensor:
    """The measured distribution over all rejected tokens, each with its probability: worked out beside the shipped
    code."""
    places = [i for i, each in enumerate(plan) if each.kind is WITHOUT]

    def visit(place: int, left: Tensor, gone: dict[int, list[int]], noise: dict[int, float]) -> Tensor:
        if place == len(plan):
            return measured_dist(p, plan, lenience, noise)
        each = plan[place]
        q = each.q
        if each.kind is WITHOUT:
            for token in gone.get(each.dist, []):
                q = L.without_tokens(q, torch.tensor([token]))
        after = L.residual(left, q)
        later = any(i > place and plan[i].dist == each.dist for i in places)
        rejected = q - torch.minimum(q, left / lenience)
        if place not in places or not later or float(rejected.sum()) <= 0.0:
            return visit(place + 1, after, gone, noise | ({place: 0.5} if place in places and later else {}))
        edges = (rejected / rejected.sum()).cumsum(0).tolist()
        mean = torch.zeros_like(p)
        for token, (low, high) in enumerate(itertools.pairwise([0.0, *edges])):
            if high > low:
                taken = gone | {each.dist: [*gone.get(each.dist, []), token]}
                mean += (high - low) * visit(place + 1, after, taken, noise | {place: (low + high) / 2})
        return mean

    return visit(0, p, {}, {})


@pytest.mark.parametrize("lenience", [1.0, 0.8, 0.4])
@pytest.mark.parametrize("plan", [W2, W3, *(NODES[n] for n in ("two drafters without replacement", "all kinds"))])
def test_without_replacement_the_mean_over_rejected_tokens_is_the_emitted_distribution(
    plan: tuple, lenience: float
) -> None:
    for p, q in [("dense", "dense"), ("sparse", "dense"), ("one-hot", "dense"), ("dense", "sparse")]:
        world = build("unbiased", 4, [plan], p, q)
        mean = mean_over_noise(world.target.probs(()), world.scheme((), ()), lenience)
        assert total_variation(mean, exact_dist(world, lenience)) < EXACT


def test_the_token_that_was_drafted_would_not_do() -> None:
    """Taking out the drafted token whatever became of it is biased: the test above has the power to see that."""
    world, lenience = build("biased", 4, [W2]), 0.8
    world.target.weights(())[:] = [1, 1, 8, 10]
    world.drafters[0].weights(())[:] = [5, 1, 7, 7]
    p, plan = world.target.probs(()), world.scheme((), ())
    assert total_variation(mean_over_noise(p, plan, lenience), exact_dist(world, lenience)) < EXACT
    q = plan[0].q
    mean = torch.zeros_like(p)
    stay = torch.minimum(q, p / lenience)
    for token in range(4):
        rest = PlannedDraw(1, L.without_tokens(q, torch.tensor([token])), DrawKind.INDEPENDENT)
        mean += q[token] * (stay + (1 - stay.sum()) * measured_dist(L.residual(p, q), [rest], lenience))
    assert total_variation(mean, exact_dist(world, lenience)) > 1e-4


@pytest.mark.parametrize("plan", [A1, A2, W3, F3, NODES["all kinds"]], ids=["a", "aa", "www", "fff", "all"])
def test_at_lenience_one_the_distribution_is_the_targets_whatever_the_noise(plan: tuple) -> None:
    for p, q in STYLES:
        world = build("one", 4, [plan], p, q)
        for number in (0.01, 0.4, 0.99):
            dist = measured_dist(world.target.probs(()), world.scheme((), ()), 1.0, {0: number, 1: number, 2: number})
            assert total_variation(dist, world.target.probs(())) < EXACT


# ------------------------------------------------------------------------------- candidates, in closed form


@pytest.mark.parametrize("lenience", [1.0, 0.7, 0.2])
def test_candidates_by_the_closed_form_and_by_the_distribution(lenience: float) -> None:
    for vocab, plan in itertools.product((2, 3, 5), (F1, F3)):
        for style in ("dense", "sparse", "one-hot"):
            world = build("closed", vocab, [plan], style, "dense")
            p, scheme = world.target.probs(()), world.scheme((), ())
            dist = measured_dist(p, scheme, lenience)
            tokens = dict.fromkeys(int(each.q.argmax()) for each in scheme)
            distance, divergence = divergence_of_candidates([float(p[token]) for token in tokens], lenience)
            assert distance == pytest.approx(total_variation(dist, p), abs=EXACT)
            assert divergence == pytest.approx(kl(dist, p), abs=EXACT)


def test_no_candidates_no_divergence() -> None:
    assert divergence_of_candidates([], 0.3) == (0.0, 0.0)
    assert divergence_of_candidates([1.0], 0.3) == (0.0, 0.0)
    assert divergence_of_candidates([0.1], 0.5) == (
        pytest.approx(0.1),
        pytest.approx(0.2 * math.log(2) + 0.8 * math.log(8 / 9)),
    )


# ------------------------------------------------------------------------------- in the verdict


def judged(rule: SpeculativeSampling, world: World, seed: int = 0) -> list[tuple[Verdict, Proposal, Tensor]]:
    cases = world.every_proposal()
    noise = [KeyedNoise(seed, i, 0) for i in range(len(cases))]
    verdicts = rule.verify([case.proposal for case in cases], [case.probs for case in cases], noise)
    return [(verdict, case.proposal, case.probs) for verdict, case in zip(verdicts, cases, strict=True)]


@pytest.mark.parametrize("plans", [(A1, A1), (A2, A1), (F3, F1), (W1, F1)], ids=["chain", "tree", "fixed", "mixed"])
def test_a_verdict_has_the_divergence_of_every_emitted_token(plans: tuple) -> None:
    lenience = 0.5
    world = build("verdict", 3, plans)
    seen = set()
    for verdict, proposal, probs in judged(LenientSampling(lenience), world):
        assert verdict.divergence is not None and len(verdict.divergence) == len(verdict.tokens)
        rows = (0, *(node + 1 for node in verdict.path))
        for i, (row, each) in enumerate(zip(rows, verdict.divergence, strict=True)):
            draws = proposal.draws[row]
            plan = world.scheme(verdict.tokens[:i], verdict.tokens[:i]) if draws else []
            dist = measured_dist(probs[row], plan, lenience)
            assert each.total_variation == pytest.approx(total_variation(dist, probs[row]), abs=EXACT)
            assert each.kl == pytest.approx(kl(dist, probs[row]), abs=EXACT)
            assert each.kl <= -math.log(lenience) + EXACT  # no token beyond p / l
            assert each.total_variation_greedy == pytest.approx(1 - float(probs[row].max()))
            assert each.kl_greedy == pytest.approx(-math.log(float(probs[row].max())))
            seen.add(bool(draws))
        if verdict.final is Origin.BONUS:
            assert verdict.divergence[-1].total_variation == verdict.divergence[-1].kl == 0.0
    assert seen == {True, False}


def test_siblings_without_replacement_measure_with_noise_that_decides_nothing() -> None:
    """Index 0 of a recovered token draws it; the numbers that stand for rejected tokens have other keys."""

    class Notes(KeyedNoise):
        asked: list[tuple[Purpose, int, int]] = []  # noqa: RUF012 - one list for the test

        def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
            self.asked.append((purpose, depth, index))
            return super().uniform(purpose, depth, index)

    for case in build("keys", 4, [W3, A1]).every_proposal()[::40]:
        Notes.asked.clear()
        verdict = LenientSampling(0.6).verify([case.proposal], [case.probs], [Notes(3, 0, 0)])[0]
        assert len(set(Notes.asked)) == len(Notes.asked)
        extra = [key for key in Notes.asked if key[0] is Purpose.RECOVERED and key[2] > 0]
        assert (Purpose.RECOVERED, 0, 1) in extra
        lossless = LenientSampling(0.6)
        assert SpeculativeSampling.verify(lossless, [case.proposal], [case.probs], [KeyedNoise(3, 0, 0)]) == [verdict]


def test_a_batch_is_measured_as_each_request_alone() -> None:
    rule = LenientSampling(0.5)
    worlds = [build("batch", 3, plans) for plans in [(A1, A1), (W2, F1), (F3,), (W3,), (NODES["all kinds"],), ()]]
    cases = [case for world in worlds for case in world.every_proposal()][::5]
    noise = [KeyedNoise(i, 0, 0) for i in range(len(cases))]
    together = rule.verify([c.proposal for c in cases], [c.probs for c in cases], noise)
    for case, own, verdict in zip(cases, noise, together, strict=True):
        alone = rule.verify([case.proposal], [case.probs], [own])[0]
        for one, other in zip(alone.divergence or (), verdict.divergence or (), strict=True):
            assert one.total_variation == pytest.approx(other.total_variation, abs=EXACT)
            assert one.kl == pytest.approx(other.kl, abs=EXACT)


def test_float32_distributions_are_measured_to_single_precision() -> None:
    generator = torch.Generator().manual_seed(4)
    p = torch.softmax(3 * torch.randn(3, 5000, generator=generator), dim=-1)
    q = torch.softmax(3 * torch.randn(2, 5000, generator=generator), dim=-1)
    chain = Proposal.chain(q.argmax(dim=-1), q)
    narrow, wide = (
        LenientSampling(0.3).verify([each], [probs], [KeyedNoise(1, 0, 0)])[0]
        for each, probs in [(chain, p), (Proposal.chain(q.argmax(dim=-1), q.double()), p.double())]
    )
    assert narrow == wide
    for one, other in zip(narrow.divergence or (), wide.divergence or (), strict=True):
        assert one.total_variation == pytest.approx(other.total_variation, abs=1e-5)
        assert one.kl == pytest.approx(other.kl, abs=1e-5)


def test_lossless_rules_measure_nothing_and_equality_looks_past_the_measure() -> None:
    lossless = judged(SpeculativeSampling(), build("none", 3, [A1, A1]))
    assert all(verdict.divergence is None for verdict, _, _ in lossless)
    with_it = judged(LenientSampling(1.0), build("none", 3, [A1, A1]))
    assert [verdict for verdict, _, _ in with_it] == [verdict for verdict, _, _ in lossless]
    assert all(each.total_variation < EXACT for verdict, _, _ in with_it for each in verdict.divergence or ())


def test_two_draws_that_name_one_child_count_once() -> None:
    """As in a merged tree: the second is of no use, for the first took the token out of p."""
    tree = TokenTree.chain([1])
    twice = Proposal(tree, ((Draw(0, -1, FIXED), Draw(0, -1, FIXED)), ()))
    p = torch.tensor([[0.7, 0.1, 0.2]] * 2, dtype=torch.float64)
    rule = LenientSampling(0.5)
    for proposal in (twice, Proposal.deterministic(tree)):
        measured = rule.verify([proposal], [p], [KeyedNoise(1, 0, 0)])[0].divergence
        assert measured is not None and measured[0].total_variation == pytest.approx(0.1, abs=EXACT)


def test_a_verdict_is_cut_with_its_divergence() -> None:
    verdict, _, _ = next(each for each in judged(LenientSampling(0.5), build("cut", 3, [A1, A1])) if each[0].path)
    assert verdict.divergence is not None
    cut = verdict.cut(1)
    assert (cut.path, cut.tokens, cut.divergence) == (verdict.path[:1], verdict.tokens[:1], verdict.divergence[:1])
    assert verdict.cut(0).tokens == () and verdict.cut(0).divergence == ()
