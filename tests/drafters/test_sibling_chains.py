"""Several chains of one draft: drawn one by one, merged where they agree, exact, and within every budget."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from support.certified import TOKENS, assert_certified
from support.chi_square import p_value
from truedraft import SamplingParams
from truedraft.certify.checks import Stack
from truedraft.certify.statistics import Statistics
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters import DraftModel, DraftRequest, from_spec
from truedraft.errors import OptionError
from truedraft.models import loading
from truedraft.testing import MarkovModel
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling
from truedraft.verification.exact import distance, target_dist
from truedraft.verification.rule import DrawnToken, JudgedRow

EXACT = 1e-12
VOCAB = 3
TARGET = MarkovModel.random(VOCAB, seed=4, sharpness=1.5, context_length=200)
DRAFT = MarkovModel.random(VOCAB, seed=5, sharpness=1.5, context_length=200)
WARM = SamplingParams(max_tokens=24, temperature=1.0)
TEXT = [1, 0]


def propose(
    drafter: DraftModel, params: SamplingParams = WARM, seed: int = 0, budget: Budget | None = None
) -> Proposal:
    request = DraftRequest(0, params, list(TEXT))
    drafter.begin(request)
    noise = KeyedNoise(seed, len(TEXT), 0)
    proposal = drafter.propose([request], [budget or drafter.limits], [noise])[0]
    drafter.end(request)
    proposal.check()
    return proposal


def chains_of(proposal: Proposal, row: int = 0) -> list[tuple[int, ...]]:
    """The chains that a tree was merged of: every draw at a node goes on with one draw at its child."""
    found: list[tuple[int, ...]] = []
    children = [draw.child for draw in proposal.draws[row]]
    for child in dict.fromkeys(children):
        below = chains_of(proposal, child + 1) or [()] * children.count(child)
        assert len(below) == children.count(child)
        found += [(proposal.tree.host_ids[child], *rest) for rest in below]
    return found


@pytest.mark.parametrize(("chains", "length"), [(1, 2), (2, 3), (3, 2), (5, 3)])
def test_every_node_has_as_many_draws_as_chains_pass_it(chains: int, length: int) -> None:
    drafter = DraftModel(DRAFT, length, chains=chains)
    merged = 0
    for seed in range(40):
        proposal = propose(drafter, seed=seed)
        found = chains_of(proposal)
        assert len(found) == chains and {len(each) for each in found} == {length}
        assert len(proposal.tree) == len({each[:n] for each in found for n in range(1, length + 1)})
        assert proposal.kinds == drafter.kinds == {DrawKind.INDEPENDENT}
        assert proposal.probs is not None
        for row, draws in enumerate(proposal.draws):
            path = proposal.tree.path_tokens(row - 1) if row else ()
            for draw in draws:
                assert torch.allclose(proposal.probs[draw.dist].double(), DRAFT.probs_after([*TEXT, *path]).double())
        merged += len(proposal.tree) < chains * length
    assert (merged > 0) == (chains > 1)


def test_chains_are_drawn_independently_of_each_other() -> None:
    """The first two tokens of both of two chains, 20,000 proposals; a right drafter fails once in a million runs."""
    drafter = DraftModel(DRAFT, 2, chains=2)
    counts: Counter[tuple[int, ...]] = Counter()
    requests = [DraftRequest(i, WARM, list(TEXT)) for i in range(50)]
    for request in requests:
        drafter.begin(request)
    for start in range(0, 20_000, 50):
        noise = [KeyedNoise(start + i, len(TEXT), 0) for i in range(50)]
        for proposal in drafter.propose(requests, [drafter.limits] * 50, noise):
            counts[tuple(itertools.chain.from_iterable(sorted(chains_of(proposal))))] += 1
    law: Counter[tuple[int, ...]] = Counter()
    for both in itertools.product(itertools.product(range(VOCAB), repeat=2), repeat=2):
        mass = 1.0
        for first, second in both:
            mass *= float(DRAFT.probs_after(TEXT)[first] * DRAFT.probs_after([*TEXT, first])[second])
        law[tuple(itertools.chain.from_iterable(sorted(both)))] += mass  # type: ignore[assignment]
    keys = sorted(law)
    assert p_value(np.array([counts[key] for key in keys]), np.array([law[key] for key in keys])) > 1e-6
    assert sum(counts.values()) == 20_000


# ------------------------------------------------------------------------------- the distribution of answers


def after(model: MarkovModel, prefix: Sequence[int]) -> Tensor:
    p = model.probs_after([*TEXT, *prefix]).double()
    return p / p.sum()


def drawn_groups(
    rule: Rule, prefix: tuple[int, ...], chains: int, length: int
) -> Iterator[tuple[float, list[JudgedRow]]]:
    """Every group that may be drawn below a prefix that so many chains pass, with its probability."""
    p, q = after(TARGET, prefix), after(DRAFT, prefix)
    for tokens in itertools.product(range(VOCAB), repeat=chains):
        mass = float(q[list(tokens)].prod())
        row = JudgedRow(p, tuple(DrawnToken(token, 0, q, DrawKind.INDEPENDENT) for token in tokens))
        if rule.joins(row.draws) and length > 1:
            for below, rows in drawn_groups(rule, (*prefix, *tokens), 1, length - 1):
                yield mass * below, [row, *rows]
        else:
            yield mass, [row]


def emitted_by(rule: Rule, chains: int, length: int, tokens: int) -> tuple[dict[tuple[int, ...], float], float]:
    """The exact distribution of the first tokens of an answer, and how many drafted ones the first step accepts."""
    dist: dict[tuple[int, ...], float] = {}
    accepted = 0.0

    def go(prefix: tuple[int, ...], drafted: int, passing: int, mass: float, first: bool) -> None:
        nonlocal accepted
        if len(prefix) >= tokens:
            dist[prefix[:tokens]] = dist.get(prefix[:tokens], 0.0) + mass
            if not first:
                return
        if drafted == length:  # a bonus token
            if len(prefix) < tokens:
                for token, each in enumerate(after(TARGET, prefix)):
                    go((*prefix, token), 0, chains, mass * float(each), False)
            return
        for weight, rows in drawn_groups(rule, prefix, passing, length - drafted):
            for outcome in rule.outcomes(rows):
                share = mass * weight * outcome.probability
                if share == 0.0:
                    continue
                accepted += share * outcome.accepted * first
                whole = (*prefix, *outcome.tokens)
                if outcome.continues:
                    below = sum(draw.token == whole[-1] for draw in rows[-1].draws)
                    go(whole, drafted + len(rows), below, share, first)
                elif len(prefix) < tokens:
                    go(whole, 0, chains, share, False)

    go((), 0, chains, 1.0, True)
    return dist, accepted


@pytest.mark.parametrize("rule", [SpeculativeSampling(), BlockVerification()], ids=lambda rule: rule.name)
@pytest.mark.parametrize(("chains", "length"), [(1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)])
def test_answers_follow_the_target(rule: Rule, chains: int, length: int) -> None:
    """By exact recursion: every chain that may be drawn, repeats included, and every verdict on it."""
    tokens = min(length, 2) + 1
    dist, _ = emitted_by(rule, chains, length, tokens)
    assert sum(dist.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance(dist, target_dist(partial(after, TARGET), tokens)) < EXACT


def test_more_chains_are_accepted_further() -> None:
    accepted = [emitted_by(SpeculativeSampling(), chains, 2, 1)[1] for chains in (1, 2, 3)]
    assert accepted[0] + 0.05 < accepted[1] < accepted[2] - 0.02


def test_the_recursion_notices_a_wrong_rule() -> None:
    class FromTarget(SpeculativeSampling):
        def rejected(self, p: Tensor, q: Tensor) -> Tensor:
            return p

    dist, _ = emitted_by(FromTarget(), 2, 1, 1)
    assert distance(dist, target_dist(partial(after, TARGET), 1)) > 0.01


# ------------------------------------------------------------------------------- budgets, and other requests


@pytest.mark.parametrize(
    "budget",
    [Budget(2), Budget(3, 2), Budget(3, 3, 7), Budget(3, 3, 2), Budget(3, 3, 1), Budget(3, 3, 9, 0.4), Budget(3, 0)],
)
def test_every_budget_is_kept(budget: Budget) -> None:
    drafter = DraftModel(DRAFT, 3, chains=3)
    for seed in range(20):
        proposal = propose(drafter, seed=seed, budget=budget)
        assert len(proposal.tree) <= min(budget.nodes, 9)
        assert max(proposal.tree.shape.depths, default=0) <= budget.depth
        assert max(map(len, proposal.draws)) <= budget.width


def test_below_an_unlikely_token_no_chain_goes_on() -> None:
    drafter = DraftModel(DRAFT, 3, chains=3, min_probability=0.3)
    unsure = 0
    for seed in range(30):
        proposal = propose(drafter, seed=seed)
        for row, draws in enumerate(proposal.draws):
            if row and not draws and proposal.tree.shape.depths[row - 1] < 3:
                parent = proposal.tree.shape.parents[row - 1]
                path = proposal.tree.path_tokens(parent) if parent >= 0 else ()
                token = proposal.tree.host_ids[row - 1]
                assert float(DRAFT.probs_after([*TEXT, *path])[token]) < 0.3
                unsure += 1
    assert unsure > 0


def test_greedy_requests_get_the_likeliest_first_tokens() -> None:
    proposal = propose(DraftModel(DRAFT, 3, chains=2), SamplingParams(max_tokens=8))
    assert proposal.kinds == {DrawKind.DETERMINISTIC} and len(proposal.tree) == 6
    first = [proposal.tree.host_ids[node] for node in proposal.tree.shape.children[0]]
    assert first == DRAFT.probs_after(TEXT).topk(2).indices.tolist()
    same = propose(DraftModel(DRAFT, branching=(2, 1, 1)), SamplingParams(max_tokens=8))
    assert same.tree.host_ids == proposal.tree.host_ids and same.draws == proposal.draws


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"chains": 3}, SpeculativeSampling()),
        ({"chains": 3}, BlockVerification()),
        pytest.param({"branching": (3, 1, 1)}, SpeculativeSampling(), marks=pytest.mark.slow),
    ],
    ids=["chains", "chains as blocks", "without replacement"],
)
def test_answers_are_certified(monkeypatch: pytest.MonkeyPatch, options: dict, rule: Rule) -> None:
    stack = Stack(TARGET, DraftModel(DRAFT, 3, **options), rule)
    checks = (*TOKENS, (WARM, Statistics())) if rule.name == "speculative" else ((WARM, Statistics()),)
    assert_certified(monkeypatch, stack, [[1, 2, 2], [0], [1, 1, 0, 2, 1], [2, 1]], checks)


def test_words_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: DRAFT)
    made = from_spec("draft,chains=3,num_speculative_tokens=2", TARGET)
    assert isinstance(made, DraftModel)
    assert (made.chains, made.branching, made.limits) == (3, (3, 1), Budget(2, 3, 6))
    with pytest.raises(OptionError, match="chains must be 1 or more"):
        from_spec("draft,chains=0", TARGET)
    with pytest.raises(OptionError, match="branching or chains, not both"):
        from_spec("draft,branching=2-1,chains=2", TARGET)
    with pytest.raises(OptionError, match="more than 1024 nodes"):
        DraftModel(DRAFT, 32, chains=64)
