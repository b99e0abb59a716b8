"""Caches that finished requests gave back, for the next ones."""

from __future__ import annotations

import threading

from truedraft.cache.request import RequestCache


class CachePool:
    """Hands out request caches and takes them back, buffers kept.

    Args:
        limit: tokens of one request (the model's context).
        keep: most free caches that are kept; more are dropped.
    """

    def __init__(self, limit: int, keep: int = 64) -> None:
        self._limit = limit
        self._keep = keep
        self._free: list[RequestCache] = []
        self._lock = threading.Lock()  # several engines may share a model
        self.in_use = 0

    def acquire(self) -> RequestCache:
        """An empty cache."""
        with self._lock:
            self.in_use += 1
            return self._free.pop() if self._free else RequestCache(self._limit)

    def release(self, cache: RequestCache) -> None:
        """Take a cache back; the caller must not use it any more."""
        cache.rollback(0)
        with self._lock:
            self.in_use -= 1
            if len(self._free) < self._keep:
                self._free.append(cache)
