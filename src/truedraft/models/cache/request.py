"""The cache of one request: committed tokens, uncommitted tokens after them, and their storage.

With a bounded context a cache keeps the first tokens of a long text and the last ones, as in StreamingLLM (2309.17453).
Tokens keep their positions, and keys their rotation. What a token sees depends on its position only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from truedraft.core.inference import in_inference_mode
from truedraft.errors import CacheError, OptionError
from truedraft.models.cache.buffers import Buffers, Entries, key_span
from truedraft.models.cache.family import BLOCK, MOST_EDGES, FamilyState
from truedraft.options import check_whole

if TYPE_CHECKING:
    from truedraft.models.cache.pages import PageTable
    from truedraft.models.cache.prefixes import PrefixCache

FIRST = 16
"""Tokens of a text that are always kept: a page of `truedraft.models.cache.pages`."""
LEAST_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class BoundedContext:
    """At most `size` tokens of a text, drafted ones aside; the last ones are dropped `step` at a time.

    Raises `OptionError` for a size below 128.

    Worked example: of a size of 128 the token at position 127 sees all 128 tokens up to itself. Those at 128 to 191 do
    not see 16 to 79, and see 65 to 128 tokens.
    """

    size: int

    def __post_init__(self) -> None:
        check_whole("context", self.size, LEAST_CONTEXT)

    @property
    def step(self) -> int:
        return max(BLOCK, self.size // 4 // BLOCK * BLOCK)

    def dropped(self, position: int) -> int:
        """How many tokens, from `FIRST` on, the token at a position does not see."""
        return max(0, -(-(position + 1 - self.size) // self.step)) * self.step

    def alike(self, position: int) -> int:
        """How many tokens, from the one at a position on, see the same first one after those that are dropped."""
        return self.size + self.dropped(position) - position


def bounded(context: int | None, *, drops: bool, name: str) -> BoundedContext | None:
    """The bound that an option `context` sets; raises `OptionError` if it is too small or the caches cannot drop."""
    if context is None:
        return None
    if not drops:
        raise OptionError(
            f"is for caches of attention layers that run packed, and those of {name} cannot drop tokens; leave it out",
            field="context",
        )
    return BoundedContext(context)


def stored_place(place: int, dropped: int) -> int:
    """The place among stored keys of the first one at or after a position.

    >>> [stored_place(position, 64) for position in (5, 16, 79, 80, 90)]
    [5, 16, 16, 16, 26]
    """
    return max(min(place, FIRST), place - dropped)


Parts = Sequence[tuple[Any, int, int]]


def without(parts: Parts, first: int, count: int) -> Iterator[tuple[Any, int, int]]:
    """Parts with their first and end token, without `count` tokens after the first `first` of them.

    >>> list(without([("a", 0, 10), ("b", 3, 9)], 8, 4))
    [('a', 0, 8), ('b', 5, 9)]
    """
    for part, start, end in parts:
        before = min(first, end - start)
        skipped = min(count, end - start - before)
        if before:
            yield part, start, start + before
        if start + before + skipped < end:
            yield part, start + before + skipped, end
        first, count = first - before, count - skipped


Storage: TypeAlias = "Buffers | PageTable"
"""Keys and values, with `capacity, calls, n_bytes, most, limit_to, reserve, write, keep, drop, entry, part, extend`."""


class RequestCache:
    """Keys and values of one request, for every attention call of a model.

    Positions `0 .. length - 1` hold committed tokens. A forward writes its tokens after them; they count only once
    `commit` keeps some. Rollback sets the length; states of layers go back to the last edge before it. Beyond `limit`
    tokens (the model's context, or less) memory grows only as far as it must. Of a long text no more than `bounds` is
    stored: `dropped` committed tokens, from `FIRST` on, are not stored any more.
    """

    def __init__(self, limit: int, family: FamilyState | None = None, storage: Storage | None = None) -> None:
        self.limit = limit
        self.family = family or FamilyState()
        self.storage = storage or Buffers()
        self.length = 0
        self.uncommitted = 0
        self.dropped = 0
        self.bounds: BoundedContext | None = None
        self._before_drop: Callable[[], object] = object

    @property
    def stored(self) -> int:
        """Number of committed tokens with keys and values: the place of the next one's."""
        return self.length - self.dropped

    def bound(self, bounds: BoundedContext | None, before_drop: Callable[[], object] = object) -> None:
        """Store no more than that of a text until the cache is given back; `before_drop` is called before each drop."""
        self.bounds, self._before_drop = bounds, before_drop

    @in_inference_mode
    def make_room(self, count: int) -> int:
        """Drop what the next token does not see; returns how many of the next `count` tokens see what it does."""
        if self.bounds is None or not count:
            return count
        more = self.bounds.dropped(self.length) - self.dropped
        if more > 0:
            self._before_drop()
            self.storage.drop(FIRST, more, self.stored)
            self.dropped += more
        return min(count, self.bounds.alike(self.length))

    def holds(self, first: int, end: int) -> bool:
        """Whether all tokens from `first` to before `end` are stored."""
        return end <= self.length and (not self.dropped or end <= FIRST or first >= FIRST + self.dropped)

    @property
    def capacity(self) -> int:
        return self.storage.capacity

    @property
    def most(self) -> int:
        return self.storage.most(self.limit)

    @property
    def n_bytes(self) -> int:
        return self.storage.n_bytes + self.family.n_bytes

    def shared(self, tokens: int) -> int:
        return 0 if self.dropped else self.family.shared(min(self.length, tokens))

    def limit_to(self, limit: int) -> None:
        self.limit = limit
        self.storage.limit_to(limit, not (self.length or self.uncommitted))

    def reserve(self, count: int, written: int = 0) -> None:
        """Allocate `count` uncommitted tokens, `written` before; CacheError if fewer than these are uncommitted."""
        if written > self.uncommitted:
            raise CacheError(f"cannot build on {written} uncommitted tokens: {self.uncommitted} were written")
        self.storage.reserve(self.stored + written, self.stored + count, self.limit)
        self.uncommitted = count

    def write(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens of one attention call after the committed ones; calls come in order.

        `keys` and `values` are `[kv_heads, new, width]`. Returns views of all keys `[kv_heads, key width, span]` and
        values `[kv_heads, span, value width]`: committed, new, undefined.
        """
        return self.storage.write(call, keys, values)

    @in_inference_mode
    def commit(self, path: Sequence[int]) -> None:
        """Keep the written tokens of `path`, ascending indices of new tokens, and drop the others.

        Worked example: with length 10 and 5 new tokens, `commit([0, 2, 4])` moves the entries of positions 12 and 14
        to positions 11 and 12 and sets the length to 13. Raises CacheError for a token that was not written. With a
        bounded context the tokens from the first one on that sees less are dropped too, to be read again.
        """
        if path and not 0 <= path[-1] < self.uncommitted:
            raise CacheError(f"cannot keep new token {path[-1]}: the last forward wrote {self.uncommitted}")
        if self.bounds is not None:
            path = path[: self.bounds.alike(self.length) if self.dropped == self.bounds.dropped(self.length) else 0]
        self._keep(path)

    def _keep(self, path: Sequence[int]) -> None:
        self.family.carried.keep(path)
        self.storage.keep(self.stored, path)
        self.length += len(path)
        self.uncommitted = 0

    def rollback(self, length: int) -> None:
        """Drop tokens from `length` on, or from an edge before it with states; CacheError if there are fewer.

        All tokens are dropped if the next one would see some that are no longer stored.
        """
        if not 0 <= length <= self.length:
            raise CacheError(f"cannot roll back to {length} tokens: the cache holds {self.length}")
        if self.bounds is not None and self.bounds.dropped(length) < self.dropped:
            length = 0
        self.length = self.family.back_to(length, self.length)
        self.dropped = self.dropped if self.length else 0
        self.uncommitted = 0

    def entries(self) -> list[tuple[Tensor, Tensor]]:
        """Committed keys and values of each attention call, `[kv_heads, stored, width]`."""
        return [self.storage.entry(call, self.stored) for call in range(self.storage.calls)]

    def part(self, first: int, end: int, lasting: bool) -> Entries:
        """Stored keys and values from `first` to before `end`; valid until the cache is used, unless `lasting`."""
        dropped = self.dropped if first >= FIRST else 0
        return self.storage.part(first - dropped, end - dropped, lasting)

    @in_inference_mode
    def extend(self, parts: Sequence[tuple[Entries, int, int]]) -> None:
        """Commit entries of other caches after the committed ones: in order, parts with their first and end token.

        With a bounded context, those that the next token does not see are left out.
        """
        length = self.length + sum(end - first for _, first, end in parts)
        more = 0 if self.bounds is None else self.bounds.dropped(length) - self.dropped
        own = min(more, max(self.stored - FIRST, 0))
        if own:
            self._before_drop()
            self.storage.drop(FIRST, own, self.stored)
        kept = list(without(parts, max(FIRST - self.length, 0), more - own))
        self.length, self.dropped = self.length + more - own, self.dropped + more
        self.storage.extend(self.stored, kept, self.limit)
        self._keep(range(sum(end - first for _, first, end in kept)))


class CachePool:
    """Hands out request caches of up to `limit` tokens and takes them back; the buffers of up to `keep` are kept."""

    kept_bytes: int = 0  # of caches that wait for the next request
    most_bytes: int | None = None  # of all caches together, if they are in one block of fixed size
    held_bytes: int = 0  # of requests and of kept prefixes in one block; shared ones count once
    lost: int = 0  # pages without an owner after all caches were given back: 0 unless there is a bug

    def __init__(
        self,
        limit: int,
        keep: int = 64,
        carries: bool = False,
        encodes: bool = False,
        drops: bool = True,
        storage: Callable[[], Storage] = Buffers,
    ) -> None:
        self._limit = limit
        self._storage = storage
        self._keep = keep
        self.carries = carries
        self.encodes = encodes
        self.drops = drops and not (carries or encodes)  # whether its caches can have a bounded context
        self._free: list[RequestCache] = []
        # Several engines may share a model. The lock is reentrant, because an allocation here may end a forgotten
        # stream, which releases its cache.
        self._lock = threading.RLock()
        self.in_use = 0  # caches that were not given back
        self.states = 1 + MOST_EDGES  # most states of all layers for one request, those after drafted tokens included
        self.position_bytes = 0  # of one key/value position; 0 until measured
        self.state_bytes = 0  # of the states of all layers after one token; 0 until measured

    def acquire(self) -> RequestCache:
        with self._lock:
            self.in_use += 1
            if not self._free:
                return self._new()
            cache = self._free.pop()
            n_bytes = cache.n_bytes  # before `kept_bytes` is read, because it may end a forgotten stream
            self.kept_bytes -= n_bytes
        cache.limit = self._limit
        return cache

    def _new(self) -> RequestCache:
        return RequestCache(self._limit, FamilyState(self.carries, self.encodes), self._storage())

    def release(self, cache: RequestCache) -> None:
        cache.rollback(0)
        cache.bound(None)
        n_bytes = cache.n_bytes
        with self._lock:
            self.in_use -= 1
            if len(self._free) < self._keep:
                self._free.append(cache)
                self.kept_bytes += n_bytes

    def expect(self, uncommitted: int) -> None:
        self.states = max(self.states, 1 + MOST_EDGES + uncommitted)

    def measure(self, cache: RequestCache) -> None:
        """Measure the bytes of a key/value position and of a state, from a cache with one committed token."""
        self.position_bytes = cache.storage.n_bytes // max(cache.capacity, 1)
        if cache.family.auxiliary is not None:  # an upper bound, because no token adds more than the first
            self.position_bytes += 2 * cache.family.auxiliary.n_bytes  # twice, for drafted tokens
        self.state_bytes = cache.family.carried.n_bytes

    def trim(self, n_bytes: int) -> None:
        """Free `n_bytes` of kept caches, or all there are, the longest unused first."""
        with self._lock:
            left = max(self.kept_bytes - n_bytes, 0)
            while self._free and self.kept_bytes > left:
                n_bytes = self._free.pop(0).n_bytes
                self.kept_bytes -= n_bytes

    def bytes_for_one(self, tokens: int) -> int:
        return self.position_bytes * key_span(tokens) + self.state_bytes * self.states

    def bytes_for(self, caches: Sequence[tuple[int, RequestCache | None]]) -> int:
        """Most bytes of caches, given their limits and the caches that exist already."""
        return sum(self.bytes_for_one(tokens) for tokens, _ in caches)

    def reclaim_from(self, keeper: PrefixCache) -> None:
        """Register what frees entries when the block of all caches is full, if there is one."""

    def reserve(self, n_bytes: int, spare: int) -> None:
        """Allocate one block of `n_bytes` for all caches, and `spare` tokens for trials, if the pool uses a block."""

    def unreserve(self) -> None:
        """Undo one `reserve`."""
