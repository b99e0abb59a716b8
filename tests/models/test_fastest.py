"""Which backend a model gets, and that a model with a part that no loop knows answers as that model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from support.tiny_models import VOCAB, build, stock, stock_logits
from truedraft.core.tree import chain_shape
from truedraft.errors import UnsupportedModelError
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.llama import Rotation
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import PackedLinear, can_pack
from truedraft.models.probe import check_against_stock

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="this torch has no oneDNN")


TEXT = [5, 9, 11, 3, 60, 2]


def rows_of(model: HuggingFaceModel) -> Tensor:
    """Logits of the text, in one forward."""
    return model.forward([Segment(model.new_cache(), torch.tensor(TEXT), chain_shape(6), range(6))]).logits


def large_llama() -> LlamaConfig:
    """Heads of 32, for the native forward."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        bos_token_id=None,
        eos_token_id=None,
    )


def test_the_fastest_that_fits_is_taken() -> None:
    """The native forward wants a compiler and heads of whole vectors, the fused loop a family that it knows."""
    small, large = stock("llama"), build(large_llama(), seed=0)
    assert isinstance(HuggingFaceModel(small, None, "small", fastest_backend)._backend, FusedBackend)
    kind = NativeBackend if built(torch.float32).library is not None else FusedBackend
    assert isinstance(HuggingFaceModel(large, None, "large", fastest_backend)._backend, kind)
    plain = HuggingFaceModel(stock("llama"), None, "plain")
    assert isinstance(plain._backend, StockBackend)
    assert plain.fast_paths == ()


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "mixtral", "qwen3_moe"])
def test_other_families_are_not_fused(family: str) -> None:
    assert isinstance(HuggingFaceModel(stock(family), None, family, fastest_backend)._backend, StockBackend)


class _LoudLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _LoudEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


def loud_norm(norm: Any) -> nn.Module:
    """A norm of a class of its own, as an adapted model would have it."""

    class Loud(type(norm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    made = Loud(norm.weight.shape[0], norm.variance_epsilon)
    made.load_state_dict(norm.state_dict())
    return made


def with_replaced(part: str) -> PreTrainedModel:
    """A Llama in which one module computes something else, as quantised and adapted models have them."""
    model: Any = stock("llama")
    if part == "hook":
        model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
        return model
    old = model.get_submodule(part)
    if isinstance(old, nn.Linear):
        new: nn.Module = _LoudLinear(old.in_features, old.out_features, bias=False)
        new.load_state_dict(old.state_dict())
    elif isinstance(old, nn.Embedding):
        new = _LoudEmbedding(old.num_embeddings, old.embedding_dim)
        new.load_state_dict(old.state_dict())
    else:
        new = loud_norm(old)
    model.set_submodule(part, new.requires_grad_(False))
    return model


@pytest.mark.parametrize(
    "part",
    [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.v_proj",
        "lm_head",
        "model.embed_tokens",
        "model.norm",
        "model.layers.1.input_layernorm",
        "hook",
    ],
)
def test_a_model_with_a_replaced_part_answers_as_that_model(part: str) -> None:
    """It runs through its own modules where the loop does not know all of them."""
    expected = stock_logits(with_replaced(part), TEXT)
    assert float((stock_logits(stock("llama"), TEXT) - expected).abs().max()) > 0.1, "the example changes nothing"
    model = HuggingFaceModel(with_replaced(part), None, part, fastest_backend)
    torch.testing.assert_close(rows_of(model), expected, rtol=0, atol=5e-5)


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
    torch.testing.assert_close(rows_of(model), expected, rtol=0, atol=close_enough)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_cuda_model_is_not_packed(family: str) -> None:
    model = HuggingFaceModel(stock(family).to("cuda"), None, family, fastest_backend)  # type: ignore[arg-type]
    assert "packed weights" not in model.fast_paths
    assert not any(isinstance(module, PackedLinear) for module in model.module.modules())
