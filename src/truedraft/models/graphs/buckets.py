"""Shapes of forwards, rounded up so that few different ones occur and each need be recorded only once."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.cache.slab import SPAN_STEP

WORD_BITS = 64
"""Nodes of a tree that one number tells about."""

_LONE_SPAN_STEP = 64  # attention kernels want masks whose rows start at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a forward. Forwards of equal buckets run the same kernels at the same addresses.

    Attributes:
        slot: the slab's first slot that takes part.
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
