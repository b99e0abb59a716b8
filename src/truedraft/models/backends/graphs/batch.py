"""The inputs of a forward over pages: its shape, the place of each token, and the mask.

Tokens of all requests are packed without padding in between. The shape of a decoding batch is rounded up to a `Bucket`.
`PagedBatch` writes places and masks as a few numbers per token, and `Inputs` copies them to fixed addresses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.tree import TreeShape
from truedraft.models.attention import AttentionPattern
from truedraft.models.base import Segment
from truedraft.models.cache import FIRST
from truedraft.models.cache.pages import PAGE, PageTable

WORD_BITS = 64
"""Nodes of a tree per mask word."""
LEAST_SPAN = 256
"""Least positions per request in recorded forwards."""

_ROWS_ALIKE = 64
_TILES = (1, 4, 16, 64)
_SPAN_STEP = 64  # without recording; attention kernels need mask rows that start at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a forward, padding included. Those of equal buckets run the same kernels at the same addresses."""

    requests: int
    tokens: int  # most new tokens of a request
    rows: int  # new tokens of all requests
    span: int  # key/value positions per request, a multiple of the page size
    words: int  # 64-bit mask words per token; 0 where all segments are chains
    logit_rows: int  # rows that get logits

    @classmethod
    def recorded(cls, requests: int, tokens: int, rows: int, end: int, nodes: int) -> Bucket:
        """The bucket of requests with greatest length `end` and tree `nodes` (0: chains); numbers are powers of two."""
        requests, tokens, span = _power(requests), _power(tokens), max(_power(end), LEAST_SPAN)
        # Few rows cost a GPU no more than one, so the shape does not depend on which requests have drafts.
        rows = requests * tokens if requests * tokens <= _ROWS_ALIKE else _power(rows)
        words = _power(-(-nodes // WORD_BITS)) if nodes else 0
        return cls(requests, tokens, rows, span, words, rows)

    @classmethod
    def exact(cls, requests: int, tokens: int, rows: int, end: int, nodes: int, logit_rows: int) -> Bucket:
        """A bucket with only the span rounded; arguments as in `recorded`."""
        span = -(-end // _SPAN_STEP) * _SPAN_STEP
        return cls(requests, tokens, rows, span, -(-nodes // WORD_BITS), logit_rows)

    @property
    def tile(self) -> int:
        return next((size for size in _TILES if self.tokens <= size), _TILES[-1])

    @property
    def tiles(self) -> int:
        most = -(-self.tokens // self.tile)
        return min(self.requests * most, self.requests + self.rows // self.tile)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


Array = TypeVar("Array")
_WIDE = 5  # the first arrays of `Numbers`, of 8 bytes each
HostNumbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Numbers(Generic[Array]):
    """The inputs on the host or on the device; int32, the first `_WIDE` int64.

    A row is a new token; rows of a request are consecutive. Results of rows of padding are never read.
    """

    tokens: Array  # [rows]
    positions: Array  # [rows], for rotary embeddings
    target: Array  # [rows]: the row of the pages where the token's key and value are written
    logit_rows: Array  # [logit_rows]: rows that get logits
    path: Array  # [patterns, rows, words]: bits of the visible uncommitted nodes, which follow the committed tokens
    until: Array  # [rows]: end of the visible key/value positions of the request
    first: Array  # [patterns, rows]: first position in reach of the pattern
    request: Array  # [rows]: index of the token's request
    length: Array  # [requests]: committed tokens that are stored
    start: Array  # [requests]: row of the first new token
    end: Array  # [requests]: length after the forward
    table: Array  # [requests, span / PAGE]: pages of each request
    tiles: Array  # [tiles, 3]: request, first row and number of rows; 0 rows for padding
    tile_end: Array  # [tiles]: `end` of the tile's request; 0 for padding


@dataclass(frozen=True, slots=True)
class PagedSegment:
    """A segment, its request's block table, and vectors `[new, width]` where the forward reads any."""

    segment: Segment
    table: PageTable
    vectors: Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.segment.shape) - self.segment.written

    @property
    def length(self) -> int:
        return self.segment.cache.stored

    @property
    def dropped(self) -> int:
        return self.segment.cache.dropped

    @property
    def end(self) -> int:
        return self.length + len(self.segment.shape)

    @property
    def nodes(self) -> int:
        """Uncommitted tokens that need a tree mask; 0 in a chain."""
        return 0 if self.segment.shape.is_chain else len(self.segment.shape)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Segments that run together."""

    parts: Sequence[PagedSegment]
    patterns: Sequence[AttentionPattern]
    sizes: HostNumbers  # [3, requests]: committed tokens that are stored, uncommitted ones written before, new ones
    bucket: Bucket
    level: int = 0  # forwards of the same recording before this one; above 0 the device chooses the tokens
    beams: int = 1  # new tokens of each request at levels above 0

    @classmethod
    def recorded(cls, parts: Sequence[PagedSegment], patterns: Sequence[AttentionPattern]) -> PagedBatch:
        sizes = _sizes(parts)
        return cls(parts, patterns, sizes, Bucket.recorded(*_most(parts, sizes)))

    @classmethod
    def exact(cls, parts: Sequence[PagedSegment], patterns: Sequence[AttentionPattern]) -> PagedBatch:
        sizes, requested = _sizes(parts), sum(len(part.segment.rows) for part in parts)
        return cls(parts, patterns, sizes, Bucket.exact(*_most(parts, sizes), logit_rows=requested))

    @classmethod
    def levels(
        cls,
        parts: Sequence[PagedSegment],  # chains with equally many rows that get logits
        patterns: Sequence[AttentionPattern],  # with `nodes` above 0, everything before the nodes must be in reach
        levels: int,
        beams: int = 1,  # new tokens of each request after the first forward; all of them get logits
        nodes: int = 0,  # of the trees that are built, with paths known to the device only; 0 for chains
    ) -> list[PagedBatch]:
        """Forwards in sequence, each of which chooses the tokens of the next. The caches have room for all of them."""
        sizes, each = _sizes(parts), len(parts[0].segment.rows)
        requests, tokens, rows, end, _ = _most(parts, sizes)
        end += (levels - 1) * beams
        first = Bucket.recorded(requests, tokens, rows, end, 0)
        first = replace(first, logit_rows=first.requests * each)
        other = Bucket.recorded(requests, beams, requests * beams, end, nodes)
        rows = other.requests * beams
        other = replace(other, tokens=beams, rows=rows, logit_rows=rows)
        return [cls(parts, patterns, sizes, other if level else first, level, beams) for level in range(levels)]

    @property
    def logit_rows(self) -> int:
        return sum(self.beams if self.level else len(part.segment.rows) for part in self.parts)

    def tokens(self) -> list[tuple[Tensor, int]]:
        """New tokens, grouped by device, and the first row of each group; none where the device chooses them."""
        if self.level:
            return []
        runs, row = [], 0
        for _, group in itertools.groupby((part.segment.tokens for part in self.parts), lambda each: each.device):
            runs.append((torch.cat(list(group)), row))
            row += len(runs[-1][0])
        return runs

    def write(self, numbers: Numbers[HostNumbers]) -> None:
        """Write the place and the mask of each token; see `Numbers`.

        Worked example: of two requests with 5 and 9 committed tokens the first is fed tokens 5 and 6, the second token
        9. Rows 0 to 2 belong to requests 0, 0, 1, which start at rows 0 and 2; their places are 5, 6, 9.
        """
        lengths, written, counts = self.sizes
        if self.level:
            written, counts = written + counts + (self.level - 1) * self.beams, np.full_like(counts, self.beams)
        ends = lengths + written + counts
        start = np.cumsum(counts) - counts
        request, rows = np.repeat(np.arange(len(counts)), counts), int(counts.sum())
        places = np.arange(rows) + (lengths + written - start)[request]
        positions, until = places, places + 1
        if self.level and self.bucket.words:
            # The host has the depths of nodes, and not their parents. Tokens read before count as committed.
            lengths = self.sizes.sum(axis=0)
            until = lengths[request]
            positions = until + self.level - 1
        for own, part, pages in zip(numbers.table, self.parts, (-(-ends // PAGE)).tolist(), strict=False):
            own[:pages] = part.table.table[:pages]
        numbers.length[: len(counts)], numbers.start[: len(counts)], numbers.end[: len(counts)] = lengths, start, ends
        numbers.request[:rows] = request
        dropped = np.array([part.dropped for part in self.parts])[request]
        positions = positions + dropped
        numbers.positions[:rows], numbers.until[:rows] = positions, until
        numbers.target[:rows] = numbers.table[request, places // PAGE].astype(np.int64) * PAGE + places % PAGE
        for pattern, first in zip(self.patterns, numbers.first, strict=True):
            first[:rows] = _stored(pattern.first(positions), dropped)
        numbers.logit_rows[: self.logit_rows] = np.arange(rows) if self.level else self._logit_rows(start)
        _write_tiles(numbers.tiles, start, counts, self.bucket.tile)
        numbers.tile_end[:] = numbers.end[numbers.tiles[:, 0]] * (numbers.tiles[:, 2] > 0)
        for number, part in enumerate(self.parts if self.bucket.words and not self.level else ()):
            if part.nodes:
                self._write_tree(part, numbers, slice(start[number], start[number] + part.count))

    def _logit_rows(self, start: HostNumbers) -> HostNumbers:
        per_part = [part.segment.rows for part in self.parts]
        flat = np.fromiter(itertools.chain.from_iterable(per_part), np.int64)
        return flat + np.repeat(start, [len(rows) for rows in per_part])

    def _write_tree(self, part: PagedSegment, numbers: Numbers[HostNumbers], rows: slice) -> None:
        shape, written, length = part.segment.shape, part.segment.written, part.length
        positions = length + part.dropped - 1 + np.array(shape.depths[written:])
        numbers.positions[rows] = positions
        numbers.until[rows] = length
        for number, pattern in enumerate(self.patterns):
            first = _stored(pattern.first(positions), part.dropped)
            numbers.first[number, rows] = first
            dropped = tuple(np.maximum(0, first - length).tolist())
            numbers.path[number, rows] = path_bits(shape, written, dropped, self.bucket.words)


def _stored(places: HostNumbers, dropped: HostNumbers | int) -> HostNumbers:
    """`stored_place` of arrays."""
    return np.maximum(np.minimum(places, FIRST), places - dropped)


def _write_tiles(tiles: HostNumbers, start: HostNumbers, counts: HostNumbers, size: int) -> None:
    """Divide the rows of each request into tiles of `size`; the last tile of a request may be smaller.

    Worked example: 6 rows and 1 row in tiles of 4 are [0, 0, 4], [0, 4, 2] and [1, 6, 1].
    """
    each = -(-counts // size)
    owner = np.repeat(np.arange(len(counts)), each)
    before = size * (np.arange(len(owner)) - (np.cumsum(each) - each)[owner])
    tiles[: len(owner)] = np.stack([owner, start[owner] + before, np.minimum(size, counts[owner] - before)], 1)


def _sizes(parts: Sequence[PagedSegment]) -> HostNumbers:
    return np.array([(part.length, part.segment.written, part.count) for part in parts], dtype=np.int64).T


def _most(parts: Sequence[PagedSegment], sizes: HostNumbers) -> tuple[int, int, int, int, int]:
    counts, ends = sizes[2], sizes.sum(axis=0)
    return len(parts), int(counts.max()), int(counts.sum()), int(ends.max()), max(part.nodes for part in parts)


@lru_cache(maxsize=1024)
def path_bits(shape: TreeShape, written: int, dropped: tuple[int, ...], words: int) -> NDArray[Any]:
    """The nodes visible to new tokens, as bits: int64 `[new, words]`; bit n of a row is set where it sees node n.

    `dropped` are for each new token the nodes at the top of its path that are out of reach.

    Worked example: parents (-1, 0, 0, 2) with nothing written or dropped give 0b1, 0b11, 0b101, 0b1101.
    """
    bits = np.zeros((len(shape) - written, words), dtype=np.uint64)
    for row, (node, out_of_reach) in enumerate(zip(range(written, len(shape)), dropped, strict=True)):
        for seen in itertools.islice(shape.path(node), out_of_reach, None):
            bits[row, seen // WORD_BITS] |= np.uint64(1 << seen % WORD_BITS)
    return bits.view(np.int64)


class Inputs:
    """Memory for the inputs of one bucket; loading never waits. `vectors` `[rows, width]` are read with tokens."""

    def __init__(self, bucket: Bucket, layout: Layout, memory: Tensor, vectors: Tensor | None) -> None:
        self.bucket = bucket
        self.vectors = vectors
        self.numbers: Numbers[Tensor] = _split(memory, layout)
        self._layout, self._memory = layout, memory

    @classmethod
    def in_a_row(
        cls, buckets: Sequence[Bucket], patterns: int, device: torch.device, vectors: Tensor | None = None
    ) -> list[Inputs]:
        """Inputs of forwards in one block of memory; `vectors` `[width]` is a row of those that the first one reads."""
        layouts = [_layout(bucket, patterns) for bucket in buckets]
        sizes = [sum(size for _, size in layout) for layout in layouts]
        block = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        first = None if vectors is None else vectors.new_zeros(buckets[0].rows, len(vectors))
        read = [first, *[None] * (len(buckets) - 1)]
        return [cls(*each) for each in zip(buckets, layouts, block.split(sizes), read, strict=True)]

    def write(self, memory: Tensor, batch: PagedBatch) -> list[tuple[Tensor, int]]:
        """Write the host's numbers into zeros on the host; returns tokens on a device, and each group's first row."""
        numbers: Numbers[HostNumbers] = _split(memory.numpy(), self._layout)
        numbers.until.fill(1)  # a softmax over nothing would be NaN
        batch.write(numbers)
        on_device = []
        for tokens, start in batch.tokens():
            if transfers.waits(tokens.device):
                on_device.append((tokens, start))
            else:
                numbers.tokens[start : start + len(tokens)] = tokens.numpy()
        return on_device

    def copy(self, on_device: Sequence[tuple[Tensor, int]], batch: PagedBatch) -> None:
        for tokens, start in on_device:
            self.numbers.tokens[start : start + len(tokens)].copy_(tokens)
        if self.vectors is not None:
            vectors = torch.cat([part.vectors for part in batch.parts if part.vectors is not None])
            self.vectors[: len(vectors)].copy_(vectors)


def load_in_a_row(inputs: Sequence[Inputs], batches: Sequence[PagedBatch]) -> None:
    """Fill in batches; the memory of the inputs is one block."""
    sizes = [len(each._memory) for each in inputs]
    block = inputs[0]._memory.as_strided((sum(sizes),), (1,))
    # Page-locked, so that the copy is only queued; torch reuses the block once it was read. Rows of padding have the
    # target 0, which is in the scratch page.
    host = torch.zeros(block.shape, dtype=torch.int64, pin_memory=block.is_cuda)
    parts = zip(inputs, host.split(sizes), batches, strict=True)
    on_device = [each.write(memory, batch) for each, memory, batch in parts]
    block.copy_(host, non_blocking=True)
    for each, tokens, batch in zip(inputs, on_device, batches, strict=True):
        each.copy(tokens, batch)


Layout: TypeAlias = list[tuple[tuple[int, ...], int]]
"""The shape of each array of `Numbers`, and its size in int64."""


def _layout(bucket: Bucket, patterns: int) -> Layout:
    """8 bytes per number for the first `_WIDE` arrays and 4 for the others, rounded up to multiples of 64 bytes."""
    rows, requests = (bucket.rows,), (bucket.requests,)
    masks = [(patterns, bucket.rows, bucket.words), rows, (patterns, bucket.rows), rows]
    table = (bucket.requests, bucket.span // PAGE)
    shapes = [
        rows, rows, rows, (bucket.logit_rows,), *masks, requests, requests, requests, table, (bucket.tiles, 3),
        (bucket.tiles,),
    ]  # fmt: skip
    halves = [math.prod(shape) * (2 if number < _WIDE else 1) for number, shape in enumerate(shapes)]
    return [(shape, -(-half // 16) * 8) for shape, half in zip(shapes, halves, strict=True)]


def _split(memory: Any, layout: Layout) -> Numbers[Any]:
    narrow: Any = torch.int32 if isinstance(memory, Tensor) else np.int32
    parts = []
    start = 0
    for number, (shape, size) in enumerate(layout):
        part = memory[start : start + size]
        part = part if number < _WIDE else part.view(narrow)
        parts.append(part[: math.prod(shape)].reshape(shape))
        start += size
    return Numbers(*parts)
