"""Keys and values of one request, in buffers that are kept for the next one.

How many key/value positions a product over keys looks at: a few fixed lengths, so that kernels are reused and add up
alike. oneDNN makes a kernel for every shape, which takes about half a millisecond; a context that grows by a token at
every step would pay that at every step. So products run over more positions than are filled, in steps of 64
(`key_span`), and those too many get the weight 0.

The same library adds up products over up to 1,024 keys in one go and longer ones in blocks of 512, which rounds
differently. Up to 512 keys both give the same bits, so lengths in between are taken as 1,088: then a row's result
does not depend on whether its neighbours in the forward lie before or behind that border. Measured bit for bit to
8,192 keys (benchmarks/LOG.md); tests hold it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from truedraft.cache.carried import MOST_EDGES, CarriedStates
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


class Beside(Protocol):
    """What a model holds of one text in a form of its own."""

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        ...


class RequestCache:
    """Keys and values of one request, for every attention call of a model.

    Key/value positions `0 .. length - 1` hold committed tokens. A forward writes its tokens behind them; they count
    only once `commit` keeps some. Rollback is an assignment to a length, but where layers carry states: these go back
    to the last edge before that length. Buffers grow by doubling, up to `limit` unless a tree needs more, and never
    shrink, so a reused cache does not allocate. Keys lie transposed, as the product with
    queries reads them. Positions behind the written ones are read with the weight 0, so their values must be finite:
    whatever forgotten tokens left there is set to 0.

    Args:
        limit: tokens beyond which buffers grow only as far as they must (the model's context).
        carries: whether layers of the model carry states beside.
        encodes: whether the first tokens are an encoder's text, whose entries are what cross-attention reads.

    Attributes:
        limit: as given; an engine that is short of memory sets that of its request.
        carries: as given.
        encodes: as given.
        source: ids of the encoder's text, as far as they came in.
        memory: how many of the first tokens are that text; 0 until it was encoded.
        shift: what is added to the position of every token behind the prompt, whose images take fewer positions than
            tokens where positions have more than one axis.
        apart: whether the last token of its prompt was read otherwise than it would be behind those before, as one of a
            text; then nobody can begin with these.
        generation: rises whenever buffers moved; addresses taken before are void.
        carried: states of layers that are no attention.
        beside: what a model holds of the text that cannot lie here.
    """

    def __init__(self, limit: int, carries: bool = False, encodes: bool = False) -> None:
        self.length = 0
        self.limit = limit
        self.carries = carries
        self.encodes = encodes
        self.source: list[int] = []
        self.memory = 0
        self.shift = 0
        self.apart = False
        self.generation = 0
        self.carried = CarriedStates()
        self.beside: Beside | None = None
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
    def calls(self) -> int:
        """Attention calls that wrote here."""
        return len(self._keys)

    @property
    def n_bytes(self) -> int:
        """Bytes that are allocated."""
        return self.buffer_bytes + self.carried.n_bytes + (self.beside.n_bytes if self.beside is not None else 0)

    @property
    def buffer_bytes(self) -> int:
        """The same without states of layers."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    def shared(self, tokens: int) -> int:
        """Of its first tokens, at most so many, how many another text can begin with and go on from."""
        most = 0 if self.apart else min(self.length, tokens)
        if self.encodes:
            return most if most >= self.memory > 0 else 0
        return max((edge for edge in self.carried.edges if edge <= most), default=0) if self.carries else most

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
        self._make(call, keys, values)
        end = self._start + keys.shape[1]
        span = key_span(end)
        all_keys, all_values = self._keys[call], self._values[call]
        if self._stale > end:
            all_values[:, end : min(self._stale, span)] = 0
        all_keys[:, :, self._start : end] = keys.transpose(1, 2)
        all_values[:, self._start : end] = values
        return all_keys[:, :, :span], all_values[:, :span]

    def write_path(self, call: int, path: Sequence[int], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the last tokens of a path of uncommitted ones, and read all that the last of them follows.

        Worked example: with length 10, `write_path(0, [0, 2, 3], keys, values)` of one new token writes position 13 and
        returns the entries of positions 0 to 9, 10, 12 and 13.

        Args:
            call: which attention call of the forward this is, from 0; calls come in order.
            path: uncommitted tokens from the first behind the committed ones, rising; the last ones are new.
            keys: `[kv_heads, new, key width]`.
            values: `[kv_heads, new, value width]`.

        Returns:
            Keys `[kv_heads, tokens, key width]` and values `[kv_heads, tokens, value width]` of the committed tokens
            and the path: views of them where the path is a chain.
        """
        self._make(call, keys, values)
        all_keys, all_values = self._keys[call], self._values[call]
        end, new = self.length + len(path), keys.shape[1]
        if path[-1] == len(path) - 1:
            all_keys[:, :, end - new : end] = keys.transpose(1, 2)
            all_values[:, end - new : end] = values
            return all_keys[:, :, :end].transpose(1, 2), all_values[:, :end]
        places = torch.tensor([*range(self.length), *(self.length + node for node in path)], device=keys.device)
        all_keys[:, :, places[-new:]] = keys.transpose(1, 2)
        all_values[:, places[-new:]] = values
        return all_keys.index_select(2, places).transpose(1, 2), all_values.index_select(1, places)

    def memory_of(self, call: int) -> tuple[Tensor, Tensor]:
        """Views `[kv_heads, memory, width]` of what cross-attention reads in an attention call that wrote before."""
        return self._keys[call][:, :, : self.memory].transpose(1, 2), self._values[call][:, : self.memory]

    def _make(self, call: int, keys: Tensor, values: Tensor) -> None:
        """The buffers of an attention call that comes for the first time."""
        if call == len(self._keys):
            self._keys.append(keys.new_zeros(keys.shape[0], keys.shape[2], self._capacity))
            self._values.append(values.new_zeros(values.shape[0], self._capacity, values.shape[2]))

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
        self.carried.keep(path)
        if kept and path[-1] != kept - 1 and self._keys:
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
        """Forget all tokens from key/value position `length` on, or from an edge before it where layers carry
        states.

        Raises:
            CacheError: fewer than `length` tokens are committed.
        """
        if not 0 <= length <= self.length:
            raise CacheError(f"cannot roll back to {length} tokens: the cache holds {self.length}")
        self._stale = max(self._stale, self.length + self._written)
        self.carried.drop_uncommitted()
        if self.carries and length < self.length:
            length = self.carried.back_to(length)
        if length < self.memory:
            self.memory = 0
        if not length:
            self.shift, self.apart = 0, False
            self.beside = None
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
            return RequestCache(self._limit, self.carries, self.encodes)
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

    def expect(self, uncommitted: int) -> None:
        """Note that so many tokens may be uncommitted, each with states of its own."""
        self.states = max(self.states, 1 + MOST_EDGES + uncommitted)

    def measure(self, cache: RequestCache) -> None:
        """Note what a key/value position takes, and a state, from a cache that one token was committed to."""
        self.position_bytes = cache.buffer_bytes // max(cache.capacity, 1)
        if cache.beside is not None:  # at most: twice, with what is drafted, and no token adds more than the first
            self.position_bytes += 2 * cache.beside.n_bytes
        self.state_bytes = cache.carried.n_bytes

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

    def bytes_for(self, tokens: Sequence[int]) -> int:
        """Most bytes of caches in use, given their limits in the order in which they are taken."""
        return sum(map(self.bytes_alone, tokens))
