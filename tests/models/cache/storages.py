"""What tests write into the cache of a request and read back, whichever storage it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from truedraft.models.cache import CachePool, CodedBuffers, PagePool, Pages, PageTable, RequestCache

HEADS, KEY_WIDTH, VALUE_WIDTH, CALLS = 2, 3, 5, 2
LIMIT = 1024


def new_page_pool() -> PagePool:
    return PagePool(Pages(CALLS, HEADS, KEY_WIDTH, torch.float32, torch.device("cpu")), LIMIT)


POOLS: dict[str, Callable[[], CachePool]] = {
    "alone": lambda: CachePool(LIMIT),
    "codes": lambda: CachePool(LIMIT, storage=partial(CodedBuffers, torch.float16)),  # whole numbers come back
    "pages": new_page_pool,
}


def table_of(cache: RequestCache) -> PageTable:
    assert isinstance(cache.storage, PageTable)
    return cache.storage


def value_width(cache: RequestCache) -> int:
    """In pages as that of keys."""
    return KEY_WIDTH if isinstance(cache.storage, PageTable) else VALUE_WIDTH


def forward(cache: RequestCache, tokens: Sequence[float], written: int = 0) -> list[tuple[Tensor, Tensor]]:
    """As a model would: reserve, then write in every attention call; a token's entries carry its number and call's."""
    cache.reserve(written + len(tokens), written)
    views = []
    end = cache.stored + written + len(tokens)
    for call in range(CALLS):
        column = torch.tensor([token + 1000.0 * call for token in tokens])[None, :, None]
        keys = column.expand(HEADS, -1, KEY_WIDTH)
        all_keys, all_values = cache.write(call, keys, -column.expand(HEADS, -1, value_width(cache)))
        assert all_keys.shape[:2] == (HEADS, KEY_WIDTH) and all_keys.shape[2] == all_values.shape[1] >= end
        views.append((all_keys[:, :, :end].transpose(1, 2), all_values[:, :end]))
    return views


def fill(cache: RequestCache, tokens: Sequence[float]) -> None:
    forward(cache, tokens)
    cache.commit(range(len(tokens)))


def filled(pool: CachePool, tokens: Sequence[float]) -> RequestCache:
    cache = pool.acquire()
    fill(cache, tokens)
    return cache


def assert_holds(pairs: Sequence[tuple[Tensor, Tensor]], tokens: Sequence[float]) -> None:
    assert len(pairs) == CALLS
    for call, (keys, values) in enumerate(pairs):
        expected = torch.tensor([token + 1000.0 * call for token in tokens])[None, :, None]
        assert keys.shape[:2] == values.shape[:2] == (HEADS, len(tokens))
        assert keys.float().equal(expected.expand_as(keys))
        assert values.float().equal(-expected.expand_as(values))
