"""Which backend a model gets, and that a model with a part that no loop knows answers as that model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from support.codes import logits
from support.tiny_models import build, llama, stock, stock_logits
from truedraft.errors import UnsupportedModelError
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.llama import Rotation
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import PackedLinear, can_pack
from truedraft.models.probe import check_against_stock

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="this torch has no oneDNN")


TEXT = [5, 9, 11, 3, 60, 2]


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
