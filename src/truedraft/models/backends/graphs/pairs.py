"""Heads that read pairs of a vector and a token, as CUDA graphs: each level that they draft is one replay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from truedraft.cache import PagePool, Pages
from truedraft.models.attention import AttentionPattern, Full
from truedraft.models.backends.graphs.attention import gathered_attention
from truedraft.models.backends.graphs.backend import PagedForward
from truedraft.models.backends.graphs.batch import Bucket, Inputs
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
        self.pool = PagePool(self._pages, limit)
        self._runners = [
            Runner(
                partial(self._forward, observed),
                partial(self._inputs, like.new_zeros(width)),
                CudaGraphs(like.device) if recorder is None else recorder,
            )
            for observed, width in zip((False, True), widths, strict=True)
        ]
        self._forwards = [PagedForward(self._pages, each, _PATTERNS, rotary, start) for each in self._runners]

    @property
    def warmups(self) -> int:
        """Forwards so far that took longer than others of their shape will."""
        return sum(runner.warmups for runner in self._runners)

    def run(self, segments: Sequence[Segment], vectors: Tensor, observed: bool) -> tuple[Tensor, Tensor]:
        """See `truedraft.drafters.heads.eagle.Eagle3Runner.forward`."""
        given, logits = self._forwards[observed].run(segments, vectors=vectors)
        return given, logits

    def _inputs(self, one: Tensor, bucket: Bucket) -> Inputs:
        return Inputs(bucket, len(_PATTERNS), one.device, one)

    def _forward(self, observed: bool, inputs: Inputs, layers: Layers) -> Outputs:
        numbers = inputs.numbers
        assert inputs.vectors is not None
        attend = gathered_attention(inputs, self._pages, inputs.vectors.dtype)
        calls = itertools.count()

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(next(calls), 0, self._scaling, query, key, value)

        return self._read(numbers.tokens, numbers.positions, inputs.vectors, observed, attention, numbers.wanted)
