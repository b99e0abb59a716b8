"""Keys and values of many requests in one block of memory, at addresses that stay.

A CUDA graph replays kernels over the addresses that it was recorded with, so all requests share one block, one slot
each. Requests lie in the lowest slots, without gaps: a forward over n of them then reads the first n slots as they
lie, and need not gather them. When one leaves, the highest moves into its place before the next forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.cache.request import CachePool, RequestCache
from truedraft.errors import CacheError

SPAN_STEP = 256
"""Slots have room for a multiple of this many tokens."""


class Arena:
    """The block itself. It grows by doubling its slots or their capacity, which moves it.

    Tokens behind the written ones are read with the weight 0, so they must be finite: whatever forgotten tokens left
    there is set to 0 before a forward (`clean`).

    Args:
        calls: attention calls of the model.
        kv_heads: key/value heads of each.
        width: of a key and of a value.
        dtype: of both.
        device: where the block lies.
        limit: tokens beyond which capacity grows only as far as it must (the model's context).

    Attributes:
        calls: as given.
        slots: requests that have room.
        capacity: tokens of each.
        generation: rises whenever the block moved; addresses taken before are void.
        lock: held while slots are read or moved; a forward holds it until its work is queued on the device.
    """

    def __init__(
        self, calls: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device, limit: int
    ) -> None:
        self.calls = calls
        self._row = (kv_heads, width)
        self._limit = _rounded(limit)
        self._data = torch.zeros(2, calls, 1, kv_heads, width, dtype=dtype, device=device)
        self._owners: list[weakref.ref[ArenaSlot] | None] = []
        self._filled: list[int] = []  # of each slot: from here on all entries are 0
        self.slots = 0
        self.capacity = 0
        self.generation = 0
        self.lock = threading.RLock()

    @property
    def nowhere(self) -> int:
        """The row behind all slots; what must be written and is not wanted goes there."""
        return self.slots * self.capacity

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self._data[:, :, 0].nbytes * self.capacity

    @property
    def n_bytes(self) -> int:
        """Bytes of the block."""
        return self._data.nbytes

    def rows(self, call: int) -> tuple[Tensor, Tensor]:
        """Keys and values of an attention call as rows to write, each `[slots * capacity + 1, kv_heads, width]`."""
        return self._data[0, call], self._data[1, call]

    def entries(self, call: int) -> tuple[Tensor, Tensor]:
        """Keys and values of an attention call by slot, each `[slots, capacity, kv_heads, width]`."""
        by_slot = self._by_slot()
        return by_slot[0, call], by_slot[1, call]

    def _by_slot(self) -> Tensor:
        """`[2, calls, slots, capacity, kv_heads, width]`."""
        slots = self._data[:, :, : self.nowhere]
        return slots.view(2, self.calls, self.slots, self.capacity, *self._row)

    def take(self, owner: ArenaSlot) -> int:
        """The lowest free slot. Its memory is there once something was reserved."""
        with self.lock:
            slot = next((slot for slot in range(len(self._owners)) if self._owner(slot) is None), len(self._owners))
            self._owners[slot : slot + 1] = [weakref.ref(owner)]
            return slot

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        with self.lock:
            self._owners[slot] = None

    def _owner(self, slot: int) -> ArenaSlot | None:
        """Who holds a slot; a request that was dropped without giving its slot back holds it no more."""
        reference = self._owners[slot]
        return None if reference is None else reference()

    @torch.inference_mode()
    def close_gaps(self) -> None:
        """Move requests from the highest slots into free ones below them."""
        slot = 0
        while slot < len(self._owners):
            last = self._owner(len(self._owners) - 1)
            if last is None:
                self._owners.pop()
                continue
            if self._owner(slot) is None:
                self._move(last, slot)
            slot += 1

    def _move(self, owner: ArenaSlot, slot: int) -> None:
        source = len(self._owners) - 1
        if source < len(self._filled):  # else nothing was written there yet
            end = self._filled[source]
            block = self._by_slot()
            block[:, :, slot, :end] = block[:, :, source, :end]
            self._filled[slot] = max(self._filled[slot], end)
        self._owners[slot] = self._owners.pop()
        owner.slot = slot

    @torch.inference_mode()
    def reserve(self, tokens: int) -> None:
        """Make room for every request that took a slot, and for `tokens` tokens in each slot."""
        with self.lock:
            slots, capacity = self._slots_for(len(self._owners)), self._capacity_for(self.capacity, tokens)
            if (slots, capacity) != (self.slots, self.capacity):
                self._grow(slots, capacity)

    def _slots_for(self, requests: int) -> int:
        return max(self.slots, 1 << (requests - 1).bit_length() if requests else 0)

    def _capacity_for(self, capacity: int, tokens: int) -> int:
        """Of each slot once there is room for `tokens`, from a capacity on."""
        if tokens <= capacity:
            return capacity
        return max(_rounded(tokens), min(max(2 * capacity, SPAN_STEP), self._limit))

    def bytes_for(self, tokens: Sequence[int]) -> int:
        """Bytes of the block once requests with room for so many tokens, in this order, took slots; never fewer."""
        capacity = self.capacity
        for each in tokens:
            capacity = self._capacity_for(capacity, each)
        return self._bytes_of(self._slots_for(len(tokens)), capacity)

    def bytes_alone(self, tokens: int) -> int:
        """The same for one request in a block that is made for it."""
        return self._bytes_of(1, self._capacity_for(0, tokens))

    def _bytes_of(self, slots: int, capacity: int) -> int:
        return self._data[:, :, 0].nbytes * (slots * capacity + 1)

    @torch.inference_mode()
    def shrink(self) -> None:
        """Give the block back to the system, if nobody holds a slot."""
        with self.lock:
            if self.slots and all(self._owner(slot) is None for slot in range(len(self._owners))):
                self._data = self._data.new_zeros(2, self.calls, 1, *self._row)
                self._owners, self._filled = [], []
                self.slots = self.capacity = 0
                self.generation += 1

    def _grow(self, slots: int, capacity: int) -> None:
        old, old_slots, old_capacity = self._by_slot(), self.slots, self.capacity
        self._data = self._data.new_zeros(2, self.calls, slots * capacity + 1, *self._row)
        self.slots, self.capacity = slots, capacity
        self._by_slot()[:, :, :old_slots, :old_capacity] = old
        self._filled.extend([0] * (slots - old_slots))
        self.generation += 1

    @torch.inference_mode()
    def clean(self, slot: int, end: int) -> None:
        """Set all entries of a slot to 0 from `end` on; what lies before may be written then."""
        if self._filled[slot] > end:
            self._by_slot()[:, :, slot, end : self._filled[slot]] = 0
        self._filled[slot] = end

    @torch.inference_mode()
    def shift(self, slot: int, source: int, target: int, count: int) -> None:
        """Copy `count` entries of a slot from `source` on to `target`, in every attention call at once."""
        block = self._by_slot()[:, :, slot]
        block[:, :, target : target + count] = block[:, :, source : source + count].clone()


class ArenaSlot:
    """Where one request lies; its methods are as in `Buffers`.

    A forward over the arena writes the entries itself, by their addresses; `write` is for one that does not know it.

    Args:
        arena: takes the lowest free slot of it.

    Attributes:
        arena: as given.
        slot: where the request lies; the arena may move it between forwards. None once it was given back.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.slot: int | None = arena.take(self)
        self._start = 0  # position of the first token that the running forward writes

    @property
    def place(self) -> int:
        """The slot.

        Raises:
            CacheError: it was given back.
        """
        if self.slot is None:
            raise CacheError("this cache was given back to its model; take a new one with new_cache()")
        return self.slot

    @property
    def capacity(self) -> int:
        return self.arena.capacity

    @property
    def calls(self) -> int:
        return self.arena.calls if self.place < self.arena.slots else 0

    @property
    def n_bytes(self) -> int:
        return self.arena.slot_bytes

    def most(self, limit: int) -> int:
        return _rounded(limit)

    def limit_to(self, limit: int, empty: bool) -> None:
        # The slots of all grow together, so they do it now: then it is known beforehand to what.
        self.arena.reserve(limit)

    def reserve(self, start: int, end: int, limit: int) -> None:
        with self.arena.lock:
            _ = self.place
            self.arena.reserve(end)
            self._start = start

    @torch.inference_mode()
    def write(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self._start + keys.shape[1]
        with self.arena.lock:
            slot = self.place
            self.arena.clean(slot, end)
            all_keys, all_values = (entries[slot] for entries in self.arena.entries(call))
        all_keys[self._start : end] = keys.transpose(0, 1)
        all_values[self._start : end] = values.transpose(0, 1)
        span = min(_rounded(end), self.capacity)
        return all_keys[:span].permute(1, 2, 0), all_values[:span].transpose(0, 1)

    def keep(self, length: int, path: Sequence[int]) -> None:
        # Entries move in runs, by addresses that the host knows, so nothing is copied to the device for it.
        with self.arena.lock:
            slot = self.place
            for source, target, count in _runs(path):
                self.arena.shift(slot, length + source, length + target, count)

    def entry(self, call: int, length: int) -> tuple[Tensor, Tensor]:
        with self.arena.lock:
            keys, values = (entries[self.place, :length] for entries in self.arena.entries(call))
        return keys.transpose(0, 1), values.transpose(0, 1)


class ArenaPool(CachePool):
    """Hands out caches in slots of an arena and takes them back.

    Args:
        arena: where they lie.
        limit: tokens of one request (the model's context).
    """

    def __init__(self, arena: Arena, limit: int) -> None:
        super().__init__(limit, keep=0)
        self._arena = arena

    def acquire(self) -> RequestCache:
        cache = RequestCache(self._limit, storage=ArenaSlot(self._arena))
        with self._lock:
            self.in_use += 1
        return cache

    def release(self, cache: RequestCache) -> None:
        """Take a cache back; the caller must not use it any more.

        Raises:
            CacheError: it is not of this pool, or was given back before.
        """
        slot = cache.storage
        if not isinstance(slot, ArenaSlot) or slot.arena is not self._arena:
            raise CacheError("this cache was made by another model; give it back to that one")
        with self._arena.lock:
            self._arena.give_back(slot.place)
            cache.rollback(0)
            slot.slot = None
        with self._lock:
            self.in_use -= 1

    @property
    def kept_bytes(self) -> int:
        """Of the whole block, where nobody has a slot."""
        return 0 if self.in_use or not self._arena.slots else self._arena.n_bytes

    def trim(self, n_bytes: int) -> None:
        if n_bytes > 0 and not self.in_use:
            self._arena.shrink()

    def bytes_alone(self, tokens: int) -> int:
        return self._arena.bytes_alone(tokens)

    def bytes_for(self, tokens: Sequence[int]) -> int:
        return self._arena.bytes_for(tokens) if tokens else 0


def _runs(path: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours of a rising path that move together: (first, where to, how many), without those that stay.

    >>> _runs((0, 2, 3, 6))
    [(2, 1, 2), (6, 3, 1)]
    """
    runs: list[tuple[int, int, int]] = []
    for target, source in enumerate(path):
        if source == target:
            continue
        if runs and source == runs[-1][0] + runs[-1][2]:
            first, start, count = runs[-1]
            runs[-1] = (first, start, count + 1)
        else:
            runs.append((source, target, 1))
    return runs


def _rounded(tokens: int) -> int:
    return -(-tokens // SPAN_STEP) * SPAN_STEP
