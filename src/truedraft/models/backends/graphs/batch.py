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
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.cache.pages import PAGE, PageTable, pages_for
from truedraft.core import transfers
from truedraft.core.tree import TreeShape
from truedraft.models.attention import AttentionPattern
from truedraft.models.base import Segment

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
HostNumbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Numbers(Generic[Array]):
    """The numbers, all int64, on the host or on the device.

    A row is a new token; rows of a request follow each other. Rows without a token are padding; what they compute is
    never looked at.

    Attributes:
        tokens: `[rows]`.
        positions: `[rows]`, by which heads are rotated.
        target: `[rows]`: row of the pages that takes the token's key and value.
        wanted: `[wanted]`: rows that get logits.
        length: `[requests]`: committed tokens.
        end: `[requests]`: tokens once the forward has run.
        until: `[rows]`: the token sees its request's key/value positions below this, and
        path: `[patterns, rows, words]`: of the uncommitted nodes, which lie behind the committed tokens, those whose
            bit is set here.
        first: `[patterns, rows]`: of the positions below `until` only those from here on are in reach of a pattern.
        table: `[requests, span / PAGE]`: pages of each request.
        tiles: `[tiles, 3]`: of each its request, its first row, and its rows; 0 rows where it is padding.
        tile_end: `[tiles]`: the end of each one's request; 0 where it is padding.
        source: `[requests, tokens]`: the row of a request's token number so-and-so; any where it has fewer.
        place: `[rows]`: the reverse, among `requests * tokens`.
    """

    tokens: Array
    positions: Array
    target: Array
    wanted: Array
    length: Array
    end: Array
    until: Array
    path: Array
    first: Array
    table: Array
    tiles: Array
    tile_end: Array
    source: Array
    place: Array


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
        bucket: a shape that holds them.
    """

    parts: Sequence[PagedSegment]
    patterns: Sequence[AttentionPattern]
    bucket: Bucket

    @classmethod
    def recorded(cls, parts: Sequence[PagedSegment], patterns: Sequence[AttentionPattern]) -> PagedBatch:
        """In a bucket that many batches share."""
        return cls(parts, patterns, Bucket.recorded(*_sizes(parts)))

    @classmethod
    def exact(cls, parts: Sequence[PagedSegment], patterns: Sequence[AttentionPattern]) -> PagedBatch:
        """Without padding."""
        return cls(parts, patterns, Bucket.exact(*_sizes(parts), wanted=sum(len(part.segment.rows) for part in parts)))

    @property
    def wanted(self) -> int:
        """Rows that get logits, without padding."""
        return sum(len(part.segment.rows) for part in self.parts)

    def tokens(self) -> list[Tensor]:
        """New tokens of each segment."""
        return [part.segment.tokens for part in self.parts]

    def write(self, numbers: Numbers[HostNumbers]) -> None:
        """Say where each token is and what it sees; see `Numbers`."""
        row = wanted = tile = 0
        for request, part in enumerate(self.parts):
            rows, asked = slice(row, row + part.count), part.segment.rows
            numbers.wanted[wanted : wanted + len(asked)] = [row + each for each in asked]
            numbers.length[request], numbers.end[request] = part.length, part.end
            pages = pages_for(part.end)
            numbers.table[request, :pages] = part.table.table[:pages]
            numbers.source[request, : part.count] = range(rows.start, rows.stop)
            first = request * self.bucket.tokens
            numbers.place[rows] = range(first, first + part.count)
            for start in range(0, part.count, self.bucket.tile):
                numbers.tiles[tile] = request, row + start, min(self.bucket.tile, part.count - start)
                tile += 1
            self._write_rows(part, numbers, rows)
            row, wanted = rows.stop, wanted + len(asked)

    def _write_rows(self, part: PagedSegment, numbers: Numbers[HostNumbers], rows: slice) -> None:
        shape, written, length = part.segment.shape, part.segment.written, part.length
        places = np.arange(length + written, part.end)
        chain = shape.is_chain
        positions = places if chain else length - 1 + np.array(shape.depths[written:])
        numbers.positions[rows] = positions
        numbers.target[rows] = part.table.rows(length + written, part.end)
        numbers.until[rows] = places + 1 if chain else length
        for number, pattern in enumerate(self.patterns):
            first = [pattern.first(position) for position in positions.tolist()]
            numbers.first[number, rows] = first
            if not chain:
                dropped = tuple(max(0, each - length) for each in first)
                numbers.path[number, rows] = path_bits(shape, written, dropped, self.bucket.words)


def _sizes(parts: Sequence[PagedSegment]) -> tuple[int, int, int, int, int]:
    """Requests, most tokens, all tokens, furthest end, and most nodes, as a bucket is made of."""
    counts = [part.count for part in parts]
    return len(parts), max(counts), sum(counts), max(part.end for part in parts), max(part.nodes for part in parts)


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

    def __init__(self, bucket: Bucket, patterns: int, device: torch.device, vectors: Tensor | None = None) -> None:
        self.bucket = bucket
        self._shapes = _shapes(bucket, patterns)
        self._flat = torch.zeros(sum(map(math.prod, self._shapes)), dtype=torch.int64, device=device)
        self.numbers: Numbers[Tensor] = _split(self._flat, self._shapes)
        self.vectors = None if vectors is None else vectors.new_zeros(bucket.rows, len(vectors))

    def load(self, batch: PagedBatch) -> None:
        """Fill in a batch of this bucket."""
        # Page-locked, so that the copy is only queued; torch gives the block out again once it was read. Rows of
        # padding have the target 0, which lies in the scratch page.
        host = torch.zeros(self._flat.shape, dtype=torch.int64, pin_memory=self._flat.is_cuda)
        numbers: Numbers[HostNumbers] = _split(host.numpy(), self._shapes)
        numbers.until.fill(1)  # a softmax over nothing would be NaN
        batch.write(numbers)
        requests, _, rows = numbers.tiles.T
        numbers.tile_end[:] = np.where(rows > 0, numbers.end[requests], 0)
        on_device: list[tuple[int, Tensor]] = []
        start = 0
        for tokens in batch.tokens():
            if transfers.waits(tokens.device):
                on_device.append((start, tokens))
            else:
                numbers.tokens[start : start + len(tokens)] = tokens.numpy()
            start += len(tokens)
        self._flat.copy_(host, non_blocking=True)
        for start, tokens in on_device:
            self.numbers.tokens[start : start + len(tokens)].copy_(tokens)
        if self.vectors is not None:
            beside = torch.cat([part.vectors for part in batch.parts if part.vectors is not None])
            self.vectors[: len(beside)].copy_(beside)


def _shapes(bucket: Bucket, patterns: int) -> list[tuple[int, ...]]:
    """Shapes of the numbers, in the order of their names."""
    rows, requests = (bucket.rows,), (bucket.requests,)
    shapes = {
        "tokens": rows,
        "positions": rows,
        "target": rows,
        "wanted": (bucket.wanted,),
        "length": requests,
        "end": requests,
        "until": rows,
        "path": (patterns, bucket.rows, bucket.words),
        "first": (patterns, bucket.rows),
        "table": (bucket.requests, bucket.span // PAGE),
        "tiles": (bucket.tiles, 3),
        "tile_end": (bucket.tiles,),
        "source": (bucket.requests, bucket.tokens),
        "place": rows,
    }
    return [shapes[field.name] for field in fields(Numbers)]


def _split(flat: Any, shapes: list[tuple[int, ...]]) -> Numbers[Any]:
    """Views of one block, one behind another."""
    parts = []
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        parts.append(flat[start:end].reshape(shape))
        start = end
    return Numbers(*parts)
