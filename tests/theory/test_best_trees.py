"""The tree search against brute force over all small trees, against the greedy search, and against chains."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truedraft.errors import OptionError
from truedraft.theory import (
    BestTree,
    best_length,
    best_tree,
    best_tree_for_cost,
    expected_tokens,
    predicted_speedup,
)

Forest = tuple["Forest", ...]  # the children of a node, in order of rank
Rows = list[list[float]]
quick = settings(max_examples=60, deadline=None, derandomize=True)


@cache
def forests(nodes: int) -> tuple[Forest, ...]:
    """All ordered forests with so many nodes: a first tree and the rest."""
    if nodes == 0:
        return ((),)
    return tuple((first, *rest) for own in range(nodes) for first in forests(own) for rest in forests(nodes - 1 - own))


def value(forest: Forest, rows: Rows, depth: int = 0) -> float:
    """Expected accepted nodes of a forest below an accepted node; a place without acceptance is no place."""
    row = rows[0] if len(rows) == 1 else rows[depth] if depth < len(rows) else []
    if len(forest) > len(row):
        return -math.inf
    return sum(rate * (1 + value(child, rows, depth + 1)) for rate, child in zip(row, forest, strict=False))


def height(forest: Forest) -> int:
    return max((1 + height(child) for child in forest), default=0)


def brute_force(rows: Rows, nodes: int, max_depth: int) -> float:
    """Expected tokens of the best of all trees of at most so many nodes."""
    trees = (forest for count in range(nodes + 1) for forest in forests(count) if height(forest) <= max_depth)
    return 1 + max(value(forest, rows) for forest in trees)


def as_forest(tree: BestTree) -> Forest:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)

    def below(node: int) -> Forest:
        return tuple(below(child) for child in children.get(node, []))

    return below(-1)


def greedy_tokens(rows: Rows, nodes: int, max_depth: int) -> float:
    """Expected tokens by taking the likeliest node again and again: exact where acceptance falls with rank."""
    waiting, tokens = [(-1.0, 0)], 0.0  # nodes: their survival, negative, and their depth
    for _ in range(nodes + 1):  # the root, too
        if not waiting:
            break
        negative, depth = heapq.heappop(waiting)
        tokens -= negative
        row = rows[0] if len(rows) == 1 else rows[depth] if depth < len(rows) else []
        for rate in row if depth < max_depth else []:
            heapq.heappush(waiting, (negative * rate, depth + 1))
    return tokens


def random_rows(seed: int, *, falling: bool) -> Rows:
    generator = random.Random(seed)
    rows: Rows = []
    for _ in range(generator.choice([1, 1, 2, 3, 5])):
        weights = [generator.expovariate(1.0) for _ in range(generator.randint(1, 4))]
        mass = generator.uniform(0.2, 1.0) / sum(weights)
        row = [weight * mass for weight in weights]
        rows.append(sorted(row, reverse=True) if falling else row)
    return rows


def cases() -> Iterator[tuple[Rows, int, int]]:
    for seed in range(40):
        generator = random.Random(1000 + seed)
        yield random_rows(seed, falling=seed % 4 == 0), generator.randint(0, 7), generator.choice([1, 2, 3, 7])


@pytest.mark.parametrize(("rows", "nodes", "max_depth"), list(cases()))
def test_dynamic_programming_finds_the_best_of_all_trees(rows: Rows, nodes: int, max_depth: int) -> None:
    tree = best_tree(rows, nodes, max_depth)
    assert tree.nodes <= nodes
    assert tree.depth <= max_depth
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
    assert tree.expected_tokens == pytest.approx(brute_force(rows, nodes, max_depth), rel=1e-12)
    assert tree.expected_tokens == pytest.approx(1 + value(as_forest(tree), rows), rel=1e-12)


@quick
@given(seed=st.integers(0, 10_000), nodes=st.integers(0, 24), max_depth=st.one_of(st.none(), st.integers(0, 8)))
def test_greedy_agrees_where_acceptance_falls_with_rank(seed: int, nodes: int, max_depth: int | None) -> None:
    rows = random_rows(seed, falling=True)
    limit = nodes if max_depth is None else max_depth
    assert best_tree(rows, nodes, max_depth).expected_tokens == pytest.approx(greedy_tokens(rows, nodes, limit))


@quick
@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 24))
def test_another_node_never_hurts_and_helps_less_and_less(seed: int, nodes: int) -> None:
    rows = random_rows(seed, falling=True)
    tokens = [best_tree(rows, count).expected_tokens for count in range(nodes + 1)]
    gains = [later - earlier for earlier, later in itertools.pairwise(tokens)]
    assert min(gains) >= -1e-12
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(gains))


def test_worked_example() -> None:
    tree = best_tree([[0.6, 0.3]], 3)
    assert tree.parents == (-1, -1, 0)
    assert tree.survival == pytest.approx((0.6, 0.3, 0.36))
    assert tree.expected_tokens == pytest.approx(2.26)


def test_a_likely_second_rank_draws_the_first_along() -> None:
    rows = [[0.0, 0.9]]
    assert best_tree(rows, 2).parents == (-1, -1)
    assert best_tree(rows, 1).parents == ()


def test_one_rank_makes_a_chain() -> None:
    tree = best_tree([[0.8]], 40)
    assert tree.parents == tuple(range(-1, 39))
    assert tree.expected_tokens == pytest.approx(expected_tokens(0.8, 40))
    assert tree.depth == 40


def test_a_large_budget_is_solved_by_both() -> None:
    rows = [[0.55, 0.15, 0.08, 0.05, 0.03]]
    assert best_tree(rows, 96).expected_tokens == pytest.approx(greedy_tokens(rows, 96, 96), rel=1e-12)


def test_limits() -> None:
    assert best_tree([[0.5, 0.2]], 0) == BestTree((), ())
    assert best_tree([[0.0, 0.0]], 5) == BestTree((), ())
    assert best_tree([[]], 5).expected_tokens == 1.0
    assert best_tree([[1.0]], 5).expected_tokens == 6.0
    assert best_tree([[0.4, 0.3, 0.2]], 3, max_depth=1).parents == (-1, -1, -1)
    assert best_tree([[0.4]], 9, max_depth=0).nodes == 0


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_for_a_cost_is_the_best_of_all_trees(seed: int) -> None:
    """Rows cost more and more, levels of the draft cost each; brute force over all trees of up to 6 nodes."""
    rows = random_rows(seed, falling=seed % 2 == 0)
    row_s = (0.02, 0.08, 0.3)[seed % 3]

    def verify_s(count: int) -> float:
        return 1.0 + row_s * (count - 1)

    def draft_s(depth: int, nodes: int) -> float:
        return 0.05 * depth + 0.01 * nodes

    choice = best_tree_for_cost(rows, verify_s, draft_s, max_nodes=6)
    factors = [
        predicted_speedup(max(0.0, 1 + value(forest, rows)), 1.0, verify_s(count + 1), draft_s(height(forest), count))
        for count in range(1, 7)
        for forest in forests(count)
    ]
    assert choice.speedup == pytest.approx(max(1.0, *factors), rel=1e-12)
    if choice.tree.nodes:
        cost = verify_s(choice.tree.nodes + 1) + draft_s(choice.tree.depth, choice.tree.nodes)
        assert choice.speedup == pytest.approx(choice.tree.expected_tokens / cost)


def test_one_rank_and_a_cost_make_the_best_chain() -> None:
    verify_s, step_s = (lambda rows: 1.0 + 0.03 * rows), 0.04
    tree = best_tree_for_cost([[0.8]], verify_s, lambda depth, nodes: step_s * depth, max_nodes=16)
    chain = best_length(0.8, verify_s, lambda length: step_s * length, limit=16)
    assert tree.tree.nodes == tree.tree.depth == chain.nodes > 1
    assert tree.speedup == pytest.approx(chain.speedup)


def test_where_nothing_pays_the_tree_is_empty() -> None:
    choice = best_tree_for_cost([[0.3, 0.1]], lambda rows: float(rows), lambda depth, nodes: 0.5, max_nodes=8)
    assert (choice.tree.nodes, choice.speedup) == (0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_tree([], 3), "at least one row"),
        (lambda: best_tree([[0.5]], -1), "nodes must be a whole number of 0 or more, got -1"),
        (lambda: best_tree([[0.5, -0.1]], 3), "each acceptance .* got -0.1"),
        (lambda: best_tree([[0.7, 0.4]], 3), "sums to 1 at most, .* got 1.1"),
        (lambda: best_tree([[0.5]], 3, max_depth=-2), "max_depth"),
        (lambda: best_tree([[math.nan]], 3), "got nan"),
        (lambda: best_tree_for_cost([[0.5]], lambda rows: 0.0, lambda depth, nodes: 0.0, 3), "plain_s"),
    ],
)
def test_bad_arguments(call: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()  # type: ignore[operator]
