"""Forwards of Llama-like decoders as CUDA graphs, recorded once for each bucket of shapes and replayed.

The backend groups requests. `batch` rounds the shape of a group up to a bucket and copies the numbers of a forward to
fixed addresses. `Decoder` is the forward, a function of those addresses only; `attention` is its part that reads pages.
`replay` runs it eagerly, or records and replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

from truedraft.errors import CacheError
from truedraft.models.attention import AttentionPattern
from truedraft.models.backends.base import Backend
from truedraft.models.backends.graphs import kernels
from truedraft.models.backends.graphs.attention import attention_for, gathered_attention, tiled_attention, write
from truedraft.models.backends.graphs.batch import (
    Bucket,
    Inputs,
    Numbers,
    PagedBatch,
    PagedSegment,
    load_in_a_row,
)
from truedraft.models.backends.graphs.replay import CudaGraphs, Layers, Outputs, Recorder, Runner, Work
from truedraft.models.base import Choose, ForwardOutput, Segment
from truedraft.models.cache import CachePool, PagePool, Pages, PageTable
from truedraft.models.llama import Linears, Llama, LlamaLayer, RotaryTable
from truedraft.models.packed_linear import joined
from truedraft.models.packing import ForwardPlan

MOST_RECORDED_TOKENS = 64
"""New tokens of one request, above which a forward is not recorded: it is a chunk of a prompt, bound by arithmetic."""
_MOST_TABULATED = 1 << 17
"""Positions in the table at the start; the table grows with longer texts."""
_MOST_RECORDED_ROWS = 1024
"""Rows of one recording; a larger batch runs in parts."""


class GraphBackend(Backend):
    """Runs Llama-like decoders on a GPU: a step's forward is one replay of a CUDA graph.

    Segments of up to 64 tokens run together, packed and padded to a bucket. Longer ones, which are chunks of prompts,
    run unpadded and unrecorded, by the same function. A forward copies one block of numbers and the tokens to the
    device, and never waits for it.

    Rows of one bucket run through the same kernels. Rows of different buckets may differ by rounding, so tokens with
    and without speculation may differ where two logits nearly tie; a report prints such places. A key that is NaN or
    infinite may make every row of its own request NaN in that forward, not only its descendants. Later forwards do not
    see it once it was rolled back.

    Args:
        llama: a decoder that `fits`. Its model stays usable: its weights become views of merged ones, without copies.
        recorder: makes the recordings; None is CUDA graphs on a CUDA device, and no recording elsewhere.
    """

    def __init__(self, llama: Llama, recorder: Recorder | None = None) -> None:
        self._device, self._dtype = llama.device, llama.dtype
        self._decoder = Decoder(llama)
        if recorder is None and self._device.type == "cuda":
            recorder = CudaGraphs(self._device)
        self._pages = Pages(*self._decoder.page_shape, self._dtype, self._device)
        self._runner = Runner(self._forward, self._inputs, recorder)
        together = self._decoder.attention is not gathered_attention
        self._paged = PagedForward(
            self._pages, self._runner, self._decoder.patterns, self._decoder.rotary, together=together
        )
        self.least_rows = 1
        self.shown_layers = len(llama.layers)
        self.records_chains = recorder is not None
        self.fast_paths = ("fused projections", "one loop over the layers", "tabulated positions", "pages of keys")
        if together:
            self.fast_paths = ("Triton kernels", *self.fast_paths)
        if isinstance(recorder, CudaGraphs):
            self.fast_paths = ("CUDA graphs", *self.fast_paths)

    @classmethod
    def fits(cls, llama: Llama) -> bool:
        """Whether all layers have one shape, so that they share pages, and rotate whole heads in the same way."""
        return cls.misfit(llama) is None

    @staticmethod
    def misfit(llama: Llama | None) -> str | None:
        """Why a decoder does not fit; None where it does. `llama` is None for a decoder of an unknown structure."""
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
        return self._runner.warmups

    @property
    def pages(self) -> Pages:
        """Keys and values of all requests."""
        return self._pages

    def new_pool(self, limit: int) -> CachePool:
        # Growing moves the table, which invalidates recordings.
        self._decoder.rotary.reach(min(limit, _MOST_TABULATED) - 1)
        return PagePool(self._pages, limit)

    def forward(self, segments: Sequence[Segment], device: torch.device, layers: Sequence[int] = ()) -> ForwardOutput:
        logits, hidden, *shown = self._paged.run(segments, tuple(layers))
        return ForwardOutput(logits, hidden, tuple(shown))

    def forward_chains(
        self, segments: Sequence[Segment], levels: int, choose: Choose, numbers: Sequence[Tensor], vocab: int
    ) -> tuple[Tensor, Tensor | None]:
        chains = Chains(self._decoder, self._pages, choose, vocab)
        ids, *probs = self._paged.run_levels(segments, levels, chains.work, numbers)
        return ids, probs[0] if probs else None

    def run(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """Run the segments of a plan; its layout is not used."""
        output = self.forward([part.segment for part in plan.segments], self._device)
        return output.logits, output.hidden

    def unembed(self, vectors: Tensor) -> Tensor:
        return self._decoder.unembed(vectors)

    def _inputs(self, bucket: Bucket) -> Inputs:
        return Inputs(bucket, len(self._decoder.patterns), self._device)

    def _forward(self, inputs: Inputs, layers: Layers) -> Outputs:
        return self._decoder.forward(inputs, self._pages, layers)


class PagedForward:
    """Forwards of segments with caches in pages.

    Args:
        patterns: the distinct attention patterns of the model.
        rotary: table of positions, which grows with longer texts.
        start: added to all positions.
        together: whether attention takes segments of any lengths together without padding; else each segment of more
            than 64 tokens runs by itself.
    """

    def __init__(
        self,
        pages: Pages,
        runner: Runner,
        patterns: Sequence[AttentionPattern],
        rotary: RotaryTable,
        start: int = 0,
        *,
        together: bool,
    ) -> None:
        self.pages = pages
        self._runner, self._patterns = runner, patterns
        self._rotary, self._start, self._together = rotary, start, together

    def run(self, segments: Sequence[Segment], layers: Layers = (), vectors: Tensor | None = None) -> Outputs:
        """Rows of all segments, in their order.

        Args:
            layers: layers to return the output of.
            vectors: `[total, width]`, inputs in addition to the tokens.

        Raises:
            CacheError: a cache is not in these pages, or there are no free pages.
        """
        inputs = [None] * len(segments) if vectors is None else vectors.split([len(each.tokens) for each in segments])
        with self.pages.lock, _on(self.pages.device):
            parts = [PagedSegment(each, self._table_of(each), own) for each, own in zip(segments, inputs, strict=True)]
            for segment in segments:
                segment.cache.reserve(len(segment.shape), segment.written)
            self._rotary.reach(max(part.end for part in parts) - 1 + self._start)
            groups = _groups([part.count for part in parts], together=self._together)
            outputs = [self._run([parts[number] for number in group], layers) for group in groups]
        if len(groups) == 1:
            return outputs[0]
        rows: dict[int, Outputs] = {}  # by segment
        for group, output in zip(groups, outputs, strict=True):
            counts = [len(segments[number].rows) for number in group]
            rows.update(zip(group, zip(*(each.split(counts) for each in output), strict=True), strict=True))
        return tuple(torch.cat(each) for each in zip(*(rows[number] for number in range(len(parts))), strict=True))

    def run_levels(
        self,
        segments: Sequence[Segment],
        levels: int,
        work: WorkOfLevels,
        numbers: Sequence[Tensor],
        beams: int = 1,
        nodes: int = 0,
        vectors: Tensor | None = None,
    ) -> Outputs:
        """Run forwards in sequence as one recording, each of which chooses the tokens of the next.

        Args:
            segments: tokens of the first forward.
            levels: number of forwards; see `PagedBatch.levels` for `beams` and `nodes`.
            numbers: `[requests, ...]` each, further inputs.
            vectors: `[total, width]`, inputs in addition to the segments' tokens.
        """
        inputs = [None] * len(segments) if vectors is None else vectors.split([len(each.tokens) for each in segments])
        with self.pages.lock, _on(self.pages.device):
            parts = [PagedSegment(each, self._table_of(each), own) for each, own in zip(segments, inputs, strict=True)]
            for segment in segments:
                segment.cache.reserve(len(segment.shape) + (levels - 1) * beams, segment.written)
            self._rotary.reach(max(part.end for part in parts) + (levels - 1) * beams - 1 + self._start)
            addresses = self.pages.generation, self._rotary.table.data_ptr()
            rows = [min(max(part.count, beams), MOST_RECORDED_TOKENS) for part in parts]
            outputs = []
            for group in _groups(rows, together=self._together):
                own = slice(group[0], group[-1] + 1)
                batches = PagedBatch.levels(parts[own], self._patterns, levels, beams, nodes)
                shape, made = work(batches, [each[own] for each in numbers])
                outputs.append(self._runner.run_work((batches[0].bucket, shape), made, addresses))
        return outputs[0] if len(outputs) == 1 else tuple(map(torch.cat, zip(*outputs, strict=True)))

    def _run(self, parts: Sequence[PagedSegment], layers: Layers) -> Outputs:
        if max(part.count for part in parts) > MOST_RECORDED_TOKENS:
            return self._runner.run_once(PagedBatch.exact(parts, self._patterns), layers)
        addresses = self.pages.generation, self._rotary.table.data_ptr()
        return self._runner.run(PagedBatch.recorded(parts, self._patterns), addresses, layers)

    def _table_of(self, segment: Segment) -> PageTable:
        table = segment.cache.storage
        if not isinstance(table, PageTable) or table.pages is not self.pages:
            raise CacheError("this cache was made by another model; take one with this model's new_cache()")
        return table


WorkOfLevels: TypeAlias = Callable[[Sequence[PagedBatch], Sequence[Tensor]], tuple[Hashable, Work[Any]]]
"""Makes the work from batches and numbers, with the part of the recording's key that is not the first bucket."""


@dataclass(frozen=True, slots=True)
class Chains:
    """Forwards recorded together, with the tokens that `choose` chooses after one, of `vocab` ids, fed to the next."""

    decoder: Decoder
    pages: Pages
    choose: Choose
    vocab: int

    def work(self, batches: Sequence[PagedBatch], numbers: Sequence[Tensor]) -> tuple[Hashable, Work[Any]]:
        """See `WorkOfLevels`; `numbers` are `[requests, levels]` each, arguments of `choose`."""
        requests, rows = batches[0].wanted, batches[0].bucket.wanted
        buckets = [batch.bucket for batch in batches]

        def make() -> tuple[list[Inputs], list[Tensor]]:
            inputs = Inputs.in_a_row(buckets, len(self.decoder.patterns), self.pages.device)
            return inputs, [each.new_zeros(len(batches), rows) for each in numbers]

        def load(held: tuple[list[Inputs], list[Tensor]]) -> None:
            load_in_a_row(held[0], batches)
            for memory, given in zip(held[1], numbers, strict=True):
                memory[:, :requests].copy_(given.t())

        def forward(held: tuple[list[Inputs], list[Tensor]]) -> Outputs:
            chosen: list[Tensor] = []
            drawn: list[Tensor] = []
            for level, inputs in enumerate(held[0]):
                if level:
                    inputs.numbers.tokens.copy_(chosen[-1])
                logits = self.decoder.forward(inputs, self.pages)[0][:, : self.vocab]
                ids, probs = self.choose(logits, *(each[level] for each in held[1]))
                chosen.append(ids)
                drawn += [] if probs is None else [probs]
            return torch.stack(chosen, 1), *([torch.stack(drawn, 1)] if drawn else [])

        return (self.choose, len(batches), len(numbers)), Work(make, load, forward, requests)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, on which Triton launches its kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _groups(counts: Sequence[int], *, together: bool) -> list[list[int]]:
    """Indices of the segments that run together, from their numbers of new tokens. With `together` and a long segment,
    all run together; else each long one runs by itself, and short ones in groups of up to `_MOST_RECORDED_ROWS` rows.

    >>> _groups([3, 300, 1], together=False), _groups([64] * 17, together=True)[1], _groups([3, 300], together=True)
    ([[0, 2], [1]], [16], [[0, 1]])
    """
    if together and max(counts) > MOST_RECORDED_TOKENS:
        return [list(range(len(counts)))]
    groups: list[list[int]] = []
    long = [[number] for number, count in enumerate(counts) if count > MOST_RECORDED_TOKENS]
    rows = 0
    for number, count in enumerate(counts):
        if count > MOST_RECORDED_TOKENS:
            continue
        rows += count
        if not groups or rows > _MOST_RECORDED_ROWS:
            groups.append([])
            rows = count
        groups[-1].append(number)
    return groups + long


class Decoder:
    """A loaded decoder over pages, as a function of fixed addresses that never waits for the device.

    Its operations depend on the bucket only, never on a value in it, so it can be recorded as a CUDA graph. Weights
    stay in place, or move once into a merged tensor of which the model's own layers become views.

    Attributes:
        patterns: the distinct attention patterns of its layers.
        page_shape: attention calls, key/value heads and head width.
    """

    def __init__(self, llama: Llama) -> None:
        self.patterns = llama.patterns
        self._embedding = llama.embedding
        (self.rotary,) = llama.rotaries
        self._layers = [layer.with_products(_Product.of) for layer in llama.layers]
        self._norm = llama.norm
        self._lm_head = _Product.of((llama.lm_head,))
        first = llama.layers[0]
        self.attention = attention_for(llama.device, first.head)
        self.page_shape: tuple[int, int, int] = (len(llama.layers), first.kv_heads, first.head)

    def forward(self, inputs: Inputs, pages: Pages, layers: Layers = ()) -> Outputs:
        """One forward over pages with room for the new tokens, which also returns the output of `layers`.

        Returns:
            Logits `[wanted, ids]`, the LM head's inputs `[wanted, width]`, and the output `[wanted, width]` of each of
            the layers; padding included.
        """
        numbers = inputs.numbers
        x = embedding(numbers.tokens, self._embedding)  # [rows, width]
        rotation = self.rotary.at(numbers.positions)
        look = self.attention(inputs, pages)
        shown = {}
        for call, layer in enumerate(self._layers):
            attend = partial(look, call, self.patterns.index(layer.pattern), layer.scaling)
            if self.attention is tiled_attention:
                x = self._by_kernels(layer, x, numbers, pages.entries(call), attend)
            else:
                x = layer.run(x, rotation, partial(_written, inputs, pages, call, attend))
            if call in layers:
                shown[call] = x.index_select(0, numbers.wanted)  # a copy: the next layer may write over it
        hidden = self._norm(x.index_select(0, numbers.wanted))
        return self._lm_head(hidden), hidden, *(shown[layer] for layer in layers)

    def _by_kernels(
        self,
        layer: LlamaLayer[_Product],
        x: Tensor,
        numbers: Numbers[Tensor],
        entries: tuple[Tensor, Tensor],
        attend: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Compute `LlamaLayer.run` in fewer kernels."""
        qkv = layer.qkv(kernels.rms_norm(x, layer.before_attention))
        query = kernels.rotate_and_write(
            qkv, self.rotary.table, numbers.positions, numbers.target, *entries, layer.query_norm, layer.key_norm,
            interleaved=self.rotary.interleaved,
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

    def unembed(self, vectors: Tensor) -> Tensor:
        """The LM head's logits `[rows, ids]` for vectors `[rows, up to width]`; missing entries are zeros."""
        return linear(vectors, self._lm_head.weight[:, : vectors.shape[1]], self._lm_head.bias)


def _written(
    inputs: Inputs,
    pages: Pages,
    call: int,
    attend: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Write keys and values to their pages, then attend; see `llama.Attend`."""
    write(inputs, pages, call, key, value)
    return attend(query)


@dataclass(frozen=True, slots=True)
class _Product:
    """`x W^T + b`; see `llama.Product`."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layers: Linears) -> _Product:
        """Concatenate the outputs of several layers with one input; the layers' own weights become views."""
        weight, bias = joined(layers)
        if len(layers) > 1:
            for layer, part in zip(layers, weight.split([layer.out_features for layer in layers]), strict=True):
                layer.weight = nn.Parameter(part, requires_grad=False)
        return cls(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the product to `residual` in place, in one kernel."""
        residual.addmm_(x, self.weight.t())
        return residual if self.bias is None else residual.add_(self.bias)
