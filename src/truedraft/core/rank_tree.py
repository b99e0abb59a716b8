"""Trees of ranks: which guesses of each head are candidates, fixed before any head has guessed or chosen at each step.

A *rank path* (r_1, ..., r_d) stands for the token of rank r_1 (from 0) of the first head's guesses, below it the token
of rank r_2 of the second head's, and so on (Medusa 2401.10774, section 2.1.2). A `RankTree` is fixed before a request
starts; at each step the heads' guesses fill in its tokens.

`likeliest_paths` makes a tree for each step, by what the heads say at that step. A path's score is the sum of the log
probabilities that the heads give to its tokens, as if they erred independently. They do not, but they know at which
steps they are sure, which a tree that was fixed before does not.
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
from truedraft.core.tree import TreeShape
from truedraft.errors import OptionError

RankPath = tuple[int, ...]
Numbers: TypeAlias = NDArray[Any]
_SHAPES = 1024


@dataclass(frozen=True)
class RankTree:
    """Rank paths in an order in which each comes after its parent, so that the first n of them are a tree too.

    Worked example: the paths (0), (0, 0), (1), (0, 1) are node 0 below the root, node 1 below it, node 2 below the
    root and node 3 below node 0: parents (-1, 0, -1, 0), depths (1, 2, 1, 2).

    Attributes:
        paths: one for each node.
        survival: for each node the probability that it is accepted, as counted; empty where nobody counted.

    Raises:
        OptionError: a path comes twice, before its parent, or holds a negative rank; or there are not as many
            probabilities as paths.
    """

    paths: tuple[RankPath, ...]
    survival: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Every path has its parent before it."""
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
        """Number of nodes."""
        return len(self.paths)

    @classmethod
    def counted(cls, frequencies: Mapping[RankPath, float]) -> RankTree:
        """The order in which a greedy choice takes paths: the most frequent first.

        A path is never more frequent than its parent, so the first n are the tree of n nodes with the most expected
        tokens (Medusa 2401.10774, section 2.3.3). Among equals the shorter path comes first, then the lower ranks.
        """
        order = sorted(frequencies, key=lambda path: (-frequencies[path], len(path), path))
        return cls(tuple(order), tuple(frequencies[path] for path in order))

    @classmethod
    def cartesian(cls, branching: Sequence[int]) -> RankTree:
        """All paths of `branching[d]` ranks at each depth d, level by level: (2, 3) makes 2 + 6 nodes.

        Raises:
            OptionError: a width below 1, or none, or too many nodes.
        """
        nodes_of(branching)
        levels = (itertools.product(*map(range, branching[: depth + 1])) for depth in range(len(branching)))
        return cls(tuple(itertools.chain.from_iterable(levels)))

    @classmethod
    def listed(cls, paths: Iterable[Sequence[int]]) -> RankTree:
        """Paths written by hand, in any order; what they continue must be among them.

        Raises:
            OptionError: a path comes twice, or its parent is missing.
        """
        return cls(tuple(sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))))

    def first(self, nodes: int) -> RankTree:
        """The tree of the first `nodes` paths."""
        return self if nodes >= len(self) else RankTree(self.paths[:nodes], self.survival[:nodes])

    def within(self, depth: int, width: int) -> RankTree:
        """Only paths of at most `depth` ranks, each below `width`."""
        kept = [i for i, path in enumerate(self.paths) if len(path) <= depth and max(path) < width]
        if len(kept) == len(self):
            return self
        survival = tuple(self.survival[i] for i in kept) if self.survival else ()
        return RankTree(tuple(self.paths[i] for i in kept), survival)

    @cached_property
    def shape(self) -> TreeShape:
        """The parents of the nodes."""
        node_of = {path: node for node, path in enumerate(self.paths)} | {(): -1}
        return TreeShape(tuple(node_of[path[:-1]] for path in self.paths))

    @cached_property
    def depth(self) -> int:
        """Length of the longest path: how many heads it needs."""
        return max(map(len, self.paths), default=0)

    @cached_property
    def width(self) -> int:
        """One more than the largest rank: how many guesses of a head it needs."""
        return max((max(path) for path in self.paths), default=-1) + 1

    @cached_property
    def branching(self) -> tuple[int, ...]:
        """The most nodes that hang below one of depth 0, 1, ..."""
        return tuple(
            max(count for path, count in self.children.items() if len(path) == depth) for depth in range(self.depth)
        )

    @cached_property
    def children(self) -> Counter[RankPath]:
        """How many nodes hang below each path; () is the root."""
        return Counter(path[:-1] for path in self.paths)

    def fill(self, guesses: Tensor) -> Tensor:
        """The nodes' tokens, by what each head guesses.

        Args:
            guesses: `[depth or more, width or more]`: in row d the tokens that head d ranks first, second, ...

        Returns:
            `[nodes]`, of the dtype and on the device of `guesses`.
        """
        places = self._places.get(guesses.device)
        if places is None:  # once for each device, for a copy to it would be waited for
            heads = torch.tensor([len(path) - 1 for path in self.paths], dtype=torch.int64)
            ranks = torch.tensor([path[-1] for path in self.paths], dtype=torch.int64)
            places = self._places[guesses.device] = heads.to(guesses.device), ranks.to(guesses.device)
        return guesses[places]

    @cached_property
    def _places(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        """Which guess each node takes, `[nodes]` heads and `[nodes]` ranks, on each device where it was asked for."""
        return {}

    @property
    def expected_tokens(self) -> float:
        """Tokens per target call that the counts promise: 1 + the sum of `survival`. NaN where nobody counted."""
        return 1.0 + math.fsum(self.survival) if self.survival or not self.paths else math.nan

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `RankTree.of` reads it again."""
        return {"paths": [list(path) for path in self.paths], "reach": list(self.survival)}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RankTree:
        """What `as_dict` wrote.

        Raises:
            OptionError: it is something else.
        """
        try:
            paths = tuple(tuple(int(rank) for rank in path) for path in record["paths"])
            return cls(paths, tuple(float(value) for value in record.get("reach", ())))
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(f'a tree of ranks holds "paths", lists of whole numbers, got {record!r}') from error


@dataclass(frozen=True, slots=True)
class ChosenPaths:
    """A tree for each row; its nodes stand by depth, then by their ranks.

    Attributes:
        places: `[rows, nodes]`, int64: for each node the place of its guess, head * ranks + rank.
        shapes: `[rows]`: how the nodes hang together.
    """

    places: Numbers
    shapes: list[TreeShape]


class CandidatePaths:
    """The rank paths that can be among the `nodes` likeliest, whatever the heads say; what is chosen from at each step.

    No path (q_1, ..., q_e) with e <= d and each q_i <= r_i is less likely than (r_1, ..., r_d): it has fewer factors,
    and none is smaller. Those are the sum over e of (r_1 + 1) ... (r_e + 1) paths, itself among them, and they come
    first; so only paths whose sum is at most `nodes` are candidates. A parent's sum is a part of its child's.

    Worked example: with 2 heads, 3 ranks and 3 nodes the candidates are (0), (1), (2), (0, 0) and (0, 1); (1, 0) is
    none, for (0), (1) and (0, 0) come first.

    Args:
        depth: heads, 1 or more.
        ranks: guesses of each head, 1 or more.
        nodes: of a tree, 1 or more.

    Attributes:
        nodes: as given, or the number of candidates if that is less.
        paths: the candidates: shorter ones first, then those of lower ranks. So a child comes after its parent.
        parents: `[candidates]`, int64: which candidate each one continues; -1 for those of a single rank.
        places: `[candidates]`, int64: where its last guess is, head * ranks + rank.

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
        self._widths = np.array(widths)  # children of the root, then of each candidate; these stand side by side
        self._first_child = np.cumsum(self._widths) - self._widths

    def scores(self, log_probs: Numbers) -> Numbers:
        """Log probabilities of the candidates, heads taken as independent: `[rows, candidates]`, float32.

        Rounding is the same for all, so no candidate scores more than its parent, or than one of lower ranks.

        Args:
            log_probs: `[depth, rows, ranks]`, float32, falling in each row; NaN counts as 0.
        """
        log_probs = np.fmin(log_probs, np.float32(0.0))  # a rounded one may be above 0, and a child above its parent
        found = np.empty((log_probs.shape[1], len(self.paths)), dtype=np.float32)
        for head, (level, parents, last) in enumerate(self._levels):
            own = log_probs[head].take(last, axis=1)
            found[:, level] = own if head == 0 else own + found.take(parents, axis=1)
        return found

    def chosen(self, scores: Numbers) -> Numbers:
        """The likeliest `nodes` candidates: `[rows, nodes]`, int64, rising; of equal scores the first candidates.

        Args:
            scores: `[rows, candidates]`, by `scores`.
        """
        rows, count = scores.shape
        if count == self.nodes:
            return np.broadcast_to(np.arange(count), scores.shape)
        least = np.partition(scores, count - self.nodes, axis=1)[:, count - self.nodes, None]
        kept, equal = scores > least, scores == least
        left = self.nodes - kept.sum(axis=1, keepdims=True)
        kept |= equal & (equal.cumsum(axis=1) <= left)
        return kept.nonzero()[1].reshape(rows, self.nodes)

    def trees(self, log_probs: Numbers) -> ChosenPaths:
        """The trees of the likeliest paths; arguments as in `scores`."""
        chosen = self.chosen(self.scores(log_probs))
        rows = np.arange(len(chosen))[:, None]
        node_of = np.empty((len(chosen), len(self.paths) + 1), dtype=np.int64)
        node_of[:, -1] = -1  # where a parent of -1 looks
        node_of[rows, chosen] = np.arange(self.nodes)
        parents = node_of[rows, self.parents[chosen]]
        return ChosenPaths(self.places[chosen], [_shape(tuple(each)) for each in parents.tolist()])

    def find(self, ranks: Numbers) -> Numbers:
        """Which candidate the first 1, 2, ... ranks of a path are: `[rows, depth]`, int64; -1 where they are none.

        Args:
            ranks: `[rows, depth]`, int64, 0 or more each.
        """
        found = np.full(ranks.shape, -1)
        above = np.zeros(len(ranks), dtype=np.int64)  # places in `_widths`; the root's is 0
        alive = np.ones(len(ranks), dtype=bool)
        for depth in range(min(ranks.shape[1], len(self._levels))):
            alive &= ranks[:, depth] < self._widths[above]
            child = self._first_child[above] + ranks[:, depth]
            found[:, depth] = np.where(alive, child, -1)
            above = np.where(alive, child + 1, 0)
        return found


def _candidates(depth: int, ranks: int, nodes: int) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Paths, the parent of each, and how many children the root and each of them has."""
    paths: list[tuple[int, ...]] = []
    parents: list[int] = []
    widths: list[int] = []
    # Of each path on the last level its number, itself, its sum, and how many of its own length are in that.
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
    """The candidates for trees of `nodes` nodes; they recur at every step. Arguments as in `CandidatePaths`."""
    return CandidatePaths(depth, ranks, nodes)


def likeliest_paths(log_probs: Numbers, nodes: int) -> ChosenPaths:
    """For each row the tree of the most probable rank paths, heads taken as independent.

    Of equally probable paths shorter ones come first, then those of lower ranks; so a tree is one of its heads' word
    alone, closed under parents. Its nodes stand by depth and then by rank, not by probability: few shapes then recur
    often, and what is derived from a shape is kept with it.

    Worked example: two heads that give their first two guesses 0.6 and 0.3, and 0.5 and 0.4, make paths (0) of 0.6,
    (0, 0) and (1) of 0.3 each, (0, 1) of 0.24, (1, 0) of 0.15 and (1, 1) of 0.12. Three nodes are (0), (1), (0, 0):
    parents -1, -1, 0, places 0, 1, 2; four have (0, 1) too: parents -1, -1, 0, 0, places 0, 1, 2, 3.

    Args:
        log_probs: `[depth, rows, ranks]`, float32: in each row the logs of the probabilities that a head gives to its
            guesses, falling.
        nodes: of a tree, 1 or more; a tree has fewer where there are not as many paths.

    Raises:
        OptionError: no head, no rank or no node.
    """
    depth, _, ranks = log_probs.shape
    return candidate_paths(depth, ranks, nodes).trees(log_probs)


@lru_cache(maxsize=_SHAPES)
def _shape(parents: tuple[int, ...]) -> TreeShape:
    return TreeShape(parents)
