"""Small random checkpoints that bring an MTP layer along, in several families' shapes, and slow drafts by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from support.tiny_models import CONTEXT, GROUPED, VOCAB, build

WEIGHTS = "model.safetensors"
_COMMON: dict[str, Any] = GROUPED | {"max_position_embeddings": CONTEXT}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR: dict[str, Any] = {
    "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_GROUPS: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """How checkpoints of a family bring the layer along."""

    config: Callable[[int, int], PretrainedConfig]  # of so many layers, the first given of the family's other kind
    parts: tuple[str, str, str, str]  # fusion, the norms of embedding and vector, and the last norm
    prefix: str  # of all of its tensors
    layer: str = ""  # of the decoder layer, behind that
    offset: float = 0.0  # what norms add to their weights
    zeroes_first: bool = False  # whether the first embedding is left out


_QWEN = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_NUMBERED = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
SPECULATORS = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")


def _sized(count: int) -> dict[str, Any]:
    return _COMMON | {"num_hidden_layers": count}


def _types(count: int, others: int) -> list[str]:
    return ["linear_attention"] * others + ["full_attention"] * (count - others)


SHAPES = {
    "qwen3": Shape(lambda count, _: Qwen3Config(**_sized(count), head_dim=16), _QWEN, "mtp.", "layers.0."),
    "qwen3_next": Shape(
        lambda count, others: Qwen3NextConfig(
            **_sized(count), **_EXPERTS, **_LINEAR, num_experts=4, shared_expert_intermediate_size=32,
            layer_types=_types(count, others),
        ),
        _QWEN, "mtp.", "layers.0.", offset=1.0,
    ),
    "qwen3_5": Shape(
        lambda count, others: Qwen3_5TextConfig(**_sized(count), **_LINEAR, layer_types=_types(count, others)),
        _QWEN, "mtp.", "layers.0.", offset=1.0,
    ),
    "glm4_moe": Shape(
        lambda count, others: Glm4MoeConfig(
            **_sized(count), **_EXPERTS, **_GROUPS, head_dim=16, first_k_dense_replace=others
        ),
        _NUMBERED, "model.layers.2.", zeroes_first=True,
    ),
    "deepseek_v3": Shape(
        lambda count, others: DeepseekV3Config(
            **_sized(count) | _LATENT, **_EXPERTS, **_GROUPS, first_k_dense_replace=others
        ),
        _NUMBERED, "model.layers.2.", zeroes_first=True,
    ),
}  # fmt: skip


class MtpReference:
    """Drafts by the page: no cache, no packing; the layer's own family by transformers, all else by hand."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.model = build(shape.config(2, 1), 1, 0.2)
        self.one = build(shape.config(1, 0), 51, 0.2)
        generator = torch.Generator().manual_seed(1)
        self.fusion = torch.randn(48, 96, generator=generator) * 0.2
        self.of_embedding, self.of_vector = (torch.rand(48, generator=generator) for _ in range(2))

    def tensors(self, folder: Path, prefix: str, parts: Sequence[str], layer: str = "") -> dict[str, Tensor]:
        """The layer's tensors by the names of a format; the folder is used on the way."""
        self.one.save_pretrained(folder)
        fusion, embedding, vector, final = parts
        named = {fusion: self.fusion, embedding: self.of_embedding, vector: self.of_vector}
        found = {f"{prefix}{part}.weight": tensor for part, tensor in named.items()}
        for name, tensor in load_file(folder / WEIGHTS).items():
            if name.startswith("model.layers.0."):
                found[prefix + layer + name.removeprefix("model.layers.0.")] = tensor
            elif name == "model.norm.weight":
                found[f"{prefix}{final}.weight"] = tensor
        return found

    def write(self, folder: Path, more: Mapping[str, Tensor | None] | None = None) -> Path:
        """The checkpoint, with other tensors, or without those that are None."""
        shape = self.shape
        self.model.save_pretrained(folder)
        whole = load_file(folder / WEIGHTS) | self.tensors(folder / "one", shape.prefix, shape.parts, shape.layer)
        if shape.zeroes_first:
            whole[f"{shape.prefix}embed_tokens.weight"] = torch.zeros(VOCAB, 48)
            whole[f"{shape.prefix}shared_head.head.weight"] = torch.zeros(VOCAB, 48)
        whole |= more or {}
        kept = {name: tensor.contiguous() for name, tensor in whole.items() if tensor is not None}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
        return folder

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.one.config.rms_norm_eps
        return x / math.sqrt(float((x * x).mean()) + eps) * (self.shape.offset + weight)

    def shown(self, model: PreTrainedModel, **given: Tensor) -> dict[str, Tensor]:
        """The vectors before and behind a model's final norm, `[tokens, width]`."""
        seen: list[Tensor] = []
        handle = model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        behind = model.model(**given, use_cache=False).last_hidden_state
        handle.remove()
        return {"before": seen[0][0], "behind": behind[0]}

    def logits(self, text: Sequence[int], path: Sequence[int], reads: str, returns: str) -> Tensor:
        """Behind a text and drafted tokens."""
        known = len(text) - 1
        vectors = list(self.shown(self.model, input_ids=torch.tensor([text[:known]]))[reads])
        table, entering = self.model.get_input_embeddings().weight, []
        for place, token in enumerate([*text[1:], *path]):
            if place >= known:  # what stood in for the target's vector there
                vectors.append(self.shown(self.one, inputs_embeds=torch.stack(entering)[None])[returns][-1])
            embedded = table[token] * (0.0 if self.shape.zeroes_first and place == 0 else 1.0)
            both = torch.cat([self.norm(embedded, self.of_embedding), self.norm(vectors[place], self.of_vector)])
            entering.append(self.fusion @ both)
        last = self.shown(self.one, inputs_embeds=torch.stack(entering)[None])["behind"][-1]
        return self.model.get_output_embeddings().weight @ last
