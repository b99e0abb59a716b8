"""Merging beams: the worked example, and the same tree as a slow, obvious version makes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.head_models import MarkovWithEmbedding, random_redrafter
from support.trees import ancestor_mask
from truedraft.core.tree import TokenTree
from truedraft.drafters.heads.base import trees_of
from truedraft.kinds.redrafter.beams import (
    NO_TOKEN,
    Beams,
    MergedBeams,
    beam_search,
    first_with_prefix,
    merge,
    with_dropped,
)
from truedraft.kinds.redrafter.module import RedrafterRunner

# The example of the module's docstring.
EXAMPLE = Beams(
    torch.tensor([[[5, 7, 9], [5, 7, 8], [6, NO_TOKEN, NO_TOKEN]]]),
    torch.tensor([[[-0.1, -0.3, -2.0], [-0.1, -0.3, -1.0], [-1.5, 0.0, 0.0]]]),
)


def trees_in(merged: MergedBeams) -> list[TokenTree]:
    return trees_of(merged.tokens, merged.parents, merged.counts)


def test_the_worked_example() -> None:
    assert first_with_prefix(EXAMPLE.tokens).tolist() == [[[0, 0, 0], [0, 0, 1], [2, 2, 2]]]
    merged = merge(EXAMPLE, 9)
    (tree,) = trees_in(merged)
    assert tree.host_ids == [5, 7, 8, 6, 9]
    assert tree.shape.parents == (-1, 0, 1, -1, 1)
    assert merged.node_of.tolist() == [[[0, 1, 4], [0, 1, 2], [3, -1, -1]]]
    assert (len(tree), tree.shape.listed) == (5, 7)
    assert ancestor_mask(tree.shape).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    merged = merge(EXAMPLE, 4)
    assert trees_in(merged)[0].host_ids == [5, 7, 8, 6]
    assert merged.node_of.tolist() == [[[0, 1, -1], [0, 1, 2], [3, -1, -1]]]


def test_requests_of_one_batch_make_their_own_trees() -> None:
    tokens = torch.tensor([[[1, 2], [1, 3]], [[4, 4], [5, 4]]])
    scores = torch.tensor([[[-0.5, -0.6], [-0.5, -0.9]], [[-1.0, -1.5], [-0.2, -3.0]]])
    beams = Beams(tokens, scores)
    first, second = trees_in(merge(beams, 4))
    assert first.host_ids == [1, 2, 3]
    assert first.shape.parents == (-1, 0, 0)
    assert second.host_ids == [5, 4, 4, 4]  # the child of 4 is likelier than that of 5
    assert second.shape.parents == (-1, -1, 1, 0)


def slowly(tokens: list[list[int]], scores: list[list[float]], nodes: int) -> dict[tuple[int, ...], float]:
    """The `nodes` best of all prefixes, of equal ones the shorter, then that of the earlier beam."""
    found: dict[tuple[int, ...], tuple[float, int, int]] = {}
    for beam, (path, along) in enumerate(zip(tokens, scores, strict=True)):
        for length, score in enumerate(along[: len(path)], 1):
            found.setdefault(tuple(path[:length]), (-score, length, beam))
    kept = sorted(found, key=lambda prefix: found[prefix])[:nodes]
    return {prefix: -found[prefix][0] for prefix in kept}


@st.composite
def some_beams(draw: st.DrawFn) -> Beams:
    requests, length = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    every, falls = [], []
    count = draw(st.integers(1, 6))
    for _ in range(requests):
        paths = draw(
            st.lists(
                st.lists(st.integers(0, 2), min_size=length, max_size=length).map(tuple),
                min_size=count, max_size=count, unique=3**length >= count,
            )
        )  # fmt: skip
        # A prefix has one score, never above that of the prefix before it; some fall by nothing.
        ends = range(1, length + 1)
        steps = {path[:end]: draw(st.sampled_from([0.0, 0.25, 0.5, 2.0])) for path in paths for end in ends}
        lengths = [draw(st.integers(1, length)) for _ in paths]
        every.append([[*path[:end], *[NO_TOKEN] * (length - end)] for path, end in zip(paths, lengths, strict=True)])
        falls.append([[-sum(steps[path[:j]] for j in range(1, end + 1)) for end in ends] for path in paths])
    return Beams(torch.tensor(every), torch.tensor(falls))


@settings(deadline=None, max_examples=150)
@given(some_beams(), st.integers(1, 30))
def test_merging_agrees_with_a_slow_version(beams: Beams, nodes: int) -> None:
    merged = merge(beams, nodes)
    made = zip(trees_in(merged), merged.node_of.tolist(), strict=True)
    for (tree, node_of), tokens, scores in zip(made, beams.tokens.tolist(), beams.scores.tolist(), strict=True):
        paths = [path[: path.index(NO_TOKEN)] if NO_TOKEN in path else path for path in tokens]
        expected = slowly(paths, scores, nodes)
        assert [tree.path_tokens(node) for node in range(len(tree))] == list(expected)
        number = {prefix: node for node, prefix in enumerate(expected)}
        for path, own in zip(paths, node_of, strict=True):
            along = [number.get(tuple(path[: end + 1]), -1) for end in range(len(path))]
            assert own == along + [-1] * (len(own) - len(along))
        assert_mask_is_ancestry(tree)


def assert_mask_is_ancestry(tree: TokenTree) -> None:
    """A node sees those whose path is a prefix of its own, and no others."""
    paths = [tree.path_tokens(node) for node in range(len(tree))]
    sees = [[paths[row][: len(path)] == path for path in paths] for row in range(len(tree))]
    assert ancestor_mask(tree.shape).tolist() == sees


@settings(deadline=None, max_examples=50)
@given(some_beams())
def test_a_request_alone_makes_the_tree_it_makes_among_others(beams: Beams) -> None:
    for row, tree in enumerate(trees_in(merge(beams, 8))):
        (alone,) = trees_in(merge(Beams(beams.tokens[row : row + 1], beams.scores[row : row + 1]), 8))
        assert alone.host_ids == tree.host_ids
        assert alone.shape == tree.shape


@pytest.mark.parametrize("nodes", [1, 5, 11, 99])
def test_a_deep_search_cut_to_a_depth_makes_the_trees_of_a_shorter_one(nodes: int) -> None:
    """For each request its own depth; probabilities fall together so often that many scores are equal."""
    model = MarkovWithEmbedding.random(6, seed=2)
    runner = RedrafterRunner(random_redrafter(model, spread=0.0, layers=0), model)
    hidden, drawn = torch.stack([model.vector_after([1, each]) for each in range(6)]), torch.arange(6)
    steps = list(itertools.islice(beam_search(runner, hidden, drawn, 4), 4))
    depths = torch.tensor([1, 4, 2, 3, 2, 4])
    cut = trees_in(merge(with_dropped(steps), nodes, depths))
    for row, depth in enumerate(depths.tolist()):
        shorter = trees_in(merge(with_dropped(steps[:depth]), nodes))[row]
        assert cut[row].host_ids == shorter.host_ids
        assert cut[row].shape == shorter.shape
        assert nodes < 5 or shorter.shape.depth <= depth
