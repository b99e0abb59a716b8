"""ReDrafter under lossy rules: not exact, marked as such, and measured."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from support.candidate_schemes import candidates_scheme
from support.head_models import MarkovWithEmbedding, fitted_redrafter, random_redrafter
from support.pairwise import named, pairwise
from truedraft import Engine, SamplingParams
from truedraft.core.stats import Counters
from truedraft.drafters import Redrafter
from truedraft.heads.redrafter import RedrafterHead
from truedraft.verification import LenientSampling, Rule, SpeculativeSampling, TypicalAcceptance
from truedraft.verification.exact import Prefix, distance, emitted_dist, target_dist
from truedraft.verification.specs import rule_from_spec

PROMPTS = [[3, 1, 4], [1] * 9, [2], [5, 6]]
SPECS = ("typical", "speculative,lenience=0.5")
OPTIONS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=0.9),
}


@cache
def target() -> MarkovWithEmbedding:
    return MarkovWithEmbedding.random(8, seed=1, sharpness=1.5, context_length=160)


@cache
def head() -> RedrafterHead:
    answers = Engine(target(), entropy=1).generate(PROMPTS, SamplingParams(max_tokens=60, temperature=1.0))
    return fitted_redrafter(target(), [[*p, *a.token_ids] for p, a in zip(PROMPTS, answers, strict=True)])


# --- the distribution ---


def off_by(rule: Rule, beams: int, length: int) -> float:
    world = MarkovWithEmbedding.random(4, seed=3, sharpness=1.0)
    small = random_redrafter(world, length=2, layers=1, spread=3.0)
    drafter = Redrafter(small, beams=beams, length=length, nodes=9)

    def dist(prefix: Prefix) -> torch.Tensor:
        return world.probs_after((0, *prefix))

    return distance(emitted_dist(rule, dist, candidates_scheme(world, drafter), 4), target_dist(dist, 4))


@pytest.mark.parametrize(("beams", "length"), [(1, 2), (3, 1), (3, 2)])
def test_lossy_rules_do_not_emit_the_targets_distribution(beams: int, length: int) -> None:
    assert off_by(SpeculativeSampling(), beams, length) < 1e-12
    assert off_by(LenientSampling(1.0), beams, length) < 1e-12
    assert off_by(TypicalAcceptance(), beams, length) > 0.05
    assert off_by(LenientSampling(0.5), beams, length) > 0.05


# --- answers ---


def answers_of(spec: str, sampled: bool, params: SamplingParams) -> tuple[list[list[int]], Counters]:
    drafter = Redrafter(head(), beams=4, length=3, nodes=9, sampled=sampled)
    answers = Engine(target(), drafter, rule_from_spec(spec), controller="fixed", entropy=5).generate(PROMPTS, params)
    assert not any(answer.warnings for answer in answers)
    return [answer.token_ids for answer in answers], sum((answer.stats for answer in answers), Counters())


@pytest.mark.parametrize(("options", "sampled", "spec"), pairwise(OPTIONS, named(beams=False, drawn=True), SPECS))
def test_answers_are_marked_lossy_with_their_divergence(spec: str, sampled: bool, options: str) -> None:
    assert not rule_from_spec(spec).lossless
    tokens, stats = answers_of(spec, sampled, OPTIONS[options])
    assert list(map(len, tokens)) == [40] * len(PROMPTS)
    assert stats.divergence is not None and stats.divergence.tokens == 40 * len(PROMPTS)
    assert stats.mean_total_variation is not None and stats.mean_kl is not None
    assert 0.0 < stats.mean_total_variation < 1.0 and 0.0 < stats.mean_kl < math.inf
    exactly, exact = answers_of("speculative", sampled, OPTIONS[options])
    assert exact.divergence is None
    assert tokens != exactly
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize("sampled", [False, True], ids=["beams", "drawn"])
@pytest.mark.parametrize("options", OPTIONS)
def test_lenience_accepts_more(sampled: bool, options: str) -> None:
    lengths = [
        answers_of(f"speculative,lenience={lenience}", sampled, OPTIONS[options])[1].mean_acceptance_length
        for lenience in (1, 0.5, 0.1)
    ]
    assert lengths[0] < lengths[1] < lengths[2]
