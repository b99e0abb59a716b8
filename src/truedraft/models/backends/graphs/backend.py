"""Forwards of Llama-like decoders as CUDA graphs, recorded once for each bucket of shapes and replayed.

The backend says which requests run together; `batch` rounds their shape up to a bucket and carries the few numbers of
a forward to addresses that stay; `Decoder` is the forward, a function of those addresses alone; `replay` runs it as
it is, or records and replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention

from truedraft.cache import CachePool
from truedraft.cache.arena import Arena, ArenaPool, ArenaSlot
from truedraft.errors import CacheError
from truedraft.models.attention import AttentionPattern
from truedraft.models.backends.base import Backend
from truedraft.models.backends.graphs.batch import ArenaBatch, Bucket, Inputs, PlacedSegment, additive_mask, visible
from truedraft.models.backends.graphs.replay import CudaGraphs, Layers, Outputs, Recorder, Runner
from truedraft.models.base import ForwardOutput, Segment
from truedraft.models.llama import Linears, Llama
from truedraft.models.packed_linear import joined
from truedraft.models.packing import ForwardPlan

_MOST_SHARED_TOKENS = 64


class GraphBackend(Backend):
    """Runs Llama-like decoders on a GPU: a step's forward is one replay of a CUDA graph.

    Segments of up to 64 tokens run together, padded to a bucket. Longer ones, which are parts of prompts, are bound
    by arithmetic, so each runs by itself, unpadded and unrecorded, by the same function. A forward copies one block
    of numbers and the tokens to the device, and waits for nothing.

    Rows of one bucket run through the same kernels. Rows of different buckets may differ by rounding, so tokens with
    and without speculation may differ where two logits nearly tie; a report prints such places. A key that is NaN or
    infinite makes every row of its own request NaN in that forward, not only its descendants: kernels multiply what is
    masked with 0. Later forwards do not see it once it was rolled back.

    Args:
        llama: one that `fits`. Its model stays usable, as views of weights that were merged; none is there twice.
        recorder: makes the recordings; None is CUDA graphs on a CUDA device, and no recording elsewhere.
    """

    def __init__(self, llama: Llama, recorder: Recorder | None = None) -> None:
        self._device, self._dtype = llama.device, llama.dtype
        self._decoder = Decoder(llama)
        if recorder is None and self._device.type == "cuda":
            recorder = CudaGraphs(self._device)
        self._runner = Runner(self._forward, self._inputs, recorder)
        self._placed = self._over(0)  # without a slot, until a pool is asked for
        self.least_rows = 1
        self.shown_layers = len(llama.layers)
        self.fast_paths = ("fused projections", "one loop over the layers", "tabulated positions", "one arena of keys")
        if isinstance(recorder, CudaGraphs):
            self.fast_paths = ("CUDA graphs", *self.fast_paths)

    @staticmethod
    def fits(llama: Llama) -> bool:
        """Whether a decoder's layers are of one shape, so that they share an arena, and rotate whole heads alike."""
        heads = {(layer.head, layer.heads, layer.kv_heads) for layer in llama.layers}
        one_rotation = len(llama.rotaries) == 1 and llama.rotaries[0].width == llama.layers[0].head
        return llama.is_dense and len(heads) == 1 and one_rotation and llama.scale == 1.0

    @property
    def warmups(self) -> int:  # type: ignore[override]
        return self._runner.warmups

    @property
    def arena(self) -> Arena:
        """Where keys and values of all requests lie."""
        return self._placed.arena

    def _over(self, limit: int) -> ArenaForward:
        arena = Arena(*self._decoder.arena_shape, self._dtype, self._device, limit)
        return ArenaForward(arena, self._runner, self._decoder.patterns, self._decoder.reach)

    def new_pool(self, limit: int) -> CachePool:
        self._placed = self._over(limit)
        return ArenaPool(self._placed.arena, limit)

    def forward(self, segments: Sequence[Segment], device: torch.device, layers: Sequence[int] = ()) -> ForwardOutput:
        logits, hidden, *shown = self._placed.run(segments, tuple(layers))
        return ForwardOutput(logits, hidden, tuple(shown))

    def run(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """Run a plan that was made elsewhere, of which only the segments are used."""
        output = self.forward([part.segment for part in plan.segments], self._device)
        return output.logits, output.hidden

    def unembed(self, vectors: Tensor) -> Tensor:
        return self._decoder.unembed(vectors)

    def _inputs(self, bucket: Bucket) -> Inputs:
        return Inputs(bucket, len(self._decoder.patterns), self._placed.arena.nowhere, self._device)

    def _forward(self, inputs: Inputs, layers: Layers) -> Outputs:
        return self._decoder.forward(inputs, self._placed.arena, layers)


class ArenaForward:
    """Forwards of segments whose caches lie in an arena: those of up to 64 tokens together, longer ones each alone.

    Args:
        arena: of the caches.
        runner: runs what was laid out.
        patterns: different reaches of attention.
        reach: is told how many positions there may be.
    """

    def __init__(
        self, arena: Arena, runner: Runner, patterns: Sequence[AttentionPattern], reach: Callable[[int], None]
    ) -> None:
        self.arena = arena
        self._runner, self._patterns, self._reach = runner, patterns, reach

    def run(self, segments: Sequence[Segment], layers: Layers = (), vectors: Tensor | None = None) -> Outputs:
        """Rows of all segments, in their order.

        Args:
            segments: the requests' shares of the forward.
            layers: whose output is shown.
            vectors: `[total, width]` that stand beside the tokens, where any do.

        Raises:
            CacheError: a cache is not of this arena.
        """
        for segment in segments:
            segment.cache.reserve(len(segment.shape), segment.written)
        arena = self.arena
        with arena.lock:
            arena.close_gaps()
            self._reach(arena.capacity)
            beside = (
                [None] * len(segments) if vectors is None else vectors.split([len(each.tokens) for each in segments])
            )
            placed = [
                PlacedSegment(segment, self._slot_of(segment), own)
                for segment, own in zip(segments, beside, strict=True)
            ]
            for part in placed:
                arena.clean(part.slot, part.end)
            return self._run(placed, layers)

    def _run(self, placed: Sequence[PlacedSegment], layers: Layers) -> Outputs:
        arena, patterns = self.arena, self._patterns
        short = [part for part in placed if part.count <= _MOST_SHARED_TOKENS]
        together = ArenaBatch.shared(short, arena.capacity, patterns) if short else None
        outputs = () if together is None else self._runner.run(together, arena.generation, layers)
        if len(short) == len(placed):
            return outputs
        rows: dict[int, Outputs] = {}  # by slot
        for part in placed:
            if part.count > _MOST_SHARED_TOKENS:
                rows[part.slot] = self._runner.run_once(ArenaBatch.lone(part, arena.capacity, patterns), layers)
        counts = [len(part.segment.rows) for part in short]
        each = zip(*(output.split(counts) for output in outputs), strict=True)
        rows.update(zip([part.slot for part in short], each, strict=True))
        return tuple(torch.cat(parts) for parts in zip(*(rows[part.slot] for part in placed), strict=True))

    def _slot_of(self, segment: Segment) -> int:
        slot = segment.cache.storage
        if not isinstance(slot, ArenaSlot) or slot.arena is not self.arena:
            raise CacheError("this cache was made by another model; take one with this model's new_cache()")
        return slot.place


class Decoder:
    """A loaded decoder over an arena, as a function of fixed addresses: nothing in it waits for the device.

    Which operations run depends on the bucket alone, never on a number in it, so it can be recorded as a CUDA graph.
    Weights stay where they are, or move once into a common block of which the model's own layers become views.

    Args:
        llama: one that `GraphBackend` fits.

    Attributes:
        patterns: the different ones of its layers.
        arena_shape: attention calls, key/value heads and width of a head, as an `Arena` wants them.
    """

    def __init__(self, llama: Llama) -> None:
        self.patterns = llama.patterns
        self._embedding = llama.embedding
        (self._rotary,) = llama.rotaries
        self._layers = [layer.with_products(_Product.of) for layer in llama.layers]
        self._norm = llama.norm
        self._lm_head = _Product.of((llama.lm_head,))
        first = llama.layers[0]
        self._group = first.heads // first.kv_heads
        self.arena_shape = (len(llama.layers), first.kv_heads, first.head)

    def reach(self, positions: int) -> None:
        """Make the table of positions hold so many; it moves when it grows."""
        self._rotary.reach(positions - 1)

    def forward(self, inputs: Inputs, arena: Arena, layers: Layers = ()) -> Outputs:
        """One forward.

        Args:
            inputs: loaded.
            arena: keys and values, with room for the new tokens, clean behind them.
            layers: whose output is shown.

        Returns:
            Logits `[wanted, ids]`, the vectors `[wanted, width]` that enter the LM head, and what each of the layers
            gives, likewise; padding included.
        """
        numbers = inputs.numbers
        x = embedding(numbers.tokens.index_select(0, numbers.source), self._embedding)  # [rows, width]
        rotation = self._rotary.at(numbers.positions)
        masks = {
            pattern: additive_mask(visible(inputs, number), self._group, x.dtype)
            for number, pattern in enumerate(self.patterns)
        }
        shown = {}
        for call, layer in enumerate(self._layers):
            x = layer.run(x, rotation, partial(attend, arena, call, inputs, masks[layer.pattern], layer.scaling))
            if call in layers:
                shown[call] = x.index_select(0, numbers.wanted)  # a copy: the next layer may write over it
        hidden = self._norm(x.index_select(0, numbers.wanted))
        return self._lm_head(hidden), hidden, *(shown[layer] for layer in layers)

    def unembed(self, vectors: Tensor) -> Tensor:
        """The LM head's logits `[rows, ids]` for vectors `[rows, up to width]`, whose further entries are zeros."""
        return linear(vectors, self._lm_head.weight[:, : vectors.shape[1]], self._lm_head.bias)


@dataclass(frozen=True, slots=True)
class _Product:
    """`x W^T + b`; see `llama.Product`."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layers: Linears) -> _Product:
        """The outputs of several layers of one input, one behind another: the layers' own become views of one block."""
        weight, bias = joined(layers)
        if len(layers) > 1:
            for layer, part in zip(layers, weight.split([layer.out_features for layer in layers]), strict=True):
                layer.weight = nn.Parameter(part, requires_grad=False)
        return cls(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual`, to which the product was added in one kernel."""
        residual.addmm_(x, self.weight.t())
        return residual if self.bias is None else residual.add_(self.bias)


def attend(
    arena: Arena, call: int, inputs: Inputs, mask: Tensor, scaling: float, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attention of all requests at once, over an arena that takes the new keys and values.

    Query heads that share a key head are rows of one product: no kernel need know of groups, and keys are read once
    for all of them.

    Args:
        arena: keys and values of all requests.
        call: which attention call of the forward this is.
        inputs: where the new tokens go.
        mask: `[requests, 1, tokens * group, span]`, added to the scores.
        scaling: factor on the products.
        query: `[requests * tokens, heads, head]`.
        key: `[requests * tokens, kv_heads, head]`.
        value: likewise.

    Returns:
        `[requests * tokens, heads * head]`.
    """
    for rows, new in zip(arena.rows(call), (key, value), strict=True):
        rows.index_copy_(0, inputs.numbers.target, new)
    bucket = inputs.bucket
    slots = slice(bucket.slot, bucket.slot + bucket.requests)
    keys, values = (each[slots, : bucket.span].transpose(1, 2) for each in arena.entries(call))
    requests, kv_heads, _, head = keys.shape
    group = query.shape[1] // kv_heads
    rows = query.view(requests, -1, kv_heads, group, head).transpose(1, 2).reshape(requests, kv_heads, -1, head)
    mixed = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return mixed.reshape(requests, kv_heads, -1, group, head).transpose(1, 2).reshape(query.shape[0], -1)
