"""Llama-like decoders: a family's parts by transformers' names (`Llama.of` only), and the forward of a layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from truedraft.models.attention import AttentionPattern
from truedraft.models.packed_linear import is_plain, release

_FIRST_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class _Names:
    before_mlp: str = "post_attention_layernorm"
    after_attention: str = ""
    after_mlp: str = ""
    offset: float = 0.0
    interleaved: bool = False
    rounds_once: bool = False
    clipped: bool = False


# Classes with layers of the form of `LlamaLayer`, and no other logits than the LM head's.
_FAMILIES = {
    **{
        f"{name}ForCausalLM": _Names() for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Mixtral", "Qwen3Moe")
    },
    "GlmForCausalLM": _Names(interleaved=True),
    "Glm4ForCausalLM": _Names(
        after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm", interleaved=True
    ),
    "Gemma3ForCausalLM": _Names(
        before_mlp="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
        offset=1.0,
        rounds_once=True,
    ),
    "GptOssForCausalLM": _Names(rounds_once=True, clipped=True),
}
_EMBEDDINGS = ("Embedding", "Gemma3TextScaledWordEmbedding")


@dataclass(frozen=True, slots=True)
class RootMeanSquareNorm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight); if `rounds_once`, not rounded before that product."""

    weight: Tensor
    eps: float
    offset: float = 0.0
    rounds_once: bool = False

    @classmethod
    def of(cls, module: Any, names: _Names) -> RootMeanSquareNorm:
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        return cls(module.weight.detach(), float(eps), names.offset, names.rounds_once)

    def __call__(self, x: Tensor) -> Tensor:
        if self.rounds_once:
            weight = self.offset + self.weight.float()
            return torch.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)
        return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotation:
    """Rotates the first `width` entries of heads by their rows' positions.

    `table` `[rows, 1, 3/2 width]` has cosines, then half of the sines. If `interleaved`, entries are rotated with their
    neighbours, not those of one half with those of the other.
    """

    def __init__(self, table: Tensor, width: int, interleaved: bool = False) -> None:
        self._cosines = table[..., :width]
        self._sines = table[..., width:]
        self._width, self._interleaved = width, interleaved

    def __call__(self, heads: Tensor) -> Tensor:
        """(a, b) becomes (a cos - b sin, b cos + a sin), a and b halves or even and odd entries."""
        width, half = self._width, self._width // 2
        first, second = slice(0, half), slice(half, width)
        cosines = self._cosines
        if self._interleaved:
            first, second = slice(0, width, 2), slice(1, width, 2)
            cosines = cosines[..., :half].repeat_interleave(2, -1)
        turned = heads * cosines if width == heads.shape[-1] else heads.clone()
        if width < heads.shape[-1]:
            turned[..., :width] *= cosines
        turned[..., first].addcmul_(heads[..., second], self._sines, value=-1)
        turned[..., second].addcmul_(heads[..., first], self._sines)
        return turned


class RotaryTable:
    """Cosines and sines of a model's own rotary module, tabulated by position; grows by doubling.

    `rotary(like, position_ids)` returns cosines and sines `[1, n, width]` (`halves`: `[1, n, width / 2]`) with the
    dtype and device of `like`. `table` is `[positions, 1, 3/2 width]`: cosines, then the first half of the sines (the
    second half is the same). For `interleaved` see `Rotation`.
    """

    def __init__(
        self,
        rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        like: Tensor,
        interleaved: bool = False,
        halves: bool = False,
    ) -> None:
        self._rotary = rotary
        self._like = like
        self._halves = halves
        self.interleaved = interleaved
        self.table = self._tabulate(_FIRST_POSITIONS)

    @classmethod
    def made(cls, parameters: Mapping[str, Any], head: int, positions: int, like: Tensor) -> RotaryTable:
        """From rotary parameters with transformers' names, such as `rope_theta`, for heads of `head` entries."""
        config = LlamaConfig(head_dim=head, max_position_embeddings=positions, rope_parameters=dict(parameters))
        return cls(LlamaRotaryEmbedding(config).to(like.device), like)

    @property
    def width(self) -> int:
        return self.table.shape[-1] * 2 // 3

    def _tabulate(self, positions: int) -> Tensor:
        cosines, sines = self._rotary(self._like, torch.arange(positions, device=self._like.device)[None])
        if self._halves:
            return torch.cat([cosines[0], cosines[0], sines[0]], dim=-1)[:, None]
        half = sines.shape[-1] // 2
        return torch.cat([cosines[0], sines[0, :, :half]], dim=-1)[:, None]

    def reach(self, furthest: int) -> None:
        if furthest >= self.table.shape[0]:
            self.table = self._tabulate(2 ** (furthest + 1).bit_length())

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of rows at `positions`, `[rows]`, int64, within the table."""
        return Rotation(self.table.index_select(0, positions), self.width, self.interleaved)


class Product(Protocol):
    """`x W^T + b`, in a form that a backend runs."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + x W^T + b`, each `[rows, out]`; `residual` may be overwritten."""
        ...


Linears = tuple[nn.Linear, ...]
"""Linear layers with one input; their outputs are concatenated."""

L = TypeVar("L", covariant=True)
M = TypeVar("M")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries `[rows, heads, head]`, keys and values `[rows, kv_heads, head]`: `[rows, heads * head]`."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A router chooses MLPs for each row; their outputs are summed, weighted by its probabilities."""

    gate: Tensor  # [experts, inner, width]
    up: Tensor  # [experts, inner, width]
    down: Tensor  # [experts, width, inner]
    gate_bias: Tensor | None  # [experts, inner]
    up_bias: Tensor | None
    down_bias: Tensor | None  # [experts, width]
    router: Tensor  # [experts, width]: gives logits; their softmax is the probabilities
    router_bias: Tensor | None
    chosen: int  # experts for each row, those of the largest probabilities
    normed: bool  # whether these probabilities are normalised to sum to 1
    clipped: bool  # a gate is g / (1 + e^(-1.702 g)), g at most 7, and the other factor 1 + u, u from -7 to 7
    holders: tuple[nn.Module, ...]

    @classmethod
    def of(cls, mlp: Any, *, clipped: bool) -> Experts:
        router, experts = _router(mlp), mlp.experts
        both, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        if getattr(experts, "is_transposed", False):
            both, down = both.transpose(1, 2), down.transpose(1, 2)
        gate_up_bias, down_bias, bias = (
            None if each is None else each.detach()
            for each in (
                getattr(experts, "gate_up_proj_bias", None),
                getattr(experts, "down_proj_bias", None),
                getattr(router, "bias", None),
            )
        )

        def split(factors: Tensor) -> Sequence[Tensor]:
            is_concatenated = getattr(experts, "is_concatenated", True)
            return factors.chunk(2, dim=1) if is_concatenated else (factors[:, ::2], factors[:, 1::2])

        gate, up = split(both)
        gate_bias, up_bias = (None, None) if gate_up_bias is None else split(gate_up_bias)
        return cls(
            gate, up, down, gate_bias, up_bias, down_bias, router.weight.detach(), bias, router.top_k,
            getattr(router, "norm_topk_prob", True), clipped, (experts, router),
        )  # fmt: skip

    def release(self) -> None:
        for module in self.holders:
            release(module)


@dataclass(frozen=True, slots=True)
class LlamaLayer(Generic[L]):
    """One decoder layer: norm, attention over rotated heads, residual, norm, gated MLP, residual.

    The four products are the loaded linear layers (`Linears`) or a backend's form of them (`Product`).
    """

    before_attention: RootMeanSquareNorm
    qkv: L  # queries, keys and values of the normed rows
    query_norm: RootMeanSquareNorm | None  # of each head, before rotation
    key_norm: RootMeanSquareNorm | None
    out: L
    before_mlp: RootMeanSquareNorm
    gate_up: L  # both factors of the MLP
    down: L
    activation: Callable[[Tensor], Tensor]  # of the gate; `torch.nn.functional.silu` itself if it is SiLU
    heads: int
    kv_heads: int
    head: int  # entries of a head
    scaling: float  # factor on products of queries and keys
    pattern: AttentionPattern
    rotary: int = 0  # index of the rotary table in `Llama.rotaries`
    after_attention: RootMeanSquareNorm | None = None  # of attention's output
    after_mlp: RootMeanSquareNorm | None = None
    experts: Experts | None = None  # replace the MLP, with `gate_up` and `down` then empty
    sinks: Tensor | None = None  # [heads], see `Scoring`

    def with_products(self, make: Callable[[L], M]) -> LlamaLayer[M]:
        products = {name: make(getattr(self, name)) for name in ("qkv", "out", "gate_up", "down")}
        return cast("LlamaLayer[M]", replace(self, **cast("dict[str, Any]", products)))

    def run(self: LlamaLayer[Product], x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """`[rows, width]` to the same; `x` may be overwritten."""
        turned = self.heads + self.kv_heads
        heads = self.qkv(self.before_attention(x)).view(x.shape[0], turned + self.kv_heads, -1)  # [rows, heads, head]
        query_key = heads[:, :turned]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(heads[:, : self.heads]), self.key_norm(heads[:, self.heads : turned])
            query_key = torch.cat([query, key], 1)
        query_key = rotation(query_key)
        mixed = attend(query_key[:, : self.heads], query_key[:, self.heads :], heads[:, turned:])
        x = self.out.plus(mixed, x) if self.after_attention is None else x + self.after_attention(self.out(mixed))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        active = self.activation(gate).mul_(up)
        return self.down.plus(active, x) if self.after_mlp is None else x + self.after_mlp(self.down(active))


@dataclass(frozen=True, slots=True)
class Llama:
    """A loaded decoder."""

    embedding: Tensor  # [ids, width], times `scale`
    scale: float
    rotaries: tuple[RotaryTable, ...]
    layers: tuple[LlamaLayer[Linears], ...]
    norm: RootMeanSquareNorm
    lm_head: nn.Linear
    tied: bool  # whether the LM head's weight is the embedding
    uniform: bool  # layers have the sizes of the first, and weights one dtype and device, unless pruned or adapted

    @classmethod
    def of(cls, model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> Llama | None:
        """A loaded model's description, with one pattern per attention call; None if its layers' form is unknown."""
        if not _is_known(model, patterns):
            return None
        decoder: Any = model.model
        names = _FAMILIES[type(model).__name__]
        embedding, lm_head = decoder.embed_tokens.weight, model.get_output_embeddings()
        scale = getattr(decoder.embed_tokens, "embed_scale", None)
        several = "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters
        types = [layer.self_attn.layer_type if several else None for layer in decoder.layers]
        different = list(dict.fromkeys(types))
        sizes = {tuple((name, each.shape) for name, each in layer.named_parameters()) for layer in decoder.layers}
        kinds = {(each.dtype, each.device) for each in model.parameters()}
        return cls(
            embedding,
            1.0 if scale is None else float(scale.to(embedding.dtype)),
            tuple(_rotary(decoder.rotary_emb, embedding.detach(), each, names) for each in different),
            tuple(
                _layer(layer, pattern, names, different.index(its))
                for layer, pattern, its in zip(decoder.layers, patterns, types, strict=True)
            ),
            RootMeanSquareNorm.of(decoder.norm, names),
            lm_head,
            tied=lm_head.weight is embedding,
            uniform=len(sizes) == 1 and kinds == {(embedding.dtype, embedding.device)},
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def patterns(self) -> tuple[AttentionPattern, ...]:
        return tuple(dict.fromkeys(layer.pattern for layer in self.layers))

    @property
    def inner(self) -> int:
        first = self.layers[0]
        return int(first.down[0].in_features if first.experts is None else first.experts.down.shape[2])

    @property
    def is_dense(self) -> bool:
        return all(layer.experts is None and layer.sinks is None for layer in self.layers)


def _layer(layer: Any, pattern: AttentionPattern, names: _Names, rotary: int) -> LlamaLayer[Linears]:
    attention, mlp = layer.self_attn, layer.mlp
    norms = {
        field: RootMeanSquareNorm.of(getattr(layer, name), names) if name else None
        for field, name in (("after_attention", names.after_attention), ("after_mlp", names.after_mlp))
    }
    normed = hasattr(attention, "q_norm")
    head, of_values = attention.head_dim, attention.o_proj.in_features
    outputs = sum(each.out_features for each in _qkv(attention))
    experts = Experts.of(mlp, clipped=names.clipped) if hasattr(mlp, "experts") else None
    return LlamaLayer(
        before_attention=RootMeanSquareNorm.of(layer.input_layernorm, names),
        qkv=_qkv(attention),
        query_norm=RootMeanSquareNorm.of(attention.q_norm, names) if normed else None,
        key_norm=RootMeanSquareNorm.of(attention.k_norm, names) if normed else None,
        out=(attention.o_proj,),
        before_mlp=RootMeanSquareNorm.of(getattr(layer, names.before_mlp), names),
        gate_up=() if experts else _gate_up(mlp),
        down=() if experts else (mlp.down_proj,),
        activation=_activation(mlp),
        heads=of_values // head,
        kv_heads=(outputs - of_values) // 2 // head,
        head=head,
        scaling=attention.scaling,
        pattern=pattern,
        rotary=rotary,
        experts=experts,
        sinks=attention.sinks.detach() if hasattr(attention, "sinks") else None,
        **norms,
    )


def _qkv(attention: Any) -> Linears:
    if hasattr(attention, "qkv_proj"):
        return (attention.qkv_proj,)
    return attention.q_proj, attention.k_proj, attention.v_proj


def _gate_up(mlp: Any) -> Linears:
    return (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)


def _router(mlp: Any) -> Any:
    return mlp.gate if hasattr(mlp, "gate") else mlp.router


def _activation(mlp: Any) -> Callable[[Tensor], Tensor]:
    holder = getattr(mlp, "experts", mlp)
    activation = next((getattr(holder, name) for name in ("activation_fn", "act_fn") if hasattr(holder, name)), None)
    silu = activation is None or isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    return nn.functional.silu if silu else cast("Callable[[Tensor], Tensor]", activation)


def _rotary(module: Any, like: Tensor, layer_type: str | None, names: _Names) -> RotaryTable:
    of_type = module if layer_type is None else partial(module, layer_type=layer_type)
    return RotaryTable(of_type, like, names.interleaved, halves=names.clipped)


def _is_known(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> bool:
    names = _FAMILIES.get(type(model).__name__)
    rope = getattr(model.config, "rope_parameters", None) or {}
    if names is None or rope.get("rope_type") == "longrope":  # angles change with the text's length
        return False
    decoder: Any = model.model
    norm = type(decoder.norm)
    return (
        len(patterns) == len(decoder.layers)
        and norm.__module__ == type(model).__module__  # the family's own class, not a derived one
        and (hasattr(decoder.norm, "variance_epsilon") or hasattr(decoder.norm, "eps"))
        and is_plain(decoder.norm, norm)
        and type(decoder.embed_tokens).__name__ in _EMBEDDINGS
        and is_plain(decoder.embed_tokens, type(decoder.embed_tokens))
        and is_plain(model.get_output_embeddings(), nn.Linear)
        and not getattr(model.config, "final_logit_softcapping", None)
        and all(_is_known_layer(layer, norm, names) for layer in decoder.layers)
    )


def _is_known_layer(layer: Any, norm: type[nn.Module], names: _Names) -> bool:
    """Whether its parts are plain: a replaced one (quantised, adapted) cannot be fused."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [*_qkv(attention), attention.o_proj]
    if hasattr(mlp, "experts"):
        if not _are_known_experts(mlp, clipped=names.clipped):
            return False
    else:
        linears += [*_gate_up(mlp), mlp.down_proj]
    own = ("input_layernorm", names.before_mlp, names.after_attention, names.after_mlp)
    norms = [getattr(layer, name) for name in own if name]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        all(is_plain(part, type(part)) for part in (layer, attention, mlp))
        and all(is_plain(part, nn.Linear) for part in linears)
        and all(is_plain(part, norm) for part in norms)
    )


def _are_known_experts(mlp: Any, *, clipped: bool) -> bool:
    router, experts = _router(mlp), mlp.experts
    family = type(mlp).__module__
    return (
        {name for name, _ in mlp.named_children()} <= {"gate", "router", "experts"}
        and all(is_plain(part, type(part)) and type(part).__module__ == family for part in (router, experts))
        and (not clipped or (experts.alpha, experts.limit) == (1.702, 7.0))
    )
