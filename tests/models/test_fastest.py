"""Which backend a model gets, that a part that no loop knows stays as it is, and whose rows keep their bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedModel

from support.backends import llama_of
from support.codes import logits
from support.rows import assert_rows_are_alike
from support.tiny_models import GROUPED, PROMPTS, VOCAB, build, llama, stock, stock_logits
from truedraft import Engine, SamplingParams
from truedraft.core.tree import chain_shape
from truedraft.drafters import Drafter, DraftModel, PromptLookup
from truedraft.errors import UnsupportedModelError
from truedraft.models.attention import Full, Window
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import Segment
from truedraft.models.huggingface import UP_TO_NEAR_TIES, HuggingFaceModel
from truedraft.models.llama import Llama, Rotation
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import PackedLinear, can_pack
from truedraft.models.probe import check_against_stock

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="this torch has no oneDNN")


TEXT = [5, 9, 11, 3, 60, 2]


def test_what_is_read_of_a_decoder() -> None:
    model = build(MistralConfig(**GROUPED, sliding_window=5), seed=0)
    llama = llama_of(model, [Window(5), Full()])
    assert llama.patterns == (Window(5), Full())
    for layer, pattern in zip(llama.layers, llama.patterns, strict=True):
        assert (layer.heads, layer.kv_heads, layer.head, layer.scaling) == (4, 2, 12, 12**-0.5)
        assert layer.pattern == pattern and layer.activation is torch.nn.functional.silu
    assert llama.uniform and not llama.tied
    assert Llama.of(model, [Full()] * 3) is None, "more attention calls than layers"
    assert llama_of(build(LlamaConfig(**GROUPED, tie_word_embeddings=True), seed=0), [Full()] * 2).tied


def test_the_fastest_that_fits_is_taken() -> None:
    """The native forward wants a compiler and heads of whole vectors, the fused loop a family that it knows."""
    small, large = stock("llama"), build(llama(hidden_size=64, num_attention_heads=2, num_key_value_heads=1), seed=0)
    assert isinstance(HuggingFaceModel(small, None, "small", fastest_backend)._backend, FusedBackend)
    kind = NativeBackend if built(torch.float32).library is not None else FusedBackend
    assert isinstance(HuggingFaceModel(large, None, "large", fastest_backend)._backend, kind)
    plain = HuggingFaceModel(stock("llama"), None, "plain")
    assert isinstance(plain._backend, StockBackend)
    assert plain.fast_paths == ()


PARTS = [
    ("llama", "model.layers.0.mlp.down_proj"),
    ("llama", "model.layers.1.self_attn.v_proj"),
    ("llama", "lm_head"),
    ("llama", "model.embed_tokens"),
    ("llama", "model.norm"),
    ("llama", "model.layers.1.input_layernorm"),
    ("llama", "model.layers.0.mlp by a hook"),
    ("gpt_neox", "gpt_neox.layers.1.mlp.dense_4h_to_h"),
    ("gpt_neox", "gpt_neox.layers.1.mlp.dense_4h_to_h by a hook"),
    ("gemma3", "model.layers.2.mlp.up_proj"),
    ("gemma3", "lm_head"),
]


def with_replaced(family: str, part: str) -> PreTrainedModel:
    """A model in which one module computes something else, as quantised and adapted models have them."""
    model = stock(family)
    module = model.get_submodule(part.removesuffix(" by a hook"))
    kind: Any = type(module)
    if part.endswith("hook"):
        module.register_forward_hook(lambda module, inputs, output: output.flip(-1))
    else:
        module.__class__ = type("Reversed", (kind,), {"forward": lambda self, x: kind.forward(self, x).flip(-1)})
    return model


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_a_model_with_a_replaced_part_answers_as_that_model(family: str, part: str) -> None:
    """It runs through its own modules where the loop does not know all of them; that part is left as it is."""
    expected = stock_logits(with_replaced(family, part), TEXT)
    assert float((stock_logits(stock(family), TEXT) - expected).abs().max()) > 0.1, "the example changes nothing"
    model = with_replaced(family, part)
    module = model.get_submodule(part.removesuffix(" by a hook"))
    loaded = HuggingFaceModel(model, None, part, fastest_backend)
    torch.testing.assert_close(logits(loaded, TEXT), expected, rtol=0, atol=5e-5)
    assert loaded.fast_paths == ("packed weights",)
    assert loaded.module.get_submodule(part.removesuffix(" by a hook")) is module


def test_a_loop_that_computes_something_else_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of `load_model` holds the loop to the model's own forward."""
    turn = Rotation.__call__
    module = stock("llama")
    check = check_against_stock(module, "llama")
    loaded = HuggingFaceModel(module, None, "llama", fastest_backend)
    check(loaded)
    monkeypatch.setattr(Rotation, "__call__", lambda self, heads: turn(self, heads.flip(-1)).flip(-1))
    with pytest.raises(UnsupportedModelError, match="other logits packed than by itself"):
        check(loaded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_dtypes_that_cannot_be_packed_run_by_the_model_itself(family: str, dtype: torch.dtype) -> None:
    model = HuggingFaceModel(stock(family, dtype=dtype), None, family, fastest_backend)
    assert model.fast_paths == ()
    assert isinstance(model._backend, StockBackend)
    expected = stock_logits(stock(family, dtype=dtype), TEXT)
    # Cosines and norms are computed in float32 also in a float64 model.
    close_enough = 2e-5 if dtype == torch.float64 else 0.1 * float(expected.std())
    torch.testing.assert_close(logits(model, TEXT).to(dtype), expected, rtol=0, atol=close_enough)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_cuda_model_is_not_packed(family: str) -> None:
    model = HuggingFaceModel(stock(family).to("cuda"), None, family, fastest_backend)  # type: ignore[arg-type]
    assert "packed weights" not in model.fast_paths
    assert not any(isinstance(module, PackedLinear) for module in model.module.modules())


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
    assert (tied(family).equality, tied(family).note) == ("bit for bit", None)


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
