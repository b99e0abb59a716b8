"""Kinds of drafters, one folder each: the head's module, its drafter, formats of other projects, and its training.

Only the table of kinds (`truedraft.drafters.kinds`) has their names; it imports a folder on first use.
"""

INSTEAD = "train an EAGLE-3 head in its place: truedraft train eagle"
"""Advice for engines that do not run a kind of heads."""
