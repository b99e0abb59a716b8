"""Tokens by nodes from measured points: by hand, and as the lowest concave curve that is nowhere below them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraft.errors import OptionError
from truedraft.theory.node_curve import NodeCurve


def test_the_worked_example() -> None:
    curve = NodeCurve.fit([(1, 1.5), (2, 1.6), (3, 1.9)])
    assert (curve.nodes, curve.tokens) == ((0, 1, 3), (1.0, 1.5, 1.9))
    assert [curve(nodes) for nodes in range(5)] == pytest.approx([1.0, 1.5, 1.7, 1.9, 1.9])
    assert curve.gains == pytest.approx((0.5, 0.2, 0.2))


def test_points_in_any_order_between_which_it_is_linear() -> None:
    curve = NodeCurve.fit([(8, 2.0), (2, 1.6), (2, 1.5), (16, 2.2), (24, 2.1)])
    assert (curve.nodes, curve.tokens) == ((0, 2, 8, 16), (1.0, 1.6, 2.0, 2.2))
    assert curve(5) == pytest.approx(1.8) and curve(12) == pytest.approx(2.1) and curve(64) == 2.2
    assert len(curve.gains) == 16 and math.fsum(curve.gains) == pytest.approx(1.2)


def test_without_points_nothing_is_brought() -> None:
    assert NodeCurve.fit([(1, 0.98), (8, 0.99)])(8) == 1.0, "each answer ends with a step that emits nothing"
    assert NodeCurve.fit([])(7) == 1.0 and NodeCurve.fit([(4, 1.0)]).gains == ()


@given(st.dictionaries(st.integers(1, 64), st.floats(0.0, 1.0), min_size=1, max_size=12))
def test_it_is_the_lowest_concave_curve_above_the_points(found: dict[int, float]) -> None:
    points = {nodes: 1.0 + share * min(nodes, 3) for nodes, share in found.items()}
    curve = NodeCurve.fit(points.items())
    assert all(curve(nodes) >= tokens - 1e-9 for nodes, tokens in points.items())
    assert all(0.0 <= gain <= 1.0 for gain in curve.gains)
    assert all(late <= early + 1e-9 for early, late in itertools.pairwise(curve.gains))
    assert all(curve(nodes) == pytest.approx(1.0 + math.fsum(curve.gains[:nodes])) for nodes in range(70))
    corners = {0: 1.0} | points  # it bends at points alone, so no lower curve would do
    assert all(tokens == pytest.approx(corners[nodes]) for nodes, tokens in zip(curve.nodes, curve.tokens, strict=True))


@pytest.mark.parametrize("point", [(8, -0.1), (2, 3.1), (4, math.nan), (-1, 1.0), (2.5, 1.2), (0, 1.5)])
def test_points_that_no_trees_bring(point: tuple[int, float]) -> None:
    with pytest.raises(OptionError):
        NodeCurve.fit([(1, 1.5), point])


@pytest.mark.parametrize(
    ("nodes", "tokens"),
    [
        ((), ()),
        ((0, 1), (1.0,)),
        ((1, 2), (1.0, 1.2)),
        ((0, 1), (1.1, 1.2)),
        ((0, 1), (1.0, 2.5)),
        ((0, 2, 1), (1.0, 1.2, 1.3)),
        ((0, 1, 2), (1.0, 1.5, 1.4)),
        ((0, 1, 2), (1.0, 1.2, 1.6)),
    ],
)
def test_what_is_no_such_curve(nodes: tuple[int, ...], tokens: tuple[float, ...]) -> None:
    with pytest.raises(OptionError):
        NodeCurve(nodes, tokens)
