"""Key/value memory: preallocated, rollback sets a length, commit keeps an accepted path."""

from truedraft.cache.arena import Arena, ArenaCache, ArenaPool
from truedraft.cache.request import WIDEST_GAP, CachePool, RequestCache, key_span

__all__ = ["WIDEST_GAP", "Arena", "ArenaCache", "ArenaPool", "CachePool", "RequestCache", "key_span"]
