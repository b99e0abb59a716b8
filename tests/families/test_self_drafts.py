"""Drafts made of the target over the families: answers are plain decoding's, and cut models are what they say."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPTNeoXConfig, OPTConfig, PretrainedConfig, PreTrainedModel

from models.test_native_forward import CONFIGS
from support.backends import fused_backend, native_backend
from support.fixed_noise import answers_of
from support.pairwise import by_turns
from support.tiny_models import PROMPTS, VOCAB, build
from truedraft import Engine, SamplingParams
from truedraft.core.tree import chain_shape
from truedraft.drafters import from_spec
from truedraft.errors import UnsupportedModelError
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import can_pack

LIBRARY = built(torch.float32)
pytestmark = pytest.mark.skipif(LIBRARY.library is None, reason=LIBRARY.reason)

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NATIVE = (
    "nothing fills a unit", "a window of 3", "five to a key head", "fused projections", "neighbours rotated",
    "norms behind sums", "two rotations, weights from 1", "experts", "experts by shares that do not sum to 1",
    "sinks, and experts with biases",
)  # fmt: skip
STOCK: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=3, n_positions=256, bos_token_id=None, eos_token_id=None
    ),
    "opt": lambda: OPTConfig(**BASE, ffn_dim=96, word_embed_proj_dim=48),
    "gpt_neox": lambda: GPTNeoXConfig(**BASE, intermediate_size=96),
}
WORDS = ("self:int8", "self:int4")
GREEDY = SamplingParams(max_tokens=48)
SEEDED = SamplingParams(max_tokens=48, temperature=0.8, seed=3)


def stock(family: str) -> PreTrainedModel:
    """In transformers' own modules."""
    return build((CONFIGS | STOCK)[family](), seed=5, spread=0.25)


@cache
def target(family: str, kind: str) -> HuggingFaceModel:
    make = {"native": native_backend, "fused": fused_backend, "stock": StockBackend, "fastest": fastest_backend}[kind]
    return HuggingFaceModel(stock(family), None, family, make)


@cache
def plain(family: str, kind: str, params: SamplingParams) -> list[list[int]]:
    answers = Engine(target(family, kind)).generate([list(prompt) for prompt in PROMPTS], params)
    return [list(answer.token_ids) for answer in answers]


CASES = [
    *((family, "native") for family in NATIVE),
    *((family, "fused") for family in ("nothing fills a unit", "a window of 3", "two rotations, weights from 1")),
    *((family, "fastest") for family in STOCK),
    *((family, "stock") for family in ("nothing fills a unit", "two rotations, weights from 1", "gpt2")),
]


@pytest.mark.parametrize(("case", "word"), by_turns(CASES, WORDS))
def test_greedy_and_seeded_answers_are_those_of_plain_decoding(case: tuple[str, str], word: str) -> None:
    family, kind = case
    model = target(family, kind)
    engine = Engine(model, from_spec(f"{word},num_speculative_tokens=3", model), controller="fixed")
    drafted = accepted = 0
    for params in (GREEDY, SEEDED):
        found = engine.generate([list(prompt) for prompt in PROMPTS], params)
        assert [list(each.token_ids) for each in found] == plain(family, kind, params)
        assert not any(each.warnings for each in found)
        drafted += sum(each.stats.draft_tokens for each in found)
        accepted += sum(each.stats.accepted_tokens for each in found)
    assert 0 < accepted < drafted


def logits_of(model: Any, cache: Any, tokens: list[int]) -> torch.Tensor:
    found = model.forward([Segment(cache, torch.tensor(tokens), chain_shape(len(tokens)), range(len(tokens)))]).logits
    cache.rollback(cache.length)
    return found


@pytest.mark.skipif(
    built(torch.bfloat16).library is None or not can_pack(torch.device("cpu"), torch.bfloat16),
    reason="no products of bfloat16 here",
)
@pytest.mark.parametrize("word", WORDS)
def test_greedy_answers_of_bfloat16_outside_the_native_forward(word: str) -> None:
    model = HuggingFaceModel(stock("opt").to(torch.bfloat16), None, "opt", fastest_backend)
    prompts = [list(prompt) for prompt in PROMPTS]
    alone = Engine(model).generate(prompts, GREEDY)
    found = Engine(model, from_spec(word, model), controller="fixed").generate(prompts, GREEDY)
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]
    assert sum(each.stats.accepted_tokens for each in found) > 0
    engine, drawn = (
        Engine(model, from_spec(word, model), controller="fixed"),
        SamplingParams(max_tokens=32, temperature=0.8),
    )
    together = answers_of(engine, prompts, drawn)
    alone = [answers_of(engine, [prompt], drawn)[0] for prompt in prompts]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("opt", "fastest"), ("gpt2", "fastest"), ("gpt_neox", "stock"), ("nothing fills a unit", "fused")],
)
def test_fewer_bits_are_near_the_model_whatever_runs_it(family: str, kind: str) -> None:
    tokens, model = list(PROMPTS[1]), target(family, kind)
    cache = model.new_cache()
    exact = logits_of(model, cache, tokens).double()
    off = [
        float((logits_of(model.quantized(bits), cache, tokens).double() - exact).std() / exact.std()) for bits in (8, 4)
    ]
    assert 0.0 < off[0] < 0.15 < off[1] < 1.0, off
    assert logits_of(model, cache, tokens).double().equal(exact), "the model itself is as it was"
    eight, four = model.quantized(8), model.quantized(4)
    assert 0 < four.weight_bytes < eight.weight_bytes < model.weight_bytes
    model.release_cache(cache)


def test_experts_outside_the_native_forward_are_not_quantised() -> None:
    model = target("experts", "stock")
    with pytest.raises(UnsupportedModelError, match="most of its weights are in no linear layers"):
        model.quantized(8)
