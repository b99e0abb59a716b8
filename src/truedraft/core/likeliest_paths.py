"""The rank paths that heads themselves hold likeliest: a tree for each step, by what the heads say at that step.

A *rank path* (r_1, ..., r_d) stands for the token of rank r_1 (from 0) of the first head's guesses, below it the token
of rank r_2 of the second head's, and so on (Medusa 2401.10774, section 2.1.2). Its score is the sum of the log
probabilities that the heads give to these tokens, as if they erred independently. They do not, but they know at which
steps they are sure, which a tree that was fixed before does not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from truedraft.core.trees import TreeShape
from truedraft.errors import OptionError

Numbers: TypeAlias = NDArray[Any]
_SHAPES = 4096


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
