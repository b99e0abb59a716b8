"""Cost curves: monotone whatever was measured, exact at monotone points, linear in between and beyond."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from truedraft.core.theory import SETTLED, BatchPoint, CostCurve, CostSurface, DraftCost, DraftPoint, TargetCost
from truedraft.core.theory.cost_curves import isotonic, isotonic_grid
from truedraft.errors import OptionError
from truedraft.options import read_record

quick = settings(max_examples=150, deadline=None, derandomize=True)
seconds = st.floats(0.0, 10.0)
grids = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(seconds, min_size=width, max_size=width), min_size=1, max_size=5)
)


def close(a: float, b: float) -> bool:
    return a <= b + 1e-9


@quick
@given(st.lists(seconds, min_size=1, max_size=12))
def test_isotonic_is_the_least_squares_fit(values: list[float]) -> None:
    fitted = isotonic(values)
    assert fitted == pytest.approx(list(isotonic_regression(values).x), abs=1e-9)
    assert fitted == sorted(fitted)


@quick
@given(grids)
def test_a_grid_becomes_monotone_along_both_axes(grid: list[list[float]]) -> None:
    fitted = isotonic_grid(grid)
    for line in (*fitted, *map(list, zip(*fitted, strict=True))):
        assert line == sorted(line)


def test_what_is_monotone_stays() -> None:
    assert isotonic([1.0, 1.0, 2.0, 5.0]) == [1.0, 1.0, 2.0, 5.0]
    assert isotonic([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic_grid([[1.0, 2.0], [1.0, 4.0]]) == [[1.0, 2.0], [1.0, 4.0]]


def test_a_curve_meets_its_points_and_goes_on() -> None:
    curve = CostCurve.fit([(1, 1.0), (2, 1.0), (4, 2.0), (8, 6.0)])
    assert [curve(size) for size in (1, 2, 4, 8)] == [1.0, 1.0, 2.0, 6.0]
    assert curve(3) == 1.5
    assert curve(0) == 1.0
    assert curve(10) == 8.0
    assert CostCurve.fit([(4, 2.0)])(99) == 2.0
    assert CostCurve.fit([(1, 1.0), (1, 3.0)])(1) == 2.0


@quick
@given(st.dictionaries(st.integers(0, 64), seconds, min_size=1, max_size=8), st.lists(st.floats(0, 200), min_size=2))
def test_a_curve_never_falls(points: dict[int, float], sizes: list[float]) -> None:
    curve = CostCurve.fit(points.items())
    values = [curve(size) for size in sorted(sizes)]
    assert all(close(earlier, later) for earlier, later in itertools.pairwise(values))


@quick
@given(grids, st.tuples(*[st.floats(0, 300)] * 2), st.tuples(*[st.floats(0, 100)] * 2))
def test_a_surface_never_falls(grid: list[list[float]], start: tuple[float, float], more: tuple[float, float]) -> None:
    cells = {(2**r, 100 * (c + 1)): value for r, line in enumerate(grid) for c, value in enumerate(line)}
    surface = CostSurface.fit(cells)
    here = surface(start[0] / 10, start[1] * 5)
    assert close(here, surface((start[0] + more[0]) / 10, start[1] * 5))
    assert close(here, surface(start[0] / 10, (start[1] + more[1]) * 5))


def test_a_surface_meets_its_points_and_goes_on_in_both_directions() -> None:
    surface = CostSurface.fit({(1, 100): 1.0, (1, 200): 2.0, (4, 100): 4.0, (4, 200): 8.0})
    assert [surface(*at) for at in ((1, 100), (1, 200), (4, 100), (4, 200))] == [1.0, 2.0, 4.0, 8.0]
    assert surface(1, 150) == 1.5
    assert surface(2.5, 150) == 3.75
    assert surface(1, 400) == 4.0  # 0.01 s for each further token of context
    assert surface(4, 300) == 12.0
    assert surface(7, 200) == 14.0  # 2 s for each further row
    assert surface(0, 0) == 1.0


def linear_costs() -> TargetCost:
    """2 ms and 0.1 ms a row; a microsecond for each row and each cached token beyond 100; 0.2 ms for a request."""
    single = {
        (rows, context): 2e-3 + 1e-4 * rows + 1e-6 * rows * (context - 100)
        for rows in (1, 2, 4, 8)
        for context in (100, 200, 400)
    }
    batches = [BatchPoint(n, 200, 2e-3 + 1e-4 * n + 1e-4 * n + 2e-4 * (n - 1)) for n in (2, 4, 8)]
    return TargetCost.fit(single, batches)


def test_plain_forwards_settle_and_others_do_not() -> None:
    """The worked example of `settling_s`."""
    cost, settled = linear_costs(), dataclasses.replace(linear_costs(), settles_s=2e-3)
    assert settled(1, [300]) == pytest.approx(cost(1, [300]) - 2e-3)
    assert settled(2, [300, 100]) == pytest.approx(cost(2, [300, 100]) - 2e-3)
    assert settled(2, [300]) == cost(2, [300])
    assert settled.settling_s(0) == 2e-3
    assert settled.settling_s(12) == pytest.approx(0.74e-3, abs=5e-6)
    assert settled.settling_s(SETTLED) < 0.1e-3
    assert cost.settling_s(0) == 0.0


def test_a_target_cost_takes_a_linear_world_apart() -> None:
    cost = linear_costs()
    assert cost.request_s == pytest.approx(2e-4)
    assert cost(3, [300]) == pytest.approx(2e-3 + 3e-4 + 3 * 200e-6)
    assert cost(16, [1000]) == pytest.approx(2e-3 + 16e-4 + 16 * 900e-6)
    # Three requests of two rows each.
    assert cost(6, [100, 200, 400]) == pytest.approx(2e-3 + 6e-4 + 2 * (100e-6 + 300e-6) + 2 * 2e-4)
    assert cost(1, [5]) == pytest.approx(2.1e-3)


single_forwards = st.fixed_dictionaries({(r, c): seconds for r in (1, 4, 16) for c in (64, 256, 512)})


@quick
@given(
    single_forwards, st.lists(st.builds(BatchPoint, st.integers(2, 8), st.just(256), seconds), max_size=4),
    st.integers(3, 40), st.lists(st.integers(0, 2000), min_size=1, max_size=3), st.integers(1, 500),
)  # fmt: skip
def test_a_target_cost_never_falls(
    single: dict[tuple[int, int], float], batches: list[BatchPoint], rows: int, contexts: list[int], more: int
) -> None:
    cost = TargetCost.fit(single, batches)
    here = cost(rows, contexts)
    assert close(here, cost(rows + more, contexts))
    assert close(here, cost(rows, [contexts[0] + more, *contexts[1:]]))
    assert here >= cost.base(rows)


def test_a_draft_cost_by_depth_and_by_nodes() -> None:
    cost = DraftCost((DraftPoint(1, 3, 1.0), DraftPoint(2, 9, 2.0), DraftPoint(4, 12, 3.0)))
    assert [cost(depth) for depth in (0, 1, 2, 3, 4)] == [0.0, 1.0, 2.0, 2.5, 3.0]
    assert [cost.of_nodes(nodes) for nodes in (0, 1, 3, 6, 12)] == [0.0, 1.0, 1.0, 1.5, 3.0]
    assert DraftCost(())(7) == DraftCost(()).of_nodes(7) == 0.0


def test_the_cost_of_chains_of_which_guesses_give_some_tokens() -> None:
    cost = DraftCost(tuple(DraftPoint(levels, levels, 0.002 * levels) for levels in (1, 2, 4))).guessed(0.5, 6)
    assert [point.depth for point in cost.points] == [1, 2, 3, 4, 5, 6]
    assert [cost(length) for length in (1, 2, 5)] == [pytest.approx(each) for each in (0.002, 0.003, 0.006)]


def test_a_draft_cost_is_monotone_though_its_measurements_are_not() -> None:
    cost = DraftCost((DraftPoint(1, 1, 2.0), DraftPoint(2, 2, 1.0)))
    assert cost(1) == cost(2) == 1.5


@pytest.mark.parametrize(
    "cost", [linear_costs(), DraftCost((DraftPoint(1, 3, 0.5),)), DraftCost(()), CostCurve((1.0, 2.0), (0.5, 0.7))]
)
def test_records_come_back_through_json(cost: Any) -> None:
    assert read_record(type(cost), json.loads(json.dumps(dataclasses.asdict(cost)))) == cost


CURVE = {"sizes": [1], "seconds": [1.0]}
SURFACE = {"rows": [1], "contexts": [1], "seconds": [[0.0]]}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (CostCurve, None),
        (CostCurve, {"sizes": [1]}),
        (CostCurve, CURVE | {"more": 1}),
        (CostCurve, {"sizes": [], "seconds": []}),
        (CostCurve, {"sizes": [2, 1], "seconds": [1.0, 2.0]}),
        (CostCurve, {"sizes": [1, 2], "seconds": [2.0, 1.0]}),
        (CostCurve, {"sizes": [1, 2], "seconds": [1.0]}),
        (CostCurve, {"sizes": [1], "seconds": ["fast"]}),
        (CostCurve, {"sizes": [1], "seconds": [math.nan]}),
        (CostCurve, {"sizes": [1], "seconds": [True]}),
        (CostCurve, {"sizes": [-1], "seconds": [1.0]}),
        (CostSurface, SURFACE | {"seconds": [[0.0], [1.0]]}),
        (CostSurface, SURFACE | {"seconds": 3}),
        (CostSurface, {"rows": [1, 2], "contexts": [1], "seconds": [[1.0], [0.0]]}),
        (TargetCost, {"base": CURVE, "attention": SURFACE}),
        (TargetCost, {"base": CURVE, "attention": SURFACE, "request_s": -1.0}),
        (TargetCost, {"base": CURVE, "attention": SURFACE, "request_s": "x"}),
        (DraftCost, {"points": 7}),
        (DraftCost, {"points": [[1, 1]]}),
        (DraftCost, {"points": [[0, 1, 1.0]]}),
        (DraftCost, {"points": [[1, 1, -1.0]]}),
        (DraftCost, {"points": [[[], 1, 1.0]]}),
        (DraftCost, {"points": [[2, 2, 1.0], [1, 1, 1.0]]}),
    ],
)
def test_what_is_no_record_is_refused(kind: Any, data: object) -> None:
    with pytest.raises(OptionError):
        read_record(kind, data)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CostCurve.fit([]), "rising numbers"),
        (lambda: CostCurve.fit([(1, math.inf)]), "finite"),
        (lambda: CostCurve.fit([(1, -1.0)]), "0 or more"),
        (lambda: CostSurface.fit({(1, 1): 1.0, (2, 2): 1.0}), r"\(1, 2\) has none"),
        (lambda: CostSurface.fit({(1, 1): math.nan}), "finite"),
        (lambda: TargetCost.fit({}), "at least one measured forward"),
        (lambda: linear_costs()(1, []), "at least one request"),
        (lambda: linear_costs()(1, [10, 10]), "rows must be a whole number of 2 or more, got 1"),
        (lambda: DraftCost(())(-1), "depth must be"),
        (lambda: DraftCost(()).of_nodes(-1), "nodes must be"),
    ],
)
def test_bad_arguments(call: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()  # type: ignore[operator]


def test_the_deepest_proposal_of_so_many_nodes_counts() -> None:
    """A limit of 8 nodes may be filled at depth 2 already; what is proposed is as deep as the tree."""
    cost = DraftCost((DraftPoint(1, 5, 0.1), DraftPoint(2, 8, 0.2), DraftPoint(3, 8, 0.4)))
    assert cost.of_nodes(8) == pytest.approx(0.4)
    assert cost.of_nodes(5) == pytest.approx(0.1)
    assert cost(2) == pytest.approx(0.2)
