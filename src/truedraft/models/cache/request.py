"""The cache of one request: what is committed, what was written behind it, and where both lie."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from truedraft.core.inference import in_inference_mode
from truedraft.errors import CacheError
from truedraft.models.cache.buffers import Buffers, Entries, Keeper, key_span
from truedraft.models.cache.carried import MOST_EDGES
from truedraft.models.cache.family import FamilyState

if TYPE_CHECKING:
    from truedraft.models.cache.pages import PageTable

Storage: TypeAlias = "Buffers | PageTable"
"""Where keys and values lie; both know `capacity, calls, n_bytes, most, limit_to, reserve, write, keep, entry, part,
extend`."""


class RequestCache:
    """Keys and values of one request, for every attention call of a model.

    Key/value positions `0 .. length - 1` hold committed tokens. A forward writes its tokens behind them; they count
    only once `commit` keeps some. Rollback is an assignment to a length, but where layers carry states: these go back
    to the last edge before that length.

    Args:
        limit: tokens beyond which memory grows only as far as it must (the model's context).
        family: what the model holds beside keys and values; None is nothing.
        storage: where they lie; None makes buffers.

    Attributes:
        limit: as given; an engine that is short of memory sets that of its request.
        family: as given.
        storage: as given.
        length: committed tokens.
        uncommitted: tokens that forwards wrote behind these.
    """

    def __init__(self, limit: int, family: FamilyState | None = None, storage: Storage | None = None) -> None:
        self.limit = limit
        self.family = family or FamilyState()
        self.storage = storage or Buffers()
        self.length = 0
        self.uncommitted = 0

    @property
    def capacity(self) -> int:
        """Key/value positions that are allocated."""
        return self.storage.capacity

    @property
    def most(self) -> int:
        """Key/value positions that are allocated at most while no more than `limit` are asked for."""
        return self.storage.most(self.limit)

    @property
    def n_bytes(self) -> int:
        """Bytes that are allocated."""
        return self.storage.n_bytes + self.family.n_bytes

    def shared(self, tokens: int) -> int:
        """Of its first tokens, at most so many, how many another text can begin with and go on from."""
        return self.family.shared(min(self.length, tokens))

    def limit_to(self, limit: int) -> None:
        """Set `limit`; while nothing is in the cache, memory beyond it is given back."""
        self.limit = limit
        self.storage.limit_to(limit, not (self.length or self.uncommitted))

    def reserve(self, count: int, written: int = 0) -> None:
        """Make room for tokens behind the committed ones; a forward calls this before it writes.

        Args:
            count: uncommitted tokens once the forward has run.
            written: how many of them, from the first, earlier forwards wrote.

        Raises:
            CacheError: fewer than `written` uncommitted tokens are there.
        """
        if written > self.uncommitted:
            raise CacheError(f"cannot build on {written} uncommitted tokens: {self.uncommitted} were written")
        self.storage.reserve(self.length + written, self.length + count, self.limit)
        self.uncommitted = count

    def write(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens of one attention call behind the committed ones.

        Args:
            call: which attention call of the forward this is, from 0; calls come in order.
            keys: `[kv_heads, new, key width]`.
            values: `[kv_heads, new, value width]`.

        Returns:
            Views of all keys `[kv_heads, key width, span]` and values `[kv_heads, span, value width]`: the committed
            ones, the new ones, and positions without meaning up to the span.
        """
        return self.storage.write(call, keys, values)

    @in_inference_mode
    def commit(self, path: Sequence[int]) -> None:
        """Keep the written tokens named by `path` (their order among the new ones, rising) and drop the others.

        Worked example: with length 10 and 5 new tokens, `commit([0, 2, 4])` moves the entries of positions 12 and 14
        to positions 11 and 12 and sets the length to 13. A path 0, 1, 2, ... moves nothing.

        Raises:
            CacheError: the path names a token that was not written.
        """
        if path and not 0 <= path[-1] < self.uncommitted:
            raise CacheError(f"cannot keep new token {path[-1]}: the last forward wrote {self.uncommitted}")
        self.family.carried.keep(path)
        self.storage.keep(self.length, path)
        self.length += len(path)
        self.uncommitted = 0

    def rollback(self, length: int) -> None:
        """Forget all tokens from key/value position `length` on, or from an edge before it where layers carry
        states.

        Raises:
            CacheError: fewer than `length` tokens are committed.
        """
        if not 0 <= length <= self.length:
            raise CacheError(f"cannot roll back to {length} tokens: the cache holds {self.length}")
        self.length = self.family.back_to(length, self.length)
        self.uncommitted = 0

    def entries(self) -> list[tuple[Tensor, Tensor]]:
        """Committed keys and values of each attention call, `[kv_heads, length, width]`."""
        return [self.storage.entry(call, self.length) for call in range(self.storage.calls)]

    def part(self, first: int, end: int, lasting: bool) -> Entries:
        """Committed keys and values from position `first` up to `end`.

        Args:
            first: of them.
            end: behind the last.
            lasting: whether they stay as they are; otherwise they are read before this cache is used again.
        """
        return self.storage.part(first, end, lasting)

    @in_inference_mode
    def extend(self, parts: Sequence[tuple[Entries, int, int]]) -> None:
        """Commit what other caches hold of the same text behind what is committed.

        Args:
            parts: one behind another, and of each from which to which of its tokens.
        """
        self.storage.extend(self.length, parts, self.limit)
        self.uncommitted = sum(end - first for _, first, end in parts)
        self.commit(range(self.uncommitted))


class CachePool:
    """Hands out request caches and takes them back, buffers kept.

    Args:
        limit: tokens of one request (the model's context).
        keep: most free caches that are kept; more are dropped.
        carries: whether layers of the model carry states.
        encodes: whether requests begin with an encoder's text.

    Attributes:
        in_use: caches that were not given back.
        states: most states of all layers that are there for one request, those behind drafted tokens included.
        position_bytes: of one key/value position; 0 until it was measured.
        state_bytes: of the states of all layers behind one token, likewise.
    """

    def __init__(self, limit: int, keep: int = 64, carries: bool = False, encodes: bool = False) -> None:
        self._limit = limit
        self._keep = keep
        self.carries = carries
        self.encodes = encodes
        self._free: list[RequestCache] = []
        # Several engines may share a model. One thread may come here twice: what is allocated here may end a forgotten
        # stream, whose cache comes back.
        self._lock = threading.RLock()
        self.in_use = 0
        self._kept_bytes = 0
        self.states = 1 + MOST_EDGES
        self.position_bytes = 0
        self.state_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Of caches that wait for the next request."""
        return self._kept_bytes

    def acquire(self) -> RequestCache:
        """An empty cache."""
        with self._lock:
            self.in_use += 1
            cache = self._free.pop() if self._free else None
            n_bytes = 0 if cache is None else cache.n_bytes
            self._kept_bytes -= n_bytes
        if cache is None:
            return self._new()
        cache.limit = self._limit
        return cache

    def _new(self) -> RequestCache:
        return RequestCache(self._limit, FamilyState(self.carries, self.encodes))

    def release(self, cache: RequestCache) -> None:
        """Take a cache back; the caller must not use it any more."""
        cache.rollback(0)
        n_bytes = cache.n_bytes
        with self._lock:
            self.in_use -= 1
            if len(self._free) < self._keep:
                self._free.append(cache)
                self._kept_bytes += n_bytes

    def expect(self, uncommitted: int) -> None:
        """Note that so many tokens may be uncommitted, each with states of its own."""
        self.states = max(self.states, 1 + MOST_EDGES + uncommitted)

    def measure(self, cache: RequestCache) -> None:
        """Note what a key/value position takes, and a state, from a cache that one token was committed to."""
        self.position_bytes = cache.storage.n_bytes // max(cache.capacity, 1)
        if cache.family.beside is not None:  # at most: twice, with what is drafted; no token adds more than the first
            self.position_bytes += 2 * cache.family.beside.n_bytes
        self.state_bytes = cache.family.carried.n_bytes

    def trim(self, n_bytes: int) -> None:
        """Give so many bytes of kept caches back to the system, or all there are; who waited longest goes first."""
        with self._lock:
            left = max(self._kept_bytes - n_bytes, 0)
            while self._free and self._kept_bytes > left:
                dropped = self._free.pop(0).n_bytes
                self._kept_bytes -= dropped

    def bytes_alone(self, tokens: int) -> int:
        """Most bytes of a cache whose `limit` is so many tokens, where no others are."""
        return self.position_bytes * key_span(tokens) + self.state_bytes * self.states

    def bytes_for(self, caches: Sequence[tuple[int, RequestCache | None]]) -> int:
        """Most bytes of caches, given their limits, and those that are there already."""
        return sum(self.bytes_alone(tokens) for tokens, _ in caches)

    def reclaim_from(self, keeper: Keeper) -> None:
        """Where caches lie in one block: when it is full, ask who keeps parts of it to forget some."""

    def reserve(self, n_bytes: int, spare: int) -> None:
        """Get memory for all caches from the system now, where they lie in one block; until `unreserve`.

        Args:
            n_bytes: for requests.
            spare: tokens beside, for what is tried and measured while requests run.
        """

    def unreserve(self) -> None:
        """Who called `reserve` needs them no more."""

    @property
    def most_bytes(self) -> int | None:
        """That all caches together can take, where they lie in one block that does not grow."""
        return None

    @property
    def held_bytes(self) -> int:
        """Of requests, and kept of earlier ones, where caches lie in one block; what is shared counts once."""
        return 0

    @property
    def lost(self) -> int:
        """Pages that nobody has and nobody keeps, once all caches were given back: none, or a mistake of ours."""
        return 0
