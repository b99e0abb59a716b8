"""The description of a Llama-like decoder: what is read of which families, and that layers run as the model does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from support.backends import llama_of
from support.tiny_models import GROUPED, VOCAB, build, stock, stock_logits
from truedraft.models.attention import AttentionPattern, Full, Window
from truedraft.models.llama import Linears, Llama
from truedraft.models.probe import probe_patterns

SIZES = GROUPED | {"intermediate_size": 40}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, tied, gelu": LlamaConfig(**SIZES, tie_word_embeddings=True, hidden_act="gelu"),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
TEXT = torch.arange(12) * 7919 % VOCAB


class Product:
    """The loaded linear layers themselves, one after the other."""

    def __init__(self, layers: Linears) -> None:
        self._layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self._layers], -1)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)


def attend(pattern: AttentionPattern, scaling: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A whole text at once, without a cache."""
    position = torch.arange(len(query))
    seen = (position >= pattern.first(position)[:, None]) & (position <= position[:, None])
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_layers_run_as_the_model_does(name: str) -> None:
    """By the description alone; the model's own forward is on the other side."""
    model = build(CONFIGS[name], seed=0)
    llama = llama_of(model)
    rotation = llama.rotaries[0].at(torch.arange(len(TEXT)))
    x = embedding(TEXT, llama.embedding)
    for layer in llama.layers:
        x = layer.with_products(Product).run(x, rotation, partial(attend, layer.pattern, layer.scaling))
    expected = stock_logits(model, TEXT.tolist())
    torch.testing.assert_close(llama.lm_head(llama.norm(x)), expected, rtol=0, atol=1e-4 * float(expected.std()))


def test_what_is_read() -> None:
    model = build(CONFIGS["mistral"], seed=0)
    llama = llama_of(model, [Window(5), Full()])
    assert llama.patterns == (Window(5), Full())
    assert [layer.pattern for layer in llama.layers] == [Window(5), Full()]
    assert {(layer.heads, layer.kv_heads, layer.head, layer.scaling) for layer in llama.layers} == {
        (4, 2, 12, 12**-0.5)
    }
    assert llama.layers[0].activation is nn.functional.silu
    assert llama.uniform
    assert not llama.tied
    assert llama_of(build(CONFIGS["llama, tied, gelu"], seed=0), [Full()] * 2).tied


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_other_families_are_not_described(family: str) -> None:
    model = stock(family)
    assert Llama.of(model, probe_patterns(model)) is None


@pytest.mark.parametrize("part", ["self_attn", "mlp", "input_layernorm", "down_proj"])
def test_parts_that_are_not_the_familys_own_are_not_described(part: str) -> None:
    """A part that was replaced, or is watched, may compute something else."""
    model: Any = build(CONFIGS["llama"], seed=0)
    layer = model.model.layers[1]
    (layer.mlp if part == "down_proj" else layer).get_submodule(part).register_forward_hook(lambda *_: None)
    assert Llama.of(model, [Full()] * 2) is None
    assert Llama.of(build(CONFIGS["llama"], seed=0), [Full()] * 3) is None, "more attention calls than layers"


@pytest.mark.parametrize("change", ["dtype", "size"])
def test_layers_that_differ_are_not_uniform(change: str) -> None:
    model: Any = build(CONFIGS["llama"], seed=0)
    if change == "dtype":
        model.model.layers[1].input_layernorm.to(torch.bfloat16)
    else:
        model.model.layers[1].mlp.gate_proj = nn.Linear(48, 96, bias=False)
    assert not llama_of(model, [Full()] * 2).uniform
