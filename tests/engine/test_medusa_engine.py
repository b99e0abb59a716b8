"""Medusa through the whole engine: the target's distribution exactly, the same tokens for a seed, and requests that
come and go.

The exact distribution is summed over the rule's own kernel for the very trees that the drafter proposes. The
distribution of what the engine emits is compared with it by a chi-square test at 1e-6, and a lossy rule is shown to
fail both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from support.answers import assert_ends_inside_blocks
from support.candidate_schemes import candidates_scheme
from support.fixed_noise import answers_of
from support.head_models import SHARPENED, MarkovWithHead, fitted_heads, random_heads
from truedraft import Engine, SamplingParams
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import KeyedNoise, Noise
from truedraft.core.proposal import Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.drafters import Medusa
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.drafters.heads.calibration import Calibration
from truedraft.drafters.heads.guess_trees import LikeliestTrees
from truedraft.heads import MedusaHeads
from truedraft.heads.published import published_tree
from truedraft.testing import ScriptedController
from truedraft.verification import Rule, SpeculativeSampling, TypicalAcceptance
from truedraft.verification.exact import Prefix, distance, emitted_dist, target_dist

TREES = {
    "chain": RankTree(((0,), (0, 0), (0, 0, 0))),
    "star": RankTree(((0,), (1,), (2,))),
    "mixed": RankTree(((0,), (0, 0), (1,), (0, 1), (1, 0), (0, 0, 0))),
    "published": published_tree().within(3, 4),
}
PROMPTS = [[3, 1, 4], [1] * 9, [2], [5, 6]]


@pytest.fixture(scope="module")
def target() -> MarkovWithHead:
    return MarkovWithHead.random(8, seed=1, sharpness=2.5, context_length=160)


@cache
def heads_of(target: MarkovWithHead) -> MedusaHeads:
    """Right about the greedy answers to half of the prompts; elsewhere only now and then."""
    answers = Engine(target).generate(PROMPTS[:2], SamplingParams(max_tokens=60))
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, answers, strict=False)]
    return fitted_heads(target, texts)


def drafter_of(target: MarkovWithHead, tree: str = "mixed", nodes: int = 64) -> Medusa:
    return Medusa(heads_of(target), {"greedy": TREES[tree]}, nodes=nodes)


# --- the distribution ---


def off_by(rule: Rule, tree: str, vocab: int = 4) -> float:
    world = MarkovWithHead.random(vocab, seed=3, sharpness=1.0)
    heads = random_heads(world, heads=3, spread=0.5)
    if tree in ("likeliest", "calibrated"):
        calibration = Calibration.of({"sampled": SHARPENED} if tree == "calibrated" else {})
        drafter = Medusa(heads, LikeliestTrees(3, calibration=calibration), nodes=6)
    else:
        drafter = Medusa(heads, {"sampled": TREES[tree].within(3, vocab)}, nodes=64)

    def dist(prefix: Prefix) -> torch.Tensor:
        return world.probs_after((0, *prefix))

    return distance(emitted_dist(rule, dist, candidates_scheme(world, drafter), 4), target_dist(dist, 4))


@pytest.mark.parametrize("tree", [*TREES, "likeliest", "calibrated"])
def test_the_lossless_rule_emits_the_targets_distribution_exactly(tree: str) -> None:
    assert off_by(SpeculativeSampling(), tree) < 1e-12


@pytest.mark.parametrize("tree", ["chain", "mixed", "likeliest", "calibrated"])
def test_typical_acceptance_does_not(tree: str) -> None:
    assert off_by(TypicalAcceptance(), tree) > 0.05


def p_value(target: MarkovWithHead, rule: Rule, answers: int = 3000) -> float:
    """Chi-square of tokens 2 and 3 of many answers under the target's own joint distribution; cells of fewer than 10
    are one."""
    engine = Engine(target, drafter_of(target), rule, max_batch=64, controller="fixed", entropy=0)
    made = engine.generate([[3, 1]] * answers, SamplingParams(max_tokens=3, temperature=1.0))
    vocab = target.vocab_size
    counts = np.zeros((vocab, vocab))
    for answer in made:
        counts[answer.token_ids[1], answer.token_ids[2]] += 1
    dist = np.zeros((vocab, vocab))
    for a, b, c in itertools.product(range(vocab), repeat=3):
        dist[b, c] += float(
            target.probs_after([3, 1])[a] * target.probs_after([1, a])[b] * target.probs_after([a, b])[c]
        )
    expected, observed = dist.ravel() * answers, counts.ravel()
    rare = expected < 10
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), df=len(expected) - 1))


def test_what_the_engine_emits_follows_the_target(target: MarkovWithHead) -> None:
    """A correct engine fails with probability below 1e-6; seeds are fixed, so a run repeats."""
    assert p_value(target, SpeculativeSampling()) > 1e-6


def test_the_same_test_catches_a_lossy_rule(target: MarkovWithHead) -> None:
    assert p_value(target, TypicalAcceptance()) < 1e-6


# --- tokens ---


@pytest.mark.parametrize("tree", TREES)
def test_greedy_answers_are_those_of_plain_decoding(target: MarkovWithHead, tree: str) -> None:
    params = SamplingParams(max_tokens=60)
    engine = Engine(target, drafter_of(target, tree), controller="fixed", entropy=0)
    plain = [answer.token_ids for answer in Engine(target).generate(PROMPTS, params)]
    made = engine.generate(PROMPTS, params)
    assert [answer.token_ids for answer in made] == plain
    assert [engine.generate(prompt, params).stats for prompt in PROMPTS] == [answer.stats for answer in made]
    assert not any(answer.warnings for answer in made)
    accepted, drafted = (sum(getattr(a.stats, name) for a in made) for name in ("accepted_tokens", "draft_tokens"))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"top_p": 0.8, "top_k": 5}], ids=["plain", "seeded", "cut"])
def test_a_request_answers_alike_alone_in_a_batch_and_streamed(
    target: MarkovWithHead, options: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.9, **options)  # type: ignore[arg-type]
    engine = Engine(target, drafter_of(target), controller="fixed", entropy=0)
    alone = [answers_of(engine, [prompt], params)[0].token_ids for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers_of(engine, PROMPTS, params)] == alone
    two = answers_of(Engine(target, drafter_of(target), max_batch=2, controller="fixed", entropy=0), PROMPTS, params)
    assert [answer.token_ids for answer in two] == alone
    if "seed" in options:
        assert [token for piece in engine.stream(PROMPTS[0], params) for token in piece.token_ids] == alone[0]
        assert [answer.token_ids for answer in Engine(target).generate(PROMPTS, params)] == alone


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_seeded_answers_are_plain_ones_and_are_guessed_more_often(target: MarkovWithHead, temperature: float) -> None:
    """Whatever trees and sizes draft; heads that hear the noise have more accepted than those kept from it.

    Seeds are fixed, so the counts are too.
    """
    params = [SamplingParams(max_tokens=30, temperature=temperature, seed=seed) for seed in range(8)]
    prompts = PROMPTS * 2
    plain = [answer.token_ids for answer in Engine(target).generate(prompts, params)]

    def accepted(drafter: Medusa) -> int:
        answers = Engine(target, drafter, max_batch=8, controller="fixed", entropy=0).generate(prompts, params)
        assert [answer.token_ids for answer in answers] == plain
        assert not any(answer.warnings for answer in answers)
        return sum(answer.stats.accepted_tokens for answer in answers)

    heads = heads_of(target)
    for trees in (LikeliestTrees(3), TREES["mixed"]):
        given = trees if isinstance(trees, LikeliestTrees) else {"sampled": trees}
        assert accepted(Medusa(heads, given, nodes=6)) > accepted(Unhearing(heads, given, nodes=6))


class Unhearing(Medusa):
    """Kept from the noise of seeded requests."""

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        return super().propose(batch, budgets, [KeyedNoise(0, 0, 0)] * len(batch))


def test_greedy_sampled_and_seeded_requests_share_a_batch(target: MarkovWithHead) -> None:
    params = [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=0.8, seed=3),
        SamplingParams(max_tokens=30, temperature=0.8),
        SamplingParams(max_tokens=30, temperature=1.2, seed=5, top_p=0.9),
    ]
    for trees in (LikeliestTrees(3), {"greedy": TREES["mixed"]}):
        engine = Engine(target, Medusa(heads_of(target), trees, nodes=6), controller="fixed", entropy=0)
        alone = [answers_of(engine, [prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
        together = answers_of(engine, PROMPTS, params)
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        assert [answer.stats for answer in together] == [answer.stats for answer in alone]
        plain = Engine(target).generate(PROMPTS, params)
        for place in (0, 1, 3):
            assert together[place].token_ids == plain[place].token_ids


def test_answers_end_inside_an_accepted_block(target: MarkovWithHead) -> None:
    assert_ends_inside_blocks(
        Engine(target), Engine(target, drafter_of(target), controller="fixed", entropy=0), PROMPTS[0]
    )


# --- requests that come and go ---


class Watched(Medusa):
    """Notes the vector of every request when it is asked for a proposal, and after every step."""

    told_late = False

    def __init__(self, target: MarkovWithHead) -> None:
        super().__init__(heads_of(target), {"greedy": TREES["mixed"]})
        self.target = target
        self.seen = 0

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        super().observe(batch, outcomes)
        for request, outcome in zip(batch, outcomes, strict=True):
            vector = self._vectors.get(request.id)
            if outcome.partial:
                continue  # a part of a prompt that is not its last: no token is drawn behind it
            assert vector is not None
            assert vector.equal(self.target.vector_after(request.tokens[:-1]))
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
def test_the_vector_is_always_that_of_the_last_drawn_token(target: MarkovWithHead, budgets: list[Budget]) -> None:
    """Whatever was accepted, also after steps without a budget, and in a batch whose members end at different times."""
    drafter = Watched(target)
    engine = Engine(target, drafter, controller=ScriptedController(budgets), entropy=1)
    params = [
        SamplingParams(max_tokens=count, temperature=t) for count, t in ((40, 0.0), (7, 1.0), (25, 0.7), (1, 0.0))
    ]
    answers = engine.generate(PROMPTS, params)
    assert not any(answer.warnings for answer in answers)
    assert [len(answer.token_ids) for answer in answers] == [40, 7, 25, 1]
    assert drafter.seen == sum(answer.stats.target_calls + 1 for answer in answers)
    assert not drafter.holding, "every request gave its vector back"
    if budgets != [NO_DRAFT]:
        assert sum(answer.stats.accepted_tokens for answer in answers) > 0


def test_a_long_prompt_is_read_in_parts(target: MarkovWithHead) -> None:
    long = MarkovWithHead(target.probs, context_length=2048)
    drafter = Watched(long)
    engine = Engine(long, drafter, controller="fixed", entropy=0)
    prompt = [i * i % 8 for i in range(1500)]
    answer = engine.generate(prompt, SamplingParams(max_tokens=20))
    assert answer.token_ids == Engine(long).generate(prompt, SamplingParams(max_tokens=20)).token_ids
    assert answer.stats.prefill_calls > 1
    assert answer.stats.accepted_tokens > 0


def test_a_stream_that_is_dropped_leaves_nothing_behind(target: MarkovWithHead) -> None:
    drafter = Watched(target)
    engine = Engine(target, drafter, controller="fixed", entropy=0)
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=60))
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    plain = Engine(target).generate(PROMPTS, SamplingParams(max_tokens=30))
    assert [a.token_ids for a in engine.generate(PROMPTS, SamplingParams(max_tokens=30))] == [
        a.token_ids for a in plain
    ]
    assert not drafter._vectors


def test_a_drafter_may_serve_two_engines_one_after_the_other(target: MarkovWithHead) -> None:
    drafter = drafter_of(target)
    first, second = (
        Engine(target, drafter, controller="fixed", entropy=0),
        Engine(target, drafter, controller="fixed", entropy=0),
    )
    params = SamplingParams(max_tokens=30)
    assert first.generate(PROMPTS[0], params).token_ids == second.generate(PROMPTS[0], params).token_ids
