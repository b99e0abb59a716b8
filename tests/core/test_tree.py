"""Token trees against slow references on random parents."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trees import ancestor_mask
from truedraft.core.tree import TokenTree, TreeShape, chain_shape, likeliest_tree, merged_paths

quick = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def parent_lists(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(0, 12))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(size))


def ancestors(parents: tuple[int, ...], node: int) -> list[int]:
    """From the node up to the root's child."""
    found = []
    while node != -1:
        found.append(node)
        node = parents[node]
    return found


@quick
@given(parent_lists())
def test_shapes_against_the_slow_way(parents: tuple[int, ...]) -> None:
    shape = TreeShape(parents)
    nodes = range(len(parents))
    up = [ancestors(parents, node) for node in nodes]
    assert len(shape) == len(parents)
    assert shape.depths == tuple(len(each) for each in up)
    assert shape.depth == max((len(each) for each in up), default=0)
    assert [shape.path(node) for node in nodes] == [tuple(reversed(each)) for each in up]
    assert shape.children == tuple(tuple(n for n in nodes if parents[n] == row - 1) for row in range(len(parents) + 1))
    assert shape.leaves == tuple(n for n in nodes if n not in parents)
    assert shape.is_chain == all(parents[n] == n - 1 for n in nodes)
    assert shape.path(-1) == ()


@quick
@given(parent_lists())
def test_the_ancestor_mask_is_the_transitive_closure(parents: tuple[int, ...]) -> None:
    size = len(parents)
    edges = torch.zeros(size, size, dtype=torch.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            edges[node, parent] = 1
    closure = torch.eye(size, dtype=torch.int64)
    for _ in range(size):
        closure = ((closure + closure @ edges) > 0).long()
    mask = ancestor_mask(TreeShape(parents))
    assert mask.dtype == torch.bool
    assert mask.shape == (size, size)
    assert torch.equal(mask, closure.bool())


@quick
@given(parent_lists())
def test_rooted_hangs_everything_below_node_zero(parents: tuple[int, ...]) -> None:
    shape = TreeShape(parents)
    rooted = shape.rooted
    assert rooted.parents == (-1, *(parent + 1 for parent in parents))
    assert rooted.depths == (1, *(depth + 1 for depth in shape.depths))
    assert bool(ancestor_mask(rooted)[:, 0].all())
    assert torch.equal(ancestor_mask(rooted)[1:, 1:], ancestor_mask(shape))
    assert shape.rooted is rooted


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (-1, 2, 0), (-1, -1, 5), (-1, 0, -3)], ids=str)
def test_parents_must_come_first(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a parent is an earlier node"):
        TreeShape(parents)


@pytest.mark.parametrize("length", [0, 1, 2, 9])
def test_a_chain_is_a_tree_with_one_path(length: int) -> None:
    shape = chain_shape(length)
    assert shape.is_chain
    assert shape.depths == tuple(range(1, length + 1))
    assert shape.leaves == ((length - 1,) if length else ())
    assert torch.equal(ancestor_mask(shape), torch.ones(length, length, dtype=torch.bool).tril())
    assert shape.rooted == chain_shape(length + 1)
    tree = TokenTree.chain(torch.arange(10, 10 + length, dtype=torch.int32))
    assert TokenTree.chain(list(range(10, 10 + length))).host_ids == tree.host_ids
    assert tree.shape == shape
    assert tree.tokens.dtype == torch.int64
    assert tree.host_ids == list(range(10, 10 + length))
    assert len(tree) == length


def test_shapes_of_long_parts_of_prompts_are_not_kept() -> None:
    assert TokenTree.empty().host_ids == [] and not TreeShape((-1, -1)).is_chain
    assert chain_shape(512) is chain_shape(512)
    assert chain_shape(513) == chain_shape(513) and chain_shape(513) is not chain_shape(513)


paths_of_tokens = st.lists(st.lists(st.integers(0, 3), max_size=5).map(tuple), max_size=8)


@quick
@given(paths_of_tokens)
def test_paths_that_share_prefixes_become_one(paths: list[tuple[int, ...]]) -> None:
    tree, ends = merged_paths(paths)
    assert [tree.path_tokens(end) for end in ends] == list(paths)
    assert TokenTree.from_paths(paths).host_ids == tree.host_ids
    assert all(tree.along(path)[-1:] == [end] for path, end in zip(paths, ends, strict=True) if path)
    prefixes = {path[:i] for path in paths for i in range(1, len(path) + 1)}
    found = [tree.path_tokens(node) for node in range(len(tree))]
    assert len(found) == len(set(found))  # no path twice
    assert set(found) == prefixes
    order = list(dict.fromkeys(path[:i] for path in paths for i in range(1, len(path) + 1)))
    assert found == order  # in order of first appearance
    leaves = {tree.path_tokens(leaf) for leaf in tree.shape.leaves}
    assert leaves == {
        path for path in prefixes if not any(len(o) > len(path) and o[: len(path)] == path for o in prefixes)
    }
    assert tree.tokens.dtype == torch.int64


def test_tokens_stay_on_a_device_until_the_host_has_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.core.transfers.waits", lambda device: True)
    for tree in (
        TokenTree.chain([4, 2]),
        TokenTree.from_paths([[1], [2, 3]]),
        TokenTree.empty(),
        TokenTree.of_ids([7], chain_shape(1)),
    ):
        assert not tree.on_device
        assert tree.host_ids == tree.tokens.tolist()
    tree = TokenTree.chain(torch.tensor([4, 2]))
    assert tree.on_device
    tree.keep_host_ids([4, 2])
    assert not tree.on_device
    assert tree.host_ids == [4, 2]
    assert tree.path_tokens(1) == (4, 2)
    waited = TokenTree.chain(torch.tensor([5]))
    assert waited.host_ids == [5]
    assert not waited.on_device


@quick
@given(st.randoms(use_true_random=False), st.integers(0, 20))
def test_the_likeliest_tree_has_the_likeliest_of_all_paths(random: Random, nodes: int) -> None:
    """Against all paths of three levels, sorted; a path is never likelier than the one that it goes on from."""
    shares = {
        path: [random.random() for _ in range(random.randrange(4))]
        for length in range(3)
        for path in itertools.product(range(3), repeat=length)
    }
    every: dict[tuple[int, ...], float] = {}

    def following(path: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
        above = every.get(path, 1.0)
        found = [(token, above * share, (*path, token)) for token, share in enumerate(shares.get(path, ()))]
        every.update({end: likely for _, likely, end in found})
        return found

    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        waiting += [end for *_, end in following(waiting.pop())]
    tree = likeliest_tree((), following, nodes)
    best = sorted(every, key=lambda path: -every[path])[:nodes]
    found = [tuple(tree.path_tokens(node)) for node in range(len(tree))]
    assert len(set(found)) == len(found)
    assert [every[path] for path in found] == [every[path] for path in best]  # any of equally likely ones


def test_of_equally_likely_nodes_the_first_that_was_found_comes_first() -> None:
    behind = {(): [(5, 0.5, (5,)), (6, 0.5, (6,))], (5,): [(7, 0.5, (5, 7))], (6,): [], (5, 7): []}
    tree = likeliest_tree((), lambda path: behind[path], 9)
    assert [tree.path_tokens(node) for node in range(3)] == [(5,), (6,), (5, 7)]
