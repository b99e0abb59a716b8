"""ReDrafter through the whole engine: the target's distribution exactly, the same tokens for a seed, batches, and
ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from support.answers import assert_ends_inside_blocks
from support.candidate_schemes import candidates_scheme, proposal_after
from support.fixed_noise import answers_of
from support.head_models import SHARPENED, MarkovWithEmbedding, fitted_redrafter, random_redrafter
from truedraft import Engine, SamplingParams
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.proposal import Proposal
from truedraft.drafters import Redrafter
from truedraft.heads import HeadRecord
from truedraft.heads.redrafter import RedrafterHead
from truedraft.testing import ScriptedController
from truedraft.verification import SpeculativeSampling
from truedraft.verification.exact import Prefix, distance, emitted_dist, target_dist

PROMPTS = [[3, 1, 4], [1] * 9, [2], [5, 6]]
CALIBRATED = {"survival": {"greedy": SHARPENED, "sampled": SHARPENED}}


@pytest.fixture(scope="module")
def target() -> MarkovWithEmbedding:
    return MarkovWithEmbedding.random(8, seed=1, sharpness=2.5, context_length=160)


@cache
def head_of(target: MarkovWithEmbedding) -> RedrafterHead:
    """Right about the greedy answers to half of the prompts; elsewhere only now and then."""
    answers = Engine(target).generate(PROMPTS[:2], SamplingParams(max_tokens=60))
    return fitted_redrafter(target, [[*p, *a.token_ids] for p, a in zip(PROMPTS, answers, strict=False)])


def drafter_of(
    target: MarkovWithEmbedding, beams: int = 4, length: int = 3, nodes: int = 9, **options: bool
) -> Redrafter:
    return Redrafter(head_of(target), beams=beams, length=length, nodes=nodes, **options)


# --- the distribution ---


def test_calibration_chooses_beams_and_leaves_drawn_ones_alone() -> None:
    """What is drawn may not depend on how likely it looks; the drawn beams' own distribution is held in
    test_sampled_beams."""
    world, head = small()
    for sampled in (False, True):
        trees = []
        for facts in ({}, CALIBRATED):
            drafter = Redrafter(head.with_record(HeadRecord(facts=facts)), beams=3, length=3, nodes=4, sampled=sampled)
            drafter.check(world)
            made = [proposal_after(drafter, world, (first, last)) for first in range(4) for last in range(4)]
            trees.append([(each.tree.host_ids, each.tree.shape.parents) for each in made])
        assert (trees[0] == trees[1]) is sampled


@cache
def small() -> tuple[MarkovWithEmbedding, RedrafterHead]:
    world = MarkovWithEmbedding.random(4, seed=3, sharpness=1.0)
    return world, random_redrafter(world, length=2, layers=1, spread=3.0)


@pytest.mark.parametrize("facts", [{}, CALIBRATED], ids=["raw", "calibrated"])
@pytest.mark.parametrize(("beams", "length", "nodes"), [(1, 2, 9), (3, 1, 9), (3, 2, 9), (4, 3, 5), (2, 3, 64)])
def test_beams_emit_the_targets_distribution_exactly(
    beams: int, length: int, nodes: int, facts: dict[str, dict[str, list[list[float]]]]
) -> None:
    world, head = small()
    drafter = Redrafter(head.with_record(HeadRecord(facts=facts)), beams=beams, length=length, nodes=nodes)

    def dist(prefix: Prefix) -> Tensor:
        return world.probs_after((0, *prefix))

    emitted = emitted_dist(SpeculativeSampling(), dist, candidates_scheme(world, drafter), 4)
    assert distance(emitted, target_dist(dist, 4)) < 1e-12


DistOf = Callable[[Sequence[int]], Tensor]
Ends = Iterator[tuple[float, tuple[int, ...]]]
"""Ways in which a step may end: for each its probability and the tokens that it emits."""


def as_published(proposal: Proposal, p: DistOf, q: DistOf) -> Ends:
    """Each beam by itself: a token stays with probability min(1, p/q), as if it had been drawn; the longest wins."""
    paths = [proposal.tree.path_tokens(leaf) for leaf in proposal.tree.shape.leaves]
    kept: list[list[float]] = []
    for path in paths:
        stays = [min(1.0, float(p(path[:i])[t] / q(path[:i])[t])) for i, t in enumerate(path)]
        reach = [1.0, *itertools.accumulate(stays, lambda a, b: a * b)]
        kept.append([reach[i] * (1 - stays[i]) if i < len(path) else reach[i] for i in range(len(path) + 1)])
    for lengths in itertools.product(*(range(len(path) + 1) for path in paths)):
        chance = 1.0
        for beam, length in enumerate(lengths):
            chance *= kept[beam][length]
        best = max(range(len(paths)), key=lambda beam: lengths[beam])
        stayed = paths[best][: lengths[best]]
        final = p(stayed) if lengths[best] == len(paths[best]) else (p(stayed) - q(stayed)).clamp(min=0)
        for token, mass in enumerate((final / final.sum()).tolist()):
            yield chance * mass, (*stayed, token)


def by_the_rule(proposal: Proposal, p: DistOf, q: DistOf) -> Ends:
    """Draw from the target, follow the child that carries the token."""

    def walk(row: int, path: tuple[int, ...], reach: float) -> Ends:
        carried = {proposal.tree.host_ids[node]: node for node in proposal.tree.shape.children[row]}
        for token, mass in enumerate(p(path).tolist()):
            if token in carried:
                yield from walk(carried[token] + 1, (*path, token), reach * mass)
            else:
                yield reach * mass, (*path, token)

    return walk(0, (), 1.0)


def apart(judge: Callable[[Proposal, DistOf, DistOf], Ends]) -> float:
    """Total variation between the distribution of the next two tokens after one step (and plain decoding) and the
    target's."""
    world, head = small()
    drafter = Redrafter(head, beams=3, length=2, nodes=9)
    drafter.check(world)
    before = (1, 2)
    proposal = proposal_after(drafter, world, before)

    def p(path: Sequence[int]) -> Tensor:
        return world.probs_after((0, *before, *path))

    def q(path: Sequence[int]) -> Tensor:
        state, vector = head.new_state(1), world.vector_after((0, *before)[:-1])[None]
        for token in (before[-1], *path):
            state = head.advance(state, world.embed(torch.tensor([token])))
        return world.unembed(head.leaving(vector, state))[0].softmax(dim=-1)

    found = torch.zeros(4, 4, dtype=torch.float64)
    for chance, tokens in judge(proposal, p, q):
        if len(tokens) == 1:
            found[tokens[0]] += chance * p(tokens)
        else:
            found[tokens[0], tokens[1]] += chance
    expected = torch.stack([p(())[token] * p((token,)) for token in range(4)])
    assert float(found.sum()) == pytest.approx(1.0)
    return float((found - expected).abs().sum() / 2)


def test_accepting_beams_as_if_they_had_been_drawn_bends_the_distribution() -> None:
    assert apart(by_the_rule) < 1e-12
    assert apart(as_published) > 0.02


# --- tokens ---


@pytest.mark.parametrize(("beams", "length", "nodes"), [(1, 3, 9), (4, 3, 9), (8, 2, 5), (8, 3, 64), (4, 5, 12)])
def test_greedy_answers_are_those_of_plain_decoding(
    target: MarkovWithEmbedding, beams: int, length: int, nodes: int
) -> None:
    params = SamplingParams(max_tokens=60)
    engine = Engine(target, drafter_of(target, beams, length, nodes), controller="fixed")
    made = engine.generate(PROMPTS, params)
    assert [a.token_ids for a in made] == [a.token_ids for a in Engine(target).generate(PROMPTS, params)]
    alone = [engine.generate(prompt, params) for prompt in PROMPTS]
    assert [a.stats.accepted_per_position for a in alone] == [a.stats.accepted_per_position for a in made]
    assert not any(answer.warnings for answer in made)
    accepted, drafted = (sum(getattr(a.stats, name) for a in made) for name in ("accepted_tokens", "draft_tokens"))
    assert 0 < accepted < drafted
    assert all(a.stats.draft_tokens <= a.stats.listed_tokens for a in made)
    assert beams == 1 or any(a.stats.draft_tokens < a.stats.listed_tokens for a in made)


@pytest.mark.parametrize("sampled", [False, True], ids=["beams", "drawn"])
@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"top_p": 0.8, "top_k": 5}], ids=["plain", "seeded", "cut"])
def test_a_request_answers_alike_alone_in_a_batch_and_streamed(
    target: MarkovWithEmbedding, options: dict[str, float], sampled: bool
) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.9, **options)  # type: ignore[arg-type]
    engine = Engine(target, drafter_of(target, sampled=sampled), controller="fixed")
    alone = [answers_of(engine, [prompt], params)[0] for prompt in PROMPTS]
    together = answers_of(engine, PROMPTS, params)
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert [a.stats.accepted_per_position for a in together] == [a.stats.accepted_per_position for a in alone]
    assert not any(a.warnings for a in together)
    assert sum(a.stats.accepted_tokens for a in together) > 0
    if "seed" in options:
        streamed = [token for piece in engine.stream(PROMPTS[0], params) for token in piece.token_ids]
        assert streamed == alone[0].token_ids
        assert [a.token_ids for a in Engine(target).generate(PROMPTS, params)] == [a.token_ids for a in alone]


def test_drawn_paths_and_chosen_beams_share_a_batch(target: MarkovWithEmbedding) -> None:
    """Greedy, sampled and seeded requests, with budgets that change from step to step."""
    budgets = [Budget(3, 4), NO_DRAFT, Budget(1, 2), Budget(3, 1), Budget(2, 4, 3)]
    params = [
        SamplingParams(max_tokens=count, temperature=t, seed=seed)
        for count, t, seed in ((40, 0.0, None), (7, 1.0, None), (25, 0.7, 1), (1, 0.0, None))
    ]
    drafter = drafter_of(target, sampled=True)
    answers = Engine(target, drafter, controller=ScriptedController(budgets)).generate(PROMPTS, params)
    assert not any(answer.warnings for answer in answers)
    assert [len(answer.token_ids) for answer in answers] == [40, 7, 25, 1]
    plain = Engine(target).generate(PROMPTS, params)
    assert [a.token_ids for a in answers][0::2] == [a.token_ids for a in plain][0::2]
    assert not drafter.holding, "every request gave its vector back"


def test_answers_end_inside_an_accepted_block(target: MarkovWithEmbedding) -> None:
    assert_ends_inside_blocks(Engine(target), Engine(target, drafter_of(target), controller="fixed"), PROMPTS[0])
