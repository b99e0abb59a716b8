"""Budgets."""

from __future__ import annotations

import math

import pytest

from truedraft.core.budget import MOST_NODES, NO_DRAFT, Budget, nodes_of
from truedraft.errors import OptionError


def test_a_budget_of_zero_is_plain_decoding() -> None:
    assert NO_DRAFT.is_zero
    assert Budget(0).is_zero
    assert Budget(3, width=0).is_zero
    assert Budget(3, nodes=0).is_zero
    assert not Budget(1).is_zero
    assert not Budget(1, 1, 1).is_zero


def test_a_cut_only_shortens() -> None:
    budget = Budget(5, 3, 40, 0.25)
    assert budget.cut(2) == Budget(2, 3, 40, 0.25)
    assert budget.cut(5) is budget
    assert budget.cut(9) is budget
    assert budget.cut(0).is_zero
    assert budget.cut(-4) == Budget(0, 3, 40, 0.25)  # no room left at the end of a context


@pytest.mark.parametrize(
    "limits",
    [
        {"depth": -1},
        {"depth": 1, "width": -1},
        {"depth": 1, "nodes": -1},
        {"depth": 1, "min_probability": -0.1},
        {"depth": 1, "min_probability": 1.5},
        {"depth": 1, "min_probability": math.nan},
    ],
    ids=str,
)
def test_limits_out_of_range_are_refused_by_name_and_value(limits: dict) -> None:
    option, value = list(limits.items())[-1]
    with pytest.raises(OptionError, match=f"{option}={value}"):
        Budget(**limits)


def test_nodes_are_counted_before_a_tree_is_made_and_too_many_refused() -> None:
    assert nodes_of((3, 2, 1)) == 15
    assert nodes_of((1,) * 7) == 7
    assert nodes_of((MOST_NODES,)) == MOST_NODES
    for branching in ((MOST_NODES, 1), (1000, 1000, 1000), (2,) * 100_000):
        with pytest.raises(OptionError, match="more than 1024 nodes"):
            nodes_of(branching)
    for branching in ((), (2, 0), (-1,)):
        with pytest.raises(OptionError, match="1 or more each"):
            nodes_of(branching)
