"""Heads with attention as CUDA graphs, one replay per forward or draft: over pairs, or blocks.

Drafts grow on the device, level by level, within a recording. Each level of each tree has the same number of open
nodes, so one recording serves all drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.top_k import TopK
from truedraft.core.tree import chain_shape
from truedraft.models.attention import AttentionPattern
from truedraft.models.backends.graphs.attention import attention_for, write
from truedraft.models.backends.graphs.batch import WORD_BITS, Inputs
from truedraft.models.backends.graphs.replay import (
    MOST_RECORDED_TOKENS,
    CudaGraphs,
    Draft,
    Layers,
    Outputs,
    PagedForward,
    Recorder,
)
from truedraft.models.base import Choose, Segment
from truedraft.models.cache import PagePool, Pages, RequestCache
from truedraft.models.llama import RotaryTable


class LikeliestNodes:
    """Builds the tree of `truedraft.drafters.tree_builder.LikeliestTree`, node for node, with tensor operations.

    Nodes are numbered level by level, in the order of their parents. Where fewer than `beams` nodes are open, the
    others are children of a node that does not exist: their log probabilities are -inf. Each open node has `beams`
    children, at most the number of ids. `ids` `[guessed]` are those of the logits; None is the whole vocabulary.
    `limits` `[requests, 2]` are open nodes and depth of each tree.
    """

    def __init__(self, beams: int, nodes: int, ids: Tensor | None, limits: Tensor) -> None:
        self.beams, self._nodes, self._ids = beams, nodes, ids
        self._widths, self._depths = limits[:, :1], limits[:, 1:]
        self._open = torch.full_like(self._widths, -1)  # [requests, open]: node numbers
        self._products = torch.zeros_like(self._open, dtype=torch.float64)  # [requests, open]: log probabilities
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents and logs [requests, open * beams]

    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Add children to the open nodes, and choose the next open nodes.

        Logits are `[requests, ids]` in the first call, then `[requests * beams, ids]`. Returns the new open nodes'
        tokens, and the rows of `logits` at their parents; both `[requests * beams]`, int64.
        """
        requests, opened = self._open.shape
        top, rank = TopK.of(logits, self.beams), torch.arange(self.beams, device=logits.device)
        tokens = top.ids if self._ids is None else self._ids[top.ids]
        gains = top.log_probs.double().view(requests, opened, self.beams)
        # As on the host, no node has a child of probability 0 or with a log probability of NaN.
        possible = (gains > -torch.inf) & (rank < self._widths[:, None]) & (len(self._levels) < self._depths[:, None])
        logs = (self._products[:, :, None] + gains).masked_fill(~possible, -torch.inf).flatten(1)
        tokens, parents = tokens.view(requests, -1), self._open.repeat_interleave(self.beams, dim=1)
        before = sum(each.shape[1] for each, *_ in self._levels)
        self._levels.append((tokens, parents, logs))
        # The likeliest nodes in the order of their numbers, then those that are not open.
        count = logs.shape[1]
        best = _first(logs, self.beams)
        closed = (rank >= self._widths) | (logs.gather(1, best) == -torch.inf)
        best = (best + count * closed).sort(dim=1).values
        closed, best = best >= count, best % count
        self._products = logs.gather(1, best).masked_fill(closed, -torch.inf)
        self._open = best + before
        above = best // self.beams + opened * torch.arange(requests, device=logits.device)[:, None]
        return tokens.gather(1, best).flatten(), above.flatten()

    def found(self) -> Outputs:
        """Tokens and parents `[requests, nodes]` of the likeliest nodes, likeliest first, and each tree's size."""
        tokens, parents, logs = (torch.cat(each, dim=1) for each in zip(*self._levels, strict=True))
        kept = _first(logs, min(self._nodes, logs.shape[1]))
        place = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        numbers = torch.zeros_like(parents).scatter_(1, kept, place)
        parents = parents.gather(1, kept)
        above = numbers.gather(1, parents.clamp_min(0)).masked_fill_(parents < 0, -1)
        return tokens.gather(1, kept), above, (logs.gather(1, kept) > -torch.inf).sum(dim=1)


def _first(logs: Tensor, count: int) -> Tensor:
    """Indices of the largest entries of each row, the first of equal ones, as Python sorts: `[requests, count]`."""
    return logs.sort(dim=1, descending=True, stable=True).indices[:, :count]


class ChosenChains:
    """Chains with tokens drawn one by one by `choose` with `numbers` `[requests, levels]`.

    `whole` maps logits of the head's ids to logits of the whole vocabulary; None where they have it already.
    """

    beams = 1

    def __init__(self, choose: Choose, whole: Callable[[Tensor], Tensor] | None, *numbers: Tensor) -> None:
        self._choose, self._whole, self._numbers = choose, whole, numbers
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []

    def choose(self, logits: Tensor) -> Tensor:
        level = len(self._tokens)
        logits = logits if self._whole is None else self._whole(logits)
        tokens, probs = self._choose(logits, *(each[:, level] for each in self._numbers))
        self._tokens.append(tokens)
        self._probs += [] if probs is None else [probs]
        return tokens

    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.choose(logits)
        return tokens, torch.arange(len(tokens), device=tokens.device)

    def found(self) -> Outputs:
        """Tokens `[requests, levels]`, and where they were sampled their distributions `[requests, levels, vocab]`."""
        return torch.stack(self._tokens, 1), *([torch.stack(self._probs, 1)] if self._probs else [])


Growth: TypeAlias = LikeliestNodes | ChosenChains
Grow: TypeAlias = Callable[..., Growth]
"""Makes trees with only their roots, from numbers `[requests, ...]` on the device. It is part of a recording's key."""


def own_bits(beams: int, level: int, words: int, like: Tensor) -> Tensor:
    """The mask bits of the nodes that are open after a level, from 0: `[beams, words]`, int64, on the device of `like`.

    Worked example: with two at each level, those open after level 1 are nodes 2 and 3, with the bits 0b100 and 0b1000.
    """
    node = torch.arange(beams * level, beams * (level + 1), device=like.device)[:, None]
    word = torch.arange(words, device=like.device)
    return torch.where(word == node // WORD_BITS, torch.ones_like(node) << node % WORD_BITS, 0)


class _GraphHead:
    """A head over its own pages; `pool` makes the requests' caches.

    `seen` is the pattern of each attention call; `sizes` are calls, key/value heads and head width; `like` has the
    head's dtype and device; `limit` is most tokens of one request. `recorder` None is CUDA graphs. `before` is an
    instance of the same sizes with pages to reuse.
    """

    def __init__(
        self,
        seen: Sequence[AttentionPattern],
        sizes: tuple[int, int, int],
        like: Tensor,
        limit: int,
        recorder: Recorder | None,
        before: _GraphHead | None,
    ) -> None:
        self._recorder = recorder
        self._scaling = sizes[2] ** -0.5
        self._patterns = tuple(dict.fromkeys(seen))
        self._seen = [self._patterns.index(each) for each in seen]
        self._pages: Pages = Pages(*sizes, like.dtype, like.device) if before is None else before._pages
        self.pool: PagePool = PagePool(self._pages, limit) if before is None else before.pool
        self._attention = attention_for(like.device, sizes[2])
        self._forwards: list[PagedForward] = []

    def _paged(
        self, forward: Callable[[Inputs, Layers], Outputs], rotary: RotaryTable, start: int, vectors: Tensor
    ) -> PagedForward:
        recorder = CudaGraphs(vectors.device) if self._recorder is None else self._recorder
        self._forwards.append(PagedForward(self._pages, forward, recorder, self._patterns, rotary, start, vectors))
        return self._forwards[-1]

    @property
    def warmups(self) -> int:
        return sum(each.recordings.warmups for each in self._forwards)


ReadPairs: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, bool, Callable[[Tensor, Tensor, Tensor], Tensor], Tensor], tuple[Tensor, Tensor]
]
"""A head: from tokens and positions `[rows]`, vectors `[rows, width]`, whether these are the target's, attention
(`truedraft.drafters.heads.layers.Attend`) and the rows to return: vectors `[rows, width]` and logits `[rows, ids]`,
without waiting for the device."""


class GraphPairs(_GraphHead):
    """Runs a head that reads pairs of a vector and a token; see `_GraphHead` for further arguments.

    `rotary` grows with longer texts; `start` is added to all positions. `widths` are those of the head's own vectors
    and of the target's concatenated ones.
    """

    def __init__(
        self,
        read: ReadPairs,
        rotary: RotaryTable,
        start: int,
        seen: Sequence[AttentionPattern],
        sizes: tuple[int, int, int],
        widths: tuple[int, int],
        like: Tensor,
        limit: int,
        recorder: Recorder | None = None,
        before: GraphPairs | None = None,
    ) -> None:
        super().__init__(seen, sizes, like, limit, recorder, before)
        self._read = read
        for observed, width in enumerate(widths):
            self._paged(partial(self._forward, bool(observed)), rotary, start, like.new_zeros(width))

    def run(self, segments: Sequence[Segment], vectors: Tensor, observed: bool) -> tuple[Tensor, Tensor]:
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
        """Draft whole trees in one recording; returns `Growth.found`. Everything stays uncommitted.

        `segments` are the next tokens of each text, up to 64, with the last one as the only row; for a head that
        guesses ahead, with one row for each level, used for all nodes of that level. `vectors` `[total, width]` are the
        target's for these tokens, `beams` the open nodes of each tree, and `numbers` `[requests, ...]` each the
        arguments of `grow`.
        """
        ahead = len(segments[0].rows) > 1
        draft = partial(self._ahead, levels, beams, grow) if ahead else partial(self._levels, beams, grow)
        forwards = 1 if ahead else levels
        nodes = (forwards - 1) * beams if beams > 1 else 0
        key = levels, beams, grow
        return self._forwards[True].run_levels(segments, forwards, key, draft, numbers, beams, nodes, vectors)

    def _levels(self, beams: int, grow: Grow, inputs: list[Inputs], numbers: list[Tensor]) -> Outputs:
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
                own.numbers.path.copy_(paths.expand_as(own.numbers.path))
            vectors, logits = self._rows(own, vectors.index_select(0, above), observed=False)
            tokens, above = trees.grow(logits)
        return trees.found()

    def _ahead(self, levels: int, beams: int, grow: Grow, inputs: list[Inputs], numbers: list[Tensor]) -> Outputs:
        (own,) = inputs
        trees = grow(*numbers)
        _, logits = self._rows(own, own.vectors, observed=True)
        for level, of_level in enumerate(logits.unflatten(0, (-1, levels)).unbind(1)):
            trees.grow(of_level.repeat_interleave(beams, 0) if level else of_level)
        return trees.found()

    def _forward(self, observed: bool, inputs: Inputs, layers: Layers) -> Outputs:
        return self._rows(inputs, inputs.vectors, observed)

    def _rows(self, inputs: Inputs, vectors: Tensor | None, observed: bool) -> tuple[Tensor, Tensor]:
        numbers = inputs.numbers
        assert vectors is not None
        look = self._attention(inputs, self._pages)
        calls = itertools.count()

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            call = next(calls)
            write(inputs, self._pages, call, key, value)
            return look(call, self._seen[call], self._scaling, query)

        return self._read(numbers.tokens, numbers.positions, vectors, observed, attention, numbers.logit_rows)


class ReadBlocks(Protocol):
    """A block drafter as functions of tensors that never wait for the device."""

    def context_keys(self, vectors: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's keys and values `[rows, kv_heads, head]`, from vectors `[rows, layers * width]`."""

    def slots(
        self, anchors: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Outputs:
        """What guesses read, `[blocks, reach, ...]` each, from anchors `[blocks]` and positions of all rows."""

    def guess(self, slot: Sequence[Tensor], tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits `[rows, ids]` and the new state, from rows of one of `slots`, the tokens `[rows]` before and their
        state, None at first."""


class GraphBlocks(_GraphHead):
    """Runs a block drafter with blocks of `block` rows; see `_GraphHead` and `GraphPairs` for further arguments."""

    def __init__(
        self,
        head: ReadBlocks,
        rotary: RotaryTable,
        block: int,
        seen: Sequence[AttentionPattern],
        sizes: tuple[int, int, int],
        width: int,
        like: Tensor,
        limit: int,
        recorder: Recorder | None = None,
        before: GraphBlocks | None = None,
    ) -> None:
        super().__init__(seen, sizes, like, limit, recorder, before)
        self._head, self._block = head, block
        self._texts = self._paged(self._read, rotary, 0, like.new_zeros(width))

    def read(self, cache: RequestCache, vectors: Tensor) -> None:
        """Read a text's next tokens, as vectors `[rows, layers * width]`, into the cache."""
        self._texts.run([_text(cache, len(vectors))], vectors=vectors)
        cache.commit(range(len(vectors)))

    def run(self, caches: Sequence[RequestCache], vectors: Sequence[Tensor], anchors: Sequence[int]) -> Outputs:
        """Read the next tokens of texts into their caches, and a block after each; `anchors` are their last tokens.

        `vectors` are the target's, `[rows, layers * width]` for each text, without the anchors'. Returns the slots.
        """
        return self._run(caches, vectors, anchors, (), None, lambda inputs, numbers: self._through(inputs, numbers[0]))

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
        draft = partial(self._trees, levels, beams, grow)
        return self._run(caches, vectors, anchors, numbers, (levels, beams, grow), draft)

    def _run(
        self,
        caches: Sequence[RequestCache],
        vectors: Sequence[Tensor],
        anchors: Sequence[int],
        numbers: Sequence[Tensor],
        key: Hashable,
        draft: Draft,
    ) -> Outputs:
        ends = []
        for cache, own in zip(caches, vectors, strict=True):
            if (count := len(own) - 1) >= MOST_RECORDED_TOKENS:
                self.read(cache, own[:count])
                own = own[count:]
            ends.append(own)
        texts = [_text(cache, len(own)) for cache, own in zip(caches, ends, strict=True)]
        read = [transfers.upload(anchors, self._pages.device), *numbers]
        found = self._texts.run_levels(texts, 2, key, draft, read, beams=self._block, vectors=torch.cat(ends))
        for cache, own in zip(caches, ends, strict=True):
            cache.commit(range(len(own)))
        return found

    def _read(self, inputs: Inputs, layers: Layers) -> Outputs:
        for call, made in enumerate(self._keys(inputs)):
            write(inputs, self._pages, call, *made)
        return ()

    def _keys(self, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        assert inputs.vectors is not None
        return self._head.context_keys(inputs.vectors, inputs.numbers.positions)

    def _through(self, inputs: list[Inputs], anchors: Tensor) -> Outputs:
        text, blocks = inputs
        numbers = blocks.numbers
        numbers.until.copy_(numbers.end.clamp_min(1).repeat_interleave(self._block))  # all of the own block
        numbers.first.copy_(numbers.first[:, :: self._block].repeat_interleave(self._block, 1))  # as its anchor
        look, keys = self._attention(blocks, self._pages), self._keys(text)

        def attend(call: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            write(text, self._pages, call, *next(keys))
            write(blocks, self._pages, call, key, value)
            return look(call, self._seen[call], self._scaling, query)

        return self._head.slots(anchors, numbers.positions, attend)

    def _trees(self, levels: int, beams: int, grow: Grow, inputs: list[Inputs], numbers: list[Tensor]) -> Outputs:
        tokens, *own = numbers
        slots, trees, state = self._through(inputs, tokens), grow(*own), None
        for level in range(levels):
            of_level = [each[:, level].repeat_interleave(beams if level else 1, 0) for each in slots]
            logits, state = self._head.guess(of_level, tokens, state)
            tokens, above = trees.grow(logits)
            state = state.index_select(0, above)
        return trees.found()


def _text(cache: RequestCache, count: int) -> Segment:
    return Segment(cache, torch.zeros(count, dtype=torch.int64), chain_shape(count), ())
