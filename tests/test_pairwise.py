"""What is left of a product still holds each pair of values, and the rest waits for `make test-slow`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from support.pairwise import by_turns, pairwise, pairwise_among, some_of

SIZES = [(4, 3, 2), (5, 4, 3, 2), (7, 2), (3,)]


def kept(cells: list[Any]) -> list[tuple[Any, ...]]:
    return [cell.values for cell in cells if not any(mark.name == "slow" for mark in cell.marks)]


def pairs(cells: list[tuple[Any, ...]]) -> set[Any]:
    return {pair for cell in cells for pair in itertools.combinations(enumerate(cell), 2)}


@pytest.mark.parametrize("sizes", SIZES)
def test_each_pair_of_values_is_kept(sizes: tuple[int, ...]) -> None:
    factors = [range(size) for size in sizes]
    found = pairwise(*factors)
    whole = list(itertools.product(*factors))
    assert [cell.values for cell in found] == whole
    assert pairs(kept(found)) == pairs(whole)
    assert kept(found) == kept(pairwise(*factors)), "another worker must collect the same"


def test_tests_share_a_product() -> None:
    first, second, third = (kept(cells) for cells in pairwise_among(3, "abcdef", "xy"))
    assert len(first) + len(second) + len(third) == 3 * 6
    for cells in (first, second, third):
        assert {one for one, _ in cells} == set("abcdef") and {other for _, other in cells} == set("xy")
    assert {*first, *second, *third} == set(itertools.product("abcdef", "xy"))


def test_by_turns_three_neighbours_have_all_of_a_row() -> None:
    columns = ["none", "chain", "tree", "lookup"]
    cells = by_turns("abcd", columns, always=["tree"])
    assert [cell.values for cell in cells] == list(itertools.product("abcd", columns))
    found = [{column for row, column in kept(cells) if row == one} for one in "abcd"]
    assert all(len(each) == 2 and "tree" in each for each in found)
    assert found[0] | found[1] | found[2] == set(columns)
    assert kept(by_turns("abc", "xy")) == [("a", "x"), ("b", "y"), ("c", "x")]


def test_some_run_always() -> None:
    assert kept(some_of("abc", "ac")) == [("a",), ("c",)]
    with pytest.raises(ValueError, match="no value is called"):
        some_of("abc", "d")


def test_values_keep_their_names_and_marks() -> None:
    named = pytest.param({}, id="nothing", marks=pytest.mark.gpu)
    (cell, other) = pairwise([named], [1, 2])
    assert (cell.id, other.id) == ("nothing-1", "nothing-2")
    assert [mark.name for mark in cell.marks] == ["gpu"]
