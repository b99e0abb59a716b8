"""Small configurations of families that ask something unusual of a packed forward, and the reason for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig

from support import tiny_models
from support.tiny_models import CONTEXT, VOCAB, WINDOW

SMALL: dict[str, Any] = tiny_models.SMALL | {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "intermediate_size": 64, "num_local_experts": 4}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8}
_ALTERNATING = ["sliding_attention", "full_attention"]
_GEMMA: dict[str, Any] = SMALL | {
    "num_hidden_layers": 4, "intermediate_size": 64, "head_dim": 16, "global_head_dim": 16, "sliding_window": WINDOW,
    "layer_types": _ALTERNATING * 2,
    "tie_word_embeddings": False,  # tied, a wide random model repeats its last token for ever
}  # fmt: skip


def config(name: str, **sizes: Any) -> PretrainedConfig:
    """A configuration by the name of its class; skips the test where this transformers does not have it."""
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    made: PretrainedConfig = kind(**sizes)
    return made


def jetmoe() -> PretrainedConfig:
    """Takes views of what attention gives; its heads are as many as its key heads times its experts."""
    left_out = ("num_attention_heads",)
    sizes = {name: value for name, value in SMALL.items() if name not in left_out}
    return config("JetMoeConfig", **sizes, **_EXPERTS, kv_channels=16)


def afmoe() -> PretrainedConfig:
    """Takes views of what attention gives, and gates it."""
    sizes = SMALL | {"intermediate_size": 64, "head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATING}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1}
    return config("AfmoeConfig", **sizes, **experts, num_dense_layers=1)


def hunyuan_v1_moe() -> PretrainedConfig:
    """Its router reads the dtype of a linear layer's weight."""
    sizes = SMALL | {"intermediate_size": 64, "head_dim": 16}
    return config("HunYuanMoEV1Config", **sizes, num_experts=4, moe_topk=2)


def longcat_flash() -> PretrainedConfig:
    """Its router multiplies by a linear layer's weight without calling the layer."""
    left_out = ("num_key_value_heads", "num_hidden_layers")
    sizes = {name: value for name, value in SMALL.items() if name not in left_out}
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32}
    return config("LongcatFlashConfig", **sizes, **ranks, **experts, num_layers=1, ffn_hidden_size=64, head_dim=8)


def gemma4_text() -> PretrainedConfig:
    """Its last layers use keys and values of earlier ones."""
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    return config("Gemma4TextConfig", **_GEMMA, **inputs, num_kv_shared_layers=2)


def gemma4_unified() -> PretrainedConfig:
    """Its masks look up which image a token is a part of."""
    text = _GEMMA | {"pad_token_id": 0, "use_bidirectional_attention": "vision"}
    return config(
        "Gemma4UnifiedConfig", text_config=text, vision_config=None, audio_config=None, tie_word_embeddings=False
    )


def granitemoehybrid(*kinds: str) -> PretrainedConfig:
    """Its class may hold recurrent layers; whether it does is said by its configuration."""
    sizes = (
        SMALL | _EXPERTS | {"shared_intermediate_size": 32, "layer_types": list(kinds), "tie_word_embeddings": False}
    )
    return config("GraniteMoeHybridConfig", **sizes, **_MAMBA)


def lfm2(*kinds: str, **others: Any) -> PretrainedConfig:
    """Layers of attention and layers of short convolutions."""
    return config("Lfm2Config", **SMALL | others, intermediate_size=64, layer_types=list(kinds))


RARE: dict[str, Callable[[], PretrainedConfig]] = {
    "afmoe": afmoe,
    "jetmoe": jetmoe,
    "hunyuan_v1_moe": hunyuan_v1_moe,
    "longcat_flash": longcat_flash,
    "gemma4_text with shared keys": gemma4_text,
    "gemma4_unified": gemma4_unified,
    "granitemoehybrid of attention": lambda: granitemoehybrid("attention", "attention"),
    "lfm2 of attention": lambda: lfm2("full_attention", "full_attention"),
}
