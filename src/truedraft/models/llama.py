"""Llama-like decoders, described once: what a backend needs of a family's loaded modules, and how a layer runs.

`Llama.of` is the only place that knows how transformers names the parts of a layer. The fused and the graph backend
give the layers' products their own form and run `LlamaLayer.run`; the native one hands the same description to C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.models.attention import AttentionPattern
from truedraft.models.packed_linear import is_plain

# Classes whose layers are: norm, attention over rotated heads, residual, norm, gated MLP, residual; and whose logits
# are the LM head's.
_KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FIRST_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class RootMeanSquareNorm:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis.

    Attributes:
        weight: `[width]`.
        eps: added to the mean of the squares.
    """

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> RootMeanSquareNorm:
        """From a loaded norm."""
        return cls(module.weight.detach(), float(module.variance_epsilon))

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotation:
    """Turns heads by their rows' positions.

    Args:
        table: `[rows, 1, 3/2 head]`: cosines, then half of the sines.
        width: of a head.
    """

    def __init__(self, table: Tensor, width: int) -> None:
        self._cosines = table[..., :width]
        self._sines = table[..., width:]
        self._half = width // 2

    def __call__(self, heads: Tensor) -> Tensor:
        """Heads `[rows, heads, head]`, turned: (a, b) becomes (a cos - b sin, b cos + a sin), a and b the halves."""
        half = self._half
        turned = heads * self._cosines
        turned[..., :half].addcmul_(heads[..., half:], self._sines, value=-1)
        turned[..., half:].addcmul_(heads[..., :half], self._sines)
        return turned


class RotaryTable:
    """Cosines and sines of a model's own rotary module, by position, tabulated once; grows by doubling.

    Args:
        rotary: the module; called as `rotary(like, position_ids)`, it gives cosines and sines `[1, n, head]`.
        like: a tensor of the dtype and device that they are wanted in.

    Attributes:
        table: `[positions, 1, 3/2 head]`: cosines, then the first half of the sines (the second half is the same).
    """

    def __init__(self, rotary: nn.Module, like: Tensor) -> None:
        self._rotary = rotary
        self._like = like
        self.table = self._tabulate(_FIRST_POSITIONS)

    @property
    def width(self) -> int:
        """Entries of a head that are rotated."""
        return self.table.shape[-1] * 2 // 3

    def _tabulate(self, positions: int) -> Tensor:
        cosines, sines = self._rotary(self._like, torch.arange(positions, device=self._like.device)[None])
        half = sines.shape[-1] // 2
        return torch.cat([cosines[0], sines[0, :, :half]], dim=-1)[:, None]

    def reach(self, furthest: int) -> None:
        """Make the table hold the position `furthest`; it moves when it grows."""
        if furthest >= self.table.shape[0]:
            self.table = self._tabulate(2 ** (furthest + 1).bit_length())

    def at(self, positions: Tensor) -> Rotation:
        """What turns the rows of a forward, by their positions `[rows]`, int64, which the table must hold."""
        return Rotation(self.table.index_select(0, positions), self.width)


class Product(Protocol):
    """`x W^T + b`, in a form that a backend runs."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + x W^T + b`, each `[rows, out]`; `residual` may be overwritten."""
        ...


Linears = tuple[nn.Linear, ...]
"""Linear layers of one input, whose outputs are wanted one behind another."""

L = TypeVar("L", covariant=True)
M = TypeVar("M")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries `[rows, heads, head]`, keys and values `[rows, kv_heads, head]`: `[rows, heads * head]`."""


@dataclass(frozen=True, slots=True)
class LlamaLayer(Generic[L]):
    """One decoder layer: norm, attention over rotated heads, residual, norm, gated MLP, residual.

    Attributes:
        qkv: makes queries, keys and values of the normed rows: the loaded linear layers (`Linears`), or a backend's
            form of them (`Product`); so do the other three products.
        query_norm: of each head, before it is rotated; None in most families, and likewise
        key_norm.
        out: adds what attention mixed to the residual stream.
        gate_up: makes both factors of the MLP.
        down: adds their product to the residual stream.
        activation: of the gate; `silu` itself where it is that.
        heads: of queries.
        kv_heads: of keys and of values.
        head: entries of a head.
        scaling: factor on products of queries and keys.
        pattern: which positions the layer may see.
    """

    before_attention: RootMeanSquareNorm
    qkv: L
    query_norm: RootMeanSquareNorm | None
    key_norm: RootMeanSquareNorm | None
    out: L
    before_mlp: RootMeanSquareNorm
    gate_up: L
    down: L
    activation: Callable[[Tensor], Tensor]
    heads: int
    kv_heads: int
    head: int
    scaling: float
    pattern: AttentionPattern

    def with_products(self, make: Callable[[L], M]) -> LlamaLayer[M]:
        """The same layer with its products in another form."""
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
        x = self.out.plus(mixed, x)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return self.down.plus(self.activation(gate).mul_(up), x)


@dataclass(frozen=True, slots=True)
class Llama:
    """A loaded decoder.

    Attributes:
        embedding: `[ids, width]`.
        rotary: of all layers.
        layers: as they were loaded.
        norm: behind the last layer.
        lm_head: behind the norm.
        tied: whether the LM head's weight is the embedding.
        uniform: whether all layers have the sizes of the first, and all weights the dtype and device of the
            embedding. Models that were pruned or adapted may not.
    """

    embedding: Tensor
    rotary: RotaryTable
    layers: tuple[LlamaLayer[Linears], ...]
    norm: RootMeanSquareNorm
    lm_head: nn.Linear
    tied: bool
    uniform: bool

    @classmethod
    def of(cls, model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> Llama | None:
        """The description of a loaded model, which stays as it is; None where its layers are not those we know.

        Args:
            model: of any family.
            patterns: of each attention call.
        """
        if not _is_known(model, patterns):
            return None
        decoder: Any = model.model
        embedding, lm_head = decoder.embed_tokens.weight, model.get_output_embeddings()
        sizes = {tuple((name, each.shape) for name, each in layer.named_parameters()) for layer in decoder.layers}
        kinds = {(each.dtype, each.device) for each in model.parameters()}
        return cls(
            embedding.detach(),
            RotaryTable(decoder.rotary_emb, embedding.detach()),
            tuple(_layer(layer, pattern) for layer, pattern in zip(decoder.layers, patterns, strict=True)),
            RootMeanSquareNorm.of(decoder.norm),
            lm_head,
            tied=lm_head.weight is embedding,
            uniform=len(sizes) == 1 and kinds == {(embedding.dtype, embedding.device)},
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding, and of all weights where they are uniform."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Of the embedding."""
        return self.embedding.device

    @property
    def patterns(self) -> tuple[AttentionPattern, ...]:
        """The different patterns of the layers, in the order in which they come."""
        return tuple(dict.fromkeys(layer.pattern for layer in self.layers))


def _layer(layer: Any, pattern: AttentionPattern) -> LlamaLayer[Linears]:
    attention, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attention, "q_norm")
    return LlamaLayer(
        before_attention=RootMeanSquareNorm.of(layer.input_layernorm),
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=RootMeanSquareNorm.of(attention.q_norm) if normed else None,
        key_norm=RootMeanSquareNorm.of(attention.k_norm) if normed else None,
        out=(attention.o_proj,),
        before_mlp=RootMeanSquareNorm.of(layer.post_attention_layernorm),
        gate_up=(mlp.gate_proj, mlp.up_proj),
        down=(mlp.down_proj,),
        activation=nn.functional.silu if _is_silu(mlp.act_fn) else mlp.act_fn,
        heads=attention.q_proj.out_features // attention.head_dim,
        kv_heads=attention.k_proj.out_features // attention.head_dim,
        head=attention.head_dim,
        scaling=attention.scaling,
        pattern=pattern,
    )


def _is_known(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> bool:
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
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        all(is_plain(part, type(part)) for part in (layer, attention, mlp))
        and all(is_plain(part, nn.Linear) for part in linears)
        and all(is_plain(part, norm) for part in norms)
    )


def _is_silu(activation: nn.Module) -> bool:
    """Whether an activation is x / (1 + e^-x), by torch's class or by transformers' own."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
