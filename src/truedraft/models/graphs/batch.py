"""The requests of one forward over a slab: their shape, and where each token is and what it sees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core.trees import TreeShape
from truedraft.models.base import Segment
from truedraft.models.graphs.buckets import WORD_BITS, Bucket, lone_bucket, shared_bucket
from truedraft.models.graphs.inputs import HostNumbers, Numbers
from truedraft.models.patterns import AttentionPattern


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment, and the slot of its request."""

    segment: Segment
    slot: int

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
class SlabBatch:
    """Segments that run together.

    Attributes:
        parts: the segments.
        bucket: a shape that holds them.
        capacity: of the slab's slots.
        patterns: different reaches of attention in the model.
    """

    parts: Sequence[PlacedSegment]
    bucket: Bucket
    capacity: int
    patterns: Sequence[AttentionPattern]

    @classmethod
    def shared(cls, parts: Sequence[PlacedSegment], capacity: int, patterns: Sequence[AttentionPattern]) -> SlabBatch:
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
    def lone(cls, part: PlacedSegment, capacity: int, patterns: Sequence[AttentionPattern]) -> SlabBatch:
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
