"""Key/value memory: preallocated, rollback sets a length, commit keeps an accepted path."""

from truedraft.cache.arena import Arena, ArenaPool, ArenaSlot
from truedraft.cache.buffers import WIDEST_GAP, Buffers, key_span
from truedraft.cache.family import BLOCK, FamilyState
from truedraft.cache.prefixes import FEW, PrefixCache
from truedraft.cache.request import CachePool, Entries, RequestCache

__all__ = [
    "BLOCK",
    "FEW",
    "WIDEST_GAP",
    "Arena",
    "ArenaPool",
    "ArenaSlot",
    "Buffers",
    "CachePool",
    "Entries",
    "FamilyState",
    "PrefixCache",
    "RequestCache",
    "key_span",
]
