"""Caches with a bounded context store the first tokens and the last ones, by positions only; the rest is given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from storages import POOLS, assert_holds, fill, forward

from truedraft.models.cache import PAGE, BoundedContext, CachePool, PrefixCache, RequestCache

BOUNDS = BoundedContext(128)
TOKENS = [*range(500)]


@pytest.fixture(params=POOLS)
def pool(request: pytest.FixtureRequest) -> Iterator[CachePool]:
    with torch.inference_mode():
        yield POOLS[request.param]()


def read(cache: RequestCache, end: int, tokens: Sequence[int] = TOKENS, most: int = 90) -> None:
    while count := cache.make_room(min(most, end - cache.length)):
        fill(cache, tokens[cache.length : cache.length + count])


def new(pool: CachePool, end: int = 0, most: int = 90) -> RequestCache:
    cache = pool.acquire()
    cache.bound(BOUNDS)
    read(cache, end, most=most)
    return cache


def seen(position: int, end: int) -> list[int]:
    """Tokens before `end` that are stored once the one at a position was read."""
    return [*TOKENS[:16], *TOKENS[16 + BOUNDS.dropped(position) : end]]


def test_positions_alone_decide_what_is_dropped() -> None:
    assert [BOUNDS.dropped(place) for place in (0, 127, 128, 191, 192, 256)] == [0, 0, 64, 64, 128, 192]
    for bounds in (BOUNDS, BoundedContext(1024), BoundedContext(1000)):
        for place in range(3000):
            stored = place + 1 - bounds.dropped(place)
            assert stored <= bounds.size and (place < bounds.size or stored > bounds.size - bounds.step)
            assert bounds.dropped(place + bounds.alike(place) - 1) == bounds.dropped(place)
            assert bounds.dropped(place + bounds.alike(place)) > bounds.dropped(place)
    assert BoundedContext(1024).step == 256 and not bounds.step % PAGE


@pytest.mark.parametrize("most", [1, 7, 90])
def test_what_stays_does_not_depend_on_how_a_text_was_read(pool: CachePool, most: int) -> None:
    cache = new(pool)
    for end in (100, 128, 129, 200, 260, 400):
        read(cache, end, most=most)
        assert_holds(cache.entries(), seen(end - 1, end))
        assert (cache.length, cache.stored) == (end, len(seen(end - 1, end)))
        assert cache.capacity <= cache.storage.most(256)
    assert cache.holds(0, 16) and cache.holds(336, 400) and not cache.holds(0, 17) and not cache.holds(300, 350)
    pool.release(cache)
    cache = pool.acquire()
    fill(cache, TOKENS[:300])
    assert_holds(cache.entries(), TOKENS[:300])


def test_drafted_tokens_are_kept_up_to_the_first_that_sees_less(pool: CachePool) -> None:
    cache = new(pool, 126)
    assert cache.make_room(1) == 1
    assert_holds(forward(cache, TOKENS[126:131]), TOKENS[:131])
    cache.commit([0, 1, 2, 3])
    assert_holds(cache.entries(), TOKENS[:128])
    forward(cache, TOKENS[128:130])  # behind a drop that is due and not yet made
    cache.commit([0, 1])
    assert cache.length == 128 and cache.make_room(9) == 9
    assert_holds(cache.entries(), seen(128, 128))


def test_a_rollback_to_where_more_was_seen_drops_all(pool: CachePool) -> None:
    cache = new(pool, 200)
    cache.rollback(192)
    assert_holds(cache.entries(), seen(192, 192))
    cache.rollback(190)
    assert (cache.length, cache.stored, cache.dropped) == (0, 0, 0)
    read(cache, 150)
    assert_holds(cache.entries(), seen(149, 150))


def test_entries_of_others_are_taken_without_what_is_not_seen(pool: CachePool) -> None:
    donor = pool.acquire()
    fill(donor, TOKENS)
    for before in (0, 10, 16, 70, 130, 250):
        for end in (128, 129, 300, 415):
            cache = new(pool, min(before, end))
            first = cache.length
            cache.extend([(donor.part(first, end, lasting=False), 0, end - first)])
            assert_holds(cache.entries(), seen(end, end))
            assert cache.length == end
            read(cache, end + 30)
            assert_holds(cache.entries(), seen(end + 29, end + 30))


def test_prefixes_are_kept_before_they_are_dropped(pool: CachePool) -> None:
    prefixes, text = PrefixCache(1 << 24), [*TOKENS]

    def joined(number: int, tokens: list[int]) -> RequestCache:
        cache = pool.acquire()
        cache.bound(BOUNDS, partial(prefixes.keep, number))
        prefixes.join(number, cache, tokens)
        return cache

    first, second = joined(1, text), joined(2, [*text[:330], 7, 7])
    read(first, 400)
    assert first.shared(330) == 0, "most of it is gone there"
    assert prefixes.fill(2) == 320, "in blocks of 64"
    assert_holds(second.entries(), seen(320, 320))
    prefixes.keep(1)
    third = joined(3, [*text[:390], 8])
    assert prefixes.fill(3) == 384
    prefixes.trim(0)
    prefixes.keep(1)  # the beginning is not stored any more, so nothing behind it can be kept
    assert prefixes.n_bytes == 0
    assert_holds(third.entries(), seen(384, 384))
