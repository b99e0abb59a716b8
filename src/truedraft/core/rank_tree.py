"""Trees of ranks: which guesses of each head are candidates, before any head has guessed.

A *rank path* (r_1, ..., r_d) stands for the token of rank r_1 (from 0) of the first head's guesses, below it the token
of rank r_2 of the second head's, and so on (Medusa 2401.10774, section 2.1.2). A tree of them is fixed before a
request starts; at each step the heads' guesses fill in its tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from truedraft.core.budget import nodes_of
from truedraft.core.trees import TreeShape
from truedraft.errors import OptionError

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class RankTree:
    """Rank paths in an order in which each comes after its parent, so that the first n of them are a tree too.

    Worked example: the paths (0), (0, 0), (1), (0, 1) are node 0 below the root, node 1 below it, node 2 below the
    root and node 3 below node 0: parents (-1, 0, -1, 0), depths (1, 2, 1, 2).

    Attributes:
        paths: one for each node.
        reach: for each node the probability that it is accepted, as counted; empty where nobody counted.

    Raises:
        OptionError: a path comes twice, before its parent, or holds a negative rank; or there are not as many
            probabilities as paths.
    """

    paths: tuple[RankPath, ...]
    reach: tuple[float, ...] = ()

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
        if self.reach and len(self.reach) != len(self.paths):
            raise OptionError(f"{len(self.paths)} rank paths need as many probabilities, got {len(self.reach)}")

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
        return self if nodes >= len(self) else RankTree(self.paths[:nodes], self.reach[:nodes])

    def within(self, depth: int, width: int) -> RankTree:
        """Only paths of at most `depth` ranks, each below `width`."""
        kept = [i for i, path in enumerate(self.paths) if len(path) <= depth and max(path) < width]
        if len(kept) == len(self):
            return self
        return RankTree(tuple(self.paths[i] for i in kept), tuple(self.reach[i] for i in kept) if self.reach else ())

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
        """Tokens per target call that the counts promise: 1 + the sum of `reach`. NaN where nobody counted."""
        return 1.0 + math.fsum(self.reach) if self.reach or not self.paths else math.nan

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `RankTree.of` reads it again."""
        return {"paths": [list(path) for path in self.paths], "reach": list(self.reach)}

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
