"""Drafting while the target verifies: a draft model in another process drafts after the likeliest outcome."""

from truedraft.drafters.parallel.ahead import AheadDrafter, ahead_drafter
from truedraft.drafters.parallel.drafter import ParallelDraft
from truedraft.drafters.parallel.process import DraftProcess

__all__ = ["AheadDrafter", "DraftProcess", "ParallelDraft", "ahead_drafter"]
