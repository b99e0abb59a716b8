"""Key/value memory: preallocated, rollback sets a length, commit keeps an accepted path."""

from truedraft.models.cache.buffers import WIDEST_GAP, Buffers, CodedBuffers, Entries, key_span
from truedraft.models.cache.family import BLOCK, FamilyState
from truedraft.models.cache.pages import PAGE, PagePool, Pages, PageTable
from truedraft.models.cache.prefixes import FEW, PrefixCache
from truedraft.models.cache.request import FIRST, BoundedContext, CachePool, RequestCache, bounded, stored_place

__all__ = [
    "BLOCK", "FEW", "FIRST", "PAGE", "WIDEST_GAP", "BoundedContext", "Buffers", "CachePool", "CodedBuffers",
    "Entries", "FamilyState", "PagePool", "PageTable", "Pages", "PrefixCache", "RequestCache", "bounded", "key_span",
    "stored_place",
]  # fmt: skip
