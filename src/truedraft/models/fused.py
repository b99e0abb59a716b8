"""One loop over the layers of Llama-like decoders, from the loaded model's own weights.

A small model costs more in the host's work between products than in the products (docs/performance.md), so products
of one input are fused, the residual is added inside the product, rotary positions come from a table, and no module
is called on the way. The result is the model's own up to rounding, which the check at load holds it to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from truedraft.models.attention import attend_packed
from truedraft.models.bodies import Body
from truedraft.models.layouts import Attending
from truedraft.models.norm import RootMeanSquareNorm
from truedraft.models.packed_linear import PackedLinear, can_pack, fuse, is_plain
from truedraft.models.patterns import AttentionPattern
from truedraft.models.plan import ForwardPlan
from truedraft.models.rotary import RotaryTable, Rotation

# Classes whose layers are: norm, attention over rotated heads, residual, norm, gated MLP, residual; and whose logits
# are the LM head's.
_KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer."""

    before_attention: RootMeanSquareNorm
    qkv: PackedLinear
    query_norm: RootMeanSquareNorm | None
    key_norm: RootMeanSquareNorm | None
    out: PackedLinear
    before_mlp: RootMeanSquareNorm
    gate_up: PackedLinear
    down: PackedLinear
    activation: Callable[[Tensor], Tensor]
    heads: int
    kv_heads: int
    how: Attending
    pattern: AttentionPattern

    @classmethod
    def of(cls, layer: Any, pattern: AttentionPattern) -> _Layer:
        """From a loaded layer, whose linear weights are freed."""
        attention, mlp = layer.self_attn, layer.mlp
        head = attention.head_dim
        heads, kv_heads = attention.q_proj.out_features // head, attention.k_proj.out_features // head
        normed = hasattr(attention, "q_norm")
        return cls(
            before_attention=RootMeanSquareNorm.of(layer.input_layernorm),
            qkv=fuse([attention.q_proj, attention.k_proj, attention.v_proj]),
            query_norm=RootMeanSquareNorm.of(attention.q_norm) if normed else None,
            key_norm=RootMeanSquareNorm.of(attention.k_norm) if normed else None,
            out=fuse([attention.o_proj]),
            before_mlp=RootMeanSquareNorm.of(layer.post_attention_layernorm),
            gate_up=fuse([mlp.gate_proj, mlp.up_proj]),
            down=fuse([mlp.down_proj]),
            activation=nn.functional.silu if is_silu(mlp.act_fn) else mlp.act_fn,
            heads=heads,
            kv_heads=kv_heads,
            how=Attending(attention.scaling),
            pattern=pattern,
        )

    def run(self, x: Tensor, rotation: Rotation, plan: ForwardPlan, number: int) -> Tensor:
        """`[total, width]` to the same."""
        total, turned = x.shape[0], self.heads + self.kv_heads
        heads = self.qkv(self.before_attention(x)).view(total, turned + self.kv_heads, -1)
        query_key = heads[:, :turned]
        if self.query_norm is not None and self.key_norm is not None:
            query_key = torch.cat(
                [self.query_norm(heads[:, : self.heads]), self.key_norm(heads[:, self.heads : turned])], 1
            )
        query_key = rotation(query_key).transpose(0, 1)
        value = heads[:, turned:].transpose(0, 1)
        query, key = query_key[: self.heads], query_key[self.heads :]
        mixed = attend_packed(query, key, value, plan, number, self.pattern, self.how)
        x = self.out.plus(mixed.reshape(total, -1), x)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return self.down.plus(self.activation(gate).mul_(up), x)


class FusedBody(Body):
    """Runs the layers of a known family in one loop; see the module's docstring.

    Args:
        model: a model that `fits`. Its linear weights are packed and freed, so it can only be run through this.
        patterns: of each attention call.
    """

    def __init__(self, model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> None:
        decoder: Any = model.model
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._rotary = RotaryTable(decoder.rotary_emb, self._embedding)
        self._layers = [_Layer.of(layer, pattern) for layer, pattern in zip(decoder.layers, patterns, strict=True)]
        self._norm = RootMeanSquareNorm.of(decoder.norm)
        head = model.get_output_embeddings()
        tied = head.weight is decoder.embed_tokens.weight
        self._head = PackedLinear(head.weight, head.bias) if tied else fuse([head])
        self.least_rows = 4 if model.dtype is torch.bfloat16 else 2
        self.any_threads = True
        self.fast_paths = ("packed weights", "fused projections", "one loop over the layers", "tabulated positions")

    @staticmethod
    def fits(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> bool:
        """Whether the model is of a family, in a dtype and on a device that this loop is for."""
        return can_pack(model.device, model.dtype) and is_fusible(model, patterns)

    def run(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """See `Body.run`."""
        x = embedding(plan.tokens[0], self._embedding)
        rotation = self._rotary.at(plan.positions[0], plan.furthest)
        for number, layer in enumerate(self._layers):
            x = layer.run(x, rotation, plan, number)
        hidden = self._norm(x.index_select(0, plan.rows))
        return self._head(hidden), hidden

    def unembed(self, vectors: Tensor) -> Tensor:
        """See `Body.unembed`."""
        return self._head(self._whole_rows(vectors, self._head.in_features))[: len(vectors)]


def is_fusible(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> bool:
    """Whether the model's layers are those that this module knows, with one attention call each."""
    if type(model).__name__ not in _KNOWN:
        return False
    decoder: Any = model.model
    norm = type(decoder.norm)
    return (
        len(patterns) == len(decoder.layers)
        and norm.__module__ == type(model).__module__  # the family's own, not a class derived from it
        and hasattr(decoder.norm, "variance_epsilon")
        and is_plain(decoder.norm, norm)
        and is_plain(decoder.embed_tokens, nn.Embedding)
        and is_plain(model.get_output_embeddings(), nn.Linear)
        and all(_is_known_layer(layer, norm) for layer in decoder.layers)
    )


def _is_known_layer(layer: Any, norm: type[nn.Module]) -> bool:
    """Whether a layer's parts are plain: a part that was replaced (quantised, adapted) is not ours to fuse."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    )
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        all(is_plain(part, type(part)) for part in (layer, attention, mlp))
        and all(is_plain(part, nn.Linear) for part in linears)
        and all(is_plain(part, norm) for part in norms)
    )


def is_silu(activation: nn.Module) -> bool:
    """Whether an activation is x / (1 + e^-x), by torch's class or by transformers' own."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
