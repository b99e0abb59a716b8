"""Kinds of drafters, one folder each, which the table `truedraft.drafters.kinds` imports on first use."""

INSTEAD = "train an EAGLE-3 head in its place: truedraft train eagle"
"""Advice for engines that do not run a kind of heads."""
