"""Sums of counts. Needs no torch."""

from __future__ import annotations

import copy
from itertools import zip_longest
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def summed(left: Kind, right: Kind) -> Kind:
    """The sum of numbers, of lists by index, of counts by name, of dataclasses with slots by field; of texts the first.

    None counts as nothing. The sum shares no mutable object with either.
    """
    one: Any = left
    other: Any = right
    if one is None or other is None:
        return copy.deepcopy(other if one is None else one)
    kind: Any = type(one)
    if isinstance(one, str):
        return one  # type: ignore[return-value]
    if isinstance(one, list):
        return kind(summed(*pair) for pair in zip_longest(one, other))
    if isinstance(one, dict):
        return kind((name, summed(one.get(name), other.get(name))) for name in {**one, **other})
    names = getattr(kind, "__slots__", None)
    if names is None:
        return one + other
    return kind(*(summed(getattr(one, name), getattr(other, name)) for name in names))
