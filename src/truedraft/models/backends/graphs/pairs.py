"""Heads that read pairs of a vector and a token, as CUDA graphs: a forward is one replay, and so is a whole draft."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from truedraft.cache import PagePool, Pages
from truedraft.core.tree import shape_of
from truedraft.models.attention import AttentionPattern, Full
from truedraft.models.backends.graphs.attention import attention_for, gathered_attention, write
from truedraft.models.backends.graphs.backend import PagedForward
from truedraft.models.backends.graphs.batch import Bucket, Inputs, PagedBatch, PagedSegment
from truedraft.models.backends.graphs.growth import Grow, in_parts, joined_work, own_bits
from truedraft.models.backends.graphs.replay import CudaGraphs, Layers, Outputs, Recorder, Runner
from truedraft.models.base import Segment
from truedraft.models.llama import RotaryTable

_PATTERNS: tuple[AttentionPattern, ...] = (Full(),)


class ReadPairs(Protocol):
    """A head as a function: of tokens and positions `[rows]`, vectors beside them `[rows, width]`, whether these are
    the target's, attention (`truedraft.heads.layers.Attend`), and the rows that are wanted."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        vectors: Tensor,
        observed: bool,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Vectors `[wanted, width]` and logits `[wanted, ids]`; nothing in it may wait for the device."""


class GraphPairs:
    """Runs a head over pages of its own, recorded once for each bucket of shapes, as `GraphBackend` runs targets.

    Args:
        read: the head.
        rotary: its table of positions, which grows when texts do.
        start: added to all positions.
        sizes: attention calls, key/value heads, and width of a head.
        widths: of the vectors that it gave, and of the target's, side by side.
        like: a tensor of its dtype on its device.
        limit: tokens of one request.
        recorder: makes recordings; None is CUDA graphs.

    Attributes:
        pool: where caches of requests come from.
    """

    def __init__(
        self,
        read: ReadPairs,
        rotary: RotaryTable,
        start: int,
        sizes: tuple[int, int, int],
        widths: tuple[int, int],
        like: Tensor,
        limit: int,
        recorder: Recorder | None = None,
    ) -> None:
        self._read, self._scaling = read, sizes[2] ** -0.5
        self._pages = Pages(*sizes, like.dtype, like.device)
        self._attention = attention_for(like.device, sizes[2])
        self.pool = PagePool(self._pages, limit)
        self._beside = [like.new_zeros(width) for width in widths]
        self._runners = [
            Runner(
                partial(self._forward, observed),
                partial(self._inputs, self._beside[observed]),
                CudaGraphs(like.device) if recorder is None else recorder,
            )
            for observed in (False, True)
        ]
        together = self._attention is not gathered_attention
        self._forwards = [
            PagedForward(self._pages, each, _PATTERNS, rotary, start, together=together) for each in self._runners
        ]

    @property
    def warmups(self) -> int:
        """Forwards so far that took longer than others of their shape will."""
        return sum(runner.warmups for runner in self._runners)

    def run(self, segments: Sequence[Segment], vectors: Tensor, observed: bool) -> tuple[Tensor, Tensor]:
        """See `truedraft.drafters.heads.eagle.Eagle3Runner.forward`."""
        given, logits = self._forwards[observed].run(segments, vectors=vectors)
        return given, logits

    def run_trees(
        self,
        segments: Sequence[Segment],
        vectors: Tensor,
        levels: int,
        beams: int,
        grow: Grow,
        numbers: Sequence[Tensor],
    ) -> Outputs:
        """Draft whole trees in one recording.

        What it reads of texts, and what is drafted behind, stays uncommitted.

        Args:
            segments: the next tokens of each text, up to 64, with one wanted row, the last. Or, of a head that guesses
                ahead, with one for each level, by which all nodes of that go.
            vectors: `[total, width]`: the target's, beside the tokens.
            levels: of the trees, 1 or more.
            beams: open nodes of each, as `Growth` has them.
            grow: makes the trees.
            numbers: `[requests, ...]` each, that it is given.

        Returns:
            What the trees found.
        """
        beside = vectors.split([len(each.tokens) for each in segments])
        ahead = len(segments[0].rows) > 1
        draft = partial(self._ahead, levels, beams, grow) if ahead else partial(self._levels, beams, grow)

        def run(of: slice) -> Outputs:
            batches = self._batches(segments[of], beside[of], 1 if ahead else levels, beams)
            buckets = tuple(each.bucket for each in batches)
            besides = self._beside[True], *[None] * (len(buckets) - 1)
            work = joined_work(
                batches, [each[of] for each in numbers], lambda: list(map(self._inputs, besides, buckets)), draft
            )
            return self._forwards[True].run_joined(batches, (levels, beams, grow, buckets), work)

        return in_parts([max(len(each.tokens), beams) for each in segments], run)

    def _batches(
        self, segments: Sequence[Segment], beside: Sequence[Tensor], forwards: int, beams: int
    ) -> list[PagedBatch]:
        """Of the text's tokens, then of so many open nodes for each forward more, behind each other."""
        for segment in segments:
            segment.cache.reserve(len(segment.tokens) + (forwards - 1) * beams)
        tables = map(self._forwards[True].table_of, segments)
        read = [PagedSegment(*each) for each in zip(segments, tables, beside, strict=True)]
        batches = [PagedBatch.recorded(read, _PATTERNS)]
        nothing = torch.empty(0, dtype=torch.int64)  # what is fed to these is chosen on the device
        for written in range(0, (forwards - 1) * beams, beams):
            # The host knows how deep nodes are, and not which they hang below: see `own_bits`.
            shape = shape_of(tuple(max(-1, node - beams) for node in range(written + beams)))
            new = partial(replace, tokens=nothing, shape=shape, rows=range(beams), written=written)
            opened = [PagedSegment(new(each.segment), each.table, read=each.count) for each in read]
            batches.append(PagedBatch.regular(opened, _PATTERNS))
        return batches

    def _levels(self, beams: int, grow: Grow, inputs: list[Inputs], numbers: list[Tensor]) -> Outputs:
        """A forward for each level."""
        first, *later = inputs
        requests, words = first.bucket.requests, inputs[-1].bucket.words
        trees = grow(*numbers)
        vectors, logits = self._rows(first, first.vectors, observed=True)
        tokens, above = trees.grow(logits[:requests])
        paths = torch.zeros(requests, words, dtype=torch.int64, device=tokens.device)
        for level, own in enumerate(later):
            own.numbers.tokens.copy_(tokens)
            if words:
                paths = paths.index_select(0, above) | own_bits(beams, level, words, tokens).repeat(requests, 1)
                own.numbers.path[0].copy_(paths[:, : own.bucket.words])
            vectors, logits = self._rows(own, vectors.index_select(0, above), observed=False)
            tokens, above = trees.grow(logits)
        return trees.found()

    def _ahead(self, levels: int, beams: int, grow: Grow, inputs: list[Inputs], numbers: list[Tensor]) -> Outputs:
        """One forward for all levels."""
        (own,) = inputs
        trees = grow(*numbers)
        _, logits = self._rows(own, own.vectors, observed=True)
        request = torch.arange(own.bucket.requests, device=logits.device)
        for level in range(levels):
            # Of requests that are not there any row will do.
            trees.grow(logits.index_select(0, (request * levels + level).clamp_max(len(logits) - 1)))
            if not level:
                request = request.repeat_interleave(beams)
        return trees.found()

    def _inputs(self, one: Tensor | None, bucket: Bucket) -> Inputs:
        return Inputs(bucket, len(_PATTERNS), self._pages.device, one)

    def _forward(self, observed: bool, inputs: Inputs, layers: Layers) -> Outputs:
        return self._rows(inputs, inputs.vectors, observed)

    def _rows(self, inputs: Inputs, vectors: Tensor | None, observed: bool) -> tuple[Tensor, Tensor]:
        """Vectors and logits at the wanted rows of a forward."""
        numbers = inputs.numbers
        assert vectors is not None
        look = self._attention(inputs, self._pages)
        calls = itertools.count()

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            call = next(calls)
            write(inputs, self._pages, call, key, value)
            return look(call, 0, self._scaling, query)

        return self._read(numbers.tokens, numbers.positions, vectors, observed, attention, numbers.wanted)
