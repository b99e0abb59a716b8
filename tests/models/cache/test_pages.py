"""Keys and values of many requests in pages, at addresses that stay; see also `test_request_cache`."""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from storages import CALLS, HEADS, KEY_WIDTH, LIMIT, assert_holds, fill, filled, forward, new_page_pool, table_of

from truedraft.errors import CacheError
from truedraft.models.cache import PAGE, PagePool, Pages, PrefixCache, RequestCache
from truedraft.models.cache.pages import pages_for, rows_of

PAGE_BYTES = 2 * CALLS * HEADS * KEY_WIDTH * PAGE * 4


def pages_of(pool: PagePool) -> Pages:
    return pool._pages


def test_requests_take_the_pages_that_their_texts_need() -> None:
    pool = new_page_pool()
    first, second = filled(pool, [1, 2, 3]), filled(pool, range(PAGE + 1))
    assert (first.capacity, second.capacity) == (PAGE, 2 * PAGE)
    assert (first.n_bytes, second.n_bytes) == (PAGE_BYTES, 2 * PAGE_BYTES)
    assert pages_of(pool).held == 3
    assert pool.bytes_for_one(PAGE + 1) == 2 * PAGE_BYTES and first.most == LIMIT
    for cache, tokens in ((first, [1, 2, 3]), (second, range(PAGE + 1))):
        assert_holds(cache.entries(), tokens)


def test_a_straight_path_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(new_page_pool(), [1])
    forward(cache, [2, 3, 4])
    monkeypatch.delattr(Pages, "move")
    cache.commit([0, 1])
    assert_holds(cache.entries(), [1, 2, 3])


def test_the_tensor_grows_by_doubling_and_entries_stay() -> None:
    pool = new_page_pool()
    first = filled(pool, range(30))
    pages = pages_of(pool)
    generation = pages.generation
    caches = [filled(pool, range(number, number + 200)) for number in range(8)]
    assert pages.generation > generation
    for number, cache in enumerate(caches):
        assert_holds(cache.entries(), range(number, number + 200))
    assert_holds(first.entries(), range(30))


def test_reserved_pages_are_all_that_there_are() -> None:
    pool = new_page_pool()
    pool.reserve(4 * PAGE_BYTES + 1, 0)
    pages = pages_of(pool)
    generation = pages.generation
    assert pool.most_bytes == 4 * PAGE_BYTES
    cache = filled(pool, range(3 * PAGE))
    other = pool.acquire()
    with pytest.raises(CacheError, match="all 4 pages of keys and values are in use; let fewer requests run"):
        forward(other, range(2 * PAGE))
    pool.release(cache)
    fill(other, range(2 * PAGE))
    assert_holds(other.entries(), range(2 * PAGE))
    assert pages.generation == generation
    pool.release(other)
    pool.unreserve()
    pool.reserve(2 * PAGE_BYTES, PAGE + 1)
    assert pages.count == 4 and pool.most_bytes == 2 * PAGE_BYTES
    pool.unreserve()
    assert pages.count == 0 and pages.generation > generation and pool.most_bytes is None


@pytest.mark.parametrize(("start", "first"), [(5, 0), (0, 5), (5, 5), (PAGE, 2 * PAGE), (3, PAGE + 7)])
def test_parts_that_begin_anywhere_are_copied_or_shared(start: int, first: int) -> None:
    pool = new_page_pool()
    text = list(range(5 * PAGE))
    donor, cache = filled(pool, text), pool.acquire()
    if start:
        fill(cache, range(900, 900 + start))
    part = donor.part(first, len(text), lasting=False)
    cache.extend([(part, 0, 40), (part, 40, len(text) - first)])
    assert_holds(cache.entries(), [*range(900, 900 + start), *text[first:]])


def test_pages_that_are_kept_are_given_back_when_a_request_needs_them() -> None:
    """The oldest first, and none that a request still holds."""
    pool, prefixes = new_page_pool(), PrefixCache(1 << 30)
    pool.reclaim_from(prefixes)
    pool.reserve(12 * PAGE_BYTES, 0)
    pages = pages_of(pool)
    for number, text in enumerate(([*range(64)], [*range(100, 164)])):
        cache = filled(pool, text)
        prefixes.join(number, cache, text)
        prefixes.keep(number)
        prefixes.leave(number)
        pool.release(cache)
    assert (pages.held, pages.kept, pool.lost) == (8, 8, 0)
    cache = pool.acquire()
    prefixes.join(2, cache, [*range(100, 164), 7])
    assert prefixes.fill(2) == 64 and pages.held == 8
    big = filled(pool, range(5 * PAGE))
    assert pages.kept == 4 and prefixes.n_bytes == 4 * PAGE_BYTES
    assert_holds(cache.entries(), range(100, 164))
    assert_holds(big.entries(), range(5 * PAGE))
    pool.release(cache)
    pool.release(big)
    assert (pages.held, pages.kept, pool.lost) == (4, 4, 0)
    prefixes.trim(0)
    assert (pages.held, pages.kept) == (0, 0)


def test_a_cache_that_was_dropped_holds_nothing() -> None:
    pool = new_page_pool()
    kept = [filled(pool, [1]), filled(pool, range(40))]
    del kept[1]
    gc.collect()
    assert pages_of(pool).held == 1
    assert_holds(kept[0].entries(), [1])


def test_pages_are_counted_again_only_once_some_were_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait ask at every step."""
    pool, counted = new_page_pool(), list[int]()
    unique = np.unique
    monkeypatch.setattr(np, "unique", lambda held: (counted.append(len(held)), unique(held))[1])
    first, second = filled(pool, range(4 * PAGE)), filled(pool, range(2 * PAGE))
    asked: list[tuple[int, RequestCache | None]] = [(9 * PAGE, first), (9 * PAGE, second)]
    for _ in range(3):
        assert pool.bytes_for(asked) == 18 * PAGE_BYTES
        fill(second, range(PAGE))
    assert counted == [6]
    third = pool.acquire()
    third.extend([(first.part(0, 3 * PAGE, lasting=False), 0, 3 * PAGE)])
    asked.append((9 * PAGE, third))
    assert pool.bytes_for(asked) == pool.bytes_for(asked) == (27 - 3) * PAGE_BYTES
    assert len(counted) == 2
    fill(third, [1])
    third.rollback(PAGE)
    fill(third, [2])  # takes a page of its own
    assert pool.bytes_for(asked) == (27 - 2) * PAGE_BYTES
    pool.release(third)
    asked[2] = (9 * PAGE, pool.acquire())  # may lie where the other was
    assert pool.bytes_for(asked) == 27 * PAGE_BYTES


def test_what_nobody_holds_is_dropped_before_more_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both together might not fit. Where even the new ones alone do not, those of before are there again."""
    pool = new_page_pool()
    pages = pages_of(pool)
    pool.reserve(20 * PAGE_BYTES, 0)
    before, made = pages.n_bytes, list[int]()
    empty = Pages._empty

    def watched(own: Pages, count: int) -> torch.Tensor:
        made.append(own.n_bytes)
        if count > 100:
            raise torch.OutOfMemoryError
        return empty(own, count)

    monkeypatch.setattr(Pages, "_empty", watched)
    pool.reserve(40 * PAGE_BYTES, 0)
    assert made == [PAGE_BYTES] and (pages.count, pages.reserved) == (40, 2)
    cache = filled(pool, range(30 * PAGE))
    pool.reserve(50 * PAGE_BYTES, 0)
    assert_holds(cache.entries(), range(30 * PAGE))
    assert made[1] == before // 21 * 41, "copied"
    pool.release(cache)
    generation = pages.generation
    with pytest.raises(torch.OutOfMemoryError):
        pool.reserve(200 * PAGE_BYTES, 0)
    assert (pages.count, pages.reserved, pages.n_bytes) == (50, 3, 51 * PAGE_BYTES)
    assert pages.generation > generation
    assert_holds(filled(pool, range(50 * PAGE)).entries(), range(50 * PAGE))


def test_misuse_is_refused() -> None:
    pool = new_page_pool()
    cache = filled(pool, [1, 2])
    for foreign in (RequestCache(LIMIT), new_page_pool().acquire()):
        with pytest.raises(CacheError, match="made by another model"):
            pool.release(foreign)
    pool.release(cache)
    assert pool.in_use == 0
    for use in (lambda: pool.release(cache), lambda: cache.reserve(1)):
        with pytest.raises(CacheError, match="was given back to its model"):
            use()


class PagesBesidePlainLists(RuleBasedStateMachine):
    """Requests that begin, grow, share, commit, roll back and end, in any order, beside lists of their tokens."""

    @initialize(pages=st.integers(6, 40))
    def begin_all(self, pages: int) -> None:
        self.pool = new_page_pool()
        self.pool.reserve(pages * PAGE_BYTES, 0)
        self.prefixes = PrefixCache(1 << 30)
        self.pool.reclaim_from(self.prefixes)
        self.texts: dict[int, list[float]] = {}
        self.caches: dict[int, RequestCache] = {}
        self.uncommitted: dict[int, list[float]] = {}
        self.numbers = itertools.count()
        self.tokens = itertools.count(1)

    def _one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.caches)))

    def _attempt(self, number: int, tokens: list[float], written: int = 0) -> bool:
        """A forward; where no page is left nothing that was committed changes."""
        try:
            forward(self.caches[number], tokens, written)
        except CacheError:
            self.caches[number].rollback(self.caches[number].length)
            self.uncommitted[number] = []
            return False
        return True

    @rule()
    def begin(self) -> None:
        number = next(self.numbers)
        self.caches[number], self.texts[number], self.uncommitted[number] = self.pool.acquire(), [], []

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), count=st.integers(1, 2 * PAGE))
    def grow(self, data: st.DataObject, count: int) -> None:
        number = self._one(data)
        tokens = [float(next(self.tokens)) for _ in range(count)]
        if len(self.texts[number]) + count < LIMIT and self._attempt(number, tokens):
            self.uncommitted[number] = tokens

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), more=st.integers(1, 5))
    def another_level(self, data: st.DataObject, more: int) -> None:
        number = self._one(data)
        before = self.uncommitted[number]
        tokens = [float(next(self.tokens)) for _ in range(more)]
        if self._attempt(number, tokens, len(before)):
            self.uncommitted[number] = before + tokens

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        number = self._one(data)
        new = self.uncommitted[number]
        path = sorted(data.draw(st.sets(st.integers(0, len(new) - 1)))) if new else []
        self.caches[number].commit(path)
        self.texts[number] += [new[node] for node in path]
        self.uncommitted[number] = []

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), share=st.floats(0.0, 1.0))
    def roll_back(self, data: st.DataObject, share: float) -> None:
        number = self._one(data)
        length = math.floor(share * len(self.texts[number]))
        self.caches[number].rollback(length)
        del self.texts[number][length:]
        self.uncommitted[number] = []

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), share=st.floats(0.0, 1.0))
    def begin_like_another(self, data: st.DataObject, share: float) -> None:
        donor = self._one(data)
        count = math.floor(share * len(self.texts[donor]))
        number = next(self.numbers)
        cache = self.pool.acquire()
        part = self.caches[donor].part(0, count, lasting=False)
        try:
            cache.extend([(part, 0, count)])
        except CacheError:
            self.pool.release(cache)
            return
        self.caches[number], self.texts[number], self.uncommitted[number] = cache, self.texts[donor][:count], []

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), kept=st.booleans())
    def end(self, data: st.DataObject, kept: bool) -> None:
        number = self._one(data)
        if kept:
            self.prefixes.join(number, self.caches[number], [int(token) for token in self.texts[number]])
            self.prefixes.keep(number)
            self.prefixes.leave(number)
        self.pool.release(self.caches.pop(number))
        del self.texts[number], self.uncommitted[number]

    @precondition(lambda self: self.prefixes._blocks)
    @rule(data=st.data())
    def go_on_from_what_was_kept(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.prefixes._blocks.values())))
        text: list[int] = []
        while block.before is not None:
            text[:0], block = block.tokens, block.before
        number = next(self.numbers)
        self.caches[number] = self.pool.acquire()
        self.prefixes.join(number, self.caches[number], [*text, 0])
        try:
            assert self.prefixes.fill(number) == len(text)
        finally:
            self.prefixes.leave(number)
        self.texts[number], self.uncommitted[number] = [float(token) for token in text], []

    @invariant()
    def what_is_held_is_what_was_written(self) -> None:
        for number, cache in self.caches.items():
            assert cache.length == len(self.texts[number])
            if cache.storage.calls:
                assert_holds(cache.entries(), self.texts[number])

    @invariant()
    def pages_of_several_count_once(self) -> None:
        for some in (list(self.caches.values()), list(self.caches.values())[1:]):
            tables = [table_of(cache).table.tolist() for cache in some]
            assert self.pool.bytes_for([(LIMIT, cache) for cache in some]) == PAGE_BYTES * (
                len(some) * pages_for(LIMIT) - sum(map(len, tables)) + len(set().union(*tables))
            )

    @invariant()
    def every_page_has_its_holders(self) -> None:
        pages = pages_of(self.pool)
        held = Counter(page for cache in self.caches.values() for page in table_of(cache).table.tolist())
        kept = Counter(page for block in self.prefixes._blocks.values() for page in block.entries.held)  # type: ignore[attr-defined]
        pages._collect()
        assert {page: count for page, count in enumerate(pages._holders) if page and count} == held + kept
        assert set(pages._free) == set(range(1, pages.count + 1)) - set(held + kept) and len(pages._free) == len(
            set(pages._free)
        )
        assert dict(pages._kept) == dict(kept)

    def teardown(self) -> None:
        for cache in self.caches.values():
            self.pool.release(cache)
        self.prefixes.trim(0)
        assert pages_of(self.pool).held == 0 and self.pool.lost == 0


def test_random_lives_of_requests() -> None:
    run_state_machine_as_test(
        PagesBesidePlainLists, settings=settings(max_examples=20, stateful_step_count=30, deadline=None)
    )


@given(table=st.lists(st.integers(0, 99), min_size=1, max_size=6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_rows_by_definition(table: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(table) * PAGE))
    first = data.draw(st.integers(0, end))
    every = [page * PAGE + place for page in table for place in range(PAGE)]
    assert rows_of(np.array(table), first, end).tolist() == every[first:end]
