"""Keys and values of one request, in buffers that are kept for the next one.

A product over keys runs over a multiple of 64 key/value positions (`key_span`), with weight 0 for unfilled ones: oneDNN
makes a kernel for every shape, which takes about half a millisecond.

It sums products over up to 1,024 keys at once and longer ones in blocks of 512, which rounds differently. Up to 512
keys both give the same bits, so lengths in between are rounded up to 1,088: then a row's result does not depend on its
neighbours in the forward. Measured bit for bit to 8,192 keys (benchmarks/LOG.md); tests hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.errors import CacheError

_FIRST_CAPACITY = 256
_STEP = 64
_ONE_BLOCK = 512
_FIRST_IN_BLOCKS = 1088

WIDEST_GAP = _FIRST_IN_BLOCKS - _ONE_BLOCK
"""Largest number of unfilled positions in a span."""


def key_span(positions: int) -> int:
    """The least span that holds so many key/value positions.

    >>> [key_span(positions) for positions in (1, 64, 65, 512, 513, 1089)]
    [64, 64, 128, 512, 1088, 1152]
    """
    if _ONE_BLOCK < positions <= _FIRST_IN_BLOCKS:
        return _FIRST_IN_BLOCKS
    return -(-positions // _STEP) * _STEP


class Entries:
    """Keys and values `[kv_heads, tokens, width]` of some tokens by call; `number` names them in other processes."""

    def __init__(self, calls: list[tuple[Tensor, Tensor]]) -> None:
        self.calls = calls
        self.number = 0

    @property
    def n_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.calls)


class Buffers:
    """The buffers of one request.

    They grow by doubling, up to the limit unless a tree needs more, and never shrink. Keys are transposed, as the
    product with queries reads them. Positions after the written ones are read with the weight 0, so their values must
    be finite: values left there by dropped tokens are set to 0. `generation` rises whenever buffers moved; addresses
    taken before are invalid. `coded` says whether entries are codes (`CodedBuffers`).
    """

    coded = False

    def __init__(self) -> None:
        self.capacity = 0
        self.generation = 0
        self._start = 0  # key/value position of the first token that the running forward writes
        self._end = 0  # after the last one that it writes
        self._stale = 0  # from here on all values were 0 before it
        self._keys: list[Tensor] = []  # one for each attention call: [kv_heads, key width, capacity]
        self._values: list[Tensor] = []  # [kv_heads, capacity, value width]

    @property
    def calls(self) -> int:
        return len(self._keys)

    @property
    def n_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    def most(self, limit: int) -> int:
        return key_span(limit)

    def limit_to(self, limit: int, empty: bool) -> None:
        if empty and self.capacity > key_span(limit):
            self._keys, self._values = [], []
            self.capacity = self._end = self._stale = 0
            self.generation += 1

    def reserve(self, start: int, end: int, limit: int) -> None:
        """Before a forward writes from `start` to `end`; beyond `limit` the buffers grow only as far as needed."""
        self._stale = max(self._stale, self._end)
        self._start, self._end = start, end
        needed = key_span(end)
        if needed <= self.capacity:
            return
        doubled = max(2 * self.capacity, _FIRST_CAPACITY)
        capacity = max(needed, min(doubled, key_span(limit)))
        self.generation += 1
        self.capacity = 0  # if memory runs out in between, the next call checks all of them again
        for call in range(len(self._keys)):  # one by one: an old and a new buffer together take half as much again
            self._keys[call] = self._grown(self._keys[call], 2, capacity)
            self._values[call] = self._grown(self._values[call], 1, capacity)
        self.capacity = capacity

    def _grown(self, buffer: Tensor, axis: int, capacity: int) -> Tensor:
        shape = list(buffer.shape)
        shape[axis] = capacity
        larger = buffer.new_zeros(shape)
        larger.narrow(axis, 0, self._start).copy_(buffer.narrow(axis, 0, self._start))
        return larger

    def addressed(
        self, calls: int, kv_heads: int, key_width: int, value_width: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The buffers of `calls` attention calls, to write by address until `generation` changes; or CacheError."""
        like = torch.empty(0, dtype=dtype, device="cpu")
        for _ in range(len(self._keys), calls):
            self._add(like, kv_heads, key_width, value_width)
        sizes = ((kv_heads, key_width, self.capacity), (kv_heads, self.capacity, value_width), dtype, dtype)
        pairs = zip(self._keys, self._values, strict=True)
        if len(self._keys) != calls or any((k.shape, v.shape, k.dtype, v.dtype) != sizes for k, v in pairs):
            raise CacheError("a cache of another model was given; make it by this model's new_cache")
        return self._keys, self._values

    def write(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._make(call, keys, values)
        end = self._start + keys.shape[1]
        span = key_span(end)
        all_keys, all_values = self._keys[call], self._values[call]
        if self._stale > end:
            all_values[:, end : min(self._stale, span)] = 0
        all_keys[:, :, self._start : end] = keys.transpose(1, 2)
        all_values[:, self._start : end] = values
        return all_keys[:, :, :span], all_values[:, :span]

    def write_path(
        self, call: int, length: int, path: Sequence[int], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the last tokens of a path of uncommitted ones, ascending indices, and read all that the last of them
        follows.

        Worked example: `write_path(0, 10, [0, 2, 3], keys, values)` of one new token, `[kv_heads, new, width]` each,
        writes position 13 and returns the entries `[kv_heads, tokens, width]` of positions 0 to 9, 10, 12 and 13: views
        if the path is a chain.
        """
        self._make(call, keys, values)
        all_keys, all_values = self._keys[call], self._values[call]
        end, new = length + len(path), keys.shape[1]
        if path[-1] == len(path) - 1:
            all_keys[:, :, end - new : end] = keys.transpose(1, 2)
            all_values[:, end - new : end] = values
            return all_keys[:, :, :end].transpose(1, 2), all_values[:, :end]
        places = torch.tensor([*range(length), *(length + node for node in path)], device=keys.device)
        all_keys[:, :, places[-new:]] = keys.transpose(1, 2)
        all_values[:, places[-new:]] = values
        return all_keys.index_select(2, places).transpose(1, 2), all_values.index_select(1, places)

    def _make(self, call: int, keys: Tensor, values: Tensor) -> None:
        if call == len(self._keys):
            self._add(keys, keys.shape[0], keys.shape[2], values.shape[2])

    def _add(self, like: Tensor, kv_heads: int, key_width: int, value_width: int) -> None:
        """Make both buffers of an attention call, so that running out of memory leaves neither."""
        keys = like.new_zeros(kv_heads, key_width, self.capacity)
        values = like.new_zeros(kv_heads, self.capacity, value_width)
        self._keys.append(keys)
        self._values.append(values)

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Move entries of `path`, ascending indices of tokens from `length` on, to the positions from `length` on."""
        if path and path[-1] != len(path) - 1 and self._keys:
            source = torch.tensor([length + i for i in path], device=self._keys[0].device)
            target = slice(length, length + len(path))
            # index_select copies before anything is written, so source and target may overlap.
            for keys, values in zip(self._keys, self._values, strict=True):
                keys[:, :, target] = keys.index_select(2, source)
                values[:, target] = values.index_select(1, source)
        # Every call of the forward has zeroed the positions of its span.
        if self._stale <= key_span(self._end):
            self._stale = self._end

    def drop(self, first: int, count: int, length: int) -> None:
        """Drop `count` of `length` tokens from the place `first` on; later ones move there."""
        for keys, values in zip(self._keys, self._values, strict=True):
            keys[:, :, first : length - count] = keys[:, :, first + count : length].clone()
            values[:, first : length - count] = values[:, first + count : length].clone()

    def entry(self, call: int, length: int) -> tuple[Tensor, Tensor]:
        """Views `[kv_heads, length, width]` of the first keys and values of an attention call."""
        return self._keys[call][:, :, :length].transpose(1, 2), self._values[call][:, :length]

    def part(self, first: int, end: int, lasting: bool) -> Entries:
        entries = [Buffers.entry(self, call, end) for call in range(self.calls)]  # as they are stored
        calls = [(keys[:, first:], values[:, first:]) for keys, values in entries]
        return Entries([(keys.clone(), values.clone()) for keys, values in calls] if lasting else calls)

    def extend(self, start: int, parts: Sequence[tuple[Entries, int, int]], limit: int) -> None:
        self.reserve(start, start + sum(end - first for _, first, end in parts), limit)
        pieces = [[(k[:, first:end], v[:, first:end]) for k, v in part.calls] for part, first, end in parts]
        for call, pairs in enumerate(zip(*pieces, strict=True)):  # none if no layer is attention
            keys, values = zip(*pairs, strict=True)
            whole = (keys[0], values[0]) if len(parts) == 1 else (torch.cat(keys, 1), torch.cat(values, 1))
            Buffers.write(self, call, *whole)  # as they are stored


SCALE_BYTES = 4


def encoded(entries: Tensor) -> Tensor:
    """Entries `[..., width]` as int8 `[..., width + 4]`: codes, then the bytes of their scale max|x| / 127.

    Codes are rounded to the nearest, ties to even. Entries that are not finite get a scale that is not finite.
    """
    numbers = entries.float()
    scale = numbers.abs().amax(-1, keepdim=True) / 127
    codes = (numbers / torch.where(scale > 0, scale, 1.0)).round().to(torch.int8)
    return torch.cat([codes, scale.contiguous().view(torch.int8)], -1)


def decoded(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers `[..., width]` of what `encoded` returned."""
    scale = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-SCALE_BYTES] * scale).to(dtype)


class CodedBuffers(Buffers):
    """Buffers of 8-bit codes, which give and take numbers of `dtype`; the native forward reads the codes themselves.

    Each token and head has codes from -127 to 127 and one scale in float32, for keys and for values: half the memory of
    bfloat16, a quarter of that of float32. An entry is quantised once, when it is written, from the number that the
    model's dtype would keep. Commits, growth and shared prefixes move codes and scales, so all forwards read the same
    ones, drafted or not.
    """

    coded = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def addressed(
        self, calls: int, kv_heads: int, key_width: int, value_width: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        return super().addressed(calls, kv_heads, key_width + SCALE_BYTES, value_width + SCALE_BYTES, torch.int8)

    def write(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        all_keys, all_values = super().write(call, encoded(keys), encoded(values))
        return decoded(all_keys.transpose(1, 2), self._dtype).transpose(1, 2), decoded(all_values, self._dtype)

    def write_path(
        self, call: int, length: int, path: Sequence[int], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        all_keys, all_values = super().write_path(call, length, path, encoded(keys), encoded(values))
        return decoded(all_keys, self._dtype), decoded(all_values, self._dtype)

    def entry(self, call: int, length: int) -> tuple[Tensor, Tensor]:
        keys, values = super().entry(call, length)
        return decoded(keys, self._dtype), decoded(values, self._dtype)
