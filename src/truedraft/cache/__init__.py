"""Key/value memory: preallocated, rollback sets a length, commit keeps an accepted path."""

from truedraft.cache.pool import CachePool
from truedraft.cache.request import RequestCache

__all__ = ["CachePool", "RequestCache"]
