"""The inputs of a forward over pages: its shape, and where each token is and what it sees.

Tokens of all requests are packed one behind another, without padding between requests. The shape of short ones, which
decode, is rounded up to a `Bucket`, so that few different ones occur and each need be recorded only once. `PagedBatch`
says where the tokens of its segments are and what they see, in a few numbers for each; `Inputs` carries these to
addresses that stay; `attention` reads them on the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.tree import TreeShape
from truedraft.models.attention import AttentionPattern
from truedraft.models.base import Segment
from truedraft.models.cache.pages import PAGE, PageTable

WORD_BITS = 64
"""Nodes of a tree that one number tells about."""
LEAST_SPAN = 256
"""Positions of a request that recorded forwards look at."""

_ROWS_ALIKE = 64
_TILES = (1, 4, 16, 64)
_SPAN_STEP = 64  # of what is not recorded; attention kernels want masks whose rows start at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a forward. Forwards of equal buckets run the same kernels at the same addresses.

    Attributes:
        requests: that take part; some may have nothing to do.
        tokens: most new tokens of a request.
        rows: new tokens of all requests, padding included.
        span: positions of each request that are looked at, a multiple of the size of a page.
        words: numbers of 64 bits that say which nodes of a tree a token sees; 0 where all are chains.
        wanted: rows that get logits, padding included.
    """

    requests: int
    tokens: int
    rows: int
    span: int
    words: int
    wanted: int

    @classmethod
    def recorded(cls, requests: int, tokens: int, rows: int, end: int, nodes: int) -> Bucket:
        """Of requests that decode, every number a power of two.

        Args:
            requests: how many there are.
            tokens: most new tokens of one.
            rows: new tokens of all.
            end: most tokens of one once the forward has run.
            nodes: nodes of the largest tree, uncommitted ones of earlier forwards included; 0 where all are chains.
        """
        requests, tokens, span = _power(requests), _power(tokens), max(_power(end), LEAST_SPAN)
        # Few rows cost a GPU no more than one, so who drafts and who does not makes no other shape.
        rows = requests * tokens if requests * tokens <= _ROWS_ALIKE else _power(rows)
        words = _power(-(-nodes // WORD_BITS)) if nodes else 0
        return cls(requests, tokens, rows, span, words, rows)

    @classmethod
    def exact(cls, requests: int, tokens: int, rows: int, end: int, nodes: int, wanted: int) -> Bucket:
        """Nothing rounded but the span; arguments as above, and how many rows get logits."""
        span = -(-end // _SPAN_STEP) * _SPAN_STEP
        return cls(requests, tokens, rows, span, -(-nodes // WORD_BITS), wanted)

    @property
    def tile(self) -> int:
        """Rows of one request that attention works on together."""
        return next((size for size in _TILES if self.tokens <= size), _TILES[-1])

    @property
    def tiles(self) -> int:
        """Tiles that hold the rows, however they are shared out among the requests."""
        most = -(-self.tokens // self.tile)
        return min(self.requests * most, self.requests + self.rows // self.tile)


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()


Array = TypeVar("Array")
_WIDE = 5  # of the numbers below have 8 bytes
HostNumbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Numbers(Generic[Array]):
    """The numbers on the host or on the device; int64 where it is said, else int32.

    A row is a new token; rows of a request follow each other. Rows without a token are padding; what they compute is
    never looked at.

    Attributes:
        tokens: `[rows]`, int64.
        positions: `[rows]`, int64, by which heads are rotated.
        target: `[rows]`, int64: row of the pages that takes the token's key and value.
        wanted: `[wanted]`, int64: rows that get logits.
        path: `[patterns, rows, words]`, int64: of the uncommitted nodes, which lie behind the committed tokens, the
            token sees those whose bit is set here, and
        until: `[rows]`: its request's key/value positions below this, of which
        first: `[patterns, rows]`: only those from here on are in reach of a pattern.
        request: `[rows]`: whose token it is.
        length: `[requests]`: committed tokens.
        start: `[requests]`: row of the first new token.
        end: `[requests]`: tokens once the forward has run.
        table: `[requests, span / PAGE]`: pages of each request.
        tiles: `[tiles, 3]`: of each its request, its first row, and its rows; 0 rows where it is padding.
        tile_end: `[tiles]`: the end of each one's request; 0 where it is padding.
    """

    tokens: Array
    positions: Array
    target: Array
    wanted: Array
    path: Array
    until: Array
    first: Array
    request: Array
    length: Array
    start: Array
    end: Array
    table: Array
    tiles: Array
    tile_end: Array


@dataclass(frozen=True, slots=True)
class PagedSegment:
    """A segment, and the block table of its request.

    Attributes:
        segment: as given.
        table: of its cache.
        vectors: `[new, width]` that stand beside its tokens, where a forward reads any.
    """

    segment: Segment
    table: PageTable
    vectors: Tensor | None = None

    @property
    def count(self) -> int:
        """New tokens."""
        return len(self.segment.shape) - self.segment.written

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.segment.cache.length

    @property
    def end(self) -> int:
        """Tokens once the forward has run."""
        return self.length + len(self.segment.shape)

    @property
    def nodes(self) -> int:
        """Uncommitted tokens that a mask must tell apart; 0 in a chain."""
        return 0 if self.segment.shape.is_chain else len(self.segment.shape)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Segments that run together.

    Attributes:
        parts: the segments.
        patterns: different reaches of attention in the model.
        sizes: `[3, requests]`: committed tokens, uncommitted ones that were written before, and new ones.
        bucket: a shape that holds them.
        level: forwards of one recording that ran before this one, of which the first read all that segments say, and
            which choose what is fed; 0 where that is the segments' tokens.
        beams: new tokens of each request at such a level.
    """

    parts: Sequence[PagedSegment]
    patterns: Sequence[AttentionPattern]
    sizes: HostNumbers
    bucket: Bucket
    level: int = 0
    beams: int = 1

    @classmethod
    def recorded(cls, parts: Sequence[PagedSegment], patterns: Sequence[AttentionPattern]) -> PagedBatch:
        """In a bucket that many batches share."""
        sizes = _sizes(parts)
        return cls(parts, patterns, sizes, Bucket.recorded(*_most(parts, sizes)))

    @classmethod
    def exact(cls, parts: Sequence[PagedSegment], patterns: Sequence[AttentionPattern]) -> PagedBatch:
        """Without padding."""
        sizes, wanted = _sizes(parts), sum(len(part.segment.rows) for part in parts)
        return cls(parts, patterns, sizes, Bucket.exact(*_most(parts, sizes), wanted=wanted))

    @classmethod
    def levels(
        cls,
        parts: Sequence[PagedSegment],
        patterns: Sequence[AttentionPattern],
        levels: int,
        beams: int = 1,
        nodes: int = 0,
    ) -> list[PagedBatch]:
        """Forwards of which each chooses what the next is fed; their caches have room for all.

        Args:
            parts: chains, of each of which equally many rows are wanted.
            patterns: as above; where nodes hang below others, all that is before these is in reach.
            levels: how many forwards.
            beams: new tokens of each request in those behind the first, which want all rows.
            nodes: of the trees that these make, whose paths the device knows; 0 where they go on in chains.
        """
        sizes, each = _sizes(parts), len(parts[0].segment.rows)
        requests, tokens, rows, end, _ = _most(parts, sizes)
        end += (levels - 1) * beams
        first = Bucket.recorded(requests, tokens, rows, end, 0)
        first = replace(first, wanted=first.requests * each)
        other = Bucket.recorded(requests, beams, requests * beams, end, nodes)
        rows = other.requests * beams
        other = replace(other, tokens=beams, rows=rows, wanted=rows)
        return [cls(parts, patterns, sizes, other if level else first, level, beams) for level in range(levels)]

    @property
    def wanted(self) -> int:
        """Rows that get logits, without padding."""
        return sum(self.beams if self.level else len(part.segment.rows) for part in self.parts)

    def tokens(self) -> list[tuple[Tensor, int]]:
        """New tokens, those of neighbours on one device together, and the row of the first; none where they are chosen
        on the device."""
        if self.level:
            return []
        runs, row = [], 0
        for _, group in itertools.groupby((part.segment.tokens for part in self.parts), lambda each: each.device):
            runs.append((torch.cat(list(group)), row))
            row += len(runs[-1][0])
        return runs

    def write(self, numbers: Numbers[HostNumbers]) -> None:
        """Say where each token is and what it sees; see `Numbers`.

        Worked example: of two requests with 5 and 9 committed tokens the first feeds tokens 5 and 6, the second 9.
        Rows 0 to 2 belong to requests 0, 0, 1, which start at rows 0 and 2; their places are 5, 6, 9.
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
            # The host knows how deep nodes are, and not below which they hang. What was read counts as committed.
            lengths = self.sizes.sum(axis=0)
            until = lengths[request]
            positions = until + self.level - 1
        for own, part, pages in zip(numbers.table, self.parts, (-(-ends // PAGE)).tolist(), strict=False):
            own[:pages] = part.table.table[:pages]
        numbers.length[: len(counts)], numbers.start[: len(counts)], numbers.end[: len(counts)] = lengths, start, ends
        numbers.request[:rows] = request
        numbers.positions[:rows], numbers.until[:rows] = positions, until
        numbers.target[:rows] = numbers.table[request, places // PAGE].astype(np.int64) * PAGE + places % PAGE
        for pattern, first in zip(self.patterns, numbers.first, strict=True):
            first[:rows] = pattern.first(positions)
        self._write_wanted(numbers.wanted, start, rows)
        _write_tiles(numbers.tiles, start, counts, self.bucket.tile)
        numbers.tile_end[:] = numbers.end[numbers.tiles[:, 0]] * (numbers.tiles[:, 2] > 0)
        for number, part in enumerate(self.parts if self.bucket.words and not self.level else ()):
            if part.nodes:
                self._write_tree(part, numbers, slice(start[number], start[number] + part.count))

    def _write_wanted(self, wanted: HostNumbers, start: HostNumbers, rows: int) -> None:
        if self.level:
            wanted[:rows] = np.arange(rows)
            return
        asked = [part.segment.rows for part in self.parts]
        flat = np.fromiter(itertools.chain.from_iterable(asked), np.int64)
        wanted[: len(flat)] = flat + np.repeat(start, [len(rows) for rows in asked])

    def _write_tree(self, part: PagedSegment, numbers: Numbers[HostNumbers], rows: slice) -> None:
        """What is otherwise for a tree: positions by depth, and nodes by their paths."""
        shape, written, length = part.segment.shape, part.segment.written, part.length
        positions = length - 1 + np.array(shape.depths[written:])
        numbers.positions[rows] = positions
        numbers.until[rows] = length
        for number, pattern in enumerate(self.patterns):
            first = pattern.first(positions)
            numbers.first[number, rows] = first
            dropped = tuple(np.maximum(0, first - length).tolist())
            numbers.path[number, rows] = path_bits(shape, written, dropped, self.bucket.words)


def _write_tiles(tiles: HostNumbers, start: HostNumbers, counts: HostNumbers, size: int) -> None:
    """Rows of each request in tiles of so many, the last of a request with what is left.

    Worked example: in tiles of 4 a request of 6 rows and one of 1 have the tiles (0, 0, 4), (0, 4, 2), (1, 6, 1).

    >>> tiles = np.zeros((3, 3), int)
    >>> _write_tiles(tiles, np.array([0, 6]), np.array([6, 1]), 4)
    >>> tiles.tolist()
    [[0, 0, 4], [0, 4, 2], [1, 6, 1]]
    """
    each = -(-counts // size)
    owner = np.repeat(np.arange(len(counts)), each)
    before = size * (np.arange(len(owner)) - (np.cumsum(each) - each)[owner])
    tiles[: len(owner)] = np.stack([owner, start[owner] + before, np.minimum(size, counts[owner] - before)], 1)


def _sizes(parts: Sequence[PagedSegment]) -> HostNumbers:
    """See `PagedBatch.sizes`."""
    return np.array([(part.length, part.segment.written, part.count) for part in parts], dtype=np.int64).T


def _most(parts: Sequence[PagedSegment], sizes: HostNumbers) -> tuple[int, int, int, int, int]:
    """Requests, most tokens, all tokens, furthest end, and most nodes, as a bucket is made of."""
    counts, ends = sizes[2], sizes.sum(axis=0)
    return len(parts), int(counts.max()), int(counts.sum()), int(ends.max()), max(part.nodes for part in parts)


@lru_cache(maxsize=1024)
def path_bits(shape: TreeShape, written: int, dropped: tuple[int, ...], words: int) -> NDArray[Any]:
    """The nodes that new tokens see, as bits: int64 `[new, words]`, bit n of a row set where it sees node n.

    Worked example: parents (-1, 0, 0, 2) with nothing written or dropped give 0b1, 0b11, 0b101, 0b1101.

    Args:
        shape: all uncommitted tokens.
        written: nodes that earlier forwards wrote; the others are new.
        dropped: for each new token, how many nodes from the top of its path are out of reach.
        words: numbers of 64 bits for each token.
    """
    bits = np.zeros((len(shape) - written, words), dtype=np.uint64)
    for row, (node, out_of_reach) in enumerate(zip(range(written, len(shape)), dropped, strict=True)):
        for seen in itertools.islice(shape.path(node), out_of_reach, None):
            bits[row, seen // WORD_BITS] |= np.uint64(1 << seen % WORD_BITS)
    return bits.view(np.int64)


class Inputs:
    """Memory for the inputs of one bucket. Loading them waits for nothing.

    All numbers on the host go up in one copy; tokens that are on the device already are put between them there.

    Args:
        bucket: the shape.
        patterns: different reaches of attention in the model.
        device: of the model.
        vectors: for one row `[width]`, of what stands beside tokens; None where nothing does.

    Attributes:
        bucket: as given.
        numbers: on the device.
        vectors: `[rows, width]`; None where nothing stands beside tokens.
    """

    def __init__(
        self,
        bucket: Bucket,
        patterns: int,
        device: torch.device,
        vectors: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> None:
        self.bucket = bucket
        self._shapes = _shapes(bucket, patterns)
        size = sum(_sizes_of(self._shapes))
        self._memory = torch.zeros(size, dtype=torch.int64, device=device) if memory is None else memory
        self.numbers: Numbers[Tensor] = _split(self._memory, self._shapes)
        self.vectors = None if vectors is None else vectors.new_zeros(bucket.rows, len(vectors))

    @classmethod
    def in_a_row(
        cls, buckets: Sequence[Bucket], patterns: int, device: torch.device, vectors: Tensor | None = None
    ) -> list[Inputs]:
        """Those of forwards behind each other, in one block of memory; vectors stand beside tokens of the first."""
        sizes = [sum(_sizes_of(_shapes(bucket, patterns))) for bucket in buckets]
        block = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = zip(buckets, block.split(sizes), strict=True)
        besides = itertools.chain([vectors], itertools.repeat(None))
        return [
            cls(bucket, patterns, device, one, memory) for (bucket, memory), one in zip(parts, besides, strict=False)
        ]

    def load(self, batch: PagedBatch) -> None:
        """Fill in a batch of this bucket."""
        load_in_a_row([self], [batch])

    def write(self, memory: Tensor, batch: PagedBatch) -> list[tuple[Tensor, int]]:
        """Fill in what the host knows, into zeros on the host that are laid out as this is.

        Returns:
            Tokens that are elsewhere, and the row of the first of each.
        """
        numbers: Numbers[HostNumbers] = _split(memory.numpy(), self._shapes)
        numbers.until.fill(1)  # a softmax over nothing would be NaN
        batch.write(numbers)
        elsewhere = []
        for tokens, start in batch.tokens():
            if transfers.waits(tokens.device):
                elsewhere.append((tokens, start))
            else:
                numbers.tokens[start : start + len(tokens)] = tokens.numpy()
        return elsewhere

    def load_beside(self, elsewhere: Sequence[tuple[Tensor, int]], batch: PagedBatch) -> None:
        """Fill in what the host does not know, once its numbers are here."""
        for tokens, start in elsewhere:
            self.numbers.tokens[start : start + len(tokens)].copy_(tokens)
        if self.vectors is not None:
            beside = torch.cat([part.vectors for part in batch.parts if part.vectors is not None])
            self.vectors[: len(beside)].copy_(beside)


def load_in_a_row(inputs: Sequence[Inputs], batches: Sequence[PagedBatch]) -> None:
    """Fill in batches; the memory of the inputs lies in one block."""
    sizes = [len(each._memory) for each in inputs]
    block = inputs[0]._memory.as_strided((sum(sizes),), (1,))
    # Page-locked, so that the copy is only queued; torch gives the block out again once it was read. Rows of padding
    # have the target 0, which lies in the scratch page.
    host = torch.zeros(block.shape, dtype=torch.int64, pin_memory=block.is_cuda)
    parts = zip(inputs, host.split(sizes), batches, strict=True)
    elsewhere = [each.write(memory, batch) for each, memory, batch in parts]
    block.copy_(host, non_blocking=True)
    for each, tokens, batch in zip(inputs, elsewhere, batches, strict=True):
        each.load_beside(tokens, batch)


def _shapes(bucket: Bucket, patterns: int) -> list[tuple[int, ...]]:
    """Shapes of the numbers, in the order of their names."""
    rows, requests = (bucket.rows,), (bucket.requests,)
    return [
        rows,
        rows,
        rows,
        (bucket.wanted,),
        (patterns, bucket.rows, bucket.words),
        rows,
        (patterns, bucket.rows),
        rows,
        requests,
        requests,
        requests,
        (bucket.requests, bucket.span // PAGE),
        (bucket.tiles, 3),
        (bucket.tiles,),
    ]


def _sizes_of(shapes: list[tuple[int, ...]]) -> list[int]:
    """What each takes of a block of int64, the first `_WIDE` one for each number and the others half of one, rounded
    up so that all start at multiples of 64 bytes."""
    halves = [math.prod(shape) * (2 if number < _WIDE else 1) for number, shape in enumerate(shapes)]
    return [-(-each // 16) * 8 for each in halves]


def _split(memory: Any, shapes: list[tuple[int, ...]]) -> Numbers[Any]:
    """Views of a block of int64, on the host (numpy) or a device (torch), one behind another."""
    narrow: Any = torch.int32 if isinstance(memory, Tensor) else np.int32
    parts = []
    start = 0
    for number, (shape, size) in enumerate(zip(shapes, _sizes_of(shapes), strict=True)):
        part = memory[start : start + size]
        part = part if number < _WIDE else part.view(narrow)
        parts.append(part[: math.prod(shape)].reshape(shape))
        start += size
    return Numbers(*parts)
