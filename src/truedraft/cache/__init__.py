"""Key/value memory: preallocated, rollback sets a length, commit keeps an accepted path."""

from truedraft.cache.arena import Arena, ArenaCache, ArenaPool
from truedraft.cache.prefixes import FEW, Prefixes
from truedraft.cache.request import WIDEST_GAP, CachePool, RequestCache, key_span

__all__ = ["FEW", "WIDEST_GAP", "Arena", "ArenaCache", "ArenaPool", "CachePool", "Prefixes", "RequestCache", "key_span"]
