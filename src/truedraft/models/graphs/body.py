"""A body that keeps all requests in one slab and runs recorded forwards over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.cache import CachePool
from truedraft.cache.slab import Slab, SlabCache, SlabPool
from truedraft.errors import CacheError
from truedraft.models.base import Segment
from truedraft.models.bodies import Body
from truedraft.models.fused import is_fusible
from truedraft.models.graphs.batch import PlacedSegment, SlabBatch
from truedraft.models.graphs.buckets import Bucket
from truedraft.models.graphs.decoder import Decoder, fits_decoder
from truedraft.models.graphs.inputs import Inputs
from truedraft.models.graphs.replay import CudaGraphs, Eager, Outputs, Recorder, Replayed, Runner
from truedraft.models.patterns import AttentionPattern
from truedraft.models.plan import ForwardPlan

_MOST_SHARED_TOKENS = 64


class GraphBody(Body):
    """Runs Llama-like decoders on a GPU: a step's forward is one replay of a CUDA graph.

    Segments of up to 64 tokens run together, padded to a bucket. Longer ones, which are parts of prompts, are bound
    by arithmetic, so each runs by itself, unpadded and unrecorded, by the same function. A forward copies one block
    of numbers and the tokens to the device, and waits for nothing.

    Rows of one bucket run through the same kernels. Rows of different buckets may differ by rounding, so tokens with
    and without speculation may differ where two logits nearly tie; a report prints such places. A key that is NaN or
    infinite makes every row of its own request NaN in that forward, not only its descendants: kernels multiply what is
    masked with 0. Later forwards do not see it once it was rolled back.

    Args:
        model: one that `fits`. It stays usable, as views of weights that were merged; no weight is there twice.
        patterns: of each attention call.
        recorder: makes the recordings; None is CUDA graphs on a CUDA device, and no recording elsewhere.
    """

    def __init__(
        self, model: PreTrainedModel, patterns: Sequence[AttentionPattern], recorder: Recorder | None = None
    ) -> None:
        self._device, self._dtype = model.device, model.dtype
        self._decoder = Decoder(model, patterns)
        self._slab = self._new_slab(0)  # without a slot, until a pool is asked for
        if recorder is None and self._device.type == "cuda":
            recorder = CudaGraphs(self._device)
        self._lone = Eager(self._forward, self._inputs)
        self._shared: Runner = self._lone
        if recorder is not None:
            self._shared = Replayed(self._forward, self._inputs, recorder)
        self.least_rows = 1
        self.fast_paths = ("fused projections", "one loop over the layers", "tabulated positions", "one slab of keys")
        if isinstance(recorder, CudaGraphs):
            self.fast_paths = ("CUDA graphs", *self.fast_paths)

    @staticmethod
    def fits(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> bool:
        """Whether the model is of a family and of sizes that the decoder is for, on any device."""
        return is_fusible(model, patterns) and fits_decoder(model)

    @property
    def slab(self) -> Slab:
        """Where keys and values of all requests lie."""
        return self._slab

    def _new_slab(self, limit: int) -> Slab:
        return Slab(*self._decoder.slab_shape, self._dtype, self._device, limit)

    def new_pool(self, limit: int) -> CachePool:
        """Slots of the slab; see `Body.new_pool`."""
        self._slab = self._new_slab(limit)
        return SlabPool(self._slab, limit)

    def forward(self, segments: Sequence[Segment], device: torch.device) -> Outputs:
        """See `Body.forward`."""
        for segment in segments:
            segment.cache.reserve(len(segment.shape), segment.written)
        slab = self._slab
        with slab.lock:
            slab.close_gaps()
            self._decoder.reach(slab.capacity)
            placed = [PlacedSegment(segment, self._slot_of(segment)) for segment in segments]
            for part in placed:
                slab.clean(part.slot, part.end)
            return self._run(placed)

    def run(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """Run a plan that was made elsewhere, of which only the segments are used; see `Body.run`."""
        return self.forward([part.segment for part in plan.segments], self._device)

    def unembed(self, vectors: Tensor) -> Tensor:
        """See `Body.unembed`."""
        return self._decoder.unembed(vectors)

    def _run(self, placed: Sequence[PlacedSegment]) -> Outputs:
        """Rows of all segments, in their order."""
        slab, patterns = self._slab, self._decoder.patterns
        short = [part for part in placed if part.count <= _MOST_SHARED_TOKENS]
        if len(short) == len(placed):
            return self._shared.run(SlabBatch.shared(short, slab.capacity, patterns), slab.generation)
        rows: dict[int, Outputs] = {}  # by slot
        for part in placed:
            if part.count > _MOST_SHARED_TOKENS:
                rows[part.slot] = self._lone.run(SlabBatch.lone(part, slab.capacity, patterns), slab.generation)
        if short:
            logits, hidden = self._shared.run(SlabBatch.shared(short, slab.capacity, patterns), slab.generation)
            counts = [len(part.segment.rows) for part in short]
            each = zip(logits.split(counts), hidden.split(counts), strict=True)
            rows.update(zip([part.slot for part in short], each, strict=True))
        logits, hidden = (torch.cat(parts) for parts in zip(*(rows[part.slot] for part in placed), strict=True))
        return logits, hidden

    def _slot_of(self, segment: Segment) -> int:
        cache = segment.cache
        if not isinstance(cache, SlabCache) or cache.slab is not self._slab:
            raise CacheError("this cache was made by another model; take one with this model's new_cache()")
        return cache.place

    def _inputs(self, bucket: Bucket) -> Inputs:
        return Inputs(bucket, len(self._decoder.patterns), self._slab.nowhere, self._device)

    def _forward(self, inputs: Inputs) -> Outputs:
        return self._decoder.forward(inputs, self._slab)
