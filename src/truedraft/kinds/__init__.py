"""Kinds of drafters, one folder each: the head's module, its drafter, formats of other projects, and its training.

Only the table of kinds (`truedraft.drafters.specs`) has their names; it imports a folder on first use.
"""
