"""Forwards of Llama-like decoders as CUDA graphs, recorded once for each bucket of shapes and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

from truedraft.models.backends.base import Backend
from truedraft.models.backends.graphs.attention import attention_for, tiled_attention, write
from truedraft.models.backends.graphs.batch import Inputs, Numbers
from truedraft.models.backends.graphs.heads import ChosenChains
from truedraft.models.backends.graphs.replay import CudaGraphs, Layers, Outputs, PagedForward, Recorder
from truedraft.models.base import Choose, ForwardOutput, Segment
from truedraft.models.cache import CachePool, PagePool, Pages
from truedraft.models.llama import Linears, Llama, LlamaLayer
from truedraft.models.packed_linear import joined

_MOST_TABULATED = 1 << 17
"""Positions in the table at the start; the table grows with longer texts."""


class GraphBackend(Backend):
    """Runs Llama-like decoders on a GPU: a step's forward is one replay of a CUDA graph.

    Segments of up to 64 tokens run together, padded to a bucket. Longer ones run unpadded and unrecorded. A forward
    copies one block of numbers and the tokens to the device, and never waits for it.

    Rows of different buckets may differ by rounding, so tokens with and without speculation may differ where two logits
    nearly tie; a report prints such places. A key that is NaN or infinite may make every row of its own request NaN in
    that forward, not only its descendants; later forwards do not see it once it was rolled back.

    `llama` is a decoder that is no `misfit`; its model stays usable, with weights that become views of merged ones.
    Without a `recorder` CUDA graphs are recorded on a CUDA device, and nothing elsewhere.
    """

    def __init__(self, llama: Llama, recorder: Recorder | None = None) -> None:
        device = llama.device
        self._embedding = llama.embedding
        (self._rotary,) = llama.rotaries
        self._patterns = llama.patterns
        self._layers = [layer.with_products(_Product.of) for layer in llama.layers]
        self._norm = llama.norm
        self._lm_head = _Product.of((llama.lm_head,))
        first = llama.layers[0]
        self._attention = attention_for(device, first.head)
        if recorder is None and device.type == "cuda":
            recorder = CudaGraphs(device)
        self.pages = Pages(len(llama.layers), first.kv_heads, first.head, llama.dtype, device)
        self._paged = PagedForward(self.pages, self._forward, recorder, self._patterns, self._rotary)
        self.least_rows = 1
        self.shown_layers = len(llama.layers)
        self.records_chains = recorder is not None
        self.fast_paths = ("fused projections", "one loop over the layers", "tabulated positions", "pages of keys")
        if self._attention is tiled_attention:
            self.fast_paths = ("Triton kernels", *self.fast_paths)
        if isinstance(recorder, CudaGraphs):
            self.fast_paths = ("CUDA graphs", *self.fast_paths)

    @staticmethod
    def misfit(llama: Llama | None) -> str | None:
        """Why a decoder cannot share pages and rotate whole heads alike, if so; None is an unknown structure."""
        if llama is None:
            return "its layers are not those of Llama"
        if not llama.is_dense:
            return "it has experts or sinks"
        if len({(layer.head, layer.heads, layer.kv_heads) for layer in llama.layers}) > 1:
            return "its layers have different heads"
        if len(llama.rotaries) > 1:
            return "its layers rotate heads differently"
        if llama.rotaries[0].width != llama.layers[0].head:
            return "it rotates a part of each head"
        return None if llama.scale == 1.0 else "it scales its embeddings"

    @property
    def warmups(self) -> int:  # type: ignore[override]
        return self._paged.recordings.warmups

    def new_pool(self, limit: int) -> CachePool:
        # Growing moves the table, which invalidates recordings.
        self._rotary.reach(min(limit, _MOST_TABULATED) - 1)
        return PagePool(self.pages, limit)

    def forward(self, segments: Sequence[Segment], device: torch.device, layers: Sequence[int] = ()) -> ForwardOutput:
        logits, hidden, *shown = self._paged.run(segments, tuple(layers))
        return ForwardOutput(logits, hidden, tuple(shown))

    def forward_chains(
        self, segments: Sequence[Segment], levels: int, choose: Choose, numbers: Sequence[Tensor], vocab: int
    ) -> tuple[Tensor, Tensor | None]:
        draft = partial(self._chains, choose, vocab)
        ids, *probs = self._paged.run_levels(segments, levels, (choose, len(numbers)), draft, numbers)
        return ids, probs[0] if probs else None

    def _chains(self, choose: Choose, vocab: int, inputs: list[Inputs], numbers: list[Tensor]) -> Outputs:
        chains, tokens = ChosenChains(choose, None, *numbers), None
        for own in inputs:
            if tokens is not None:
                own.numbers.tokens.copy_(tokens)
            tokens = chains.choose(self._forward(own)[0][:, :vocab])
        return chains.found()

    def _forward(self, inputs: Inputs, layers: Layers = ()) -> Outputs:
        """A function of fixed addresses that never waits for the device; its operations depend on the bucket only."""
        numbers, pages = inputs.numbers, self.pages
        x = embedding(numbers.tokens, self._embedding)  # [rows, width]
        rotation = self._rotary.at(numbers.positions)
        look = self._attention(inputs, pages)
        shown = {}
        for call, layer in enumerate(self._layers):
            attend = partial(look, call, self._patterns.index(layer.pattern), layer.scaling)
            if self._attention is tiled_attention:
                x = self._by_kernels(layer, x, numbers, pages.entries(call), attend)
            else:
                x = layer.run(x, rotation, partial(self._write_and_attend, inputs, pages, call, attend))
            if call in layers:
                shown[call] = x.index_select(0, numbers.logit_rows)  # a copy: the next layer may write over it
        hidden = self._norm(x.index_select(0, numbers.logit_rows))
        return self._lm_head(hidden), hidden, *(shown[layer] for layer in layers)

    def _by_kernels(
        self,
        layer: LlamaLayer[_Product],
        x: Tensor,
        numbers: Numbers[Tensor],
        entries: tuple[Tensor, Tensor],
        attend: Callable[[Tensor], Tensor],
    ) -> Tensor:
        from truedraft.models.backends.graphs import layer_kernels as kernels

        qkv = layer.qkv(kernels.rms_norm(x, layer.before_attention))
        query = kernels.rotate_and_write(
            qkv, self._rotary.table, numbers.positions, numbers.target, *entries, layer.query_norm, layer.key_norm,
            interleaved=self._rotary.interleaved,
        )  # fmt: skip
        mixed = attend(query)
        after = layer.after_attention
        x = layer.out.plus(mixed, x) if after is None else x + kernels.rms_norm(layer.out(mixed), after)
        both = layer.gate_up(kernels.rms_norm(x, layer.before_mlp))
        if layer.activation is silu:
            active = kernels.gated(both)
        else:
            gate, up = both.chunk(2, dim=-1)
            active = layer.activation(gate).mul_(up)
        after = layer.after_mlp
        return layer.down.plus(active, x) if after is None else x + kernels.rms_norm(layer.down(active), after)

    @staticmethod
    def _write_and_attend(
        inputs: Inputs, pages: Pages, call: int, attend: Callable[[Tensor], Tensor], query: Tensor, *new: Tensor
    ) -> Tensor:
        write(inputs, pages, call, *new)
        return attend(query)

    def unembed(self, vectors: Tensor) -> Tensor:
        return linear(vectors, self._lm_head.weight[:, : vectors.shape[1]], self._lm_head.bias)


@dataclass(frozen=True, slots=True)
class _Product:
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layers: Linears) -> _Product:
        """One product for several layers with one input; their own weights become views of its weight."""
        weight, bias = joined(layers)
        if len(layers) > 1:
            for layer, part in zip(layers, weight.split([layer.out_features for layer in layers]), strict=True):
                layer.weight = nn.Parameter(part, requires_grad=False)
        return cls(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        residual.addmm_(x, self.weight.t())
        return residual if self.bias is None else residual.add_(self.bias)
