"""The distribution of what the whole pipeline emits, against the target's own exact distribution.

Tokens 2 to 4 of an answer come from speculative steps (the first from the prefill). Their joint distribution is known
exactly: a forward over every prefix. Over N answers the chi-square statistic of their counts is compared with its 1 -
1e-6 quantile, so a correct pipeline fails with probability below 1e-6 at each configuration. With N = 48,000 a
distribution that is off by a total variation of 0.02 is caught, even when it is off in the way that chi-square sees
least; that is shown below. Trees and siblings are counted over a quarter of that (0.04 is caught; `make test-slow`
counts them, and a chain once more by the models' own modules, over all). Seeds are fixed, so a run repeats."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.answers import fixed
from support.backends import fused_backend, native_backend
from support.broken_rules import AcceptsAlways, DrawsFromTarget, PassesByWeight
from support.chi_square import p_value
from support.tiny_models import build, llama
from truedraft import Engine, SamplingParams
from truedraft.core.probs import probs_from_logits
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel, PromptLookup, from_spec
from truedraft.errors import IncompatibleRuleError
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling

VOCAB = 3
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1}
PROMPT = [1, 0, 2, 1]
BATCH = 64
ANSWERS, FEWER = 750 * BATCH, 188 * BATCH
FALSE_ALARM = 1e-6
PARAMS = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9)


def tiny_llama(
    seed: int, head_dim: int = 8, spread: float = 0.35, backend: BackendMaker = StockBackend
) -> LanguageModel:
    """One layer, three tokens."""
    config = llama(**SIZES, head_dim=head_dim, num_hidden_layers=1, num_attention_heads=2)
    return HuggingFaceModel(build(config, seed, spread), None, f"llama-{seed}", backend)


def exact_dist(model: LanguageModel, prompt: Sequence[int] = PROMPT) -> Tensor:
    """Joint distribution `[vocab, vocab, vocab]` of tokens 2 to 4, from the model's own logits, with `PARAMS`."""
    prefixes = list(itertools.product(range(VOCAB), repeat=3))
    segments = []
    for prefix in prefixes:
        ids = torch.tensor([*prompt, *prefix])
        segments.append(Segment(model.new_cache(), ids, chain_shape(len(ids)), range(len(prompt) - 1, len(ids))))
    logits = model.forward(segments).logits.view(VOCAB, VOCAB, VOCAB, 4, VOCAB)
    dist = probs_from_logits(logits.double().view(-1, VOCAB), PARAMS).view_as(logits)
    first, second = dist[:, 0, 0, 0], dist[:, :, 0, 1]  # [1st, 2nd's distribution] is the same for all later tokens
    joint = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for token in range(VOCAB):
        weight = first[0, token] * second[token, 0, :, None, None]
        joint += weight * dist[token, :, 0, 2, :, None] * dist[token, :, :, 3, :]
    return joint


def counts_of(engine: Engine, answers: int, text: Sequence[int] = PROMPT) -> np.ndarray:
    """Counts of tokens 2 to 4 over many answers, each batch mixed with requests of other lengths and options."""
    counts = np.zeros((VOCAB,) * 3, dtype=np.int64)
    others = [
        ([2, 2, 1], SamplingParams(max_tokens=7)),
        ([2] * 9, SamplingParams(max_tokens=3, temperature=1.0)),
        ([0], SamplingParams(max_tokens=6, temperature=1.3, seed=2)),
    ]
    for _ in range(0, answers, BATCH):
        sampled = [([*text], SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9))] * BATCH
        mixed = [*sampled[:20], others[0], *sampled[20:50], *others[1:], *sampled[50:]]
        made = engine.generate([prompt for prompt, _ in mixed], [params for _, params in mixed])
        for (prompt, _), answer in zip(mixed, made, strict=True):
            if len(prompt) == len(text):
                counts[tuple(answer.token_ids[1:])] += 1
    return counts


@dataclass(frozen=True)
class Pair:
    """What answers, what drafts for it, and the distribution that answers must have."""

    target: LanguageModel
    draft: LanguageModel
    dist: np.ndarray


@cache
def pair(forward: str) -> Pair:
    """By the models' own modules, fused ones, or of sizes for the native forward and by it: half the time."""
    seeds, own = (8, 2), dict[str, Any]()
    if forward == "fused":  # models on which the broken block rule is off by 0.09
        seeds, own = (12, 6), {"backend": fused_backend}
    if forward == "native" and built(torch.float32).library is not None:
        seeds, own = (16, 13), {"head_dim": 32, "spread": 0.25, "backend": native_backend}
    target, draft = (tiny_llama(seed, **own) for seed in seeds)
    return Pair(target, draft, exact_dist(target).numpy())


@pytest.mark.parametrize("forward", ["native", "stock"])
def test_the_exact_distribution_is_a_distribution_with_room_to_be_wrong(forward: str) -> None:
    dist = pair(forward).dist
    assert dist.sum() == pytest.approx(1.0, abs=1e-9)
    assert (dist > 0.001).sum() >= 12


@pytest.mark.parametrize(
    ("options", "answers", "forward"),
    [
        pytest.param({"branching": (1, 1, 1)}, ANSWERS, "native", id="chain"),
        pytest.param({"branching": (2, 2)}, FEWER, "native", id="tree"),
        pytest.param({"num_speculative_tokens": 3, "chains": 3}, FEWER, "stock", id="chains"),
        pytest.param({"branching": (1, 1, 1)}, ANSWERS, "stock", id="chain, all", marks=pytest.mark.slow),
        pytest.param({"branching": (2, 2)}, ANSWERS, "stock", id="tree, all", marks=pytest.mark.slow),
        pytest.param(
            {"num_speculative_tokens": 3, "chains": 3}, ANSWERS, "stock", id="chains, all", marks=pytest.mark.slow
        ),
    ],
)
def test_sampled_answers_follow_the_target(options: dict[str, Any], answers: int, forward: str) -> None:
    own = pair(forward)
    engine = fixed(own.target, DraftModel(own.draft, **options), max_batch=BATCH + 3, entropy=0)
    counts = counts_of(engine, answers)
    assert counts.sum() == answers
    assert p_value(counts, own.dist) > FALSE_ALARM


@pytest.mark.slow
def test_answers_behind_a_text_longer_than_what_the_draft_sees_follow_the_target() -> None:
    """An eighth of the answers: a total variation of 0.06 is caught."""
    own, text = pair("native"), [(7 * place * place + place) % VOCAB for place in range(200)]
    dist = exact_dist(own.target, text).numpy()
    draft = DraftModel(own.draft, branching=(2, 1), context=128)
    engine = fixed(own.target, draft, max_batch=BATCH + 3, entropy=0, prefix_cache_bytes=1 << 24)
    assert p_value(counts_of(engine, 94 * BATCH, text), dist) > FALSE_ALARM
    assert not np.allclose(dist, own.dist, atol=0.02)


@pytest.mark.parametrize("forward", ["native", "stock"])
def test_a_total_variation_of_two_hundredths_is_caught(forward: str) -> None:
    """Half the mass of the distribution is made likelier by 4 %, the other half less likely: TV 0.02, least visible."""
    dist = pair(forward).dist
    generator = np.random.default_rng(7)
    caught = 0
    for _ in range(200):
        signs = balanced_signs(dist.ravel(), generator)
        planted = dist.ravel() * (1.0 + 0.04 * signs)
        planted /= planted.sum()
        assert 0.5 * np.abs(planted - dist.ravel()).sum() == pytest.approx(0.02, abs=0.002)
        counts = generator.multinomial(ANSWERS, planted)
        caught += p_value(counts.reshape(dist.shape), dist) < FALSE_ALARM
    assert caught >= 190


def balanced_signs(dist: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Random signs that split the mass of a distribution nearly in halves."""
    while True:
        signs = generator.choice([-1.0, 1.0], size=dist.shape)
        if abs((signs * dist).sum()) < 0.02:
            return signs


@pytest.mark.parametrize("rule", [DrawsFromTarget(), AcceptsAlways()], ids=lambda rule: type(rule).__name__)
def test_a_broken_rule_is_caught_by_far_fewer_answers(rule: Rule) -> None:
    own = pair("native")
    engine = fixed(own.target, DraftModel(own.draft, 3), rule, max_batch=BATCH + 3, entropy=0)
    assert p_value(counts_of(engine, 2048), own.dist) < FALSE_ALARM


# ------------------------------------------------------------------------------------------ block verification


@pytest.mark.parametrize(("rule", "batches"), [(BlockVerification(), 94), (PassesByWeight(), 47)], ids=["", "broken"])
def test_answers_judged_by_blocks_follow_the_target_and_a_broken_rule_is_caught(rule: Rule, batches: int) -> None:
    """An eighth of the answers: a total variation of 0.06 is caught in whatever way the distribution is off."""
    own = pair("fused")
    engine = fixed(own.target, DraftModel(own.draft, 3), rule, max_batch=BATCH + 3, entropy=0)
    assert (p_value(counts_of(engine, batches * BATCH), own.dist) > FALSE_ALARM) == (batches == 94)


def test_other_requests_judged_by_blocks_get_the_tokens_of_speculative_sampling() -> None:
    """Greedy and seeded ones, and those that prompt lookup drafts for; trees are refused."""
    own, prompts = pair("fused"), [PROMPT, [2, 2, 1], [0]]
    lookup = SamplingParams(max_tokens=16, temperature=0.7)
    for drafter, params in (
        (DraftModel(own.draft, 4), SamplingParams(max_tokens=12)),
        (DraftModel(own.draft, 4), SamplingParams(max_tokens=12, temperature=0.7, seed=3)),
        (PromptLookup(), lookup),
    ):
        engines = [fixed(own.target, drafter, BlockVerification(), entropy=0)]
        own_drafter, rule = (drafter, SpeculativeSampling()) if params is lookup else (None, None)
        engines.append(fixed(own.target, own_drafter, rule, entropy=0))
        found = [[answer.token_ids for answer in engine.generate(prompts, params)] for engine in engines]
        assert found[0] == found[1]
    with pytest.raises(IncompatibleRuleError, match="take the rule 'speculative'"):
        fixed(own.target, DraftModel(own.draft, branching=(2, 2)), BlockVerification())


def test_more_is_accepted_by_blocks_than_token_by_token() -> None:
    """0.64 tokens a step against 0.46, over some 1,100 steps each. The seeds are fixed, so a run repeats."""
    own, accepted = pair("fused"), []
    for rule in (BlockVerification(), SpeculativeSampling()):
        engine = fixed(own.target, DraftModel(own.draft, 5), rule, max_batch=BATCH, entropy=0)
        made = engine.generate([PROMPT] * 128, SamplingParams(max_tokens=12, temperature=0.7))
        accepted.append(sum(a.stats.accepted_tokens for a in made) / sum(a.stats.target_calls for a in made))
    assert accepted[0] > 1.1 * accepted[1]


# ------------------------------------------------------------------------------------------ the target as its own draft


@pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
@pytest.mark.parametrize(
    ("word", "batches"),
    [pytest.param("self:int8", 47, marks=pytest.mark.slow), ("self:int4", 47), ("self:int4", 16)],
    ids=["int8", "int4", "int4, broken"],
)
def test_sampled_answers_of_a_target_that_drafts_for_itself_follow_it(word: str, batches: int) -> None:
    """Two layers, of sizes that the native forward is for; a rule that lets the draft's distribution come through is
    caught by fewer answers."""
    config = llama(**SIZES, head_dim=32, num_attention_heads=1)
    target = HuggingFaceModel(build(config, 5, spread=0.25), None, "three tokens", native_backend)
    dist, rule = exact_dist(target).numpy(), SpeculativeSampling() if batches == 47 else AcceptsAlways()
    assert (dist > 0.001).sum() >= 12
    drafter = from_spec(f"{word},num_speculative_tokens=3", target)
    counts = counts_of(fixed(target, drafter, rule, max_batch=BATCH + 3), batches * BATCH)
    assert (p_value(counts, dist) > FALSE_ALARM) == (batches == 47)
