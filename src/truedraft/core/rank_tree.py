"""Trees of ranks: the guesses of each head that are candidates, fixed in advance or chosen at each step.

A *rank path* (r_1, ..., r_d) is the token of rank r_1 (from 0) of the first head's guesses, below it the token of rank
r_2 of the second head's, and so on (Medusa 2401.10774, section 2.1.2). A `RankTree` is fixed before a request starts.
`likeliest_paths` makes a tree for each step from the heads' probabilities, as if heads erred independently: they do
not, but unlike a fixed tree this uses the heads' confidence at each step.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core.budget import nodes_of
from truedraft.core.tree import TreeShape, shape_of
from truedraft.errors import OptionError

RankPath = tuple[int, ...]
Numbers: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class RankTree:
    """Rank paths in an order in which each comes after its parent, so that the first n of them are a tree too.

    Worked example: the paths (0), (0, 0), (1), (0, 1) are node 0 below the root, node 1 below it, node 2 below the root
    and node 3 below node 0: parents (-1, 0, -1, 0), depths (1, 2, 1, 2).

    Attributes:
        paths: one for each node.
        survival: for each node the measured probability that it is accepted; empty without measurements.

    Raises:
        OptionError: a path is repeated, comes before its parent, or has a negative rank; or the number of probabilities
            differs from that of paths.
    """

    paths: tuple[RankPath, ...]
    survival: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        known: set[RankPath] = {()}
        for path in self.paths:
            if not path or min(path) < 0 or path in known or path[:-1] not in known:
                raise OptionError(
                    f"the rank path {list(path)} comes twice, before its parent {list(path[:-1])}, or is no path; "
                    "list each path of ranks, from 0, once and after the path that it continues"
                )
            known.add(path)
        if self.survival and len(self.survival) != len(self.paths):
            raise OptionError(f"{len(self.paths)} rank paths need as many probabilities, got {len(self.survival)}")

    def __len__(self) -> int:
        return len(self.paths)

    @classmethod
    def counted(cls, frequencies: Mapping[RankPath, float]) -> RankTree:
        """Paths in the order of a greedy choice: the most frequent first.

        The first n are the tree of n nodes with the most expected tokens (Medusa 2401.10774, section 2.3.3), because a
        path is never more frequent than its parent. Among equals the shorter path comes first, then the lower ranks.
        """
        order = sorted(frequencies, key=lambda path: (-frequencies[path], len(path), path))
        return cls(tuple(order), tuple(frequencies[path] for path in order))

    @classmethod
    def cartesian(cls, branching: Sequence[int]) -> RankTree:
        """All paths of `branching[d]` ranks at each depth d, level by level; raises as `nodes_of`."""
        nodes_of(branching)
        levels = (itertools.product(*map(range, branching[: depth + 1])) for depth in range(len(branching)))
        return cls(tuple(itertools.chain.from_iterable(levels)))

    @classmethod
    def listed(cls, paths: Iterable[Sequence[int]]) -> RankTree:
        """Given paths in any order; raises OptionError for a repeated path or a missing parent."""
        return cls(tuple(sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))))

    def first(self, nodes: int) -> RankTree:
        return self if nodes >= len(self) else RankTree(self.paths[:nodes], self.survival[:nodes])

    def within(self, depth: int, width: int) -> RankTree:
        kept = [i for i, path in enumerate(self.paths) if len(path) <= depth and max(path) < width]
        if len(kept) == len(self):
            return self
        survival = tuple(self.survival[i] for i in kept) if self.survival else ()
        return RankTree(tuple(self.paths[i] for i in kept), survival)

    @cached_property
    def shape(self) -> TreeShape:
        node_of = {path: node for node, path in enumerate(self.paths)} | {(): -1}
        return TreeShape(tuple(node_of[path[:-1]] for path in self.paths))

    @cached_property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @cached_property
    def width(self) -> int:
        """One more than the largest rank: the guesses per head that it needs."""
        return max((max(path) for path in self.paths), default=-1) + 1

    @cached_property
    def branching(self) -> tuple[int, ...]:
        return tuple(
            max(count for path, count in self.children.items() if len(path) == depth) for depth in range(self.depth)
        )

    @cached_property
    def children(self) -> Counter[RankPath]:
        return Counter(path[:-1] for path in self.paths)

    def fill(self, guesses: Tensor) -> Tensor:
        """Tokens `[nodes]`; row d of `guesses` `[depth or more, width or more]` has head d's tokens by rank."""
        places = self._places.get(guesses.device)
        if places is None:  # once for each device, because a copy to it would wait
            heads = torch.tensor([len(path) - 1 for path in self.paths], dtype=torch.int64)
            ranks = torch.tensor([path[-1] for path in self.paths], dtype=torch.int64)
            places = self._places[guesses.device] = heads.to(guesses.device), ranks.to(guesses.device)
        return guesses[places]

    @cached_property
    def _places(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    @property
    def expected_tokens(self) -> float:
        """Tokens per target call by the measurements: 1 + the sum of `survival`. NaN without measurements."""
        return 1.0 + math.fsum(self.survival) if self.survival or not self.paths else math.nan

    def as_dict(self) -> dict[str, Any]:
        return {"paths": [list(path) for path in self.paths], "reach": list(self.survival)}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RankTree:
        """Read the result of `as_dict`; raises OptionError for another form."""
        try:
            paths = tuple(tuple(int(rank) for rank in path) for path in record["paths"])
            return cls(paths, tuple(float(value) for value in record.get("reach", ())))
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(f'a tree of ranks holds "paths", lists of whole numbers, got {record!r}') from error


@dataclass(frozen=True, slots=True)
class ChosenPaths:
    """A tree for each row; `places` `[rows, nodes]`, int64, are indices of guesses, head * ranks + rank."""

    places: Numbers
    shapes: list[TreeShape]


class CandidatePaths:
    """The rank paths that can be among the `nodes` likeliest for any probabilities; each step chooses among them.

    No path (q_1, ..., q_e) with e <= d and each q_i <= r_i is less likely than (r_1, ..., r_d): it has fewer factors,
    and none is smaller. Those are the sum over e of (r_1 + 1) ... (r_e + 1) paths, itself among them, and they come
    first; so only paths with a sum of at most `nodes` are candidates. A parent's sum is a part of its child's.

    Worked example: with 2 heads, 3 ranks and 3 nodes the candidates are (0), (1), (2), (0, 0) and (0, 1); (1, 0) is
    none, because (0), (1) and (0, 0) come first.

    Attributes:
        nodes: limited to the number of candidates.
        paths: shorter ones first, then those of lower ranks. So a child comes after its parent.
        parents: `[candidates]`, int64: index of the parent; -1 for paths of a single rank.
        places: `[candidates]`, int64: index of the last guess, head * ranks + rank.

    Raises:
        OptionError: an argument below 1.
    """

    def __init__(self, depth: int, ranks: int, nodes: int) -> None:
        if min(depth, ranks, nodes) < 1:
            raise OptionError(f"heads, ranks and nodes of a tree are 1 or more, got {depth}, {ranks} and {nodes}")
        self.paths, parents, widths = _candidates(depth, ranks, nodes)
        self.nodes = min(nodes, len(self.paths))
        lengths = np.array([len(path) for path in self.paths])
        last = np.array([path[-1] for path in self.paths])
        self.parents = np.array(parents)
        self.places = (lengths - 1) * ranks + last
        starts = np.searchsorted(lengths, np.arange(1, lengths[-1] + 2))
        levels = [slice(first, end) for first, end in itertools.pairwise(starts)]
        self._levels = [(level, self.parents[level], last[level]) for level in levels]
        self._widths = np.array(widths)  # children of the root, then of each candidate; siblings are consecutive
        self._first_child = np.cumsum(self._widths) - self._widths

    def scores(self, log_probs: Numbers) -> Numbers:
        """Log probabilities of the candidates, heads taken as independent: `[rows, candidates]`, float32.

        No candidate scores more than its parent. `log_probs` `[depth, rows, ranks]` descend in each row; NaN is 0.
        """
        log_probs = np.fmin(log_probs, np.float32(0.0))  # by rounding it may be above 0, and a child above its parent
        found = np.empty((log_probs.shape[1], len(self.paths)), dtype=np.float32)
        for head, (level, parents, last) in enumerate(self._levels):
            own = log_probs[head].take(last, axis=1)
            found[:, level] = own if head == 0 else own + found.take(parents, axis=1)
        return found

    def chosen(self, scores: Numbers) -> Numbers:
        """The likeliest `nodes` candidates: `[rows, nodes]`, int64, ascending; of equal scores the first candidates."""
        rows, count = scores.shape
        if count == self.nodes:
            return np.broadcast_to(np.arange(count), scores.shape)
        least = np.partition(scores, count - self.nodes, axis=1)[:, count - self.nodes, None]
        kept, equal = scores > least, scores == least
        left = self.nodes - kept.sum(axis=1, keepdims=True)
        kept |= equal & (equal.cumsum(axis=1) <= left)
        return kept.nonzero()[1].reshape(rows, self.nodes)

    def trees(self, log_probs: Numbers) -> ChosenPaths:
        chosen = self.chosen(self.scores(log_probs))
        rows = np.arange(len(chosen))[:, None]
        node_of = np.empty((len(chosen), len(self.paths) + 1), dtype=np.int64)
        node_of[:, -1] = -1  # the entry of a parent of -1
        node_of[rows, chosen] = np.arange(self.nodes)
        parents = node_of[rows, self.parents[chosen]]
        return ChosenPaths(self.places[chosen], [shape_of(tuple(each)) for each in parents.tolist()])

    def find(self, ranks: Numbers) -> Numbers:
        """The candidates that are the first 1, 2, ... of the ranks: `[rows, depth]`, int64; -1 for none."""
        found = np.full(ranks.shape, -1)
        above = np.zeros(len(ranks), dtype=np.int64)  # indices into `_widths`; the root's is 0
        alive = np.ones(len(ranks), dtype=bool)
        for depth in range(min(ranks.shape[1], len(self._levels))):
            alive &= ranks[:, depth] < self._widths[above]
            child = self._first_child[above] + ranks[:, depth]
            found[:, depth] = np.where(alive, child, -1)
            above = np.where(alive, child + 1, 0)
        return found


def _candidates(depth: int, ranks: int, nodes: int) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    paths: list[tuple[int, ...]] = []
    parents: list[int] = []
    widths: list[int] = []
    # For each path on the last level its number, itself, its sum, and the part of the sum of its own length.
    level: list[tuple[int, tuple[int, ...], int, int]] = [(-1, (), 0, 1)]
    for _ in range(depth):
        below = []
        for number, path, before, alike in level:
            width = min(ranks, (nodes - before) // alike)
            widths.append(width)
            for rank in range(width):
                more = alike * (rank + 1)
                below.append((len(paths), (*path, rank), before + more, more))
                paths.append((*path, rank))
                parents.append(number)
        level = below
    return paths, parents, widths + [0] * len(level)


@lru_cache(maxsize=64)
def candidate_paths(depth: int, ranks: int, nodes: int) -> CandidatePaths:
    """The candidates for trees of `nodes` nodes, cached because they recur at every step."""
    return CandidatePaths(depth, ranks, nodes)


def likeliest_paths(log_probs: Numbers, nodes: int) -> ChosenPaths:
    """For each row the tree of the most probable rank paths, heads taken as independent.

    Of equally probable paths shorter ones come first, then those of lower ranks; so a tree is closed under parents. Its
    nodes are ordered by depth and then by rank: so few shapes occur, and their derived properties are cached.

    Worked example: two heads with probabilities 0.6 and 0.3, and 0.5 and 0.4, of their first two guesses make paths (0)
    of 0.6, (0, 0) and (1) of 0.3 each, (0, 1) of 0.24, (1, 0) of 0.15 and (1, 1) of 0.12. Three nodes are (0), (1), (0,
    0): parents -1, -1, 0, places 0, 1, 2; four have (0, 1) too: parents -1, -1, 0, 0, places 0, 1, 2, 3.

    Args:
        log_probs: `[depth, rows, ranks]`, float32: in each row the log probabilities of a head's guesses, descending.
        nodes: of a tree, 1 or more; a tree has fewer if there are fewer paths.

    Raises:
        OptionError: no head, no rank or no node.
    """
    depth, _, ranks = log_probs.shape
    return candidate_paths(depth, ranks, nodes).trees(log_probs)
