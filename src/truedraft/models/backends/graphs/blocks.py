"""Block drafters as CUDA graphs: one replay reads committed tokens and the block after them, or builds a whole draft.

Rows of a text only write keys and values; rows of a block see the text and their whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.tree import chain_shape
from truedraft.models.attention import AttentionPattern, Full
from truedraft.models.backends.graphs.attention import attention_for, gathered_attention, write
from truedraft.models.backends.graphs.backend import MOST_RECORDED_TOKENS, PagedForward
from truedraft.models.backends.graphs.batch import Bucket, Inputs, PagedBatch
from truedraft.models.backends.graphs.growth import Grow, joined_work
from truedraft.models.backends.graphs.replay import CudaGraphs, Layers, Outputs, Recorder, Runner, Work
from truedraft.models.base import Segment
from truedraft.models.cache import PagePool, Pages, RequestCache
from truedraft.models.llama import RotaryTable

_PATTERNS: tuple[AttentionPattern, ...] = (Full(),)


class ReadBlocks(Protocol):
    """A block drafter as functions of tensors that never wait for the device."""

    def context_keys(self, vectors: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[rows, kv_heads, head]` of each layer, from the target's vectors `[rows, layers *
        width]`."""

    def leaving(
        self, anchors: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The LM head's inputs `[blocks, reach, width]`, from anchors `[blocks]` and positions of all rows of blocks;
        `attend` is `truedraft.kinds.block.module.Attend`."""

    def guess(self, x: Tensor, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits `[rows, ids]` at rows `[rows, width]`, given the tokens `[rows]` before them and their state `[rows,
        ...]`, None at first; and the new state."""


class GraphBlocks:
    """Runs a block drafter over its own pages, recorded once for each bucket of shapes; `pool` makes the requests'
    caches.

    Args:
        rotary: table of positions, which grows with longer texts.
        block: rows of a block.
        sizes: layers, key/value heads, and head width.
        width: of the target's concatenated vectors of all layers.
        like: a tensor of the drafter's dtype on its device.
        limit: most tokens of one request.
        recorder: makes recordings; None is CUDA graphs.
        before: an instance of the same sizes with pages to reuse.
    """

    def __init__(
        self,
        head: ReadBlocks,
        rotary: RotaryTable,
        block: int,
        sizes: tuple[int, int, int],
        width: int,
        like: Tensor,
        limit: int,
        recorder: Recorder | None = None,
        before: GraphBlocks | None = None,
    ) -> None:
        self._head, self._block, self._scaling = head, block, sizes[2] ** -0.5
        self._pages: Pages = Pages(*sizes, like.dtype, like.device) if before is None else before._pages
        self._attention = attention_for(like.device, sizes[2])
        self._one = like.new_zeros(width)
        self.pool: PagePool = PagePool(self._pages, limit) if before is None else before.pool
        recorder = CudaGraphs(like.device) if recorder is None else recorder
        self._runner = Runner(self._read, self._inputs, recorder)
        together = self._attention is not gathered_attention
        self._paged = PagedForward(self._pages, self._runner, _PATTERNS, rotary, together=together)

    @property
    def warmups(self) -> int:
        """Drafts so far that took longer than later ones of their shape will."""
        return self._runner.warmups

    def read(self, cache: RequestCache, vectors: Tensor) -> None:
        """Read a text's next tokens, as vectors `[rows, layers * width]`, into the cache."""
        self._paged.run([_text(cache, len(vectors))], vectors=vectors)
        cache.commit(range(len(vectors)))

    def run(self, caches: Sequence[RequestCache], vectors: Sequence[Tensor], anchors: Sequence[int]) -> Tensor:
        """Read the next tokens of texts into their caches, and a block after each.

        Args:
            vectors: for each text the target's vectors `[rows, layers * width]`, one row or more.
            anchors: the last token of each text, which has no vector yet.

        Returns:
            The LM head's inputs `[blocks, reach, width]`.
        """
        return self._run(
            caches, vectors, anchors, (), None, lambda inputs, numbers: (self._through(inputs, numbers[0]),)
        )[0]

    def run_trees(
        self,
        caches: Sequence[RequestCache],
        vectors: Sequence[Tensor],
        anchors: Sequence[int],
        levels: int,
        beams: int,
        grow: Grow,
        numbers: Sequence[Tensor],
    ) -> Outputs:
        """`run`, and build trees from the blocks; further arguments as in `GraphPairs.run_trees`."""
        draft = partial(self._trees, levels, beams, grow)
        return self._run(caches, vectors, anchors, numbers, (levels, beams, grow), draft)

    def _run(
        self,
        caches: Sequence[RequestCache],
        vectors: Sequence[Tensor],
        anchors: Sequence[int],
        numbers: Sequence[Tensor],
        shape: Hashable,
        draft: Callable[[list[Inputs], list[Tensor]], Outputs],
    ) -> Outputs:
        ends = []
        for cache, own in zip(caches, vectors, strict=True):
            if (count := len(own) - 1) >= MOST_RECORDED_TOKENS:
                self.read(cache, own[:count])
                own = own[count:]
            ends.append(own)

        def work(batches: Sequence[PagedBatch], own: Sequence[Tensor]) -> tuple[Hashable, Work[Any]]:
            return (shape, batches[1].bucket), joined_work(batches, own, self._one, draft)

        texts = [_text(cache, len(own)) for cache, own in zip(caches, ends, strict=True)]
        read = [transfers.upload(anchors, self._one.device), *numbers]
        found = self._paged.run_levels(texts, 2, work, read, beams=self._block, vectors=torch.cat(ends))
        for cache, own in zip(caches, ends, strict=True):
            cache.commit(range(len(own)))
        return found

    def _inputs(self, bucket: Bucket) -> Inputs:
        return Inputs(bucket, len(_PATTERNS), self._pages.device, self._one)

    def _read(self, inputs: Inputs, layers: Layers) -> Outputs:
        """Read only texts."""
        for call, made in enumerate(self._keys(inputs)):
            write(inputs, self._pages, call, *made)
        return ()

    def _keys(self, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        assert inputs.vectors is not None
        return self._head.context_keys(inputs.vectors, inputs.numbers.positions)

    def _through(self, inputs: list[Inputs], anchors: Tensor) -> Tensor:
        """Read texts and the blocks after them; the LM head's inputs."""
        text, blocks = inputs
        numbers = blocks.numbers
        numbers.until.copy_(numbers.end.clamp_min(1).repeat_interleave(self._block))  # all of the own block
        look, keys = self._attention(blocks, self._pages), self._keys(text)

        def attend(call: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            write(text, self._pages, call, *next(keys))
            write(blocks, self._pages, call, key, value)
            return look(call, 0, self._scaling, query)

        return self._head.leaving(anchors, numbers.positions, attend)

    def _trees(self, levels: int, beams: int, grow: Grow, inputs: list[Inputs], numbers: list[Tensor]) -> Outputs:
        """Build the trees, with one row of the block per level."""
        tokens, *own = numbers
        x, trees, state = self._through(inputs, tokens), grow(*own), None
        for level in range(levels):
            of_level = x[:, level].repeat_interleave(beams if level else 1, 0)
            logits, state = self._head.guess(of_level, tokens, state)
            tokens, above = trees.grow(logits)
            state = state.index_select(0, above)
        return trees.found()


def _text(cache: RequestCache, count: int) -> Segment:
    """A segment of `count` more positions; vectors replace its token ids."""
    return Segment(cache, torch.zeros(count, dtype=torch.int64), chain_shape(count), ())
