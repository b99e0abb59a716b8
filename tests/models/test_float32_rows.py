"""In float32 a row's bits hold where all weights are packed; where they do not, the model says so in every report."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from support.rows import assert_rows_are_alike
from support.tiny_models import PROMPTS, VOCAB, stock
from truedraft import Engine, SamplingParams
from truedraft.core.tree import chain_shape
from truedraft.drafters import Drafter, DraftModel, PromptLookup
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import Segment
from truedraft.models.huggingface import UP_TO_NEAR_TIES, HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import can_pack

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="this torch has no oneDNN")

FAMILIES = ("gpt_neox", "gemma3", "llama")


@cache
def tied(family: str, noise: float = 0.0) -> HuggingFaceModel:
    """Each id's row of the LM head stands there twice, so all logits tie with another; in float32."""
    module = stock(family)
    head = module.get_output_embeddings().weight
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        head[VOCAB // 2 : VOCAB // 2 * 2] = head[: VOCAB // 2].clone()
        for weight in module.parameters():
            weight += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return HuggingFaceModel(module, None, family, fastest_backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_same_bits_whatever_shares_a_forward(family: str) -> None:
    assert_rows_are_alike(tied(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_changes_no_token_though_all_logits_are_tied(family: str) -> None:
    drafters: list[Drafter] = [
        PromptLookup(num_speculative_tokens=5, max_ngram=3, min_ngram=1),
        DraftModel(tied(family, 0.03), num_speculative_tokens=4),
        DraftModel(tied(family, 0.03), branching=(3, 2, 1)),
    ]
    prompts, params = [list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=32)
    plain = [answer.token_ids for answer in Engine(tied(family)).generate(prompts, params)]
    for drafter in drafters:
        answers = Engine(tied(family), drafter, controller="fixed").generate(prompts, params)
        assert [answer.token_ids for answer in answers] == plain
        assert sum(answer.stats.accepted_tokens for answer in answers) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_paths_promise_equality_bit_for_bit(family: str) -> None:
    assert (tied(family).equality, tied(family).note) == ("bit for bit", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stock_modules_promise_what_their_rows_keep(family: str) -> None:
    """Their products in float32 take a single row another way on most processors; then every report says so."""
    model = HuggingFaceModel(stock(family), None, family, StockBackend)
    ids = torch.arange(8)
    logits = []
    for count in (8, 1):
        cache = model.new_cache()
        logits.append(model.forward([Segment(cache, ids[:count], chain_shape(count), (0,))]).logits.clone())
        model.release_cache(cache)
    if not logits[0].equal(logits[1]):
        assert model.equality == UP_TO_NEAR_TIES
    assert (model.note is not None and "nearly tie" in model.note) == (model.equality == UP_TO_NEAR_TIES)
