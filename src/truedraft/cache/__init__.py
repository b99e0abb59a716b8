"""Key/value memory: preallocated, rollback sets a length, commit keeps an accepted path."""

from truedraft.cache.buffers import WIDEST_GAP, Buffers, Entries, key_span
from truedraft.cache.family import BLOCK, FamilyState
from truedraft.cache.pages import PAGE, PagePool, Pages, PageTable
from truedraft.cache.prefixes import FEW, PrefixCache
from truedraft.cache.request import CachePool, RequestCache

__all__ = [
    "BLOCK",
    "FEW",
    "PAGE",
    "WIDEST_GAP",
    "Buffers",
    "CachePool",
    "Entries",
    "FamilyState",
    "PagePool",
    "PageTable",
    "Pages",
    "PrefixCache",
    "RequestCache",
    "key_span",
]
