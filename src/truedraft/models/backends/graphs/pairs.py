"""Heads that read pairs of a vector and a token, as CUDA graphs: one replay per forward, or per whole draft."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from truedraft.models.attention import AttentionPattern, Full
from truedraft.models.backends.graphs.attention import attention_for, gathered_attention, write
from truedraft.models.backends.graphs.backend import PagedForward
from truedraft.models.backends.graphs.batch import Bucket, Inputs, PagedBatch
from truedraft.models.backends.graphs.growth import Grow, joined_work, own_bits
from truedraft.models.backends.graphs.replay import CudaGraphs, Layers, Outputs, Recorder, Runner, Work
from truedraft.models.base import Segment
from truedraft.models.cache import PagePool, Pages
from truedraft.models.llama import RotaryTable

_PATTERNS: tuple[AttentionPattern, ...] = (Full(),)


class ReadPairs(Protocol):
    """A head as a function of tokens and positions `[rows]`, vectors `[rows, width]`, whether these are the target's,
    attention (`truedraft.drafters.heads.layers.Attend`), and the rows to return."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        vectors: Tensor,
        observed: bool,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Vectors `[wanted, width]` and logits `[wanted, ids]`, without waiting for the device."""


class GraphPairs:
    """Runs a head over its own pages, recorded once for each bucket of shapes; `pool` makes the requests' caches.

    Args:
        rotary: table of positions, which grows with longer texts.
        start: added to all positions.
        sizes: attention calls, key/value heads, and head width.
        widths: of the head's own output vectors, and of the target's concatenated vectors.
        like: a tensor of the head's dtype on its device.
        limit: most tokens of one request.
        recorder: makes recordings; None is CUDA graphs.
        before: an instance of the same sizes with pages to reuse.
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
        before: GraphPairs | None = None,
    ) -> None:
        self._read, self._scaling = read, sizes[2] ** -0.5
        self._pages: Pages = Pages(*sizes, like.dtype, like.device) if before is None else before._pages
        self._attention = attention_for(like.device, sizes[2])
        self.pool: PagePool = PagePool(self._pages, limit) if before is None else before.pool
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
        """Forwards so far that took longer than later ones of their shape will."""
        return sum(runner.warmups for runner in self._runners)

    def run(self, segments: Sequence[Segment], vectors: Tensor, observed: bool) -> tuple[Tensor, Tensor]:
        """See `truedraft.kinds.eagle.drafter.Eagle3Runner.forward`."""
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
        """Draft whole trees in one recording; returns `Growth.found`. Everything that it reads and drafts stays
        uncommitted.

        Args:
            segments: the next tokens of each text, up to 64, with the last one as the only row; for a head that guesses
                ahead, with one row for each level, used for all nodes of that level.
            vectors: `[total, width]`: the target's, for the same tokens.
            levels: of the trees, 1 or more.
            beams: open nodes of each tree, see `Growth`.
            numbers: `[requests, ...]` each, arguments of `grow`.
        """
        ahead = len(segments[0].rows) > 1
        draft = partial(self._ahead, levels, beams, grow) if ahead else partial(self._levels, beams, grow)

        def work(batches: Sequence[PagedBatch], own: Sequence[Tensor]) -> tuple[Hashable, Work[Any]]:
            shape = levels, beams, grow, tuple(each.bucket for each in batches)
            return shape, joined_work(batches, own, self._beside[True], draft)

        forwards = 1 if ahead else levels
        nodes = (forwards - 1) * beams if beams > 1 else 0
        return self._forwards[True].run_levels(segments, forwards, work, numbers, beams, nodes, vectors)

    def _levels(self, beams: int, grow: Grow, inputs: list[Inputs], numbers: list[Tensor]) -> Outputs:
        """Run one forward for each level."""
        first, *later = inputs
        trees, words = grow(*numbers), inputs[-1].bucket.words
        vectors, logits = self._rows(first, first.vectors, observed=True)
        tokens, above = trees.grow(logits)
        paths = torch.zeros(len(logits), words, dtype=torch.int64, device=tokens.device)
        for level, own in enumerate(later):
            own.numbers.tokens.copy_(tokens)
            if words:
                paths = paths.index_select(0, above) | own_bits(beams, level, words, tokens).repeat(
                    first.bucket.requests, 1
                )
                own.numbers.path[0].copy_(paths)
            vectors, logits = self._rows(own, vectors.index_select(0, above), observed=False)
            tokens, above = trees.grow(logits)
        return trees.found()

    def _ahead(self, levels: int, beams: int, grow: Grow, inputs: list[Inputs], numbers: list[Tensor]) -> Outputs:
        """Run one forward for all levels."""
        (own,) = inputs
        trees = grow(*numbers)
        _, logits = self._rows(own, own.vectors, observed=True)
        for level, of_level in enumerate(logits.unflatten(0, (-1, levels)).unbind(1)):
            trees.grow(of_level.repeat_interleave(beams, 0) if level else of_level)
        return trees.found()

    def _inputs(self, one: Tensor, bucket: Bucket) -> Inputs:
        return Inputs(bucket, len(_PATTERNS), self._pages.device, one)

    def _forward(self, observed: bool, inputs: Inputs, layers: Layers) -> Outputs:
        return self._rows(inputs, inputs.vectors, observed)

    def _rows(self, inputs: Inputs, vectors: Tensor | None, observed: bool) -> tuple[Tensor, Tensor]:
        """Vectors and logits at the requested rows of a forward."""
        numbers = inputs.numbers
        assert vectors is not None
        look = self._attention(inputs, self._pages)
        calls = itertools.count()

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            call = next(calls)
            write(inputs, self._pages, call, key, value)
            return look(call, 0, self._scaling, query)

        return self._read(numbers.tokens, numbers.positions, vectors, observed, attention, numbers.wanted)
