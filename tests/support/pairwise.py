"""Cross products of which `make test` runs a part in which all values meet others, and `make test-slow` all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def named(**values: Any) -> list[ParameterSet]:
    """Values of one parameter with their names in ids."""
    return [pytest.param(value, id=name) for name, value in values.items()]


def pairwise(*factors: Iterable[Any]) -> list[ParameterSet]:
    """All combinations for `parametrize`, marked slow but for a few in which each two values meet.

    Args:
        factors: the values of each parameter, plain or as `pytest.param(value, id=...)`.
    """
    return pairwise_among(1, *factors)[0]


def pairwise_among(tests: int, *factors: Iterable[Any]) -> list[list[ParameterSet]]:
    """The same for several tests that have the same parameters; which test it is counts as one of them."""
    values = [[_as_param(value) for value in factor] for factor in factors]
    cells = list(itertools.product(range(tests), *(range(len(factor)) for factor in values)))
    kept = set(covering(cells))
    found: list[list[ParameterSet]] = [[] for _ in range(tests)]
    for test, *cell in cells:
        chosen = [factor[at] for factor, at in zip(values, cell, strict=True)]
        marks = [mark for each in chosen for mark in each.marks]
        if (test, *cell) not in kept:
            marks.append(pytest.mark.slow)
        given = [value for each in chosen for value in each.values]
        words = "-".join(_word(each, at) for each, at in zip(chosen, cell, strict=True))
        found[test].append(pytest.param(*given, marks=marks, id=words))
    return found


def by_turns(rows: Iterable[Any], columns: Iterable[Any], always: Iterable[Any] = ()) -> list[ParameterSet]:
    """All pairs of two parameters for `parametrize`, most of them marked slow.

    Every row keeps what stands in `always` and, of the other columns, every third: others than its neighbours. Where
    there are two others it keeps one.
    """
    kept, columns = list(always), list(columns)
    others = [column for column in columns if column not in kept]
    turns = min(3, len(others))
    return [
        pytest.param(
            row,
            column,
            marks=[] if column in kept or (at + others.index(column)) % turns == 0 else pytest.mark.slow,
            id=f"{_word(_as_param(row), at)}-{_word(_as_param(column), columns.index(column))}",
        )
        for at, row in enumerate(rows)
        for column in columns
    ]


def some_of(values: Iterable[Any], kept: Iterable[str]) -> list[ParameterSet]:
    """Values of one parameter for `parametrize`, of which `make test` runs some and `make test-slow` the others.

    Args:
        values: strings, or what has a `name`.
        kept: the strings or names of those that always run.

    Raises:
        ValueError: none of the values is called so.
    """
    kept, found = list(kept), []
    for value in values:
        name = getattr(value, "name", value)
        found.append(pytest.param(value, id=str(name), marks=[] if name in kept else pytest.mark.slow))
    unknown = set(kept) - {param.id for param in found}
    if unknown:
        raise ValueError(f"no value is called {sorted(unknown)}")
    return found


def covering(cells: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Cells in which all pairs of values meet that meet anywhere: each time the one with the most new pairs."""
    left = {pair for cell in cells for pair in _pairs(cell)}
    kept = []
    while left:
        best = max(cells, key=lambda cell: sum(pair in left for pair in _pairs(cell)))
        kept.append(best)
        left.difference_update(_pairs(best))
    return kept


def _pairs(cell: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Of any two parameters which values they have."""
    return list(itertools.combinations(enumerate(cell), 2))


def _as_param(value: Any) -> ParameterSet:
    return value if isinstance(value, ParameterSet) else pytest.param(value)


def _word(param: ParameterSet, at: int) -> str:
    """Its part of an id, the same in every process: what has no short name is numbered."""
    if param.id is not None:
        return str(param.id)
    words = [str(getattr(value, "__name__", value)) for value in param.values]
    return ",".join(word if len(word) < 24 and "<" not in word else str(at) for word in words)
