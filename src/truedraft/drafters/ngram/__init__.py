"""Tables of n-grams: what usually followed the last few tokens, and the drafter that reads it."""

from truedraft.drafters.ngram.drafter import NgramDrafter
from truedraft.drafters.ngram.table import NgramTable

__all__ = ["NgramDrafter", "NgramTable"]
