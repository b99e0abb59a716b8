"""Suffix decoding: what followed where this ending occurred before, in this text or an earlier one."""

from truedraft.drafters.suffix.drafter import SuffixDrafter
from truedraft.drafters.suffix.index import SuffixIndex
from truedraft.drafters.suffix.store import SuffixFile, SuffixStore

__all__ = ["SuffixDrafter", "SuffixFile", "SuffixIndex", "SuffixStore"]
