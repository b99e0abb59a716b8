"""What planted faults emit: the closed forms, against the faulty code itself, run over a grid of its noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.coupled_choice import coupled_choice
from truedraft.certify import faults
from truedraft.certify.checks import Stack
from truedraft.certify.faults import Fault, probs_under_shared_noise
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.core.probs import total_variation
from truedraft.core.proposal import Proposal
from truedraft.core.tree import TokenTree
from truedraft.drafters import Drafter, NoDrafter
from truedraft.drafters.base import DraftRequest
from truedraft.testing import MarkovModel, altered
from truedraft.verification import BlockVerification, CoupledSampling, Rule, SpeculativeSampling

P = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.1, 0.25, 0.45]], dtype=torch.float64)
ONE_HOT = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
SIDE = 120
"""Of the grid over (accept, recovered): a cell's edge can be off by 1 / SIDE in each of a few places."""


class GridNoise:
    """One point of the grid."""

    def __init__(self, accept: float, final: float) -> None:
        self._numbers = {Purpose.ACCEPT: accept, Purpose.RECOVERED: final, Purpose.BONUS: final}

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return self._numbers[purpose]

    def gumbel(self, depth: int, vocab: int, device: torch.device) -> None:
        return None


def emitted(rule: Rule, p: Tensor, q: Tensor, deterministic: bool = False) -> Tensor:
    """The distribution of a step's first token by the rule's own code, for one draft from q."""
    dist = torch.zeros_like(p)
    ticks = [(i + 0.5) / SIDE for i in range(SIDE)]
    # The rows of the grid that matter: every accept number, and of the final ones as many.
    points = [(a, b) for a, b in itertools.product(ticks, ticks[::6])]
    for token in range(p.shape[-1]):
        chance = float(q[0, token])
        if not chance:
            continue
        tree = TokenTree.chain([token])
        proposal = Proposal.deterministic(tree) if deterministic else Proposal.chain(torch.tensor([token]), q)
        probs = [p.expand(2, -1)] * len(points)
        verdicts = rule.verify([proposal] * len(points), probs, [GridNoise(a, b) for a, b in points])
        for verdict in verdicts:
            dist[0, verdict.tokens[0]] += chance / len(points)
    return dist


RULES = {rule.name: rule for rule in (SpeculativeSampling(), BlockVerification())}
OF_RULES = [faults.KEEPS_ALL, faults.RESIDUAL_IS_P, faults.draft_judged_at(2.0), faults.ONE_NUMBER]


def broken(fault: Fault, rule: Rule) -> Rule:
    return fault.planted(Stack(MarkovModel.random(4, seed=0), NoDrafter(), rule)).rule


@pytest.mark.parametrize("name", RULES)
def test_a_rule_itself_emits_what_it_should(name: str) -> None:
    assert float(total_variation(P, emitted(RULES[name], P, Q))) < 0.02


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("fault", OF_RULES, ids=lambda fault: fault.name)
def test_a_fault_of_a_rule_emits_what_its_formula_says(name: str, fault: Fault) -> None:
    predicted = fault.emitted(P, Q)
    assert float(predicted.sum()) == pytest.approx(1.0, abs=1e-9)
    assert float(total_variation(predicted, P)) > 0.03
    assert float(total_variation(predicted, emitted(broken(fault, RULES[name]), P, Q))) < 0.02


@pytest.mark.parametrize("fault", [each for each in OF_RULES if not each.needs_draw], ids=lambda fault: fault.name)
def test_the_same_for_deterministic_candidates(fault: Fault) -> None:
    predicted = fault.emitted(P, ONE_HOT)
    assert float(total_variation(predicted, P)) > 0.03
    assert float(total_variation(predicted, emitted(broken(fault, SpeculativeSampling()), P, ONE_HOT, True))) < 0.02


def test_one_key_by_hand() -> None:
    """p uniform over 2, draft sure of token 0: kept below 1/2; above, u in [1/2, 1) draws from (0, 1): token 1."""
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    assert faults.ONE_NUMBER.emitted(p, q).tolist() == [[0.5, 0.5]]
    # Three tokens: after a rejection u >= 0.2 draws from (0, 1/2, 1/2), so token 1 gets [0.2, 0.5) and 2 [0.5, 1).
    p, q = torch.tensor([[0.2, 0.4, 0.4]]), torch.tensor([[1.0, 0.0, 0.0]])
    assert faults.ONE_NUMBER.emitted(p, q)[0].tolist() == pytest.approx([0.2, 0.3, 0.5])


@pytest.mark.parametrize(
    ("fault", "plant", "shows"),
    [
        (
            faults.dropped_below(0.3),
            lambda drafter: faults.hides_unlikely_draws(drafter, 0.3),
            lambda x: Q[0, x] >= 0.3,
        ),
        (faults.LOST_BY_FAILURES, faults.loses_what_it_drew, lambda x: x % 2 == 0),
    ],
    ids=["unlikely", "failing"],
)
def test_hiding_draws_by_its_own_code(
    fault: Fault, plant: Callable[[Drafter], Drafter], shows: Callable[[int], bool]
) -> None:
    """Some drafts are dropped, the others judged rightly."""
    predicted = fault.emitted(P, Q)
    dist = torch.zeros_like(P)
    rule, ticks = SpeculativeSampling(), [(i + 0.5) / 60 for i in range(60)]
    for token in range(4):
        made = [Proposal.chain(torch.tensor([token]), Q)]

        fixed = altered(NoDrafter(), propose=lambda batch, budgets, noise, made=made: made)
        (shown,) = plant(fixed).propose([DraftRequest(0, None, [1])], [], [])  # type: ignore[arg-type]
        assert len(shown.tree) == int(shows(token))
        for a, b in itertools.product(ticks, ticks):
            probs = P.expand(len(shown.tree) + 1, -1)
            (verdict,) = rule.verify([shown], [probs], [GridNoise(a, b)])
            dist[0, verdict.tokens[0]] += float(Q[0, token]) / len(ticks) ** 2
    assert float(total_variation(predicted, dist)) < 0.02
    assert float(total_variation(predicted, P)) > 0.05


def test_a_coupled_rule_that_accepts_always_keeps_drafts_and_chooses_behind_them() -> None:
    noise = KeyedNoise(3, position=11, step=0)
    probs = P.expand(2, -1)
    proposal = Proposal.deterministic(TokenTree.chain([3]))
    (verdict,) = faults.coupled_accepts_always().verify([proposal], [probs], [noise])
    assert verdict.tokens[0] == 3
    assert verdict.tokens[1] == int(coupled_choice(probs[:1], noise.gumbel(1, 4, torch.device("cpu"))))


def test_shared_noise_is_shared_and_gives_the_distribution_of_the_formula() -> None:
    """Two tokens by one noise, over 20,000 seeds: the second follows the formula, each count within 4 sigmas."""
    p, after = P, torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    rule, counts = faults.coupled_one_key(), torch.zeros(4, 4)
    seeds = 20_000
    for start in range(0, seeds, 2000):
        noise = [KeyedNoise(seed, position=5, step=0) for seed in range(start, start + 2000)]
        chosen = [v.tokens[0] for v in CoupledSampling().verify([Proposal.empty()] * 2000, [p] * 2000, noise)]
        drafted = [Proposal.deterministic(TokenTree.chain([token])) for token in chosen]
        for token, verdict in zip(chosen, rule.verify(drafted, [torch.cat([p, after])] * 2000, noise), strict=True):
            counts[token, verdict.tokens[1]] += 1
    for token in range(4):
        dist, first = probs_under_shared_noise(p[0], token, after[0]), float(counts[token].sum())
        assert float(dist.sum()) == pytest.approx(1.0, abs=1e-12)
        assert float(total_variation(dist, after[0])) > 0.1
        for other in range(4):
            share = float(dist[other])
            sigma = (share * (1 - share) / first) ** 0.5
            assert float(counts[token, other]) / first == pytest.approx(share, abs=4 * sigma + 1e-9)


def test_shared_noise_by_hand() -> None:
    half = torch.tensor([0.5, 0.5])
    assert probs_under_shared_noise(half, 0, torch.tensor([0.25, 0.75])).tolist() == pytest.approx([0.5, 0.5])
    assert probs_under_shared_noise(half, 0, half).tolist() == [1.0, 0.0]
    # A token that can come no more, one that could not come before, and one sure before and after.
    assert probs_under_shared_noise(torch.tensor([1.0, 0.0]), 0, torch.tensor([0.0, 1.0])).tolist() == [0.0, 1.0]
    three = probs_under_shared_noise(torch.tensor([0.5, 0.5, 0.0]), 0, torch.tensor([0.0, 0.5, 0.5]))
    # Token 2 starts at once, token 1 at 1: with S = t/2 until 1, then t - 1/2: 1/3 for 2 alone, then halves of 2/3.
    assert three.tolist() == pytest.approx([0.0, 1 / 3, 2 / 3])
