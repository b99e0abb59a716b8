"""The LM head alone gives the logits that came with its vectors, in every backend, or says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from support.backends import fused_backend, graph_backend, native_backend
from support.tiny_models import CONTEXT, FAMILIES, GROUPED, SMALL, VOCAB, build, stock
from truedraft.core.top_k import stable_topk
from truedraft.core.tree import chain_shape
from truedraft.errors import UnsupportedModelError
from truedraft.models import ForwardOutput, HuggingFaceModel, LanguageModel, LmHead, Segment, pad_model
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.lm_head import LogitFinish
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import can_pack
from truedraft.models.padding import PaddedSize
from truedraft.testing import MarkovModel

GATED = GROUPED | {"intermediate_size": 96, "max_position_embeddings": CONTEXT}
FINISHED: dict[str, PretrainedConfig] = {
    "softly capped": Gemma2Config(**GATED, head_dim=16, final_logit_softcapping=5.0, tie_word_embeddings=False),
    "scaled": CohereConfig(**GATED, logit_scale=0.3),
    "divided": GraniteConfig(**GATED, logits_scaling=7.0),
    "biased": PhiConfig(**SMALL, intermediate_size=96, max_position_embeddings=CONTEXT),
}
WIDE = LlamaConfig(**GATED | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1})
"""Sizes that the native forward takes where it can be compiled; 97 ids fill no whole unit."""

PACKS = can_pack(torch.device("cpu"), torch.bfloat16)
NATIVE = built(torch.bfloat16).library is not None
BACKENDS: list[Any] = [
    pytest.param(StockBackend, id="stock"),
    pytest.param(graph_backend, id="graph"),
    pytest.param(fused_backend, id="fused", marks=pytest.mark.skipif(not PACKS, reason="this machine cannot pack")),
    pytest.param(native_backend, id="native", marks=pytest.mark.skipif(not NATIVE, reason="it cannot be compiled")),
]


def run(model: LanguageModel) -> ForwardOutput:
    cache = model.new_cache()
    ids = torch.arange(11) * 7 % model.vocab_size
    output = model.forward([Segment(cache, ids, chain_shape(11), range(11))])
    model.release_cache(cache)
    return output


def assert_head_gives_the_logits(model: LanguageModel, exactly: bool = False) -> None:
    output = run(model)
    made = model.unembed(output.hidden[:, : model.head_width])
    assert made.shape == output.logits.shape
    tolerance = 0.0 if exactly else 2e-2 if model.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(made, output.logits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    assert_head_gives_the_logits(HuggingFaceModel(stock(family), None, family))
    assert_head_gives_the_logits(HuggingFaceModel(stock(family), None, family, fastest_backend))


@pytest.mark.parametrize("kind", FINISHED)
def test_scales_caps_and_biases(kind: str) -> None:
    model = build(FINISHED[kind], seed=1)
    head = LmHead.of(model)
    ours = HuggingFaceModel(model, None, kind)
    assert_head_gives_the_logits(ours)
    output = run(ours)
    torch.testing.assert_close(head(output.hidden), output.logits, rtol=1e-5, atol=1e-5)
    plain = LogitFinish(1.0, None)
    assert (head.finish == plain) == (kind == "biased")
    product = output.hidden @ head.weight.T
    if head.finish != plain:
        torch.testing.assert_close(ours.finish_logits(product), output.logits, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(product, output.logits, atol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bodies_rank_alike_and_each_row_for_itself(backend: BackendMaker, dtype: torch.dtype) -> None:
    model = HuggingFaceModel(build(WIDE, seed=3, dtype=dtype), None, "wide", backend)
    assert_head_gives_the_logits(model, exactly=backend is native_backend)
    vectors = run(model).hidden
    logits = model.unembed(vectors)
    assert model.likeliest(vectors, 10).ids.equal(stable_topk(logits, 10))
    assert model.likeliest(vectors, VOCAB).ids.equal(stable_topk(logits, VOCAB))
    if dtype is torch.bfloat16 and backend is not graph_backend:
        for row in range(len(vectors)):
            assert model.unembed(vectors[row : row + 1]).equal(logits[row : row + 1])


def pad_small(model: PreTrainedModel) -> PreTrainedModel:
    return pad_model(model, PaddedSize("0.2M", layers=3, width=256, inner=384))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_padded_model_reads_only_what_is_not_zero(backend: BackendMaker) -> None:
    own = HuggingFaceModel(build(WIDE, seed=3), None, "own")
    padded = HuggingFaceModel(pad_small(build(WIDE, seed=3)), None, "padded", backend)
    assert (padded.head_width, own.head_width) == (64, 64)
    output = run(padded)
    assert output.hidden.shape[1] == 256
    assert not output.hidden[:, 64:].any()
    assert_head_gives_the_logits(padded)
    vectors = run(own).hidden
    torch.testing.assert_close(padded.unembed(vectors), own.unembed(vectors), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vectors, output.hidden[:, :64], rtol=1e-4, atol=1e-4)


def test_ids_that_do_not_exist_are_never_ranked() -> None:
    for backend in (StockBackend, fastest_backend):
        model = HuggingFaceModel(build(WIDE, seed=3), None, "cut", backend)
        model.vocab_size = 70
        vectors = run(model).hidden
        assert model.unembed(vectors).shape[1] == 70
        assert int(model.likeliest(vectors, 70).ids.max()) == 69


def test_many_rows_and_two_threads() -> None:
    model = HuggingFaceModel(build(WIDE, seed=3), None, "wide", fastest_backend)
    vectors = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    one = model.unembed(vectors)
    torch.set_num_threads(2)
    try:
        two, made = model.unembed(vectors), model.likeliest(vectors, 5)
    finally:
        torch.set_num_threads(1)
    assert two.equal(one)
    assert made.ids.equal(stable_topk(one, 5))
    expected = one.float().log_softmax(dim=-1).gather(-1, made.ids)
    torch.testing.assert_close(made.log_probs, expected, rtol=1e-5, atol=1e-5)


def test_log_probabilities_know_the_logits_factor() -> None:
    config = GraniteConfig(**GATED | {"vocab_size": 213}, logits_scaling=0.25)
    for backend in (StockBackend, fastest_backend):
        model = HuggingFaceModel(build(config, seed=3), None, "scaled", backend)
        vectors = run(model).hidden
        made = model.likeliest(vectors, 213)
        expected = model.unembed(vectors).log_softmax(dim=-1).gather(-1, made.ids)
        torch.testing.assert_close(made.log_probs, expected, rtol=1e-4, atol=1e-4)
        assert float(made.log_probs.exp().sum(dim=-1).sub(1).abs().max()) < 1e-5


class _More:
    """Does more to its logits than any configuration says."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.forward = model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


def test_a_family_that_does_more_is_refused() -> None:
    model = build(WIDE, seed=3)
    model.forward = _More(model)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="not what its LM head makes"):
        LmHead.of(model)
    ours = HuggingFaceModel(model, None, "more")
    for ask in (lambda: ours.unembed(torch.zeros(1, 64)), lambda: ours.likeliest(torch.zeros(1, 64), 1)):
        with pytest.raises(UnsupportedModelError, match="logits of more are not what its LM head makes"):
            ask()


def test_a_packed_head_cannot_be_trained_through() -> None:
    model = build(WIDE, seed=3)
    HuggingFaceModel(model, None, "packed", fused_backend)
    with pytest.raises(UnsupportedModelError, match="packed for inference"):
        LmHead.of(model)


def test_gradients_pass_through_the_vectors_and_leave_the_weights() -> None:
    model = build(FINISHED["softly capped"], seed=1)
    head = LmHead.of(model)
    vectors = torch.randn(3, 48, requires_grad=True)
    head(vectors).sum().backward()
    gradient: Tensor | None = vectors.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
    assert not head.weight.requires_grad
    assert head.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert not model.training


def test_a_model_without_a_head_says_so() -> None:
    model = MarkovModel.random(4, seed=1)
    assert model.head_width == 0
    for ask in (lambda: model.unembed(torch.zeros(1, 4)), lambda: model.likeliest(torch.zeros(1, 4), 1)):
        with pytest.raises(UnsupportedModelError, match="no LM head"):
            ask()
    with pytest.raises(UnsupportedModelError, match="no weights"):
        _ = model.fingerprint
    assert model.shared_heads([]) is None
