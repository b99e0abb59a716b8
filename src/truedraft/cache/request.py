"""Keys and values of one request, in buffers that are kept for the next one.

How many key/value positions a product over keys looks at: a few fixed lengths, so that kernels are reused and add up
alike. oneDNN makes a kernel for every shape, which takes about half a millisecond; a context that grows by a token at
every step would pay that at every step. So products run over more positions than are filled, in steps of 64
(`key_span`), and those too many get the weight 0.

The same library adds up products over up to 1,024 keys in one go and longer ones in blocks of 512, which rounds
differently. Up to 512 keys both give the same bits, so lengths in between are taken as 1,088: then a row's result
does not depend on whether its neighbours in the forward lie before or behind that border. Measured bit for bit to
8,192 keys (docs/performance.md); tests hold it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.errors import CacheError

_FIRST_CAPACITY = 256
_STEP = 64
_ONE_BLOCK = 512
_FIRST_IN_BLOCKS = 1088

WIDEST_GAP = _FIRST_IN_BLOCKS - _ONE_BLOCK
"""Most positions that a span exceeds what it was made for."""


def key_span(positions: int) -> int:
    """The least span that holds so many key/value positions.

    >>> [key_span(positions) for positions in (1, 64, 65, 512, 513, 1089)]
    [64, 64, 128, 512, 1088, 1152]
    """
    if _ONE_BLOCK < positions <= _FIRST_IN_BLOCKS:
        return _FIRST_IN_BLOCKS
    return -(-positions // _STEP) * _STEP


class RequestCache:
    """Keys and values of one request, for every attention call of a model.

    Key/value positions `0 .. length - 1` hold committed tokens. A forward writes its tokens behind them; they count
    only once `commit` keeps some. Rollback is an assignment to a length. Buffers grow by doubling, up to `limit` unless
    a tree needs more, and never shrink, so a reused cache does not allocate. Keys lie transposed, as the product with
    queries reads them. Positions behind the written ones are read with the weight 0, so their values must be finite:
    whatever forgotten tokens left there is set to 0.

    Args:
        limit: tokens beyond which buffers grow only as far as they must (the model's context).

    Attributes:
        limit: as given; an engine that is short of memory sets that of its request.
        generation: rises whenever buffers moved; addresses taken before are void.
    """

    def __init__(self, limit: int) -> None:
        self.length = 0
        self.limit = limit
        self.generation = 0
        self._start = 0  # key/value position of the first token that the running forward writes
        self._written = 0  # uncommitted tokens that are there once it has run
        self._stale = 0  # from here on all values are 0
        self._capacity = 0
        self._keys: list[Tensor] = []  # one for each attention call: [kv_heads, key width, capacity]
        self._values: list[Tensor] = []  # [kv_heads, capacity, value width]

    @property
    def capacity(self) -> int:
        """Key/value positions that are allocated."""
        return self._capacity

    @property
    def most(self) -> int:
        """Key/value positions that are allocated at most while no more than `limit` are asked for."""
        return key_span(self.limit)

    @property
    def uncommitted(self) -> int:
        """Tokens that forwards wrote behind the committed ones."""
        return self._written

    @property
    def n_bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    def reserve(self, count: int, written: int = 0) -> None:
        """Make room for tokens behind the committed ones; a forward calls this before it writes.

        Args:
            count: uncommitted tokens once the forward has run.
            written: how many of them, from the first, earlier forwards wrote.

        Raises:
            CacheError: fewer than `written` uncommitted tokens are there.
        """
        if written > self._written:
            raise CacheError(f"cannot build on {written} uncommitted tokens: {self._written} were written")
        self._stale = max(self._stale, self.length + self._written)
        self._start = self.length + written
        self._written = count
        needed = key_span(self.length + count)
        if needed <= self._capacity:
            return
        doubled = max(2 * self._capacity, _FIRST_CAPACITY)
        self._capacity = max(needed, min(doubled, key_span(self.limit)))
        self.generation += 1
        self._keys = [self._grown(keys.transpose(1, 2)).transpose(1, 2).contiguous() for keys in self._keys]
        self._values = [self._grown(values) for values in self._values]

    def limit_to(self, limit: int) -> None:
        """Set `limit` while nothing is in the cache; buffers that are larger than it allows are given back."""
        self.limit = limit
        if self._capacity > self.most:
            self._keys, self._values = [], []
            self._capacity = self._stale = 0
            self.generation += 1

    def allow(self, limit: int) -> None:
        """Raise `limit`, whatever is in the cache."""
        self.limit = limit

    def _grown(self, buffer: Tensor) -> Tensor:
        larger = buffer.new_zeros(buffer.shape[0], self._capacity, buffer.shape[2])
        larger[:, : self._start] = buffer[:, : self._start]
        return larger

    def buffers(
        self, calls: int, kv_heads: int, key_width: int, value_width: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The buffers themselves, for a forward that writes them by address; made on the CPU where there are none yet.

        Args:
            calls: attention calls of the model.
            kv_heads: key/value heads.
            key_width: of a key.
            value_width: of a value.
            dtype: of both.

        Returns:
            Keys `[kv_heads, key width, capacity]` and values `[kv_heads, capacity, value width]` of each call. They
            stay where they are until `generation` changes.
        """
        for _ in range(len(self._keys), calls):
            self._keys.append(torch.zeros(kv_heads, key_width, self._capacity, dtype=dtype, device="cpu"))
            self._values.append(torch.zeros(kv_heads, self._capacity, value_width, dtype=dtype, device="cpu"))
        return self._keys, self._values

    def write(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens of one attention call behind the committed ones.

        Args:
            call: which attention call of the forward this is, from 0; calls come in order.
            keys: `[kv_heads, new, key width]`.
            values: `[kv_heads, new, value width]`.

        Returns:
            Views of all keys `[kv_heads, key width, span]` and values `[kv_heads, span, value width]`: the committed
            ones, the new ones, and positions without meaning up to the span (`key_span`).
        """
        if call == len(self._keys):
            self._keys.append(keys.new_zeros(keys.shape[0], keys.shape[2], self._capacity))
            self._values.append(values.new_zeros(values.shape[0], self._capacity, values.shape[2]))
        end = self._start + keys.shape[1]
        span = key_span(end)
        all_keys, all_values = self._keys[call], self._values[call]
        if self._stale > end:
            all_values[:, end : min(self._stale, span)] = 0
        all_keys[:, :, self._start : end] = keys.transpose(1, 2)
        all_values[:, self._start : end] = values
        return all_keys[:, :, :span], all_values[:, :span]

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the written tokens named by `path` (their order among the new ones, rising) and drop the others.

        Worked example: with length 10 and 5 new tokens, `commit([0, 2, 4])` moves the entries of positions 12 and 14
        to positions 11 and 12 and sets the length to 13. A path 0, 1, 2, ... moves nothing.

        Raises:
            CacheError: the path names a token that was not written.
        """
        kept = len(path)
        if kept and not 0 <= path[-1] < self._written:
            raise CacheError(f"cannot keep new token {path[-1]}: the last forward wrote {self._written}")
        if kept and path[-1] != kept - 1:
            source = torch.tensor([self.length + i for i in path], device=self._keys[0].device)
            target = slice(self.length, self.length + kept)
            # index_select copies before it is written, so source and target may overlap.
            for keys, values in zip(self._keys, self._values, strict=True):
                keys[:, :, target] = keys.index_select(2, source)
                values[:, target] = values.index_select(1, source)
        # Every call of the forward has cleaned the positions of its span.
        end = self.length + self._written
        if self._stale <= key_span(end):
            self._stale = end
        self.length += kept
        self._written = 0

    def rollback(self, length: int) -> None:
        """Forget all tokens from key/value position `length` on.

        Raises:
            CacheError: fewer than `length` tokens are committed.
        """
        if not 0 <= length <= self.length:
            raise CacheError(f"cannot roll back to {length} tokens: the cache holds {self.length}")
        self._stale = max(self._stale, self.length + self._written)
        self.length = length
        self._written = 0

    def entries(self) -> list[tuple[Tensor, Tensor]]:
        """Committed keys and values of each attention call, `[kv_heads, length, width]`; for tests and checks."""
        pairs = zip(self._keys, self._values, strict=True)
        return [(keys[:, :, : self.length].transpose(1, 2), values[:, : self.length]) for keys, values in pairs]


class CachePool:
    """Hands out request caches and takes them back, buffers kept.

    Args:
        limit: tokens of one request (the model's context).
        keep: most free caches that are kept; more are dropped.

    Attributes:
        in_use: caches that were not given back.
        position_bytes: of one key/value position; 0 until it was measured.
    """

    def __init__(self, limit: int, keep: int = 64) -> None:
        self._limit = limit
        self._keep = keep
        self._free: list[RequestCache] = []
        # Several engines may share a model. One thread may come here twice: what is allocated here may end a forgotten
        # stream, whose cache comes back.
        self._lock = threading.RLock()
        self.in_use = 0
        self._kept_bytes = 0
        self.position_bytes = 0

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
            return RequestCache(self._limit)
        cache.limit = self._limit
        return cache

    def release(self, cache: RequestCache) -> None:
        """Take a cache back; the caller must not use it any more."""
        cache.rollback(0)
        n_bytes = cache.n_bytes
        with self._lock:
            self.in_use -= 1
            if len(self._free) < self._keep:
                self._free.append(cache)
                self._kept_bytes += n_bytes

    def measure(self, cache: RequestCache) -> None:
        """Note what a key/value position takes, from a cache that a forward wrote to."""
        self.position_bytes = cache.n_bytes // max(cache.capacity, 1)

    def trim(self, n_bytes: int) -> None:
        """Give so many bytes of kept caches back to the system, or all there are; who waited longest goes first."""
        with self._lock:
            left = max(self._kept_bytes - n_bytes, 0)
            while self._free and self._kept_bytes > left:
                dropped = self._free.pop(0).n_bytes
                self._kept_bytes -= dropped

    def bytes_alone(self, tokens: int) -> int:
        """Most bytes of a cache whose `limit` is so many tokens, where no others are."""
        return self.position_bytes * key_span(tokens)

    def bytes_for(self, tokens: Sequence[int]) -> int:
        """Most bytes of caches in use, given their limits in the order in which they are taken."""
        return self.position_bytes * sum(map(key_span, tokens))
