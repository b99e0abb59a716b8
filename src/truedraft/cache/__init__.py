"""Key/value memory: preallocated, rollback sets a length, commit keeps an accepted path."""

from truedraft.cache.pool import CachePool
from truedraft.cache.request import RequestCache
from truedraft.cache.spans import WIDEST_GAP, key_span

__all__ = ["WIDEST_GAP", "CachePool", "RequestCache", "key_span"]
