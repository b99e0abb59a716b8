"""Medusa and ReDrafter through the whole engine: the target's distribution exactly, the same tokens for a seed, and
requests that come and go. That batches and ends change nothing is for `test_mixed_batch`.

The exact distribution is summed over the rule's own kernel for the very trees that the drafter proposes; a lossy rule
is shown to fail it. What an engine emits with heads is counted by `test_reasoning` and by the table of options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from support.answers import fixed
from support.head_models import (
    SHARPENED,
    MarkovWithEmbedding,
    MarkovWithHead,
    fitted_heads,
    fitted_redrafter,
    random_heads,
    random_redrafter,
)
from truedraft import Engine, SamplingParams
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.drafters import Drafter, Medusa, Redrafter
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.drafters.heads.calibration import Calibration
from truedraft.drafters.heads.head import HeadRecord
from truedraft.kinds.medusa.folders import published_tree
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.testing import ScriptedController
from truedraft.verification import Rule, SpeculativeSampling, TypicalAcceptance
from truedraft.verification.exact import PlannedDraw, Prefix, distance, emitted_dist, target_dist

TREES = {
    "chain": RankTree(((0,), (0, 0), (0, 0, 0))),
    "star": RankTree(((0,), (1,), (2,))),
    "mixed": RankTree(((0,), (0, 0), (1,), (0, 1), (1, 0), (0, 0, 0))),
    "published": published_tree().within(3, 4),
}
PROMPTS = [[3, 1, 4], [1] * 9, [2], [5, 6]]
PARAMS = [SamplingParams(count, temperature) for count, temperature in ((40, 0.0), (7, 1.0), (25, 0.7), (1, 0.0))]
CALIBRATED = {"survival": {"greedy": SHARPENED, "sampled": SHARPENED}}


@pytest.fixture(scope="module")
def target() -> MarkovWithEmbedding:
    return MarkovWithEmbedding.random(8, seed=1, sharpness=2.5, context_length=160)


@cache
def known_texts(target: MarkovWithEmbedding) -> list[list[int]]:
    """The greedy answers to half of the prompts; elsewhere heads that are fitted to them are right now and then."""
    answers = Engine(target).generate(PROMPTS[:2], SamplingParams(max_tokens=60))
    return [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, answers, strict=False)]


@cache
def heads_of(target: MarkovWithEmbedding) -> MedusaHeads:
    return fitted_heads(target, known_texts(target))


@cache
def head_of(target: MarkovWithEmbedding) -> RedrafterHead:
    return fitted_redrafter(target, known_texts(target))


def medusa(target: MarkovWithEmbedding, tree: str = "mixed") -> Medusa:
    return Medusa(heads_of(target), {"greedy": TREES[tree]}, nodes=64)


def redrafter(
    target: MarkovWithEmbedding, beams: int = 4, length: int = 3, nodes: int = 9, **options: bool
) -> Redrafter:
    return Redrafter(head_of(target), beams=beams, length=length, nodes=nodes, **options)


GUESSING: dict[str, Callable[[MarkovWithEmbedding], Drafter]] = {
    **{f"medusa {tree}": lambda target, tree=tree: medusa(target, tree) for tree in TREES},
    "redrafter 1-3-9": lambda target: redrafter(target, 1, 3, 9),
    "redrafter 4-3-9": lambda target: redrafter(target, 4, 3, 9),
    "redrafter 8-2-5": lambda target: redrafter(target, 8, 2, 5),
    "redrafter 8-3-64": lambda target: redrafter(target, 8, 3, 64),
    "redrafter 4-5-12": lambda target: redrafter(target, 4, 5, 12),
}


# --- the distribution ---


def proposal_after(drafter: Drafter, world: MarkovWithHead, before: Sequence[int]) -> Proposal:
    """What is proposed when the last of some tokens was just drawn, for a sampled request."""
    request = DraftRequest(0, SamplingParams(temperature=1.0), [0, *before])
    drafter.begin(request)
    vector = world.vector_after([0, *before][:-1])[None]
    drafter.observe([request], [StepOutcome(Proposal.empty(), (), (0,), vector)])
    return drafter.propose([request], [drafter.limits], [KeyedNoise(0, 0, 0)])[0]


def candidates_scheme(world: MarkovWithHead, drafter: Drafter) -> Callable[[Prefix, Prefix], Sequence[PlannedDraw]]:
    """The children that the drafter itself proposes at a node, as planned draws of one-hot distributions."""
    drafter.check(world)

    @cache
    def proposed(before: Prefix) -> Proposal:
        return proposal_after(drafter, world, before)

    def scheme(prefix: Prefix, drafted: Prefix) -> list[PlannedDraw]:
        tree = proposed(prefix[: len(prefix) - len(drafted)]).tree
        row = 0
        for token in drafted:
            row = 1 + next(node for node in tree.shape.children[row] if tree.host_ids[node] == token)
        eye = torch.eye(world.vocab_size, dtype=torch.float64)
        children = tree.shape.children[row]
        return [PlannedDraw(-1, eye[tree.host_ids[node]], DrawKind.DETERMINISTIC) for node in children]

    return scheme


def off_by(rule: Rule, world: MarkovWithHead, drafter: Drafter) -> float:
    """The distance of what a rule emits for the drafter's trees from the target's distribution of four tokens."""

    def dist(prefix: Prefix) -> Tensor:
        return world.probs_after((0, *prefix))

    return distance(emitted_dist(rule, dist, candidates_scheme(world, drafter), 4), target_dist(dist, 4))


def medusa_off_by(rule: Rule, tree: str, vocab: int = 4) -> float:
    world = MarkovWithHead.random(vocab, seed=3, sharpness=1.0)
    heads = random_heads(world, heads=3, spread=0.5)
    if tree in ("likeliest", "calibrated"):
        calibration = Calibration.of({"sampled": SHARPENED} if tree == "calibrated" else {})
        drafter = Medusa(heads, GuessTrees(3, calibration=calibration), nodes=6)
    else:
        drafter = Medusa(heads, {"sampled": TREES[tree].within(3, vocab)}, nodes=64)
    return off_by(rule, world, drafter)


@pytest.mark.parametrize("tree", [*TREES, "likeliest", "calibrated"])
def test_the_lossless_rule_emits_the_targets_distribution_exactly(tree: str) -> None:
    assert medusa_off_by(SpeculativeSampling(), tree) < 1e-12


@pytest.mark.parametrize("tree", ["chain", "mixed", "likeliest", "calibrated"])
def test_typical_acceptance_does_not(tree: str) -> None:
    assert medusa_off_by(TypicalAcceptance(), tree) > 0.05


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
    assert off_by(SpeculativeSampling(), world, drafter) < 1e-12


# --- tokens ---


@pytest.mark.parametrize("name", GUESSING)
def test_greedy_answers_are_those_of_plain_decoding(target: MarkovWithEmbedding, name: str) -> None:
    params = SamplingParams(max_tokens=60)
    engine = fixed(target, GUESSING[name](target), entropy=0)
    plain = [answer.token_ids for answer in Engine(target).generate(PROMPTS, params)]
    made = engine.generate(PROMPTS, params)
    assert [answer.token_ids for answer in made] == plain
    alone = [engine.generate(prompt, params) for prompt in PROMPTS]
    assert [a.stats.accepted_per_position for a in alone] == [a.stats.accepted_per_position for a in made]
    assert not any(answer.warnings for answer in made)
    accepted, drafted = (sum(getattr(a.stats, name) for a in made) for name in ("accepted_tokens", "draft_tokens"))
    assert 0 < accepted < drafted
    if name.startswith("medusa"):
        assert [answer.stats for answer in alone] == [answer.stats for answer in made]
    else:
        assert all(a.stats.draft_tokens <= a.stats.listed_tokens for a in made)
        assert "1-3-9" in name or any(a.stats.draft_tokens < a.stats.listed_tokens for a in made)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_seeded_answers_are_plain_ones_and_are_guessed_more_often(
    target: MarkovWithEmbedding, temperature: float
) -> None:
    """Whatever trees and sizes draft; heads that hear the noise have more accepted than those kept from it.

    Seeds are fixed, so the counts are too.
    """
    params = [SamplingParams(max_tokens=30, temperature=temperature, seed=seed) for seed in range(8)]
    prompts = PROMPTS * 2
    plain = [answer.token_ids for answer in Engine(target).generate(prompts, params)]

    def accepted(drafter: Medusa) -> int:
        answers = fixed(target, drafter, max_batch=8, entropy=0).generate(prompts, params)
        assert [answer.token_ids for answer in answers] == plain
        assert not any(answer.warnings for answer in answers)
        return sum(answer.stats.accepted_tokens for answer in answers)

    heads = heads_of(target)
    for trees in (GuessTrees(3), TREES["mixed"]):
        given = trees if isinstance(trees, GuessTrees) else {"sampled": trees}
        assert accepted(Medusa(heads, given, nodes=6)) > accepted(Unhearing(heads, given, nodes=6))


class Unhearing(Medusa):
    """Kept from the noise of seeded requests."""

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        return super().propose(batch, budgets, [KeyedNoise(0, 0, 0)] * len(batch))


def test_drawn_paths_and_chosen_beams_share_a_batch(target: MarkovWithEmbedding) -> None:
    """Greedy, sampled and seeded requests, with budgets that change from step to step."""
    budgets = [Budget(3, 4), NO_DRAFT, Budget(1, 2), Budget(3, 1), Budget(2, 4, 3)]
    params = [*PARAMS[:2], replace(PARAMS[2], seed=1), PARAMS[3]]
    drafter = redrafter(target, sampled=True)
    answers = Engine(target, drafter, controller=ScriptedController(budgets)).generate(PROMPTS, params)
    assert not any(answer.warnings for answer in answers)
    assert [len(answer.token_ids) for answer in answers] == [40, 7, 25, 1]
    plain = Engine(target).generate(PROMPTS, params)
    assert [a.token_ids for a in answers][0::2] == [a.token_ids for a in plain][0::2]
    assert not drafter.held.requests, "every request gave its vector back"


# --- requests that come and go ---


class Watched(Medusa):
    """Notes the vector of every request when it is asked for a proposal, and after every step."""

    observes_lazily = False

    def __init__(self, target: MarkovWithEmbedding) -> None:
        super().__init__(heads_of(target), {"greedy": TREES["mixed"]})
        self.target = target
        self.seen = 0

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        super().observe(batch, outcomes)
        for request, outcome in zip(batch, outcomes, strict=True):
            if outcome.partial:
                continue  # a part of a prompt that is not its last: no token is drawn behind it
            vector = self._vectors.get(request.id)
            assert vector is not None and vector.equal(self.target.vector_after(request.tokens[:-1]))
            self.seen += 1


@pytest.mark.parametrize(
    "budgets",
    [
        [Budget(3, 3)],
        [NO_DRAFT],
        [Budget(3, 3), NO_DRAFT, NO_DRAFT, Budget(1, 2), NO_DRAFT, Budget(3, 3)],
        [NO_DRAFT] * 9 + [Budget(3, 3)],
    ],
    ids=["always", "never", "now and then", "late"],
)
def test_the_vector_is_always_that_of_the_last_drawn_token(target: MarkovWithEmbedding, budgets: list[Budget]) -> None:
    """Whatever was accepted, also after steps without a budget, and in a batch whose members end at different times."""
    drafter = Watched(target)
    engine = Engine(target, drafter, controller=ScriptedController(budgets), entropy=1)
    answers = engine.generate(PROMPTS, PARAMS)
    assert not any(answer.warnings for answer in answers)
    assert [len(answer.token_ids) for answer in answers] == [40, 7, 25, 1]
    assert drafter.seen == sum(answer.stats.target_calls + 1 for answer in answers)
    assert not drafter.held.requests, "every request gave its vector back"
    if budgets != [NO_DRAFT]:
        assert sum(answer.stats.accepted_tokens for answer in answers) > 0


def test_a_long_prompt_is_read_in_parts(target: MarkovWithEmbedding) -> None:
    long = MarkovWithEmbedding(target.probs, context_length=2048)
    drafter = Watched(long)
    engine = fixed(long, drafter, entropy=0)
    prompt = [i * i % 8 for i in range(1500)]
    answer = engine.generate(prompt, SamplingParams(max_tokens=20))
    assert answer.token_ids == Engine(long).generate(prompt, SamplingParams(max_tokens=20)).token_ids
    assert answer.stats.prefill_calls > 1
    assert answer.stats.accepted_tokens > 0
