"""Keys and values of one request: reserve, write, commit, roll back, grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from storages import CALLS, HEADS, KEY_WIDTH, LIMIT, POOLS, VALUE_WIDTH, assert_holds, filled, forward, value_width
from torch import Tensor

from truedraft.errors import CacheError
from truedraft.machine import has_bfloat16
from truedraft.models.cache import WIDEST_GAP, CachePool, RequestCache, key_span
from truedraft.models.cache.buffers import Buffers


@pytest.fixture(params=POOLS)
def pool(request: pytest.FixtureRequest) -> CachePool:
    """Of either storage: what a cache promises holds of both."""
    return POOLS[request.param]()


def test_tokens_count_only_once_committed(pool: CachePool) -> None:
    cache = filled(pool, [1, 2, 3])
    assert_holds(forward(cache, [4, 5]), [1, 2, 3, 4, 5])
    assert_holds(cache.entries(), [1, 2, 3])
    assert (cache.length, cache.uncommitted) == (3, 2)
    before = [keys.data_ptr() for keys, _ in cache.entries()]
    cache.commit([0, 1])
    assert_holds(cache.entries(), [1, 2, 3, 4, 5])
    assert cache.uncommitted == 0
    moved = [keys.data_ptr() for keys, _ in cache.entries()] != before
    assert not moved or not isinstance(cache.storage, Buffers) or cache.storage.coded


@pytest.mark.parametrize(
    "path", [(), (0,), (5,), (0, 1), (1, 2, 3, 4, 5), (0, 2, 4), (3, 4, 5), (0, 1, 2, 3, 4, 5), (1, 3, 5)]
)
def test_commit_keeps_any_path(path: tuple[int, ...], pool: CachePool) -> None:
    """Also where source and target positions overlap, as in 1, 2, 3, 4, 5 to 0, 1, 2, 3, 4; no neighbour is touched."""
    neighbour, cache = filled(pool, range(20)), filled(pool, [50, 51])
    forward(cache, range(6))
    cache.commit(path)
    assert_holds(cache.entries(), [50, 51, *path])
    assert cache.uncommitted == 0
    assert_holds(neighbour.entries(), range(20))


def test_a_branch_commits_outside_inference_mode(pool: CachePool) -> None:
    """Forwards run in inference mode, and buffers born there can be written nowhere else; a caller need not know."""
    with torch.inference_mode():
        cache = filled(pool, [1, 2])
        forward(cache, [3, 4, 5])
    cache.commit([0, 2])
    assert_holds(cache.entries(), [1, 2, 3, 5])


def test_a_tree_is_written_level_by_level(pool: CachePool) -> None:
    cache = filled(pool, [1, 2])
    forward(cache, [3, 4])
    views = forward(cache, [5, 6, 7], written=2)
    assert_holds(views, [1, 2, 3, 4, 5, 6, 7])
    assert_holds(forward(cache, [5, 6, 7], written=2), [1, 2, 3, 4, 5, 6, 7])  # upon a part of what was written
    assert cache.uncommitted == 5
    cache.commit([1, 3])
    assert_holds(cache.entries(), [1, 2, 4, 6])


def test_growth_keeps_uncommitted_nodes_of_earlier_forwards() -> None:
    cache = filled(CachePool(LIMIT), range(250))
    forward(cache, [250, 251, 252])
    assert cache.capacity == 256
    assert_holds(forward(cache, range(253, 260), written=3), range(260))
    assert cache.capacity == 512
    cache.commit([0, 2, 5])
    assert_holds(cache.entries(), [*range(250), 250, 252, 255])


def test_growth_stops_at_the_limit_unless_a_tree_needs_more() -> None:
    cache = RequestCache(300)
    forward(cache, range(200))
    cache.commit(range(200))
    assert cache.capacity == 256
    forward(cache, range(200, 290))
    cache.commit(range(90))
    assert cache.capacity == key_span(300) == 320, "doubling would make 512"
    forward(cache, range(31))
    assert cache.capacity == key_span(321) == 384
    cache.commit([0, 29])
    assert_holds(cache.entries(), [*range(290), 0, 29])


def test_a_large_prompt_is_reserved_at_once() -> None:
    cache = RequestCache(LIMIT)
    forward(cache, range(700))
    assert cache.capacity == key_span(700) == 1088
    assert cache.n_bytes == CALLS * HEADS * 1088 * (KEY_WIDTH + VALUE_WIDTH) * 4


def spoil(cache: RequestCache, tokens: int) -> None:
    """A forward that leaves numbers behind which are not finite."""
    cache.reserve(tokens)
    keys, values = (torch.full((HEADS, tokens, width), torch.nan) for width in (KEY_WIDTH, value_width(cache)))
    for call in range(CALLS):
        cache.write(call, keys, values)


def values_behind(cache: RequestCache, tokens: Sequence[int], written: int = 0) -> list[Tensor]:
    """What a forward over these tokens sees behind them."""
    cache.reserve(written + len(tokens), written)
    end = cache.length + written + len(tokens)
    keys, values = (torch.ones(HEADS, len(tokens), width) for width in (KEY_WIDTH, value_width(cache)))
    writes = [cache.write(call, keys, values) for call in range(CALLS)]
    return [values[:, end:] for _, values in writes]


@pytest.mark.parametrize("forget", [lambda cache: cache.commit([]), lambda cache: cache.rollback(3)])
def test_values_that_were_forgotten_become_zeros(forget: Callable[[RequestCache], None], pool: CachePool) -> None:
    """A weight of 0 times NaN would be NaN."""
    cache = filled(pool, [1, 2, 3])
    spoil(cache, 70)
    forget(cache)
    for step in range(3):
        assert not any(values.any() for values in values_behind(cache, [4, 5, 6])), step
        cache.commit([0])
    assert not any(values.any() for values in values_behind(cache, range(60))), "a longer span sees further"
    assert not any(values.any() for values in values_behind(cache, [9], written=2)), "one more level of a tree"


def test_a_shorter_forward_after_a_longer_one_sees_nothing_of_it(pool: CachePool) -> None:
    cache = filled(pool, [1, 2, 3])
    spoil(cache, 5)
    assert not any(values.any() for values in values_behind(cache, [9], written=1))


def test_a_pooled_cache_shows_nothing_of_its_last_request() -> None:
    pool = CachePool(LIMIT)
    cache = pool.acquire()
    spoil(cache, 200)
    cache.commit(range(200))
    pool.release(cache)
    again = pool.acquire()
    assert again is cache
    for tokens in (range(5), range(60), range(130)):
        assert not any(values.any() for values in values_behind(again, tokens))
        again.commit(range(len(tokens)))


def test_rollback_sets_a_length(pool: CachePool) -> None:
    cache = filled(pool, range(8))
    forward(cache, [8, 9])
    cache.rollback(5)
    assert (cache.length, cache.uncommitted) == (5, 0)
    assert_holds(cache.entries(), range(5))
    assert_holds(forward(cache, [70]), [0, 1, 2, 3, 4, 70])


MISUSES: dict[str, Callable[[RequestCache], object]] = {
    "cannot keep new token 5: the last forward wrote 2": lambda cache: cache.commit([0, 5]),
    "cannot keep new token 2: the last forward wrote 2": lambda cache: cache.commit([0, 2]),
    "cannot build on 3 uncommitted tokens: 2 were written": lambda cache: cache.reserve(4, written=3),
    "the last forward wrote 0": lambda cache: [cache.commit([0]), cache.commit([0])],
    "cannot build on 2 .* 0 were written": lambda cache: [cache.rollback(3), cache.reserve(3, written=2)],
    "to -1 tokens: the cache holds 3": lambda cache: cache.rollback(-1),
    "to 4 tokens: the cache holds 3": lambda cache: cache.rollback(4),
    "to 5 tokens: the cache holds 3": lambda cache: cache.rollback(5),
}


def test_what_was_not_written_cannot_be_used(pool: CachePool) -> None:
    for said, use in MISUSES.items():
        cache = filled(pool, [1, 2, 3])
        forward(cache, [4, 5])
        with pytest.raises(CacheError, match=said):
            use(cache)


def test_the_pool_hands_buffers_on() -> None:
    pool = CachePool(LIMIT)
    first = pool.acquire()
    forward(first, range(300))
    first.commit(range(300))
    capacity = first.capacity
    pool.release(first)
    assert pool.in_use == 0

    again = pool.acquire()
    assert again is first
    assert (again.length, again.uncommitted, again.capacity) == (0, 0, capacity)
    views = forward(again, [5, 6])
    assert_holds(views, [5, 6])
    assert again.capacity == capacity, "a reused cache does not allocate"


def test_the_pool_keeps_only_so_many() -> None:
    pool = CachePool(LIMIT, keep=1)
    first, second = pool.acquire(), pool.acquire()
    assert first is not second and pool.in_use == 2
    pool.release(first)
    pool.release(second)
    assert pool.acquire() is first
    assert pool.acquire() is not second


@pytest.mark.parametrize("failing", range(1, 2 * CALLS))
def test_growth_that_memory_ends_is_begun_again(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The next call finds all buffers of one size, and what they held."""
    cache = filled(POOLS["alone"](), [1, 2, 3])
    grown, calls = Buffers._grown, iter(range(1 << 30))

    def short(self: Buffers, *given: Any) -> Tensor:
        if next(calls) == failing:
            raise MemoryError
        return grown(self, *given)

    monkeypatch.setattr(Buffers, "_grown", short)
    with pytest.raises(MemoryError):
        cache.reserve(cache.capacity)
    cache.reserve(2)
    assert_holds(cache.entries(), [1, 2, 3])
    storage = cache.storage
    assert isinstance(storage, Buffers) and storage.capacity >= key_span(5)
    sizes = {keys.shape[2] for keys in storage._keys} | {values.shape[1] for values in storage._values}
    assert sizes == {storage.capacity}
    assert_holds(forward(cache, [4, 5]), [1, 2, 3, 4, 5])


def test_there_are_few_spans_and_each_holds_its_positions() -> None:
    assert [key_span(length) for length in (1, 64, 65, 512, 513, 1088, 1089)] == [64, 64, 128, 512, 1088, 1088, 1152]
    assert len({key_span(length) for length in range(1, 2049)}) == 8 + 16
    for length in range(1, 3000):
        span = key_span(length)
        assert 0 <= span - length <= WIDEST_GAP
        assert key_span(span) == span
        assert key_span(length + 1) >= span


@pytest.mark.skipif(not has_bfloat16(torch.device("cpu")), reason="this CPU has no instructions for bfloat16 products")
@pytest.mark.parametrize("length", [1, 60, 130, 400, 511, 512, 600, 1000, 1030, 1088, 1500, 2500])
def test_weights_of_zero_behind_do_not_change_a_bit(length: int) -> None:
    """A product over any longer span gives the same bits, and so does each pair of rows by itself."""
    generator = torch.Generator().manual_seed(length)
    longest = 4096
    values = torch.randn(4, longest, 64, generator=generator).bfloat16()
    span = key_span(length)
    for rows in (2, 3, 8, 15, 16, 48):
        weights = torch.zeros(4, rows, longest, dtype=torch.bfloat16)
        weights[:, :, :length] = torch.softmax(2 * torch.randn(4, rows, length, generator=generator), -1).bfloat16()
        mixed = torch.bmm(weights[:, :, :span].contiguous(), values[:, :span])
        for longer in {key_span(length + more) for more in (16, 70, 300, 1000, 2000)}:
            assert torch.bmm(weights[:, :, :longer].contiguous(), values[:, :longer]).equal(mixed), (rows, longer)
        pair = torch.bmm(weights[:, :2, :span].contiguous(), values[:, :span])
        assert pair.equal(mixed[:, :2]), rows
