"""Requests that begin alike: what is copied, from whom, what is kept, and what goes first."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truedraft.models.cache import FEW, PrefixCache, RequestCache
from truedraft.models.cache.prefixes import BLOCK

CALLS, HEADS, WIDTH = 2, 3, 4
BYTES = 2 * CALLS * HEADS * WIDTH * 4 * BLOCK  # of a block in float32


@torch.inference_mode()
def read(cache: RequestCache, tokens: list[int]) -> None:
    """What a model would write: entries that depend on all tokens up to a position, and on nothing else."""
    new = range(cache.length, len(tokens))
    sums = torch.tensor([float(hash(tuple(tokens[: place + 1])) % 997) for place in new])
    cache.reserve(len(new))
    for call in range(CALLS):
        entries = (sums + call)[None, :, None].expand(HEADS, -1, WIDTH)
        cache.write(call, entries, -entries)
    cache.commit(range(len(new)))


def whole(tokens: list[int], length: int) -> RequestCache:
    cache = RequestCache(4096)
    read(cache, tokens[:length])
    return cache


def same(cache: RequestCache, tokens: list[int]) -> bool:
    if not cache.length:
        return True  # and so without buffers
    fresh = whole(tokens, cache.length)
    pairs = zip(cache.entries(), fresh.entries(), strict=True)
    return all(torch.equal(k, other_k) and torch.equal(v, other_v) for (k, v), (other_k, other_v) in pairs)


def joined(prefixes: PrefixCache, number: int, tokens: list[int], scope: str | None = None) -> RequestCache:
    cache = RequestCache(4096)
    prefixes.join(number, cache, tokens, scope)
    return cache


def test_what_another_has_read_is_copied_and_the_last_token_is_left() -> None:
    prefixes, text = PrefixCache(), list(range(100))
    first = joined(prefixes, 1, text)
    read(first, text)
    second = joined(prefixes, 2, list(text))
    assert prefixes.fill(2) == 99 and same(second, text)
    third = joined(prefixes, 3, [*text[:40], 7, 7, 7])
    assert prefixes.fill(3) == 40 and same(third, text)
    assert prefixes.copied == 139
    few = joined(prefixes, 4, [*text[: FEW - 1], 7])
    assert prefixes.fill(4) == 0 and few.length == 0, "so few are computed as fast as copied"


def test_nobody_shares_with_another_scope() -> None:
    prefixes, text = PrefixCache(1 << 20), list(range(200))
    read(joined(prefixes, 1, text, "a"), text)
    assert prefixes.keep(1) is None and prefixes.n_bytes == 3 * BYTES
    joined(prefixes, 2, text, "b")
    assert prefixes.fill(2) == 0 and prefixes.leader(2, [1]) is None
    prefixes.leave(1)
    joined(prefixes, 3, text, "b")
    assert prefixes.fill(3) == 0
    joined(prefixes, 4, text, "a")
    assert prefixes.fill(4) == 3 * BLOCK


def test_nothing_is_shared_where_that_is_switched_off() -> None:
    prefixes, text = PrefixCache(), list(range(200))
    prefixes.shares = False
    read(joined(prefixes, 1, text), text)
    joined(prefixes, 2, text)
    assert prefixes.fill(2) == 0
    joined(prefixes, 3, text)
    assert prefixes.leader(3, [2]) is None


def test_whole_blocks_outlive_their_request() -> None:
    prefixes, text = PrefixCache(1 << 20), list(range(300))
    read(joined(prefixes, 1, text), text[:290])
    prefixes.keep(1)
    prefixes.leave(1)
    again = joined(prefixes, 2, text)
    assert prefixes.fill(2) == 4 * BLOCK and same(again, text)
    other = joined(prefixes, 3, [*text[:130], *range(900, 1000)])
    assert prefixes.fill(3) == 130 and same(other, text), "of the live one, which is longer than the blocks"
    prefixes.leave(2)
    last = joined(prefixes, 4, [*text[:130], *range(500, 600)])
    prefixes.leave(3)
    assert prefixes.fill(4) == 2 * BLOCK and same(last, text)
    exact = joined(prefixes, 5, text[: 2 * BLOCK])
    assert prefixes.fill(5) == 2 * BLOCK - 1 and same(exact, text), "the last token has to be computed"


def test_a_follower_waits_for_who_reads_the_same_and_copies_it() -> None:
    prefixes, text = PrefixCache(), list(range(500))
    first = joined(prefixes, 1, [*text, 1])
    second = joined(prefixes, 2, [*text, 2])
    assert prefixes.leader(2, [1]) == (1, 500) and prefixes.leader(1, []) is None
    read(first, text[:256])
    assert prefixes.leader(2, [1]) == (1, 500), "the leader has not read all yet"
    read(first, text)
    assert prefixes.leader(2, [1]) is None
    assert prefixes.fill(2) == 500 and same(second, text)


def test_what_was_not_used_for_longest_goes_first_and_never_what_others_stand_on() -> None:
    prefixes = PrefixCache(4 * BYTES)
    texts = {number: [number, *range(10, 10 + 3 * BLOCK)] for number in range(3)}
    for number in (0, 1):
        read(joined(prefixes, number, texts[number]), texts[number][: 2 * BLOCK])
        prefixes.keep(number)
        prefixes.leave(number)
    joined(prefixes, 9, texts[0])
    assert prefixes.fill(9) == 2 * BLOCK
    prefixes.leave(9)
    read(joined(prefixes, 2, texts[2]), texts[2][:BLOCK])
    prefixes.keep(2)
    prefixes.leave(2)
    found = {}
    for number in (0, 1, 2):
        joined(prefixes, 20 + number, texts[number])
        found[number] = prefixes.fill(20 + number)
        prefixes.leave(20 + number)
    assert found == {0: 2 * BLOCK, 1: BLOCK, 2: BLOCK}, "text 1 was used before text 0, and its end is what goes"
    prefixes.trim(0)
    assert prefixes.n_bytes == 0


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4), min_size=1, max_size=12),
    most=st.integers(0, 6),
)
def test_any_order_of_texts_is_answered_rightly_within_the_bytes(texts: list[list[int]], most: int) -> None:
    """Texts of up to four blocks that branch at block borders; a block behind a forgotten one is never found."""
    prefixes = PrefixCache(most * BYTES)
    for number, branches in enumerate(texts):
        text = [branch * 1000 + place for branch in branches for place in range(BLOCK)]
        cache = joined(prefixes, number, text)
        prefixes.fill(number)
        assert cache.length <= len(text) - 1 and same(cache, text)
        read(cache, text)
        prefixes.keep(number)
        prefixes.leave(number)
        assert prefixes.n_bytes <= most * BYTES
