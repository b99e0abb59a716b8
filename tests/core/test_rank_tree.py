"""Trees of ranks: orders, cuts, shapes of known trees, and how guesses fill them in."""

from __future__ import annotations

import json
import math

import pytest
import torch

from support.trees import ancestor_mask
from truedraft.core.rank_tree import RankTree
from truedraft.errors import OptionError
from truedraft.kinds.medusa.folders import published_tree

CHAIN = RankTree(((0,), (0, 0), (0, 0, 0)))
STAR = RankTree(((0,), (1,), (2,), (3,)))
SMALL = RankTree(((0,), (0, 0), (1,), (0, 1)), (0.6, 0.3, 0.2, 0.1))


def test_the_published_tree_has_its_published_choices() -> None:
    """63 nodes: the first and the last of the list, how many there are at each depth, and 42 paths to a leaf."""
    tree = published_tree()
    assert (len(tree), tree.depth, tree.width) == (63, 4, 10)
    assert tree.paths[:6] == ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0))
    assert tree.paths[-3:] == ((0, 0, 0, 1), (1, 6), (0, 7, 0))
    depths = tree.shape.depths
    assert [depths.count(depth) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert len(tree.shape.leaves) == 42


@pytest.mark.parametrize("tree", [published_tree(), CHAIN, STAR, SMALL], ids=["published", "chain", "star", "small"])
def test_shape_mask_and_paths_follow_from_the_rank_paths(tree: RankTree) -> None:
    mask = ancestor_mask(tree.shape)
    for node, path in enumerate(tree.paths):
        ancestors = [tree.paths.index(path[: length + 1]) for length in range(len(path))]
        assert tree.shape.path(node) == tuple(ancestors)
        assert tree.shape.depths[node] == len(path)
        assert mask[node].nonzero().flatten().tolist() == sorted(ancestors)


def test_guesses_fill_in_the_tokens() -> None:
    guesses = torch.tensor([[10, 11, 12], [20, 21, 22]])
    assert SMALL.fill(guesses).tolist() == [10, 20, 11, 21]
    assert STAR.first(3).fill(guesses).tolist() == [10, 11, 12]


def test_any_first_nodes_are_a_tree() -> None:
    tree = published_tree()
    for nodes in range(len(tree) + 1):
        cut = tree.first(nodes)
        assert (len(cut), cut.paths) == (nodes, tree.paths[:nodes])
    assert tree.first(100) is tree
    assert SMALL.first(2).survival == (0.6, 0.3)


def test_within_keeps_shallow_and_narrow_paths() -> None:
    assert SMALL.within(1, 2).paths == ((0,), (1,))
    assert SMALL.within(2, 1).paths == ((0,), (0, 0))
    assert SMALL.within(2, 1).survival == (0.6, 0.3)
    assert SMALL.within(9, 9) is SMALL
    assert len(SMALL.within(0, 5)) == 0


def test_counted_orders_by_frequency_and_promises_their_sum() -> None:
    tree = RankTree.counted({(1,): 0.2, (0, 0): 0.3, (0,): 0.6, (0, 1): 0.2})
    assert tree.paths == ((0,), (0, 0), (1,), (0, 1))
    assert tree.expected_tokens == pytest.approx(1 + 0.6 + 0.3 + 0.2 + 0.2)
    assert math.isnan(STAR.expected_tokens)
    assert RankTree(()).expected_tokens == 1.0


def test_cartesian_and_listed() -> None:
    tree = RankTree.cartesian([2, 3])
    assert len(tree) == 2 + 6
    assert tree.shape.depths == (1, 1, 2, 2, 2, 2, 2, 2)
    assert RankTree.listed([[1], [0, 0], [0]]).paths == ((0,), (1,), (0, 0))


def test_json_and_back() -> None:
    assert RankTree.of(json.loads(json.dumps(SMALL.as_dict()))) == SMALL
    assert RankTree.of({"paths": [[0]]}) == RankTree(((0,),))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RankTree(((0,), (0,))),
        lambda: RankTree(((0, 0), (0,))),
        lambda: RankTree(((0,), (-1,))),
        lambda: RankTree(((),)),
        lambda: RankTree(((0,),), (0.5, 0.5)),
        lambda: RankTree.listed([[1, 0]]),
        lambda: RankTree.cartesian([]),
        lambda: RankTree.cartesian([2, 0]),
        lambda: RankTree.of({"path": []}),
        lambda: RankTree.of({"paths": [["a"]]}),
        lambda: RankTree.of({"paths": 3}),
    ],
)
def test_what_is_no_tree_is_refused(make: object) -> None:
    with pytest.raises(OptionError):
        make()  # type: ignore[operator]
