"""The description of a Llama-like decoder: what is read of which families; `test_loops` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, MistralConfig, PretrainedConfig

from support.backends import llama_of
from support.tiny_models import GROUPED, build, stock
from truedraft.models.attention import Full, Window
from truedraft.models.llama import Llama
from truedraft.models.probe import probe_patterns

SIZES = GROUPED | {"intermediate_size": 40}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied, gelu": LlamaConfig(**SIZES, tie_word_embeddings=True, hidden_act="gelu"),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
}


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
