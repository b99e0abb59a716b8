"""What planted faults emit: the closed forms, against the faulty code itself, run over a grid of its noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.coupled_choice import coupled_choice
from truedraft.certify import faults
from truedraft.certify.cells import ScriptedNoise
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


def grid_noise(accept: float, final: float) -> ScriptedNoise:
    """One point of the grid."""
    return ScriptedNoise({}, lambda key: accept if key[0] is Purpose.ACCEPT else final)


TICKS = [(i + 0.5) / SIDE for i in range(SIDE)]
POINTS = list(itertools.product(TICKS, TICKS[::6]))
"""The rows of the grid that matter: every accept number, and of the final ones as many."""


def over_grid(rule: Rule, proposal: Proposal, p: Tensor) -> Tensor:
    """The distribution of a step's first token by the rule's own code, for one proposal."""
    probs = [p.expand(len(proposal.tree) + 1, -1)] * len(POINTS)
    verdicts = rule.verify([proposal] * len(POINTS), probs, [grid_noise(*point) for point in POINTS])
    firsts = torch.tensor([verdict.tokens[0] for verdict in verdicts])
    return firsts.bincount(minlength=p.shape[-1])[None].double() / len(POINTS)


def emitted(rule: Rule, p: Tensor, q: Tensor) -> Tensor:
    """The same for one draft from q, or for a candidate where that is one-hot."""
    dist = torch.zeros_like(p)
    for token in q[0].nonzero().flatten().tolist():
        tree = TokenTree.chain([token])
        proposal = Proposal.deterministic(tree) if q is ONE_HOT else Proposal.chain(torch.tensor([token]), q)
        dist += q[0, token] * over_grid(rule, proposal, p)
    return dist


RULES = {rule.name: rule for rule in (SpeculativeSampling(), BlockVerification())}
OF_RULES = [faults.KEEPS_ALL, faults.RESIDUAL_IS_P, faults.draft_judged_at(2.0), faults.ONE_NUMBER]


def broken(fault: Fault, rule: Rule) -> Rule:
    return fault.planted(Stack(MarkovModel.random(4, seed=0), NoDrafter(), rule)).rule


@pytest.mark.parametrize("name", RULES)
def test_a_rule_itself_emits_what_it_should(name: str) -> None:
    assert float(total_variation(P, emitted(RULES[name], P, Q))) < 0.02


@pytest.mark.parametrize(
    ("fault", "name", "q"),
    [
        *((fault, name, Q) for fault in OF_RULES for name in RULES),
        *((fault, "speculative", ONE_HOT) for fault in OF_RULES if not fault.needs_draw),  # a candidate without a draw
    ],
)
def test_a_fault_of_a_rule_emits_what_its_formula_says(fault: Fault, name: str, q: Tensor) -> None:
    predicted = fault.emitted(P, q)
    assert float(predicted.sum()) == pytest.approx(1.0, abs=1e-9)
    assert float(total_variation(predicted, P)) > 0.03
    assert float(total_variation(predicted, emitted(broken(fault, RULES[name]), P, q))) < 0.02


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
    for token in range(4):
        made = [Proposal.chain(torch.tensor([token]), Q)]

        fixed = altered(NoDrafter(), propose=lambda batch, budgets, noise, made=made: made)
        (shown,) = plant(fixed).propose([DraftRequest(0, None, [1])], [], [])  # type: ignore[arg-type]
        assert len(shown.tree) == int(shows(token))
        dist += Q[0, token] * over_grid(SpeculativeSampling(), shown, P)
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


def test_shared_noise_of_draft_and_replacement_by_hand() -> None:
    """10/60/30 drafted from 50/25/25: 0 is rejected with 4/5, leaving 7 to 1 of 0.35 and 0.05.

    Given that 0 came first, 1 starts at 1/4 / (7/8) = 2/7 and 2 at 1/4 / (1/8) = 2: S is 3/2 when 2 starts, so 1 came
    by then with 3/5, and of the other 2/5 it gets 7/8: 19/20 in place of 7/8. The published 10.2/63.0/26.8 of a target
    of 10/60/30 is what such a draft gives.
    """
    p, q = torch.tensor([[0.1, 0.6, 0.3]]), torch.tensor([[0.5, 0.25, 0.25]])
    assert faults.ONE_GUMBEL.emitted(p, q)[0].tolist() == pytest.approx([0.1, 0.25 + 0.4 * 0.95, 0.25 + 0.4 * 0.05])


def test_sums_in_bfloat16_lose_small_cells() -> None:
    q = torch.cat([torch.tensor([0.5]), torch.full((500,), 0.001)])[None]
    drawn = faults.as_bfloat16_draws(q)
    assert float(drawn.sum()) == pytest.approx(1.0)
    assert int((drawn > 0).sum()) < 200
    assert float(total_variation(drawn, q.double())) > 0.2
    emitted = faults.IN_BFLOAT16.emitted(q.double(), q.double())  # the draft is right, so all that was drawn is kept
    assert float(total_variation(emitted, q.double())) > 0.1
