"""The inputs of a forward over the arena: its shape, and where each token is and what it sees.

A forward's shape is rounded up to a `Bucket`, so that few different ones occur and each need be recorded only once.
`ArenaBatch` says where the tokens of its segments are and what they see, in a few numbers for each; `Inputs` carries
these to addresses that stay; `visible` and `additive_mask` make the attention mask of them on the device.
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

from truedraft.cache.arena import SPAN_STEP
from truedraft.core import transfers
from truedraft.core.tree import TreeShape
from truedraft.models.attention import AttentionPattern
from truedraft.models.base import Segment

WORD_BITS = 64
"""Nodes of a tree that one number tells about."""

_LONE_SPAN_STEP = 64  # attention kernels want masks whose rows start at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a forward. Forwards of equal buckets run the same kernels at the same addresses.

    Attributes:
        slot: the arena's first slot that takes part.
        requests: slots from there on that take part; some may have nothing to do.
        tokens: new tokens of each request, padding included.
        span: keys of each request that are looked at.
        words: numbers of 64 bits that say which nodes of a tree a token sees; 0 where all are chains.
        wanted: rows that get logits, padding included.
    """

    slot: int
    requests: int
    tokens: int
    span: int
    words: int
    wanted: int

    @property
    def rows(self) -> int:
        """Tokens of the whole forward, padding included."""
        return self.requests * self.tokens


def shared_bucket(slots: int, tokens: int, end: int, nodes: int, capacity: int) -> Bucket:
    """The bucket of requests that run together, every number a power of two (the span: or all there is).

    Args:
        slots: the highest slot that takes part, plus 1.
        tokens: most new tokens of a request.
        end: most tokens of a request once the forward has run.
        nodes: nodes of the largest tree, uncommitted ones of earlier forwards included; 0 where all are chains.
        capacity: of a slot.
    """
    requests, tokens = _power(slots), _power(tokens)
    span = min(capacity, _power(max(end, SPAN_STEP)))
    words = _power(-(-nodes // WORD_BITS)) if nodes else 0
    return Bucket(0, requests, tokens, span, words, requests * tokens)


def lone_bucket(slot: int, tokens: int, end: int, nodes: int, wanted: int) -> Bucket:
    """The bucket of one long request that runs by itself, nothing rounded but the span; arguments as above."""
    span = -(-end // _LONE_SPAN_STEP) * _LONE_SPAN_STEP
    return Bucket(slot, 1, tokens, span, -(-nodes // WORD_BITS), wanted)


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()


Array = TypeVar("Array")
HostNumbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Numbers(Generic[Array]):
    """The numbers, all int64, on the host or on the device.

    A row is a token of a request: row `request * tokens + i`. Rows without a token are padding; what they compute is
    never looked at.

    Attributes:
        tokens: `[rows]`: the pack of tokens, one request's behind another's; then numbers without meaning.
        source: `[rows]`: where in the pack of tokens a row's token is.
        positions: `[rows]`.
        target: `[rows]`: the arena's row that takes the token's key and value.
        wanted: `[wanted]`: rows that get logits.
        length: `[requests]`: committed tokens.
        until: `[rows]`: the token sees its request's slots below this, and
        path: `[patterns, rows, words]`: of the uncommitted nodes those whose bit is set here.
        first: `[patterns, rows]`: of the slots below `until` only those from here on are in reach of a pattern.
    """

    tokens: Array
    source: Array
    positions: Array
    target: Array
    wanted: Array
    length: Array
    until: Array
    path: Array
    first: Array


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment, and the slot of its request.

    Attributes:
        segment: as given.
        slot: of the arena.
        vectors: `[new, width]` that stand beside its tokens, where a forward reads any.
    """

    segment: Segment
    slot: int
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
class ArenaBatch:
    """Segments that run together.

    Attributes:
        parts: the segments.
        bucket: a shape that holds them.
        capacity: of the arena's slots.
        patterns: different reaches of attention in the model.
    """

    parts: Sequence[PlacedSegment]
    bucket: Bucket
    capacity: int
    patterns: Sequence[AttentionPattern]

    @classmethod
    def shared(cls, parts: Sequence[PlacedSegment], capacity: int, patterns: Sequence[AttentionPattern]) -> ArenaBatch:
        """Any segments, padded to each other."""
        bucket = shared_bucket(
            slots=max(part.slot for part in parts) + 1,
            tokens=max(part.count for part in parts),
            end=max(part.end for part in parts),
            nodes=max(part.nodes for part in parts),
            capacity=capacity,
        )
        return cls(parts, bucket, capacity, patterns)

    @classmethod
    def lone(cls, part: PlacedSegment, capacity: int, patterns: Sequence[AttentionPattern]) -> ArenaBatch:
        """One segment without padding."""
        bucket = lone_bucket(part.slot, part.count, part.end, part.nodes, len(part.segment.rows))
        return cls((part,), bucket, capacity, patterns)

    @property
    def wanted(self) -> int:
        """Rows that get logits, without padding."""
        return sum(len(part.segment.rows) for part in self.parts)

    def tokens(self) -> list[Tensor]:
        """New tokens of each segment."""
        return [part.segment.tokens for part in self.parts]

    def write(self, numbers: Numbers[HostNumbers]) -> None:
        """Say where each token is and what it sees; see `Numbers`."""
        packed = wanted = 0
        for part in self.parts:
            request = part.slot - self.bucket.slot
            first_row = request * self.bucket.tokens
            rows = slice(first_row, first_row + part.count)
            asked = part.segment.rows
            numbers.source[rows] = np.arange(packed, packed + part.count)
            numbers.wanted[wanted : wanted + len(asked)] = [first_row + row for row in asked]
            numbers.length[request] = part.length
            self._write_rows(part, numbers, rows)
            packed += part.count
            wanted += len(asked)

    def _write_rows(self, part: PlacedSegment, numbers: Numbers[HostNumbers], rows: slice) -> None:
        shape, written, length = part.segment.shape, part.segment.written, part.length
        slots = np.arange(length + written, part.end)
        chain = shape.is_chain
        positions = slots if chain else length - 1 + np.array(shape.depths[written:])
        numbers.positions[rows] = positions
        numbers.target[rows] = part.slot * self.capacity + slots
        numbers.until[rows] = slots + 1 if chain else length
        for number, pattern in enumerate(self.patterns):
            first = [pattern.first(position) for position in positions.tolist()]
            numbers.first[number, rows] = first
            if not chain:
                dropped = tuple(max(0, each - length) for each in first)
                numbers.path[number, rows] = path_bits(shape, written, dropped, self.bucket.words)


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
        nowhere: the arena's row for what is not wanted.
        device: of the model.
        vectors: for one row `[width]`, of what stands beside tokens; None where nothing does.

    Attributes:
        bucket: as given.
        numbers: on the device.
        vectors: `[rows, width]`, packed as the tokens are; None where nothing stands beside these.
    """

    def __init__(
        self, bucket: Bucket, patterns: int, nowhere: int, device: torch.device, vectors: Tensor | None = None
    ) -> None:
        self.bucket = bucket
        self._shapes = _shapes(bucket, patterns)
        self._nowhere = nowhere
        self._flat = torch.zeros(sum(map(math.prod, self._shapes)), dtype=torch.int64, device=device)
        self.numbers: Numbers[Tensor] = _split(self._flat, self._shapes)
        self.vectors = None if vectors is None else vectors.new_zeros(bucket.rows, len(vectors))

    def load(self, batch: ArenaBatch) -> None:
        """Fill in a batch of this bucket."""
        # Page-locked, so that the copy is only queued; torch gives the block out again once it was read.
        host = torch.zeros(self._flat.shape, dtype=torch.int64, pin_memory=self._flat.is_cuda)
        numbers: Numbers[HostNumbers] = _split(host.numpy(), self._shapes)
        numbers.target.fill(self._nowhere)
        numbers.until.fill(1)  # a softmax over nothing would be NaN
        batch.write(numbers)
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
    rows = (bucket.rows,)
    shapes = {
        "tokens": rows,
        "source": rows,
        "positions": rows,
        "target": rows,
        "wanted": (bucket.wanted,),
        "length": (bucket.requests,),
        "until": rows,
        "path": (patterns, bucket.rows, bucket.words),
        "first": (patterns, bucket.rows),
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


def visible(inputs: Inputs, pattern: int) -> Tensor:
    """Which keys each token sees under a pattern: bool `[requests, tokens, span]`, by slots of its request.

    In a chain these are the slots below the token's own, from the first in reach on. In a tree slots are not
    positions, so the host says by bits which uncommitted nodes are on the token's path and in reach.
    """
    bucket, numbers = inputs.bucket, inputs.numbers
    shape = (bucket.requests, bucket.tokens, 1)
    slot = torch.arange(bucket.span, device=numbers.source.device)
    seen = (slot >= numbers.first[pattern].view(shape)) & (slot < numbers.until.view(shape))
    if not bucket.words:
        return seen
    node = (slot - numbers.length[:, None])[:, None]  # [requests, 1, span]
    word = (node // WORD_BITS).clamp(0, bucket.words - 1)
    path = numbers.path[pattern].view(bucket.requests, bucket.tokens, bucket.words)
    bit = path.gather(-1, word.expand(-1, bucket.tokens, -1)) >> node.remainder(WORD_BITS) & 1
    return seen | ((bit == 1) & (node >= 0) & (node < WORD_BITS * bucket.words))


def additive_mask(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores, 0 where a key is seen and -inf elsewhere.

    Args:
        seen: bool `[requests, tokens, span]`.
        group: query heads that share a key head; they are rows of one product.
        dtype: of the scores' operands.

    Returns:
        `[requests, 1, tokens * group, span]`.
    """
    requests, tokens, span = seen.shape
    hidden = ~seen[:, :, None].expand(-1, -1, group, -1).reshape(requests, 1, tokens * group, span)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
