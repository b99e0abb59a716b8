"""How many nodes of a growing tree pay, and what the counts of its paths promise."""

from __future__ import annotations

import pytest

from truedraft.errors import OptionError
from truedraft.theory import (
    DraftCost,
    DraftPoint,
    best_node_budget,
    expected_tokens_if_independent,
    predicted_speedup,
)

REACH = (0.7, 0.45, 0.2, 0.15, 0.1, 0.05, 0.02, 0.01)


def test_the_worked_example() -> None:
    seconds = {1: 0.010, 2: 0.011, 3: 0.020}
    choice = best_node_budget((0.6, 0.3), seconds.__getitem__, lambda nodes: 0.001)
    assert choice.best.nodes == 1
    assert [option.speedup for option in choice.table] == pytest.approx([1.0, 16 / 12, 19 / 21])
    assert [option.expected_tokens for option in choice.table] == pytest.approx([1.0, 1.6, 1.9])


@pytest.mark.parametrize("row_s", [0.0, 0.0002, 0.002, 0.02])
def test_no_other_budget_predicts_more(row_s: float) -> None:
    def verify_s(rows: int) -> float:
        return 0.01 + row_s * (rows - 1)

    choice = best_node_budget(REACH, verify_s, lambda nodes: 0.0005)
    for nodes in range(1, len(REACH) + 1):
        factor = predicted_speedup(1 + sum(REACH[:nodes]), verify_s(1), verify_s(nodes + 1), 0.0005)
        assert choice.table[nodes].speedup == pytest.approx(factor)
        assert factor <= choice.best.speedup
    assert choice.best in choice.table


def test_dearer_rows_take_fewer_nodes_and_none_is_an_answer() -> None:
    chosen = [
        best_node_budget(REACH, lambda rows, row_s=row_s: 0.01 + row_s * rows, lambda nodes: 0.001).best.nodes
        for row_s in (0.0, 0.0003, 0.002, 0.02)
    ]
    assert chosen[0] == len(REACH) and chosen[-1] == 0
    assert chosen == sorted(chosen, reverse=True) and len(set(chosen)) == 4
    assert best_node_budget((), lambda rows: 1.0, lambda nodes: 0.0).best.speedup == 1.0


def test_the_fewest_of_equals() -> None:
    assert best_node_budget((0.5, 0.0, 0.0), lambda rows: 1.0, lambda nodes: 0.0).best.nodes == 1


def test_what_is_no_reach_or_no_cost() -> None:
    with pytest.raises(OptionError, match="each reach"):
        best_node_budget((1.2,), lambda rows: 1.0, lambda nodes: 0.0)
    with pytest.raises(OptionError, match="verify_s"):
        best_node_budget((0.5,), lambda rows: 1.0 if rows == 1 else 0.0, lambda nodes: 0.0)


def test_the_deepest_proposal_of_so_many_nodes_counts() -> None:
    """A limit of 8 nodes may be filled at depth 2 already; what is proposed is as deep as the tree."""
    cost = DraftCost((DraftPoint(1, 5, 0.1), DraftPoint(2, 8, 0.2), DraftPoint(3, 8, 0.4)))
    assert cost.of_nodes(8) == pytest.approx(0.4)
    assert cost.of_nodes(5) == pytest.approx(0.1)
    assert cost(2) == pytest.approx(0.2)


def test_independent_heads() -> None:
    accuracy = ((0.6, 0.2), (0.5,))
    assert expected_tokens_if_independent([(0,), (1,), (0, 0)], accuracy) == pytest.approx(2.1)
    assert expected_tokens_if_independent([], accuracy) == 1.0
    with pytest.raises(OptionError, match=r"the path \[0, 1\] needs accuracies"):
        expected_tokens_if_independent([(0, 1)], accuracy)
    with pytest.raises(OptionError, match=r"the path \[0, 0, 0\] needs accuracies"):
        expected_tokens_if_independent([(0, 0, 0)], accuracy)
    with pytest.raises(OptionError, match="each accuracy"):
        expected_tokens_if_independent([], [[1.5]])
