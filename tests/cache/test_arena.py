"""Keys and values of many requests in one arena: each behaves like a cache of its own, at addresses that stay."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.cache.arena import SPAN_STEP, Arena, ArenaPool
from truedraft.errors import CacheError

HEADS, WIDTH, CALLS, LIMIT = 2, 3, 2, 1024


def new_arena() -> Arena:
    return Arena(CALLS, HEADS, WIDTH, torch.float32, torch.device("cpu"), LIMIT)


def new_pool() -> ArenaPool:
    return ArenaPool(new_arena(), LIMIT)


def forward(cache: RequestCache, tokens: Sequence[float], written: int = 0) -> list[tuple[Tensor, Tensor]]:
    """As a model would: reserve, then write in every attention call; a token's entries carry its number."""
    cache.reserve(written + len(tokens), written)
    views = []
    end = cache.length + written + len(tokens)
    for call in range(CALLS):
        column = torch.tensor([token + 1000.0 * call for token in tokens])[None, :, None].expand(HEADS, -1, WIDTH)
        keys, values = cache.write(call, column, -column)
        assert keys.shape[2] == values.shape[1] >= end
        views.append((keys[:, :, :end].transpose(1, 2), values[:, :end]))
    return views


def fill(cache: RequestCache, tokens: Sequence[float]) -> None:
    forward(cache, tokens)
    cache.commit(range(len(tokens)))


def filled(pool: ArenaPool, tokens: Sequence[float]) -> RequestCache:
    cache = pool.acquire()
    fill(cache, tokens)
    return cache


def assert_holds(pairs: Sequence[tuple[Tensor, Tensor]], tokens: Sequence[float]) -> None:
    assert len(pairs) == CALLS
    for call, (keys, values) in enumerate(pairs):
        expected = torch.tensor([token + 1000.0 * call for token in tokens])[None, :, None].expand(HEADS, -1, WIDTH)
        assert keys.equal(expected)
        assert values.equal(-expected)


def test_a_new_cache_is_empty() -> None:
    cache = new_pool().acquire()
    assert (cache.length, cache.capacity, cache.uncommitted, cache.n_bytes) == (0, 0, 0, 0)
    assert cache.entries() == []


def test_what_is_written_counts_once_committed() -> None:
    cache = filled(new_pool(), [1, 2, 3])
    assert_holds(forward(cache, [4, 5]), [1, 2, 3, 4, 5])
    assert (cache.length, cache.uncommitted) == (3, 2)
    assert_holds(cache.entries(), [1, 2, 3])
    cache.commit([0])
    assert_holds(forward(cache, [6]), [1, 2, 3, 4, 6])


def test_trees_are_written_level_by_level() -> None:
    cache = filled(new_pool(), [1, 2])
    forward(cache, [10])
    forward(cache, [11, 12], written=1)
    assert_holds(forward(cache, [13], written=3), [1, 2, 10, 11, 12, 13])
    cache.commit([0, 2, 3])
    assert_holds(cache.entries(), [1, 2, 10, 12, 13])


@pytest.mark.parametrize(
    "path", [(), (0,), (5,), (0, 1), (1, 2, 3, 4, 5), (0, 2, 3, 4, 5), (3, 4, 5), (0, 1, 2, 3, 4, 5), (1, 3, 5)]
)
def test_commit_keeps_any_path(path: tuple[int, ...]) -> None:
    """Also where source and target overlap, as in 1, 2, 3, 4, 5 to 0, 1, 2, 3, 4; the neighbour is left alone."""
    pool = new_pool()
    neighbour, cache = filled(pool, range(20)), filled(pool, [50, 51])
    forward(cache, range(6))
    cache.commit(path)
    assert_holds(cache.entries(), [50, 51, *path])
    assert_holds(neighbour.entries(), range(20))


def test_rollback_is_a_length() -> None:
    cache = filled(new_pool(), [1, 2, 3, 4])
    cache.rollback(2)
    assert_holds(forward(cache, [9]), [1, 2, 9])
    with pytest.raises(CacheError, match="cannot roll back to 5 tokens"):
        cache.rollback(5)


def test_capacity_and_slots_grow_and_entries_stay() -> None:
    pool = new_pool()
    first = filled(pool, [1, 2, 3])
    assert first.capacity == SPAN_STEP
    assert first.n_bytes == 2 * CALLS * HEADS * WIDTH * SPAN_STEP * 4
    second = filled(pool, range(SPAN_STEP + 1))
    assert first.capacity == second.capacity == 2 * SPAN_STEP
    others = [filled(pool, [7, number]) for number in range(3)]
    assert first.storage.arena.slots == 8
    for cache, tokens in ((first, [1, 2, 3]), (second, range(SPAN_STEP + 1)), (others[2], [7, 2])):
        assert_holds(cache.entries(), tokens)


def test_capacity_stops_at_the_limit_unless_a_tree_needs_more() -> None:
    cache = new_pool().acquire()
    fill(cache, range(LIMIT - 1))
    assert cache.capacity == LIMIT
    forward(cache, range(8))
    assert cache.capacity == LIMIT + SPAN_STEP


def test_addresses_stay_until_the_arena_grows() -> None:
    pool = new_pool()
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
    pool = new_pool()
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
    pool = new_pool()
    old = filled(pool, [float("nan")] * 40)
    pool.release(old)
    cache = filled(pool, [1, 2, 3])
    assert cache.storage.slot == 0
    for call in range(CALLS):
        for entries in cache.storage.arena.entries(call):
            assert bool(entries.isfinite().all())
    assert_holds(cache.entries(), [1, 2, 3])


def test_what_a_longer_tree_left_is_cleaned_by_the_next_forward() -> None:
    cache = filled(new_pool(), [1, 2, 3])
    forward(cache, [4, *[float("inf")] * 9])
    cache.commit((0,))
    forward(cache, [5])
    for call in range(CALLS):
        for entries in cache.storage.arena.entries(call):
            assert bool(entries.isfinite().all())


def test_what_a_moved_request_left_is_cleaned_as_well() -> None:
    """Its old slot, and the end of the longer request that was in the new one."""
    pool = new_pool()
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
    pool = new_pool()
    kept = [filled(pool, [1]), filled(pool, [2])]
    del kept[0]
    gc.collect()
    kept[0].storage.arena.close_gaps()
    assert kept[0].storage.slot == 0
    assert_holds(kept[0].entries(), [2])


def test_commits_outside_inference_mode() -> None:
    """Forwards run in inference mode, and memory born there can be written nowhere else; a caller need not know."""
    pool = new_pool()
    with torch.inference_mode():
        cache = filled(pool, [1, 2])
        forward(cache, [3, 4, 5])
    cache.commit([0, 2])
    assert_holds(cache.entries(), [1, 2, 3, 5])
    forward(cache, range(SPAN_STEP))
    assert_holds(cache.entries(), [1, 2, 3, 5])


def test_misuse_is_refused() -> None:
    pool = new_pool()
    cache = filled(pool, [1, 2])
    forward(cache, [3, 4])
    with pytest.raises(CacheError, match="cannot keep new token 2: the last forward wrote 2"):
        cache.commit([0, 2])
    with pytest.raises(CacheError, match="cannot build on 3 uncommitted tokens: 2 were written"):
        cache.reserve(4, 3)
    for foreign in (RequestCache(LIMIT), new_pool().acquire()):
        with pytest.raises(CacheError, match="made by another model"):
            pool.release(foreign)
    pool.release(cache)
    assert pool.in_use == 0
    for use in (lambda: pool.release(cache), lambda: cache.reserve(1), lambda: cache.commit(())):
        with pytest.raises(CacheError, match="was given back to its model"):
            use()
