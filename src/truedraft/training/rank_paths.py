"""Which rank path the true continuation took: counted over traces, and replayed as decoding would walk along them.

Medusa 2401.10774, section 2.3.3, with joint counts: heads err together, which the product of their accuracies does
not see. Plain counts take all positions alike. Decoding does not: a step starts behind what the last one accepted,
at a place where the heads had just failed. `RankTable.replay` walks as decoding does, and is exact wherever the
candidates are deterministic: drawing from the target and following the child that carries the drawn token is the rule
itself, so along a trace of the target's own draws no chance is left.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from truedraft.core.rank_tree import RankPath, RankTree
from truedraft.errors import DataError, OptionError
from truedraft.theory import expected_tokens_if_independent, expected_tokens_of_paths
from truedraft.training.guesses import LOGITS
from truedraft.training.likely_paths import HeadGuesses
from truedraft.training.traces import Trace
from truedraft.training.walks import Walk

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.models.lm_head import LmHead


@dataclass(frozen=True)
class RankTable:
    """At each position of some traces, the rank that each head gave to the true token.

    Worked example, one head, limit 2: the ranks (0), (2), (1), (2) of a trace of 5 tokens say that the head was right
    at position 0, missed at 1, and had the token second at 2; what it guessed at 3 does not matter. A tree of the path
    (0) accepts 1 token at 0, so the next step starts at 2; it accepts none, and neither does the one at 3. Three steps
    emit 4 tokens: 1.33 each.

    Attributes:
        ranks: `[positions, heads]`, int64, from 0; `limit` where the token was not among the first `limit` guesses,
            or is the trace's last or beyond it, which the engine never drafts.
        starts: for each trace the row of its first position, then the number of rows; a trace of n tokens has n - 1.
        limit: ranks that are told apart.
    """

    ranks: Tensor
    starts: tuple[int, ...]
    limit: int

    @property
    def heads(self) -> int:
        """How many heads guess."""
        return self.ranks.shape[1]

    def __len__(self) -> int:
        """Number of positions."""
        return self.ranks.shape[0]

    @property
    def walk(self) -> Walk:
        """Along the traces."""
        return Walk(self.starts)

    @cached_property
    def whole(self) -> Tensor:
        """Rows `[some]` at which every head's token lies within the trace: those that plain counts take."""
        spans = itertools.pairwise(self.starts)
        rows = [torch.arange(first, max(first, end - self.heads)) for first, end in spans]
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)

    @cached_property
    def _codes(self) -> list[Tensor]:
        """For each depth the path down to it as one number `[positions]`; -1 where a head missed."""
        codes = []
        code = torch.zeros(len(self), dtype=torch.int64)
        for ranks in self.ranks.unbind(1):
            missed = (ranks >= self.limit) | (code < 0)
            code = torch.where(missed, -1, code * self.limit + ranks)
            codes.append(code)
        return codes

    def accepted(self, tree: RankTree) -> Tensor:
        """Nodes of the tree that a step at each position would accept: `[positions]`, int64.

        Raises:
            OptionError: the tree looks at more heads or ranks than were counted.
        """
        if tree.depth > self.heads or tree.width > self.limit:
            raise OptionError(
                f"a tree {tree.depth} deep and {tree.width} wide needs as many heads and ranks; counted were "
                f"{self.heads} heads and {self.limit} ranks"
            )
        found = torch.zeros(len(self), dtype=torch.int64)
        for depth, codes in enumerate(self._codes[: tree.depth], 1):
            nodes = [_code(path, self.limit) for path in tree.paths if len(path) == depth]
            found += torch.isin(codes, torch.tensor(nodes))
        return found

    def visited(self, tree: RankTree) -> Tensor:
        """Rows `[steps]` at which decoding with this tree starts its steps."""
        return self.walk.visited(self.accepted(tree))

    def replay(self, tree: RankTree) -> float:
        """Mean acceptance length of decoding these traces with the tree; see `Walk.mean_length`."""
        return self.walk.mean_length(self.accepted(tree))

    def frequencies(self, rows: Tensor) -> dict[RankPath, float]:
        """For each path of ranks that occurs, the share of `rows` at which the true continuation follows it."""
        found: dict[RankPath, float] = {}
        for depth, codes in enumerate(self._codes, 1):
            here = codes[rows]
            values, counts = here[here >= 0].unique(return_counts=True)
            for code, count in zip(values.tolist(), counts.tolist(), strict=True):
                found[_path(code, depth, self.limit)] = count / len(rows)
        return found


@dataclass(frozen=True)
class PathCounts:
    """Plain counts of rank paths: over all positions with a whole continuation, each counted once.

    Attributes:
        table: what was counted.
        frequencies: for each path the share of positions at which the true continuation follows it.
        accuracy: `[heads][ranks]`: for each head how often the true token had which rank.
    """

    table: RankTable
    frequencies: dict[RankPath, float]
    accuracy: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, table: RankTable) -> PathCounts:
        """Count a table.

        Raises:
            DataError: no trace is longer than what the heads reach.
        """
        rows = table.whole
        if not len(rows):
            raise DataError(
                f"rank paths of {table.heads} heads are counted on traces of at least {table.heads + 2} tokens, and "
                "there is none; let the target write longer answers"
            )
        ranks = table.ranks[rows]
        shares = [
            torch.bincount(each, minlength=table.limit + 1)[: table.limit] / len(rows) for each in ranks.unbind(1)
        ]
        return cls(table, table.frequencies(rows), tuple(tuple(share.tolist()) for share in shares))

    @property
    def positions(self) -> int:
        """How many were counted."""
        return len(self.table.whole)

    def tree(self, nodes: int = 64) -> RankTree:
        """The most frequent paths, in the order of a greedy choice."""
        return most_frequent(self.frequencies, nodes)

    def counted_tokens(self, tree: RankTree) -> float:
        """1 + the sum of the tree's path frequencies: expected tokens of a step that starts anywhere alike."""
        return expected_tokens_of_paths(self.frequencies.get(path, 0.0) for path in tree.paths)

    def product_tokens(self, tree: RankTree) -> float:
        """The same if heads erred independently: from their accuracies alone."""
        return expected_tokens_if_independent(tree.paths, self.accuracy)


def most_frequent(frequencies: dict[RankPath, float], nodes: int) -> RankTree:
    """The tree of the `nodes` most frequent paths; a path is never more frequent than its parent.

    Raises:
        OptionError: a negative number of nodes.
    """
    if nodes < 0:
        raise OptionError(f"a tree has 0 nodes or more, got {nodes}")
    kept = heapq.nsmallest(nodes, frequencies, key=lambda path: (-frequencies[path], len(path), path))
    return RankTree.counted({path: frequencies[path] for path in kept})


def count_rank_paths(
    heads: MedusaHeads, lm_head: LmHead, traces: Sequence[Trace], *, ranks: int = 10, logits_at_once: int = LOGITS
) -> PathCounts:
    """Rank the true continuations of traces under Medusa heads, and count their rank paths.

    Args:
        heads: guess; they compute on their own device and in their own dtype.
        lm_head: of the target that wrote the traces.
        traces: written at the temperature at which the tree is to be used, by the target alone or losslessly.
        ranks: guesses of a head that are told apart; of equal logits the lower id ranks first.
        logits_at_once: the largest number of logits that is held at a time.

    Raises:
        DataError: no trace is longer than what the heads reach.
        OptionError: ranks below 1, or so many that paths cannot be numbered.
    """
    return PathCounts.of(rank_table(heads, lm_head, traces, ranks=ranks, logits_at_once=logits_at_once))


def rank_table(
    heads: MedusaHeads, lm_head: LmHead, traces: Sequence[Trace], *, ranks: int = 10, logits_at_once: int = LOGITS
) -> RankTable:
    """The ranks of true tokens at every position of some traces; arguments as in `count_rank_paths`.

    Raises:
        OptionError: ranks below 1, or so many that paths cannot be numbered.
    """
    return table_of(HeadGuesses.along(heads, lm_head, traces, 1, logits_at_once), ranks)


def table_of(guesses: HeadGuesses, ranks: int = 10) -> RankTable:
    """The ranks of true tokens, of which the first `ranks` are told apart.

    Raises:
        OptionError: ranks below 1, or so many that paths cannot be numbered.
    """
    count = guesses.ranks.shape[1]
    if ranks < 1 or ranks**count >= 1 << 62:
        raise OptionError(f"ranks must be 1 or more, and ranks ** heads below 2 ** 62; got {ranks} and {count} heads")
    found = torch.where(guesses.ranks < 0, ranks, guesses.ranks).clamp(max=ranks)
    return RankTable(found, guesses.walk.starts, ranks)


def _code(path: RankPath, limit: int) -> int:
    code = 0
    for rank in path:
        code = code * limit + rank
    return code


def _path(code: int, depth: int, limit: int) -> RankPath:
    ranks = []
    for _ in range(depth):
        code, rank = divmod(code, limit)
        ranks.append(rank)
    return tuple(reversed(ranks))
