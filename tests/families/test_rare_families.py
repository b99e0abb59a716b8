"""Families that ask something unusual of a packed forward: exact by every path, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from transformers import BartConfig, BartForCausalLM, RobertaConfig

from families.test_packed_forward import TOLERANCE, worst_difference
from support.pairwise import by_turns
from support.rare_families import RARE, SMALL, config
from support.tiny_models import CONTEXT, PROMPTS, VOCAB, build, greedy_with_lead, stock_greedy, with_noise
from truedraft import Engine, SamplingParams
from truedraft.drafters import Drafter, DraftModel, Lookahead
from truedraft.errors import UnsupportedModelError
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.models.probe import check_against_stock

COUNT = 32
PARAMS = SamplingParams(max_tokens=COUNT)
BACKENDS = {"stock": StockBackend, "fastest": fastest_backend}
# Weights whose answers wander and have no near tie (checked below).
SEEDS = {"gemma4_text with shared keys": 5, "gemma4_unified": 5, "granitemoehybrid of attention": 3}


@cache
def loaded(family: str, backend: str, noise: float = 0.0) -> HuggingFaceModel:
    """As `load_model` makes it, checked; with noise on its weights, a draft that often agrees."""
    model = with_noise(build(RARE[family](), SEEDS.get(family, 0), spread=0.3), noise)
    check = check_against_stock(model, family)
    made = HuggingFaceModel(model, None, family, BACKENDS[backend])
    check(made)
    return made


@cache
def by_transformers(family: str) -> tuple[list[list[int]], float]:
    """Its own answers, and the smallest lead of a chosen token over the next."""
    return greedy_with_lead(build(RARE[family](), SEEDS.get(family, 0), spread=0.3), COUNT)


@pytest.mark.parametrize(("family", "backend"), by_turns(RARE, BACKENDS))
def test_chains_and_trees_in_mixed_packs_equal_transformers(family: str, backend: str) -> None:
    alone = build(RARE[family](), SEEDS.get(family, 0), spread=0.3)
    assert worst_difference(loaded(family, backend), alone) <= 2 * TOLERANCE  # logits are twice as large as there


DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "chain": lambda family: DraftModel(loaded(family, "fastest", 0.05), 4),
    "tree": lambda family: DraftModel(loaded(family, "fastest", 0.05), branching=(3, 2, 1)),
    "windows of guesses": lambda family: Lookahead(window=4, ngram=3, candidates=2),
}


@pytest.mark.parametrize(("family", "drafter"), by_turns(RARE, DRAFTERS))
def test_greedy_equals_transformers(family: str, drafter: str) -> None:
    """In a ragged batch, with a draft that is right now and then; that no row hangs on its neighbours is seen above."""
    expected, margin = by_transformers(family)
    assert margin > 1e-3
    assert min(len(set(answer)) for answer in expected) >= 8
    engine = Engine(loaded(family, "fastest"), DRAFTERS[drafter](family), controller="fixed")
    batch = engine.generate([list(prompt) for prompt in PROMPTS], PARAMS)
    assert [answer.token_ids for answer in batch] == expected
    assert not any(answer.warnings for answer in batch)
    drafted = sum(answer.stats.draft_tokens for answer in batch)
    if drafter in ("chain", "tree"):
        assert 0 < sum(answer.stats.accepted_tokens for answer in batch) < drafted
    else:
        assert drafted > len(PROMPTS) * COUNT


@pytest.mark.parametrize(("family", "backend"), by_turns(RARE, [*BACKENDS][::-1]))
def test_the_check_at_load_passes_in_bfloat16(family: str, backend: str) -> None:
    model = build(RARE[family](), SEEDS.get(family, 0), spread=0.3, dtype=torch.bfloat16)
    check = check_against_stock(model, family)
    check(HuggingFaceModel(model, None, family, BACKENDS[backend]))


@pytest.mark.parametrize("backend", [StockBackend, fastest_backend])
def test_layers_that_keep_a_state_of_their_own_are_refused(backend: BackendMaker) -> None:
    """Whatever the weights: at this scale such a layer moves logits by less than bfloat16 rounds them."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
    indexed = config("HYV4Config", **SMALL, **latent, **experts, layer_types=["indexed_attention"] * 2)
    model = build(indexed, seed=0, spread=0.02, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"layers of the kind 'indexed_attention'.*attention layers only"):
        HuggingFaceModel(model, None, "mixed", backend)


def test_a_decoder_of_an_encoder_decoder_is_refused_as_such() -> None:
    half = BartConfig(
        vocab_size=VOCAB, d_model=48, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
        encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=64, max_position_embeddings=64,
    )  # fmt: skip
    model = BartForCausalLM(half).eval()
    check = check_against_stock(model, "half")
    with pytest.raises(UnsupportedModelError, match=r"half gives other logits.*decoder of an encoder-decoder \(bart\)"):
        check(HuggingFaceModel(model, None, "half"))


@pytest.mark.parametrize("padding", [0, 1])
def test_positions_are_those_that_generation_gives(padding: int) -> None:
    """Not those behind the padding id, from which such a model would count if it were not told."""
    offset = RobertaConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=CONTEXT, pad_token_id=padding, bos_token_id=None, eos_token_id=None, is_decoder=True,
    )  # fmt: skip
    model = build(offset, seed=0)
    expected = [stock_greedy(model, prompt, COUNT) for prompt in PROMPTS]
    check = check_against_stock(model, "offset")
    loaded = HuggingFaceModel(model, None, "offset")
    check(loaded)
    answers = Engine(loaded, "prompt-lookup,min_ngram=1").generate([list(prompt) for prompt in PROMPTS], PARAMS)
    assert [list(answer.token_ids) for answer in answers] == expected
