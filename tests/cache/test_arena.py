"""Keys and values of many requests in one arena, at addresses that stay; see also `test_request_cache`."""

from __future__ import annotations

import gc

import pytest
from storages import CALLS, HEADS, KEY_WIDTH, LIMIT, assert_holds, fill, filled, forward, new_arena_pool

from truedraft.cache import RequestCache
from truedraft.cache.arena import SPAN_STEP
from truedraft.errors import CacheError


def test_capacity_and_slots_grow_and_entries_stay() -> None:
    pool = new_arena_pool()
    first = filled(pool, [1, 2, 3])
    assert first.capacity == SPAN_STEP
    assert first.n_bytes == 2 * CALLS * HEADS * KEY_WIDTH * SPAN_STEP * 4
    second = filled(pool, range(SPAN_STEP + 1))
    assert first.capacity == second.capacity == 2 * SPAN_STEP
    others = [filled(pool, [7, number]) for number in range(3)]
    assert first.storage.arena.slots == 8
    for cache, tokens in ((first, [1, 2, 3]), (second, range(SPAN_STEP + 1)), (others[2], [7, 2])):
        assert_holds(cache.entries(), tokens)


def test_capacity_stops_at_the_limit_unless_a_tree_needs_more() -> None:
    cache = new_arena_pool().acquire()
    fill(cache, range(LIMIT - 1))
    assert cache.capacity == LIMIT
    forward(cache, range(8))
    assert cache.capacity == LIMIT + SPAN_STEP


def test_addresses_stay_until_the_arena_grows() -> None:
    pool = new_arena_pool()
    cache = filled(pool, [1, 2, 3])

    def addresses() -> list[int]:
        return [tensor.data_ptr() for call in range(CALLS) for tensor in cache.storage.arena.rows(call)]

    before, generation = addresses(), cache.storage.arena.generation
    for token in range(SPAN_STEP - 10):
        fill(cache, [token])
    forward(cache, range(5))
    cache.commit((0, 3))
    assert addresses() == before
    assert cache.storage.arena.generation == generation
    forward(cache, range(2 * SPAN_STEP))
    assert cache.storage.arena.generation == generation + 1


def test_requests_lie_in_the_lowest_slots_without_gaps() -> None:
    """The highest moves into the first gap, its uncommitted tokens with it."""
    pool = new_arena_pool()
    caches = [filled(pool, [number, 10]) for number in range(5)]
    assert [cache.storage.slot for cache in caches] == [0, 1, 2, 3, 4]
    forward(caches[4], [20, 21, 22])
    arena = caches[0].storage.arena
    for gone in (caches[1], caches[3]):
        pool.release(gone)
    arena.close_gaps()
    assert [caches[number].storage.slot for number in (0, 4, 2)] == [0, 1, 2]
    for number in (0, 2, 4):
        assert_holds(caches[number].entries(), [number, 10])
    caches[4].commit((0, 2))
    assert_holds(caches[4].entries(), [4, 10, 20, 22])
    assert pool.acquire().storage.slot == 3
    assert pool.in_use == 4


def test_a_free_slot_is_taken_again_and_nothing_of_its_past_shows() -> None:
    """Entries behind the written ones are multiplied with weights of 0, so NaN must not stay there."""
    pool = new_arena_pool()
    old = filled(pool, [float("nan")] * 40)
    pool.release(old)
    cache = filled(pool, [1, 2, 3])
    assert cache.storage.slot == 0
    for call in range(CALLS):
        for entries in cache.storage.arena.entries(call):
            assert bool(entries.isfinite().all())
    assert_holds(cache.entries(), [1, 2, 3])


def test_what_a_longer_tree_left_is_cleaned_by_the_next_forward() -> None:
    cache = filled(new_arena_pool(), [1, 2, 3])
    forward(cache, [4, *[float("inf")] * 9])
    cache.commit((0,))
    forward(cache, [5])
    for call in range(CALLS):
        for entries in cache.storage.arena.entries(call):
            assert bool(entries.isfinite().all())


def test_what_a_moved_request_left_is_cleaned_as_well() -> None:
    """Its old slot, and the end of the longer request that was in the new one."""
    pool = new_arena_pool()
    long, short = filled(pool, [float("nan")] * 30), filled(pool, [1, 2])
    pool.release(long)
    short.storage.arena.close_gaps()
    assert short.storage.slot == 0
    fill(short, [3])
    fresh = filled(pool, [9])
    assert_holds(short.entries(), [1, 2, 3])
    assert_holds(fresh.entries(), [9])
    for entries in short.storage.arena.entries(0):
        assert bool(entries.isfinite().all())


def test_a_cache_that_was_dropped_frees_its_slot() -> None:
    pool = new_arena_pool()
    kept = [filled(pool, [1]), filled(pool, [2])]
    del kept[0]
    gc.collect()
    kept[0].storage.arena.close_gaps()
    assert kept[0].storage.slot == 0
    assert_holds(kept[0].entries(), [2])


def test_misuse_is_refused() -> None:
    pool = new_arena_pool()
    cache = filled(pool, [1, 2])
    for foreign in (RequestCache(LIMIT), new_arena_pool().acquire()):
        with pytest.raises(CacheError, match="made by another model"):
            pool.release(foreign)
    pool.release(cache)
    assert pool.in_use == 0
    for use in (lambda: pool.release(cache), lambda: cache.reserve(1), lambda: cache.commit(())):
        with pytest.raises(CacheError, match="was given back to its model"):
            use()
