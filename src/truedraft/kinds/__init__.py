"""Kinds of drafters, a folder each: the head's module, its drafter, folders of other projects, its training.

Nobody else knows their names but the table of kinds (`truedraft.drafters.specs`), which imports a folder when its word
is asked for.
"""
