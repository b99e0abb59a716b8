"""What GGUF files say of models: each key is followed, says what holds anyway, or refuses the file by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.gguf import without_weights
from truedraft.models.gguf_config import FAMILIES, ModelKeys, check_positions, read_config

RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
NORM_OF = dict.fromkeys(("falcon", "stablelm", "starcoder2", "bloom", "gpt2", "nemotron"), NORM)
OTHERS: dict[str, dict[str, Any]] = {
    "falcon": {"attention.head_count_kv": 1},
    "lfm2": {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    "mamba": {
        "attention.head_count": 0,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 128,
    },
    "qwen2moe": {"expert_count": 4, "expert_used_count": 2},
    "qwen3moe": {"expert_count": 4, "expert_used_count": 2},
}


def said_by(architecture: str, values: dict[str, Any], *tensors: str) -> ModelKeys:
    """What a file of two layers says, with and without some keys; None leaves one out."""
    said = {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 2,
        "attention.head_count": 4,
        NORM_OF.get(architecture, RMS): 1e-5,
        **OTHERS.get(architecture, {}),
        **values,
    }
    fields = {f"{architecture}.{key}": value for key, value in said.items() if value is not None}
    names = ["token_embd.weight", "position_embd.weight", "blk.0.a", "blk.1.a", *tensors]
    shapes = {name: (128 if "position" in name else 300, 64) for name in names}
    return ModelKeys("file", {"general.architecture": architecture, **fields}, shapes)


def config_of(architecture: str, values: dict[str, Any], *tensors: str) -> PreTrainedConfig:
    said = said_by(architecture, values, *tensors)
    config = read_config(said, 300, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None})
    check_positions(said, without_weights(config, torch.float32))
    return config


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_familys_configuration_is_that_of_its_file(architecture: str) -> None:
    config = config_of(architecture, {})
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 300)
    assert config.tie_word_embeddings and (config.bos_token_id, config.pad_token_id) == (1, None)
    if architecture != "bloom":
        assert not config_of(architecture, {}, "output.weight").tie_word_embeddings
    for key in ("attention.indexer.top_k", "hidden_activation", "attention.key_length_swa", "made.up"):
        with pytest.raises(UnsupportedModelError, match=rf"says {architecture}\.{key} = '1', which truedraft does not"):
            config_of(architecture, {key: 1})


@pytest.mark.parametrize(
    ("architecture", "values", "field", "expected"),
    [
        ("starcoder2", {"rope.freq_base": 999999.0}, "rope_parameters", {"rope_theta": 999999.0}),
        ("stablelm", {"rope.dimension_count": 4}, "rope_parameters", {"partial_rotary_factor": 0.25}),
        ("phi3", {"rope.dimension_count": 12}, "rope_parameters", {"partial_rotary_factor": 0.75}),
        ("nemotron", {"rope.dimension_count": 8}, "rope_parameters", {"partial_rotary_factor": 0.5}),
        ("nemotron", {NORM: 1e-3}, "norm_eps", 1e-3),
        ("falcon", {NORM: 1e-3}, "layer_norm_epsilon", 1e-3),
        ("phi3", {"attention.sliding_window": 99}, "sliding_window", 99),
        ("llama", {"attention.sliding_window": 0}, "num_key_value_heads", 4),
        ("llama", {"attention.key_length": 32, "attention.value_length": 32}, "head_dim", 32),
        ("qwen3", {"attention.key_length": 32}, "head_dim", 32),
        ("qwen3", {}, "head_dim", 16),
        ("llama", {"feed_forward_length": [96, 96]}, "intermediate_size", 96),
        ("gpt2", {"feed_forward_length": 96}, "n_inner", 96),
        ("qwen3moe", {"expert_feed_forward_length": 48}, "moe_intermediate_size", 48),
        ("qwen3moe", {}, "norm_topk_prob", True),
        ("qwen2moe", {"expert_shared_feed_forward_length": 48}, "shared_expert_intermediate_size", 48),
        ("gemma2", {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping", 20.0),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping", None),
        ("gemma2", {}, "layer_types", ["sliding_attention", "full_attention"]),
        ("gemma2", {}, "query_pre_attn_scalar", 16),
        ("gemma3", {"attention.key_length": 32}, "query_pre_attn_scalar", 32),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping", 30.0),
        ("gemma3", {}, "layer_types", ["full_attention"] * 2),
        ("gemma3", {"attention.sliding_window": 9}, "layer_types", ["sliding_attention"] * 2),
        (
            "gemma3",
            {"attention.sliding_window": 9, "attention.sliding_window_pattern": [False, True]},
            "layer_types",
            ["full_attention", "sliding_attention"],
        ),
        ("lfm2", {}, "layer_types", ["conv", "full_attention"]),
        ("mamba", {}, "state_size", 8),
    ],
)
def test_keys_are_followed(architecture: str, values: dict[str, Any], field: str, expected: Any) -> None:
    found = getattr(config_of(architecture, values), field)
    assert expected.items() <= found.items() if isinstance(expected, dict) else found == expected


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "attention.sliding_window", 64),
        ("qwen2", "attention.sliding_window", 64),
        ("llama", "attention.clamp_kqv", 8.0),
        ("llama", "attention.max_alibi_bias", 8.0),
        ("llama", "attention.causal", False),
        ("llama", "attention.scale", 0.5),
        ("llama", "attention.sliding_window_pattern", 4),
        ("llama", "logit_scale", 0.0625),
        ("llama", "residual_scale", 0.22),
        ("llama", "embedding_scale", 12.0),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "expert_count", 8),
        ("llama", "feed_forward_length", [96, 48]),
        ("llama", "nextn_predict_layers", 1),
        ("llama", "use_parallel_residual", True),
        ("llama", NORM, 1e-5),
        ("qwen2moe", "expert_gating_func", 2),
        ("qwen2moe", "expert_weights_scale", 2.5),
        ("qwen2", "rope.dimension_count", 8),
        ("qwen2", "rope.dimension_sections", [8, 4, 4, 0]),
        ("qwen2", "rope.freq_base_swa", 5000.0),
        ("qwen2", "rope.scaling.attn_factor", 1.2),
        ("qwen2", "rope.scaling.alpha", 2.0),
        ("qwen2", "attention.key_length", 32),
        ("phi3", "rope.scaling.factor", 4.0),
        ("gpt2", "attention.head_count_kv", 2),
        ("falcon", "attention.head_count_kv", 2),
        ("mamba", "ssm.dt_b_c_rms", True),
    ],
)
def test_keys_that_are_not_followed_are_named(architecture: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        config_of(architecture, {key: value})
    assert f"says {architecture}.{key} = " in str(raised.value)
    assert str(raised.value).endswith("which truedraft does not follow; get the model as a Hugging Face folder")


@pytest.mark.parametrize("kind", ["yarn", "longrope", "x"])
def test_positions_that_are_stretched_in_other_ways_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"stretches positions \\(rope.scaling of type '{kind}'\\)"):
        config_of("qwen2", {"rope.scaling.type": kind})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 1_000_000_000),
        ("block_count", 3),
        ("block_count", 0),
        ("block_count", "2"),
        ("block_count", [1, 2]),
        ("embedding_length", 10**9),
        ("feed_forward_length", 10**9),
        ("vocab_size", 299),
        ("attention.head_count", 0),
        ("attention.head_count", 256),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 128),
        ("attention.value_length", 8),
        ("attention.head_count", -4),
        ("context_length", 2**40),
        ("context_length", 128.0),
        (RMS, float("nan")),
        (RMS, -1e-5),
        (RMS, 2.0),
        (RMS, "1e-5"),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", float("inf")),
        ("rope.scaling.factor", -2.0),
        ("rope.scaling.factor", 1e-30),
        ("expert_used_count", 2),
    ],
)
def test_numbers_that_no_model_has_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ModelError) as raised:
        config_of("llama", {key: value})
    assert f"says llama.{key} = " in str(raised.value)


@pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count", "attention.head_count", RMS])
def test_what_a_model_needs_is_missed_by_name(key: str) -> None:
    with pytest.raises(ModelError, match=f"does not say 'llama.{key}' of its model"):
        config_of("llama", {key: None})


def test_other_architectures_are_refused() -> None:
    for architecture in ("granite", "gemma4", None, 3):
        with pytest.raises(UnsupportedModelError, match="and truedraft reads GGUF files of llama, qwen2"):
            ModelKeys("file", {"general.architecture": architecture}, {})


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "lfm2"])
@pytest.mark.parametrize(
    ("values", "stretched"),
    [
        ({}, 1.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, 1.0),
    ],
)
def test_positions_are_stretched_as_a_file_says(architecture: str, values: dict[str, Any], stretched: float) -> None:
    """Of Gemma 3, those of layers that read all of a text alone."""
    window = {"attention.sliding_window": 9, "attention.sliding_window_pattern": 2} if architecture == "gemma3" else {}
    model = without_weights(config_of(architecture, values | window), torch.float32)
    found = {name: each for name, each in model.named_buffers() if name.endswith("inv_freq") and "original" not in name}
    assert len(found) == (2 if architecture == "gemma3" else 1)
    for name, frequencies in found.items():
        divided = 1.0 if "sliding" in name else stretched
        torch.testing.assert_close(frequencies, 10000.0 ** (-torch.arange(0, 16, 2) / 16) / divided)
