"""The forward of Llama-like decoders as a function of fixed addresses: nothing in it waits for the device.

Which operations run depends on the bucket alone, never on a number in it, so the function can be recorded as a CUDA
graph. Weights stay where they are, or move once into a common block of which the model's own layers become views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from truedraft.cache.slab import Slab
from truedraft.models.fused import is_silu
from truedraft.models.graphs.inputs import Inputs
from truedraft.models.graphs.masks import additive_mask, visible
from truedraft.models.norm import RootMeanSquareNorm
from truedraft.models.patterns import AttentionPattern
from truedraft.models.rotary import RotaryTable, Rotation


@dataclass(frozen=True, slots=True)
class _Linear:
    """`x W^T + b`."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layers: Sequence[nn.Linear]) -> _Linear:
        """The outputs of several layers of one input, one behind another, without a second copy of their weights."""
        if len(layers) == 1:
            bias = layers[0].bias
            return cls(layers[0].weight.detach(), None if bias is None else bias.detach())
        return cls(*_merged(layers))

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the product to `residual`, in one kernel."""
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)


def _merged(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One block for the weights of several layers, and one for their biases; the layers' own become views of it."""
    counts = [layer.out_features for layer in layers]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    for layer, part in zip(layers, weight.split(counts), strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
    return weight, torch.cat(biases)


@dataclass(frozen=True, slots=True)
class _Memory:
    """One attention call's share of the slab in a forward.

    Attributes:
        key_rows: `[slots * capacity + 1, kv_heads, head]`, to write.
        value_rows: likewise.
        target: `[rows]`: where each new token's go.
        keys: `[requests, span, kv_heads, head]`, to read.
        values: likewise.
    """

    key_rows: Tensor
    value_rows: Tensor
    target: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, slab: Slab, call: int, inputs: Inputs) -> _Memory:
        bucket = inputs.bucket
        slots = slice(bucket.slot, bucket.slot + bucket.requests)
        keys, values = slab.entries(call)
        return cls(*slab.rows(call), inputs.numbers.target, keys[slots, : bucket.span], values[slots, : bucket.span])

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Take the new tokens' keys and values, each `[rows, kv_heads, head]`."""
        self.key_rows.index_copy_(0, self.target, keys)
        self.value_rows.index_copy_(0, self.target, values)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer."""

    before_attention: RootMeanSquareNorm
    qkv: _Linear
    query_norm: RootMeanSquareNorm | None
    key_norm: RootMeanSquareNorm | None
    out: _Linear
    before_mlp: RootMeanSquareNorm
    gate_up: _Linear
    down: _Linear
    activation: Callable[[Tensor], Tensor]
    heads: int
    kv_heads: int
    scaling: float
    pattern: int

    @classmethod
    def of(cls, layer: Any, pattern: int) -> _Layer:
        """From a loaded layer."""
        attention, mlp = layer.self_attn, layer.mlp
        normed = hasattr(attention, "q_norm")
        return cls(
            before_attention=RootMeanSquareNorm.of(layer.input_layernorm),
            qkv=_Linear.of([attention.q_proj, attention.k_proj, attention.v_proj]),
            query_norm=RootMeanSquareNorm.of(attention.q_norm) if normed else None,
            key_norm=RootMeanSquareNorm.of(attention.k_norm) if normed else None,
            out=_Linear.of([attention.o_proj]),
            before_mlp=RootMeanSquareNorm.of(layer.post_attention_layernorm),
            gate_up=_Linear.of([mlp.gate_proj, mlp.up_proj]),
            down=_Linear.of([mlp.down_proj]),
            activation=silu if is_silu(mlp.act_fn) else mlp.act_fn,
            heads=attention.q_proj.out_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            scaling=attention.scaling,
            pattern=pattern,
        )

    def run(self, x: Tensor, rotation: Rotation, mask: Tensor, memory: _Memory) -> None:
        """Change `x` `[rows, width]` to the layer's output."""
        turned = self.heads + self.kv_heads
        heads = self.qkv(self.before_attention(x)).view(x.shape[0], turned + self.kv_heads, -1)
        query_key = heads[:, :turned]
        if self.query_norm is not None and self.key_norm is not None:
            query_key = torch.cat(
                [self.query_norm(heads[:, : self.heads]), self.key_norm(heads[:, self.heads : turned])], 1
            )
        query_key = rotation(query_key)
        memory.write(query_key[:, self.heads :], heads[:, turned:])
        mixed = attend(query_key[:, : self.heads], memory.keys, memory.values, mask, self.scaling)
        self.out.add_to(x, mixed)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        self.down.add_to(x, self.activation(gate).mul_(up))


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attention of all requests at once.

    Query heads that share a key head are rows of one product: no kernel need know of groups, and keys are read once
    for all of them.

    Args:
        query: `[requests * tokens, heads, head]`.
        keys: `[requests, span, kv_heads, head]`.
        values: likewise.
        mask: `[requests, 1, tokens * group, span]`, added to the scores.
        scaling: factor on the products.

    Returns:
        `[requests * tokens, heads * head]`.
    """
    requests, _, kv_heads, head = keys.shape
    group = query.shape[1] // kv_heads
    rows = query.view(requests, -1, kv_heads, group, head).transpose(1, 2).reshape(requests, kv_heads, -1, head)
    mixed = scaled_dot_product_attention(
        rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scaling
    )
    return mixed.reshape(requests, kv_heads, -1, group, head).transpose(1, 2).reshape(query.shape[0], -1)


class Decoder:
    """A loaded decoder over a slab.

    Args:
        model: of a family that `fused.is_fusible` knows. Its modules stay usable, as views of the merged weights.
        patterns: of each attention call.

    Attributes:
        patterns: the different ones.
        slab_shape: attention calls, key/value heads and width of a head, as a `Slab` wants them.
    """

    def __init__(self, model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> None:
        decoder: Any = model.model
        self.patterns = tuple(dict.fromkeys(patterns))
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._rotary = RotaryTable(decoder.rotary_emb, self._embedding)
        self._layers = [
            _Layer.of(layer, self.patterns.index(pattern))
            for layer, pattern in zip(decoder.layers, patterns, strict=True)
        ]
        self._norm = RootMeanSquareNorm.of(decoder.norm)
        self._head = _Linear.of([model.get_output_embeddings()])
        first = self._layers[0]
        self._group = first.heads // first.kv_heads
        self.slab_shape = (len(self._layers), first.kv_heads, decoder.layers[0].self_attn.head_dim)

    def reach(self, positions: int) -> None:
        """Make the table of positions hold so many; it moves when it grows."""
        self._rotary.reach(positions - 1)

    def forward(self, inputs: Inputs, slab: Slab) -> tuple[Tensor, Tensor]:
        """One forward.

        Args:
            inputs: loaded.
            slab: keys and values, with room for the new tokens, clean behind them.

        Returns:
            Logits `[wanted, ids]` and the vectors `[wanted, width]` that enter the LM head, padding included.
        """
        numbers = inputs.numbers
        x = embedding(numbers.tokens.index_select(0, numbers.source), self._embedding)
        rotation = Rotation(self._rotary.table.index_select(0, numbers.positions), self._rotary.width)
        masks = [additive_mask(visible(inputs, number), self._group, x.dtype) for number in range(len(self.patterns))]
        for call, layer in enumerate(self._layers):
            layer.run(x, rotation, masks[layer.pattern], _Memory.of(slab, call, inputs))
        hidden = self._norm(x.index_select(0, numbers.wanted))
        return self._head(hidden), hidden

    def unembed(self, vectors: Tensor) -> Tensor:
        """The LM head's logits `[rows, ids]` for vectors `[rows, up to width]`, whose further entries are zeros."""
        return linear(vectors, self._head.weight[:, : vectors.shape[1]], self._head.bias)


def fits_decoder(model: PreTrainedModel) -> bool:
    """Whether a fusible model's layers are all of one shape, so that they share a slab, and rotate whole heads."""
    decoder: Any = model.model
    shapes = {
        (layer.self_attn.head_dim, layer.self_attn.q_proj.out_features, layer.self_attn.k_proj.out_features)
        for layer in decoder.layers
    }
    width = RotaryTable(decoder.rotary_emb, decoder.embed_tokens.weight.detach()).width
    return len(shapes) == 1 and decoder.layers[0].self_attn.head_dim == width
