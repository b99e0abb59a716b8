"""Keys and values of one request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.errors import CacheError

_FIRST_CAPACITY = 256
_BEYOND = 64


class RequestCache:
    """Keys and values of one request, for every attention call of a model.

    Slots `0 .. length - 1` hold committed tokens. A forward writes its tokens behind them; they count only once
    `commit` keeps some. Rollback is an assignment to a length. Buffers grow by doubling, up to `limit` unless a
    tree needs more, and never shrink, so a reused cache does not allocate.

    Args:
        limit: tokens beyond which buffers grow only as far as they must (the model's context).
    """

    def __init__(self, limit: int) -> None:
        self.length = 0
        self._limit = limit
        self._start = 0  # slot of the first token that the running forward writes
        self._written = 0  # uncommitted tokens that are there once it has run
        self._capacity = 0
        self._keys: list[Tensor] = []  # one for each attention call: [kv_heads, capacity, key width]
        self._values: list[Tensor] = []  # [kv_heads, capacity, value width]

    @property
    def capacity(self) -> int:
        """Slots that are allocated."""
        return self._capacity

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
        self._start = self.length + written
        self._written = count
        needed = self.length + count
        if needed <= self._capacity:
            return
        doubled = max(2 * self._capacity, _FIRST_CAPACITY)
        # Beyond the limit only trees reach; a little more than needed, so that not every step copies.
        self._capacity = max(needed + _BEYOND if needed > self._limit else needed, min(doubled, self._limit))
        self._keys = [self._grown(buffer) for buffer in self._keys]
        self._values = [self._grown(buffer) for buffer in self._values]

    def _grown(self, buffer: Tensor) -> Tensor:
        larger = buffer.new_empty(buffer.shape[0], self._capacity, buffer.shape[2])
        larger[:, : self._start] = buffer[:, : self._start]
        return larger

    def write(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens of one attention call behind the committed ones.

        Args:
            call: which attention call of the forward this is, from 0; calls come in order.
            keys: `[kv_heads, new, key width]`.
            values: `[kv_heads, new, value width]`.

        Returns:
            Views of all keys and values up to and with the new ones, `[kv_heads, slots, width]`.
        """
        if call == len(self._keys):
            self._keys.append(keys.new_empty(keys.shape[0], self._capacity, keys.shape[2]))
            self._values.append(values.new_empty(values.shape[0], self._capacity, values.shape[2]))
        end = self._start + keys.shape[1]
        all_keys = self._keys[call][:, :end]
        all_values = self._values[call][:, :end]
        all_keys[:, self._start :] = keys
        all_values[:, self._start :] = values
        return all_keys, all_values

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the written tokens named by `path` (their order among the new ones, rising) and drop the others.

        Worked example: with length 10 and 5 new tokens, `commit([0, 2, 4])` moves the entries of slots 12 and 14 to
        slots 11 and 12 and sets the length to 13. A path 0, 1, 2, ... moves nothing.

        Raises:
            CacheError: the path names a token that was not written.
        """
        kept = len(path)
        if kept and not 0 <= path[-1] < self._written:
            raise CacheError(f"cannot keep new token {path[-1]}: the last forward wrote {self._written}")
        if kept and path[-1] != kept - 1:
            source = torch.tensor([self.length + i for i in path], device=self._keys[0].device)
            for buffer in (*self._keys, *self._values):
                # index_select copies before it is written, so source and target may overlap.
                buffer[:, self.length : self.length + kept] = buffer.index_select(1, source)
        self.length += kept
        self._written = 0

    def rollback(self, length: int) -> None:
        """Forget all tokens from slot `length` on.

        Raises:
            CacheError: fewer than `length` tokens are committed.
        """
        if not 0 <= length <= self.length:
            raise CacheError(f"cannot roll back to {length} tokens: the cache holds {self.length}")
        self.length = length
        self._written = 0

    def entries(self) -> list[tuple[Tensor, Tensor]]:
        """Committed keys and values of each attention call, `[kv_heads, length, width]`; for tests and checks."""
        pairs = zip(self._keys, self._values, strict=True)
        return [(keys[:, : self.length], values[:, : self.length]) for keys, values in pairs]
