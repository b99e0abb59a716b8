"""What nodes bring, from measured points: the lowest concave curve above them; and how many of them pay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraft.core.theory import AcceptanceCurve, best_option, predicted_speedup, size_options
from truedraft.errors import OptionError

GAINS = (0.7, 0.45, 0.2, 0.15, 0.1, 0.05, 0.02, 0.01)


def fitted(points: Iterable[tuple[int, float]]) -> AcceptanceCurve:
    return AcceptanceCurve.fit(points, lambda nodes: nodes)


def test_the_worked_example() -> None:
    curve = fitted([(1, 1.5), (2, 1.6), (3, 1.9)])
    assert [curve.tokens(nodes) for nodes in range(5)] == pytest.approx([1.0, 1.5, 1.7, 1.9, 1.9])
    assert curve.marginal_gains == pytest.approx((0.5, 0.2, 0.2)) and curve.depths == (0, 1, 2, 3)


def test_points_in_any_order_between_which_it_is_linear() -> None:
    curve = fitted([(8, 2.0), (2, 1.6), (2, 1.5), (16, 2.2), (24, 2.1)])
    assert [curve.tokens(nodes) for nodes in (2, 5, 8, 12, 16, 64)] == pytest.approx([1.6, 1.8, 2.0, 2.1, 2.2, 2.2])
    assert len(curve.marginal_gains) == 16


def test_without_points_nothing_is_brought() -> None:
    assert fitted([(1, 0.98), (8, 0.99)]).tokens(8) == 1.0, "each answer ends with a step that emits nothing"
    assert fitted([]).tokens(7) == 1.0 and fitted([(4, 1.0)]).marginal_gains == ()


@given(st.dictionaries(st.integers(1, 64), st.floats(0.0, 1.0), min_size=1, max_size=12))
def test_it_is_the_lowest_concave_curve_above_the_points(found: dict[int, float]) -> None:
    points = {nodes: 1.0 + share * min(nodes, 3) for nodes, share in found.items()}
    curve = fitted(points.items())
    gains = curve.marginal_gains
    assert all(curve.tokens(nodes) >= tokens - 1e-9 for nodes, tokens in points.items())
    assert all(0.0 <= gain <= 1.0 for gain in gains)
    assert all(late <= early + 1e-9 for early, late in itertools.pairwise(gains))
    # It bends at points alone, so no lower curve would do.
    bends = [nodes for nodes, (early, late) in enumerate(itertools.pairwise((*gains, 0.0)), 1) if late < early - 1e-9]
    assert all(curve.tokens(nodes) == pytest.approx(points[nodes]) for nodes in bends)


@pytest.mark.parametrize("point", [(8, -0.1), (2, 3.1), (4, math.nan), (-1, 1.0), (2.5, 1.2), (0, 1.5)])
def test_points_that_no_trees_bring(point: tuple[int, float]) -> None:
    with pytest.raises(OptionError):
        fitted([(1, 1.5), point])


def curve(*gains: float) -> AcceptanceCurve:
    """Trees of so many levels as nodes."""
    return AcceptanceCurve(gains, tuple(range(len(gains) + 1)))


def test_the_worked_choice() -> None:
    seconds = {1: 0.010, 2: 0.011, 3: 0.020}
    options = size_options(curve(0.6, 0.3), seconds.__getitem__, lambda depth: 0.001)
    assert best_option(options).nodes == 1
    assert [option.speedup for option in options] == pytest.approx([1.0, 16 / 12, 19 / 21])
    assert [option.expected_tokens for option in options] == pytest.approx([1.0, 1.6, 1.9])


@pytest.mark.parametrize("row_s", [0.0, 0.0002, 0.002, 0.02])
def test_no_other_budget_predicts_more(row_s: float) -> None:
    def verify_s(rows: int) -> float:
        return 0.01 + row_s * (rows - 1)

    options = size_options(curve(*GAINS), verify_s, lambda depth: 0.0005)
    for nodes in range(1, len(GAINS) + 1):
        factor = predicted_speedup(1 + sum(GAINS[:nodes]), verify_s(1), verify_s(nodes + 1), 0.0005)
        assert options[nodes].speedup == pytest.approx(factor)
        assert factor <= best_option(options).speedup


def test_dearer_rows_take_fewer_nodes_and_none_is_an_answer() -> None:
    chosen = [
        best_option(
            size_options(curve(*GAINS), lambda rows, row_s=row_s: 0.01 + row_s * rows, lambda depth: 0.001)
        ).nodes
        for row_s in (0.0, 0.0003, 0.002, 0.02)
    ]
    assert chosen[0] == len(GAINS) and chosen[-1] == 0
    assert chosen == sorted(chosen, reverse=True) and len(set(chosen)) == 4
    assert best_option(size_options(curve(), lambda rows: 1.0, lambda depth: 0.0)).speedup == 1.0


def test_the_fewest_of_equals() -> None:
    assert best_option(size_options(curve(0.5, 0.0, 0.0), lambda rows: 1.0, lambda depth: 0.0)).nodes == 1


def test_drafting_costs_by_the_depth_of_trees() -> None:
    asked: list[int] = []

    def draft_s(depth: int) -> float:
        asked.append(depth)
        return 0.1 * depth

    options = size_options(AcceptanceCurve((0.5, 0.4, 0.4), (0, 1, 1, 2)), lambda rows: 1.0, draft_s)
    assert sorted(asked) == [1, 2], "each once, and nothing for an empty tree"
    assert [option.speedup for option in options] == pytest.approx([1.0, 1.5 / 1.1, 1.9 / 1.1, 2.3 / 1.2])


def test_what_is_no_curve_or_no_cost() -> None:
    with pytest.raises(OptionError, match="each marginal gain"):
        AcceptanceCurve((1.2,), (0, 1))
    with pytest.raises(OptionError, match="one more depths than nodes"):
        AcceptanceCurve((0.2,), (0,))
    with pytest.raises(OptionError, match="verify_s"):
        size_options(curve(0.5), lambda rows: 1.0 if rows == 1 else 0.0, lambda depth: 0.0)
