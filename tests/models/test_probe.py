"""What the probe reads from a model at load, what it refuses, and what the self-test catches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    Llama4TextConfig,
    LlamaConfig,
    LlamaModel,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
)

from support import tiny_models
from support.rare_families import lfm2
from support.tiny_models import FAMILIES, WINDOW, build, stock
from truedraft.core.tree import TreeShape
from truedraft.errors import UnsupportedModelError
from truedraft.models import HuggingFaceModel, attention, probe
from truedraft.models.attention import (
    AttentionPattern,
    Chunk,
    ForwardPlan,
    Full,
    SegmentLayout,
    TreeLayout,
    Window,
    layout_of,
)
from truedraft.models.cache import RequestCache
from truedraft.models.probe import check_against_stock, probe_patterns

SMALL: dict[str, Any] = tiny_models.SMALL | {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("family", "patterns"),
    [
        ("llama", [Full(), Full()]),
        ("gpt2", [Full(), Full()]),
        ("mixtral", [Full(), Full()]),
        ("mistral", [Window(WINDOW), Window(WINDOW)]),
        ("gemma3", [Window(WINDOW), Full(), Window(WINDOW)]),
    ],
)
def test_patterns_in_order_of_the_calls(family: str, patterns: list[AttentionPattern]) -> None:
    model = stock(family)
    assert probe_patterns(model) == patterns
    assert model.config._attn_implementation == "eager", "the probe puts the model's attention back"


def test_chunks() -> None:
    config = Llama4TextConfig(
        **SMALL, num_key_value_heads=1, intermediate_size_mlp=32, num_local_experts=2, head_dim=16,
        attention_chunk_size=6, no_rope_layers=[1, 0], attn_temperature_tuning=False,
    )  # fmt: skip
    assert probe_patterns(build(config, seed=0)) == [Chunk(6), Full()]


def test_a_window_on_some_layers_only() -> None:
    config = Qwen2Config(**SMALL, num_key_value_heads=1, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    assert probe_patterns(build(config, seed=0)) == [Full(), Window(5)]


@pytest.mark.parametrize(
    ("pattern", "query", "keys"),
    [
        (Full(), 7, range(8)),
        (Window(3), 7, [5, 6, 7]),
        (Window(3), 1, [0, 1]),
        (Chunk(3), 7, [6, 7]),
        (Chunk(3), 8, [6, 7, 8]),
        (Chunk(3), 9, [9]),
    ],
)
def test_what_a_pattern_allows(pattern: AttentionPattern, query: int, keys: list[int]) -> None:
    """Among the positions up to the query's own; those behind it are never ancestors."""
    first = max(0, pattern.first(query))
    assert list(range(first, query + 1)) == list(keys)
    assert pattern.first(torch.tensor([query])).clamp(min=0).tolist() == [first]
    assert pattern.reaches(query + 1) == (first == 0)


def test_an_encoder_is_refused() -> None:
    """The same layers with a causal mask, as in BertLMHeadModel with is_decoder, are a language model."""
    with pytest.raises(UnsupportedModelError, match="encoder, not a causal"):
        HuggingFaceModel(BertForMaskedLM(BertConfig(**SMALL)).eval(), None, "bert")
    assert probe_patterns(BertLMHeadModel(BertConfig(**SMALL, is_decoder=True)).eval()) == [Full(), Full()]


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no LM head"):
        HuggingFaceModel(LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=1)), None, "headless")


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}
ROPES: dict[str, PretrainedConfig] = {
    "dynamic": LlamaConfig(
        **SMALL, num_key_value_heads=1, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "longrope": Phi3Config(
        **SMALL, num_key_value_heads=1, original_max_position_embeddings=64, max_position_embeddings=128,
        rope_parameters={**LONG, "original_max_position_embeddings": 64},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_positions_end_where_they_would_depend_on_the_neighbours(kind: str) -> None:
    model = HuggingFaceModel(build(ROPES[kind], seed=0), None, "far")
    config = ROPES[kind]
    assert model.context_length == (64 if kind == "longrope" else config.max_position_embeddings)
    assert ("reads at most 64 tokens of its 128" in (model.note or "")) == (kind == "longrope")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), ("llama", torch.bfloat16), ("llama", torch.float16)],
)
def test_the_self_test_passes_in_any_precision_and_gives_its_cache_back(family: str, dtype: torch.dtype) -> None:
    model = stock(family, dtype=dtype)
    check = check_against_stock(model, family)
    loaded = HuggingFaceModel(model, None, family)
    check(loaded)
    assert loaded.pool.in_use == 0


def _shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    make = ForwardPlan.of

    def shifted(*arguments: Any) -> ForwardPlan:
        plan = make(*arguments)
        plan.positions[0, -1] += 1
        return plan

    monkeypatch.setattr(ForwardPlan, "of", shifted)


def _leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(shape: TreeShape, *rest: Any) -> SegmentLayout:
        made = layout_of(shape, *rest)
        if isinstance(made, TreeLayout):
            made.blocked.mask.fill_(False)
        return made

    monkeypatch.setattr(attention, "layout_of", leaky)


def _narrow(monkeypatch: pytest.MonkeyPatch, window: int = 3) -> None:
    monkeypatch.setattr("truedraft.models.backends.stock.probe_patterns", lambda model: [Window(window)] * 2)


def _lose_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    write = RequestCache.write

    def forgetful(self: RequestCache, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys = keys.clone()
        keys[:, 0] = 0.0
        return write(self, call, keys, values)

    monkeypatch.setattr(RequestCache, "write", forgetful)


@pytest.mark.parametrize("plant", [_shift_positions, _leak, _narrow, _lose_a_key])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_catches_a_planted_fault(plant: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock("llama", dtype=dtype)
    check = check_against_stock(model, "planted")
    plant(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="planted gives other logits packed than by itself"):
        check(HuggingFaceModel(model, None, "planted"))


@pytest.mark.parametrize("plant", [_shift_positions, _leak, partial(_narrow, window=7), _lose_a_key])
def test_a_fault_among_weak_weights_is_caught_in_bfloat16(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights this small attention does little, yet more than rounding; smaller still, two of these do less. Of
    the narrower window, the last row of eight no longer sees the first."""
    model = build(FAMILIES["llama"].config(), seed=0, spread=0.1, dtype=torch.bfloat16)
    check = check_against_stock(model, "planted")
    check(HuggingFaceModel(model, None, "planted"))
    plant(monkeypatch)
    model = build(FAMILIES["llama"].config(), seed=0, spread=0.1, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="rounding explains"):
        check(HuggingFaceModel(model, None, "planted"))


def _take_for_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that carry states are taken for something that nobody knows."""
    monkeypatch.setattr(probe, "_refuse_other_layers", lambda *_: None)
    monkeypatch.setattr(probe, "carrying_modules", lambda *_: [])
    monkeypatch.setattr("truedraft.models.backends.stock.carrying_modules", lambda *_: [])


def test_a_lost_convolution_is_caught_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparison of logits alone, where the two checks before it are passed over."""
    _take_for_unknown(monkeypatch)
    mixes = probe._mixes_without_attention
    monkeypatch.setattr(probe, "_mixes_without_attention", lambda model: mixes(model) and False)
    model = build(lfm2("conv", "full_attention"), seed=0, spread=0.1, dtype=torch.bfloat16)
    check = check_against_stock(model, "planted")
    with pytest.raises(UnsupportedModelError, match="rounding explains"):
        check(HuggingFaceModel(model, None, "planted"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.002, 0.3])
def test_a_convolution_is_found_whatever_it_is_called_and_however_small(
    spread: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _take_for_unknown(monkeypatch)
    model = build(lfm2("conv", "full_attention"), seed=0, spread=spread, dtype=dtype)
    with pytest.raises(UnsupportedModelError, match=r"outside its attention \(in Lfm2ShortConv\)"):
        probe_patterns(model)


def test_a_model_made_in_inference_mode_can_be_probed() -> None:
    with torch.inference_mode():
        model = stock("llama")
        assert next(model.parameters()).is_inference()
        assert probe_patterns(model) == [Full(), Full()]
