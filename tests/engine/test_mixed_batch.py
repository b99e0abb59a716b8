"""Twelve requests with nothing in common answer together what each answers alone: tokens, origins, text and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from support.answers import fixed
from support.fixed_noise import answers_of
from support.head_models import random_heads, random_redrafter
from support.letters import Letters
from support.pairwise import some_of
from support.tiny_models import VOCAB, build, llama, with_noise
from truedraft import Engine, SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.drafters import Drafter, DraftModel, Medusa, PromptLookup, Redrafter
from truedraft.engine import Answer
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.testing import ScriptedDrafter
from truedraft.verification import BlockVerification, LenientSampling, Rule

LETTERS = Letters(VOCAB, [chr(33 + token) for token in range(VOCAB)])
FEW = SamplingParams(max_tokens=18)
DRAWN = replace(FEW, temperature=0.9)
REQUESTS: dict[int, SamplingParams] = {  # by the length of their prompts, many of which end beside a border of chunks
    255: FEW,
    256: DRAWN,
    257: replace(DRAWN, seed=2),
    511: replace(DRAWN, top_p=0.8),
    512: replace(FEW, stop_token_ids=(44, 79)),
    513: replace(DRAWN, top_k=5, stop=("a", "b", "c+")),
    1: replace(DRAWN, min_p=0.1, temperature=1.4),
    7: replace(FEW, stop=("d[S", "[z")),
    37: replace(DRAWN, seed=6, top_p=0.9, top_k=20),
    8: replace(FEW, max_tokens=1),
    90: replace(DRAWN, temperature=0.3, stop_token_ids=(3, 8, 61), max_tokens=40),
    300: replace(FEW, max_tokens=5),
}
PROMPTS = [[(length * i * i + 7 * i + length) % VOCAB for i in range(length)] for length in REQUESTS]


@cache
def model(noise: float = 0.0) -> HuggingFaceModel:
    """A small Llama in bfloat16, where rows depend on their neighbours first; with noise, a draft for it."""
    module = with_noise(build(llama(max_position_embeddings=600), seed=2), noise)
    made = HuggingFaceModel(module.to(torch.bfloat16), None, f"llama+{noise}")
    if not noise:
        made.tokenizer = LETTERS  # type: ignore[assignment]
    return made


def likely(tokens: Sequence[int]) -> list[list[int]]:
    """Guesses that the text decides, two of which begin alike."""
    return [[tokens[-1], 5], [tokens[-1], tokens[0], 9], [(3 * tokens[-1]) % VOCAB]]


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "prompt lookup": lambda: PromptLookup(min_ngram=1),
    "chain": lambda: DraftModel(model(0.1), 3),
    "tree": lambda: DraftModel(model(0.1), branching=(3, 2, 1)),
    "chains": lambda: DraftModel(model(0.1), 3, chains=3),
    "medusa": lambda: Medusa(random_heads(model(), heads=3, spread=0.05), GuessTrees(3), nodes=9),
    "fixed tree": lambda: Medusa(random_heads(model(), heads=2), {"greedy": RankTree.cartesian((3, 2))}, nodes=9),
    "redrafter": lambda: Redrafter(random_redrafter(model()), beams=3),
    "drawn beams": lambda: Redrafter(random_redrafter(model()), beams=3, sampled=True),
    "scripted": lambda: ScriptedDrafter(likely),
}
RULES: dict[str, Rule | None] = {"chain": BlockVerification(), "scripted": LenientSampling(0.5)}


@cache
def plain() -> list[tuple[list[int], str | None, str]]:
    """What the requests answer undrafted."""
    answers = Engine(model()).generate(PROMPTS, list(REQUESTS.values()))
    return [(answer.token_ids, answer.text, answer.finish_reason) for answer in answers]


def told(answers: Sequence[Answer]) -> list[tuple[object, ...]]:
    return [
        (each.token_ids, each.origins, each.text, each.finish_reason, each.stats, each.warnings) for each in answers
    ]


@pytest.mark.parametrize("name", some_of(DRAFTERS, DRAFTERS.keys() - {"fixed tree", "drawn beams"}))
def test_each_answers_as_alone(name: str) -> None:
    rule = RULES.get(name)
    every = list(REQUESTS.values())
    if rule is not None and not rule.lossless:
        every = [replace(each, seed=None) for each in every]
    engine = fixed(model(), DRAFTERS[name](), rule)
    alone = [answers_of(engine, [prompt], params)[0] for prompt, params in zip(PROMPTS, every, strict=True)]
    assert told(answers_of(engine, PROMPTS, every)) == told(alone)
    # In another order, a few at a time, so that each meets others at other places.
    order = sorted(range(len(every)), key=lambda i: 7 * i % len(every))
    engine = fixed(model(), DRAFTERS[name](), rule, max_batch=5)
    others = answers_of(engine, [PROMPTS[i] for i in order], [every[i] for i in order])
    assert told(others) == told([alone[i] for i in order])
    assert {answer.finish_reason for answer in alone} == {"stop", "length"}
    assert name == "none" or sum(answer.stats.draft_tokens for answer in alone) > 100
    for own, undrafted, its in zip(alone, plain(), every, strict=True):
        if its.seeded or (its.greedy and (rule is None or rule.lossless)):  # then no drafter and no rule can be seen
            assert (own.token_ids, own.text, own.finish_reason) == undrafted
    if name in ("chain", "tree"):
        assert sum(answer.stats.accepted_tokens for answer in alone) > 40
