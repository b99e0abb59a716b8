"""Token trees: drafted tokens that share prefixes. A chain is a tree with one path.

The root is the last token of the context; it is not a node. Node i has parent `parents[i]`, which is an earlier node or
-1 for the root. *Tree rows* are the places with a distribution of the target: row 0 is the root, row i + 1 is node i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

from truedraft.core import transfers

Path = TypeVar("Path")

_MOST_KEPT = 512
"""Longest chain with a cached shape: chunks of prompts are longer, and have many lengths."""


@dataclass(frozen=True)
class TreeShape:
    """The shape of a tree, without its tokens.

    Worked example: parents (-1, -1, 0, 0, 2) has the children (0, 1) of the root, (2, 3) of node 0 and (4,) of
    node 2; its depths are (1, 1, 2, 2, 3) and its leaves 1, 3 and 4.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; a parent is an earlier node, or -1 for the root")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each tree row: `children[0]` of the root, `children[i + 1]` of node i."""
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        return tuple(node for node in range(len(self.parents)) if not self.children[node + 1])

    @cached_property
    def listed(self) -> int:
        return sum(self.depths[leaf] for leaf in self.leaves)

    def path(self, node: int) -> tuple[int, ...]:
        return path_to(node, self.parents)

    @cached_property
    def rooted(self) -> TreeShape:
        """The same tree with its root as node 0: the segment of the target's forward."""
        return chain_shape(len(self) + 1) if self.is_chain else TreeShape((-1, *(p + 1 for p in self.parents)))


def path_to(node: int, parents: Sequence[int]) -> tuple[int, ...]:
    """Nodes from the root's child down to `node`."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))


def chain_shape(length: int) -> TreeShape:
    """The shape of a chain."""
    return _kept_chain(length) if length <= _MOST_KEPT else _new_chain(length)


def _new_chain(length: int) -> TreeShape:
    return TreeShape(tuple(range(-1, length - 1)))


_kept_chain = lru_cache(maxsize=None)(_new_chain)


@lru_cache(maxsize=1024)
def shape_of(parents: tuple[int, ...]) -> TreeShape:
    """The shape with these parents, cached with its derived properties, because shapes recur at every step."""
    return TreeShape(parents)


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens `[nodes]`, int64, perhaps on a device until the step reads all at once, and their tree shape."""

    tokens: Tensor
    shape: TreeShape

    @classmethod
    def chain(cls, tokens: Tensor | Sequence[int]) -> TokenTree:
        ids = torch.as_tensor(tokens, dtype=torch.int64)
        tree = cls(ids, chain_shape(ids.shape[0]))
        if not isinstance(tokens, Tensor):
            tree.keep_host_ids([int(token) for token in tokens])
        return tree

    @classmethod
    def empty(cls) -> TokenTree:
        return cls.of_ids([], chain_shape(0))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> TokenTree:
        """Merge paths that share prefixes: equal prefixes become one path of nodes, in order of first appearance."""
        return merged_paths(paths)[0]

    @classmethod
    def of_ids(cls, ids: Sequence[int], shape: TreeShape) -> TokenTree:
        tree = cls(torch.tensor(ids, dtype=torch.int64), shape)
        tree.keep_host_ids(ids)
        return tree

    def __len__(self) -> int:
        return len(self.shape)

    @cached_property
    def host_ids(self) -> list[int]:
        """The tokens on the host; reading them from a device waits for it, unless they are cached."""
        ids: list[int] = self.tokens.tolist()
        return ids

    @property
    def on_device(self) -> bool:
        """Whether the tokens are on a device and the host has not read them, so that `host_ids` would wait."""
        return "host_ids" not in self.__dict__ and transfers.waits(self.tokens.device)

    def keep_host_ids(self, ids: Sequence[int]) -> None:
        """Set `host_ids`: the numbers in `tokens`, read elsewhere."""
        self.__dict__["host_ids"] = list(ids)  # where cached_property stores it

    def first(self, nodes: int) -> TokenTree:
        if nodes >= len(self):
            return self
        return TokenTree(self.tokens[:nodes], TreeShape(self.shape.parents[:nodes]))

    def along(self, text: Sequence[int]) -> list[int]:
        ids, row = self.host_ids, 0
        found: list[int] = []
        for token in text:
            child = next((node for node in self.shape.children[row] if ids[node] == token), None)
            if child is None:
                break
            found.append(child)
            row = child + 1
        return found

    def path_tokens(self, node: int) -> tuple[int, ...]:
        return tuple(self.host_ids[i] for i in self.shape.path(node))


class GrowingTree:
    """Merges shared prefixes of paths as they are added; `children` maps parent (-1: the root) and token to node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.children: dict[tuple[int, int], int] = {}

    def add(self, path: Iterable[int], node: int = -1) -> int:
        for token in path:
            child = self.children.get((node, token))
            if child is None:
                child = self.children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = child
        return node


def merged_paths(paths: Sequence[Sequence[int]]) -> tuple[TokenTree, tuple[int, ...]]:
    """The tree of `TokenTree.from_paths`, and the last node of each path; -1 for an empty path."""
    tree = GrowingTree()
    ends = tuple(map(tree.add, paths))
    return TokenTree.of_ids(tree.tokens, TreeShape(tuple(tree.parents))), ends


def narrowed(tree: TokenTree, width: int) -> TokenTree:
    """A tree with at most the first `width` children of each node, and their descendants."""
    kept: list[int] = []
    number, taken = {-1: -1}, dict.fromkeys(range(-1, len(tree)), 0)
    for node, parent in enumerate(tree.shape.parents):
        if parent in number and taken[parent] < width:
            taken[parent] += 1
            number[node] = len(kept)
            kept.append(node)
    parents = tuple(number[tree.shape.parents[node]] for node in kept)
    return TokenTree(tree.tokens[kept], TreeShape(parents))


def likeliest_tree(root: Path, following: Callable[[Path], Sequence[tuple[int, float, Path]]], nodes: int) -> TokenTree:
    """The at most `nodes` likeliest nodes of a tree, in descending order, equally likely ones in order of discovery.

    `following` gives for a path (first `root`) its next tokens in any order, each with the probability of the extended
    path and that path itself; empty where nothing is drafted below.

    Worked example: 5 has 0.6 and 6 has 0.3, and after 5 come 7 with 0.54 and 8 with 0.06. The three likeliest nodes are
    5, 5 7 and 6.
    """
    order = count()
    waiting: list[tuple[float, int, int, int, Path]] = []  # -likely, order, parent, token, path
    ids: list[int] = []
    parents: list[int] = []
    parent, path = -1, root
    while len(ids) < nodes:
        for token, likely, end in following(path):
            heappush(waiting, (-likely, next(order), parent, token, end))
        if not waiting:
            break
        _, _, above, token, path = heappop(waiting)
        parent = len(ids)
        ids.append(token)
        parents.append(above)
    return TokenTree.of_ids(ids, shape_of(tuple(parents)))
