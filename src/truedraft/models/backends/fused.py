"""One loop over the layers of Llama-like decoders, from the loaded model's own weights.

A small model spends more time on the host between products than in the products (benchmarks/LOG.md). So products of one
input are fused, the residual is added inside the product, rotary positions come from a table, and no modules are
called.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from truedraft.errors import UnsupportedModelError
from truedraft.models.attention import ForwardPlan, Scoring
from truedraft.models.backends.base import Backend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.linear import NativeLinear, native_linears
from truedraft.models.llama import Llama, LlamaLayer, Product
from truedraft.models.packed_linear import PackedLinear, can_pack, fuse


class FusedBackend(Backend):
    """Runs the layers of a known family in one loop; packs and frees the linear weights of `llama`, which must fit."""

    def __init__(self, llama: Llama) -> None:
        self._embedding = llama.embedding
        self._scale = llama.scale
        self._rotaries = llama.rotaries
        self._layers: list[LlamaLayer[Product]] = [layer.with_products(fuse) for layer in llama.layers]
        self._scorings = [Scoring(layer.scaling) for layer in llama.layers]
        self._norm = llama.norm
        head = PackedLinear(llama.lm_head.weight, llama.lm_head.bias) if llama.tied else fuse([llama.lm_head])
        self._lm_head: PackedLinear | NativeLinear = head
        self.least_rows = 4 if llama.dtype is torch.bfloat16 else 2
        self.any_threads = llama.dtype is torch.float32  # bfloat16 sums depend on their number on some processors
        self.shown_layers = len(self._layers)
        self.reads_codes = True
        self.fast_paths = ("packed weights", "fused projections", "one loop over the layers", "tabulated positions")

    @staticmethod
    def fits(llama: Llama) -> bool:
        return llama.is_dense and can_pack(llama.device, llama.dtype)

    def quantized(self, bits: int) -> FusedBackend:
        dtype = self._embedding.dtype
        if built(dtype).reason:
            raise UnsupportedModelError(built(dtype).reason)
        products = [each for layer in self._layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        fewer = native_linears([*products, self._lm_head], bits, dtype)
        twin = copy.copy(self)
        twin._layers = [layer.with_products(lambda each: fewer.get(each, each)) for layer in self._layers]
        twin._lm_head = fewer.get(self._lm_head, self._lm_head)
        twin.weight_bytes = sum(each.weight_bytes for each in fewer.values())
        if len(fewer) == len(products) + 1:
            twin.least_rows = 1  # a row of these products does not depend on the number of rows
        twin.fast_paths = (*self.fast_paths[1:], f"weights of {bits} bits")
        return twin

    def run(self, plan: ForwardPlan, layers: Sequence[int]) -> tuple[Tensor, ...]:
        seen: dict[int, Tensor] = {}
        for table in self._rotaries:
            table.reach(plan.furthest)
        rotations = [table.at(plan.positions[0]) for table in self._rotaries]
        x = embedding(plan.tokens[0], self._embedding)  # [total, width]
        if self._scale != 1.0:
            x = x * self._scale
        for call, (layer, scoring) in enumerate(zip(self._layers, self._scorings, strict=True)):
            x = layer.run(x, rotations[layer.rotary], partial(plan.attend_rows, call, layer.pattern, scoring))
            if call in layers:
                seen[call] = x.index_select(0, plan.rows)  # a copy: the next layer may write over it
        hidden = self._norm(x.index_select(0, plan.rows))  # [requested, width]
        return self._lm_head(hidden), hidden, *(seen[layer] for layer in layers)

    def unembed(self, vectors: Tensor) -> Tensor:
        return self._lm_head(self._whole_rows(vectors, self._lm_head.in_features))[: len(vectors)]
