"""Keys and values of all requests of a model in pages of one tensor, at fixed addresses for CUDA graphs.

A page has 16 tokens; a request has a block table, the numbers of its pages in the order of its text. Requests with a
common prefix share pages by reference: a page with more than one holder is never written, and a writer copies it first
(PagedAttention 2309.06180, sections 4.3 and 4.4). Pages are allocated by doubling, which moves the tensor, or all at
the start (`Pages.reserve`).
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.inference import in_inference_mode
from truedraft.errors import CacheError
from truedraft.models.cache.buffers import Entries
from truedraft.models.cache.request import CachePool, RequestCache

if TYPE_CHECKING:
    from truedraft.models.cache.prefixes import PrefixCache

PAGE = 16
"""Tokens of a page."""
_FIRST_PAGES = 64
_MOST_COUNTS = 64  # cached sets of block tables


class Pages:
    """The tensor, and the number of holders of each page. Page 0 is scratch for rows of padding.

    `generation` rises whenever the tensor moved, `shares` whenever a block table gets a page that others hold, or gives
    back one that they keep. While `reserved`, the number of reservations of all pages, is not 0, the tensor never
    moves. `lock` is held while pages are taken or moved; a forward holds it until its work is queued on the device.
    """

    def __init__(self, calls: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.calls, self.width = calls, width
        self._row = (kv_heads, width)
        self._data = torch.zeros(2, calls, 1, PAGE, kv_heads, width, dtype=dtype, device=device)
        self._holders = [1]  # of each page
        self._free: list[int] = []
        self._kept: Counter[int] = Counter()  # holders of each page that keep it for later requests
        self._dropped: deque[tuple[int, bool]] = deque()  # by finalisers, in any thread; whether it was kept
        self._keepers: WeakSet[PrefixCache] = WeakSet()
        self.generation = self.shares = 0
        self.reserved = 0
        self.lock = threading.RLock()

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def page_bytes(self) -> int:
        return self._data[:, :, 0].nbytes

    @property
    def n_bytes(self) -> int:
        return self._data.nbytes

    @property
    def count(self) -> int:
        return len(self._holders) - 1

    @property
    def held(self) -> int:
        with self.lock:
            self._collect()
            return self.count - len(self._free)

    @property
    def kept(self) -> int:
        with self.lock:
            self._collect()
            return len(self._kept)

    def entries(self, call: int) -> tuple[Tensor, Tensor]:
        """Keys and values of an attention call, each `[pages, PAGE, kv_heads, width]`."""
        return self._data[0, call], self._data[1, call]

    def rows(self, call: int) -> tuple[Tensor, Tensor]:
        keys, values = self.entries(call)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy rows of all calls; all are read before any is written."""
        rows, device = self._data.flatten(2, 3), self._data.device
        entries = rows.index_select(2, transfers.upload(source, device))
        rows.index_copy_(2, transfers.upload(target, device), entries)

    @in_inference_mode
    def take(self) -> int:
        """A page with one holder and its previous contents; CacheError if none is free or can be allocated."""
        with self.lock:
            self._collect()
            while self.reserved and not self._free and any(each.forget_oldest() for each in list(self._keepers)):
                self._collect()
            if not self._free:
                if self.reserved:
                    raise CacheError(
                        f"all {self.count} pages of keys and values are in use; let fewer requests run at once, or "
                        "raise max_cache_bytes or gpu_memory_utilization"
                    )
                self._grow(max(2 * len(self._holders), _FIRST_PAGES))
            page = self._free.pop()
            self._holders[page] = 1
            return page

    def share(self, page: int) -> int:
        with self.lock:
            self._holders[page] += 1
            return page

    def give_back(self, pages: Sequence[int]) -> None:
        with self.lock:
            for page in pages:
                self._holders[page] -= 1
                if self._holders[page]:
                    self.shares += 1
                else:
                    self._free.append(page)

    def drop(self, pages: Sequence[int], kept: bool = False) -> None:
        """`give_back` for a finalised holder: safe when called by Python's memory management at any moment."""
        self._dropped.extend((page, kept) for page in pages)

    def _collect(self) -> None:
        while self._dropped:
            page, kept = self._dropped.popleft()
            self.give_back((page,))
            if kept:
                self._kept[page] -= 1
                if not self._kept[page]:
                    del self._kept[page]

    def keep(self, pages: Sequence[int]) -> None:
        with self.lock:
            self._kept.update(pages)

    def reclaim_from(self, keeper: PrefixCache) -> None:
        self._keepers.add(keeper)

    @in_inference_mode
    def private(self, page: int) -> int:
        """A page with the same entries and a single holder: itself, or a copy that replaces it."""
        with self.lock:
            self._collect()
            if self._holders[page] == 1:
                return page
            copy = self.take()
            self._data[:, :, copy] = self._data[:, :, page]
            self.give_back((page,))
            return copy

    @in_inference_mode
    def reserve(self, pages: int) -> None:
        """Allocate this many pages, and no more until `unreserve`; fewer than before if no page is held."""
        with self.lock:
            if not self.reserved:
                self.shrink()
            self.reserved += 1  # first, because finalising another holder in between would shrink it
            try:
                if pages > self.count:
                    self._grow(pages + 1)
            except torch.OutOfMemoryError:
                self.reserved -= 1
                raise

    def unreserve(self) -> None:
        with self.lock:
            self.reserved -= 1
            self.shrink()

    @in_inference_mode
    def shrink(self) -> None:
        with self.lock:
            if self.count and not self.reserved and not self.held:
                self._data = self._data[:, :, :1].clone()
                self._holders, self._free = [1], []
                self.generation += 1

    def _grow(self, pages: int) -> None:
        """Grow to this many pages, page 0 included. Old and new tensor exist at the same time if any page is held."""
        before, old = len(self._holders), self._data
        if self.held:
            self._data = self._empty(pages)
            self._data[:, :, :before] = old
        else:
            self._data = old = old[:, :, :1].clone()
            try:
                self._data = self._empty(pages)
            except torch.OutOfMemoryError:  # earlier reservations keep their pages
                self._data = self._empty(before)
                self.generation += 1
                raise
        self._holders.extend([0] * (pages - before))
        self._free = [*range(pages - 1, before - 1, -1), *self._free]
        self.generation += 1

    def _empty(self, pages: int) -> Tensor:
        return self._data.new_zeros(2, self.calls, pages, PAGE, *self._row)


class PageSpan(Entries):
    """Held pages of neighbouring tokens, from the first page's token `skip` on, to share without a copy."""

    def __init__(self, pages: Pages, held: Sequence[int], skip: int, kept: bool) -> None:
        super().__init__([])
        self._pages = pages
        self.held = [pages.share(page) for page in held]
        self.skip = skip
        self._kept = kept
        if kept:
            pages.keep(self.held)

    def __del__(self) -> None:
        self._pages.drop(self.held, self._kept)

    @property
    def n_bytes(self) -> int:
        return len(self.held) * self._pages.page_bytes

    def rows(self, first: int, end: int) -> NDArray[np.int64]:
        return rows_of(np.array(self.held), self.skip + first, self.skip + end)


class PageTable:
    """The block table of one request, with the methods of `Buffers`. A forward over pages writes by address."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._table = np.zeros(0, np.int64)
        self._count = 0  # pages in it
        self._start = 0  # position of the first token that the running forward writes
        self.is_open = True

    def __del__(self) -> None:
        self.pages.drop(self.table.tolist())

    @property
    def table(self) -> NDArray[np.int64]:
        return self._table[: self._count]

    @property
    def capacity(self) -> int:
        return self._count * PAGE

    @property
    def calls(self) -> int:
        return self.pages.calls if self._count else 0

    @property
    def n_bytes(self) -> int:
        return self._count * self.pages.page_bytes

    def most(self, limit: int) -> int:
        return pages_for(limit) * PAGE

    def limit_to(self, limit: int, empty: bool) -> None:
        """No effect: pages are taken as they are needed."""

    def _check_open(self) -> None:
        if not self.is_open:
            raise CacheError("this cache was given back to its model; take a new one with new_cache()")

    def close(self) -> None:
        with self.pages.lock:
            self._check_open()
            self.pages.give_back(self.table.tolist())
            self._count, self.is_open = 0, False

    def reserve(self, start: int, end: int, limit: int) -> None:
        self._check_open()
        with self.pages.lock:
            for number in range(start // PAGE, min(pages_for(end), self._count)):
                self._table[number] = self.pages.private(int(self._table[number]))
            while self._count < pages_for(end):
                self._append(self.pages.take())
        self._start = start

    def _append(self, page: int) -> None:
        if self._count == len(self._table):
            self._table = np.append(self._table, np.zeros(max(self._count, 8), np.int64))
        self._table[self._count] = page
        self._count += 1

    def rows(self, first: int, end: int) -> NDArray[np.int64]:
        return rows_of(self.table, first, end)

    @in_inference_mode
    def write(self, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self._start + keys.shape[1]
        with self.pages.lock:
            index = transfers.upload(self.rows(self._start, end), keys.device)
            for rows, new in zip(self.pages.rows(call), (keys, values), strict=True):
                rows.index_copy_(0, index, new.transpose(0, 1))
            all_keys, all_values = self.entry(call, end)
        return all_keys.transpose(1, 2), all_values

    def keep(self, length: int, path: Sequence[int]) -> None:
        moved = [(source, target) for target, source in enumerate(path) if source != target]
        if not moved:
            return
        self._check_open()
        source, target = np.array(moved).T + length
        with self.pages.lock:
            self.pages.move(rows_at(self.table, source), rows_at(self.table, target))

    def drop(self, first: int, count: int, length: int) -> None:
        """Give back the pages of `count` tokens from `first` on: whole pages, or up to the last of `length` tokens."""
        self._check_open()
        start, end = first // PAGE, pages_for(first + count)
        with self.pages.lock:
            self.pages.give_back(self.table[start:end].tolist())
            self._table[start : self._count - (end - start)] = self.table[end:].copy()
            self._count -= end - start

    def entry(self, call: int, length: int) -> tuple[Tensor, Tensor]:
        with self.pages.lock:
            keys, values = self.pages.rows(call)
            index = transfers.upload(self.rows(0, length), keys.device)
            return keys.index_select(0, index).transpose(0, 1), values.index_select(0, index).transpose(0, 1)

    def part(self, first: int, end: int, lasting: bool) -> PageSpan:
        self._check_open()
        with self.pages.lock:
            return PageSpan(self.pages, self.table[first // PAGE : pages_for(end)].tolist(), first % PAGE, lasting)

    @in_inference_mode
    def extend(self, start: int, parts: Sequence[tuple[Entries, int, int]], limit: int) -> None:
        self._check_open()
        with self.pages.lock:
            for part, first, end in parts:
                assert isinstance(part, PageSpan), "entries of another model"
                start = self._follow(start, part, first, end)

    def _follow(self, start: int, part: PageSpan, first: int, end: int) -> int:
        while first < end:
            place = part.skip + first
            count = min(PAGE - start % PAGE, end - first)
            if count == PAGE and place % PAGE == 0:
                self._share(start // PAGE, part.held[place // PAGE])
            else:
                self.reserve(start, start + count, 0)
                self.pages.move(part.rows(first, first + count), self.rows(start, start + count))
            start, first = start + count, first + count
        return start

    def _share(self, number: int, page: int) -> None:
        self.pages.share(page)
        self.pages.shares += 1
        if number == self._count:
            self._append(page)
        else:
            self.pages.give_back((int(self._table[number]),))
            self._table[number] = page


class PagePool(CachePool):
    """Hands out caches in pages and takes them back."""

    def __init__(self, pages: Pages, limit: int) -> None:
        super().__init__(limit, keep=0, storage=partial(PageTable, pages))
        self._pages = pages
        self._spare = 0  # pages
        self._twice: dict[tuple[int, ...], int] = {}  # by tables: results of `_held_twice`
        self._twice_at = 0  # `Pages.shares` at that time
        self.position_bytes = pages.page_bytes // PAGE

    def release(self, cache: RequestCache) -> None:
        table = cache.storage
        if not isinstance(table, PageTable) or table.pages is not self._pages:
            raise CacheError("this cache was made by another model; give it back to that one")
        table.close()
        cache.length = cache.uncommitted = cache.dropped = 0
        with self._lock:
            self.in_use -= 1

    def measure(self, cache: RequestCache) -> None:
        """No effect: the size of a page is known."""

    @property
    def held_bytes(self) -> int:  # type: ignore[override]
        return self._pages.held * self._pages.page_bytes

    @property
    def lost(self) -> int:  # type: ignore[override]
        return 0 if self.in_use else self._pages.held - self._pages.kept

    @property
    def kept_bytes(self) -> int:  # type: ignore[override]
        return 0 if self._pages.reserved or self._pages.held else self._pages.count * self._pages.page_bytes

    def trim(self, n_bytes: int) -> None:
        if n_bytes > 0:
            self._pages.shrink()

    def reserve(self, n_bytes: int, spare: int) -> None:
        self._spare = pages_for(spare)
        self._pages.reserve(n_bytes // self._pages.page_bytes + self._spare)

    def unreserve(self) -> None:
        self._pages.unreserve()

    def reclaim_from(self, keeper: PrefixCache) -> None:
        self._pages.reclaim_from(keeper)

    @property
    def most_bytes(self) -> int | None:  # type: ignore[override]
        """See `CachePool`: all reserved pages. Several engines of one model share them, and each counts them all."""
        return (self._pages.count - self._spare) * self._pages.page_bytes if self._pages.reserved else None

    def bytes_for_one(self, tokens: int) -> int:
        return pages_for(tokens) * self._pages.page_bytes

    def bytes_for(self, caches: Sequence[tuple[int, RequestCache | None]]) -> int:
        pages = sum(pages_for(tokens) for tokens, _ in caches)
        tables = [cache.storage for _, cache in caches if cache is not None]
        return (pages - self._held_twice(tables)) * self._pages.page_bytes  # type: ignore[arg-type]

    def _held_twice(self, tables: Sequence[PageTable]) -> int:
        """Pages in more than one of these tables. New pages have one holder, so this is rarely recomputed."""
        with self._pages.lock:
            self._pages.held  # noqa: B018 - what was dropped is given back, so that no table here has another's name
            if self._pages.shares != self._twice_at or len(self._twice) > _MOST_COUNTS:
                self._twice, self._twice_at = {}, self._pages.shares
            names = tuple(map(id, tables))
            if names not in self._twice:
                held = [table.table for table in tables]
                self._twice[names] = sum(map(len, held)) - len(np.unique(np.concatenate([np.zeros(0, int), *held])))
            return self._twice[names]


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens.

    >>> [pages_for(tokens) for tokens in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-tokens // PAGE)


def rows_of(table: NDArray[np.int64], first: int, end: int) -> NDArray[np.int64]:
    """Rows, among those of all pages, of positions `first` to `end` of a request.

    >>> rows_of(np.array([5, 2]), 14, 18).tolist()  # positions 14 to 18 with pages of 16 tokens
    [94, 95, 32, 33]
    """
    return rows_at(table, np.arange(first, end))


def rows_at(table: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """`rows_of` for some positions."""
    return table[positions // PAGE] * PAGE + positions % PAGE
