"""The trees stored with Medusa heads: counted ones, those chosen at each step, and their expected tokens.

Medusa 2401.10774, section 2.3.3, with joint counts, because heads err together. A replay visits positions as decoding
does: a step starts after the last accepted token, where the heads had just failed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truedraft.core.rank_tree import CandidatePaths, Numbers, RankPath, RankTree, candidate_paths
from truedraft.core.theory import expected_tokens_if_independent
from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.drafters.heads.calibration import COUNTED, COUPLED, LIKELIEST
from truedraft.errors import DataError, OptionError
from truedraft.kinds.medusa.guess_trees import MOST_RANKS
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.medusa.traced_guesses import HeadGuesses
from truedraft.measure.replay import (
    BUDGETS,
    CALIBRATED,
    CURVE_NODES,
    NEVER,
    RAW,
    TREE_TEMPERATURES,
    TraceReplay,
    WrittenText,
    cross_replayed,
    fit_survival,
    raw_is_kept,
)
from truedraft.models.lm_head import LmHead

_ROUNDS = 4
_TOP = 5
_ROWS = 1024  # positions per batch
_COUPLED = 3000  # approximate number of positions with noise for every token id


@dataclass(frozen=True)
class RankTable:
    """At each position of traces, the rank that each head gave to the true token.

    Attributes:
        ranks: `[positions, heads]`, int64, from 0; `limit` if the token was not among the first `limit` guesses, or is
            the trace's last or after it, which the engine never drafts.
        starts: of the traces, by `starts_of`.
    """

    ranks: Tensor
    starts: tuple[int, ...]
    limit: int

    @classmethod
    def of(cls, guesses: HeadGuesses, limit: int = 10) -> RankTable:
        """The ranks of true tokens below `limit`; raises `OptionError` if it is below 1, or too large."""
        heads = guesses.ranks.shape[1]
        if limit < 1 or limit**heads >= 1 << 62:
            raise OptionError(
                f"ranks must be 1 or more, and ranks ** heads below 2 ** 62; got {limit} and {heads} heads"
            )
        return cls(torch.where(guesses.ranks < 0, limit, guesses.ranks).clamp(max=limit), guesses.starts, limit)

    @property
    def heads(self) -> int:
        return self.ranks.shape[1]

    @cached_property
    def whole(self) -> Tensor:
        """Positions with every head's token inside the trace."""
        spans = itertools.pairwise(self.starts)
        rows = [torch.arange(first, max(first, end - self.heads)) for first, end in spans]
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)

    @cached_property
    def _codes(self) -> list[Tensor]:
        """For each depth the path down to it as one number `[positions]`; -1 if a head missed."""
        codes = []
        code = torch.zeros(len(self.ranks), dtype=torch.int64)
        for ranks in self.ranks.unbind(1):
            missed = (ranks >= self.limit) | (code < 0)
            code = torch.where(missed, -1, code * self.limit + ranks)
            codes.append(code)
        return codes

    def replay(self, tree: RankTree) -> TraceReplay:
        """Decode with the first nodes of a tree, for every number; `OptionError` for heads or ranks not counted."""
        if tree.depth > self.heads or tree.width > self.limit:
            raise OptionError(
                f"a tree {tree.depth} deep and {tree.width} wide needs as many heads and ranks; counted were "
                f"{self.heads} heads and {self.limit} ranks"
            )
        fewest = torch.full((len(self.ranks), self.heads), NEVER)
        for nodes, path in enumerate(tree.paths, 1):
            code = int(np.ravel_multi_index(path, (self.limit,) * len(path)))
            fewest[self._codes[len(path) - 1] == code, len(path) - 1] = nodes
        return TraceReplay(fewest, self.starts, len(tree))

    def frequencies(self, rows: Tensor) -> dict[RankPath, float]:
        """The share of `rows` at which the true continuation follows each path."""
        found: dict[RankPath, float] = {}
        for depth, every in enumerate(self._codes, 1):
            here = every[rows]
            codes, counts = here[here >= 0].unique(return_counts=True)
            paths = np.stack(np.unravel_index(codes.numpy(), (self.limit,) * depth), axis=1)  # [paths, depth]
            shares = (count / len(rows) for count in counts.tolist())
            found.update(zip(map(tuple, paths.tolist()), shares, strict=True))
        return found

    @cached_property
    def counted(self) -> dict[RankPath, float]:
        """The same over all positions with a whole continuation; raises `DataError` if traces are too short for any."""
        if not len(self.whole):
            raise DataError(
                f"rank paths of {self.heads} heads are counted on traces of at least {self.heads + 2} tokens, and "
                "there is none; let the target write longer answers"
            )
        return self.frequencies(self.whole)

    @cached_property
    def accuracy(self) -> tuple[tuple[float, ...], ...]:
        """`[heads][ranks]`: how often the true token had which rank, over the same positions."""
        ranks = self.ranks[self.whole]
        counts = [torch.bincount(each, minlength=self.limit + 1)[: self.limit] for each in ranks.unbind(1)]
        return tuple(tuple((count / len(ranks)).tolist()) for count in counts)


def most_frequent(frequencies: Mapping[RankPath, float], nodes: int) -> RankTree:
    """The tree of the most frequent paths; raises `OptionError` for a negative number of nodes."""
    if nodes < 0:
        raise OptionError(f"a tree has 0 nodes or more, got {nodes}")
    kept = heapq.nsmallest(nodes, frequencies, key=lambda path: (-frequencies[path], len(path), path))
    return RankTree.counted({path: frequencies[path] for path in kept})


def choose_tree(table: RankTable, nodes: int = 64, settle_for: int = 32) -> RankTree:
    """The paths to keep, in the order in which a budget takes them, with the probability that each is accepted.

    It begins with the most frequent paths over all positions. Then it repeatedly counts at the positions at which
    decoding with the first `settle_for` nodes starts its steps, and chooses again, while the replayed mean acceptance
    length grows. So 1 + the sum of the first `settle_for` probabilities is the replayed length itself.

    Args:
        table: of traces that no head was trained on.
        settle_for: node budget for which the order is optimized.

    Raises:
        DataError: every trace is shorter than the heads' reach.
        OptionError: a negative number of nodes.
    """
    best = most_frequent(table.counted, nodes)
    replay = table.replay(best)
    for _ in range(_ROUNDS):
        other = most_frequent(table.frequencies(replay.visited(settle_for)), nodes)
        again = table.replay(other)
        if not again.mean_acceptance_length(settle_for) > replay.mean_acceptance_length(settle_for):
            break
        best, replay = other, again
    return with_survival(table, best, settle_for)


def with_survival(table: RankTable, tree: RankTree, settle_for: int) -> RankTree:
    """With the share of steps in which each node is accepted when decoding with the first `settle_for` nodes."""
    found = table.frequencies(table.replay(tree).visited(settle_for))
    return RankTree(tree.paths, tuple(found.get(path, 0.0) for path in tree.paths))


@dataclass(frozen=True, slots=True)
class TreeTokens:
    """Expected tokens per target call of the first nodes of a tree.

    `replayed` is the reported value; `counted` is 1 + the sum of plain path frequencies, and `product` the
    same if heads erred independently.
    """

    nodes: int
    replayed: float
    counted: float
    product: float


def tokens_of_tree(
    table: RankTable, tree: RankTree, budgets: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
) -> list[TreeTokens]:
    """Expected tokens of a tree, on the counting `table`, at rising node budgets up to its size."""
    found, replay = [], table.replay(tree)
    for nodes in sorted({min(nodes, len(tree)) for nodes in budgets}):
        paths = tree.first(nodes).paths
        counted = 1.0 + math.fsum(table.counted.get(path, 0.0) for path in paths)
        product = expected_tokens_if_independent(paths, table.accuracy)
        found.append(TreeTokens(nodes, replay.mean_acceptance_length(nodes), counted, product))
    return [each for each in found if not math.isnan(each.replayed)]


@dataclass(frozen=True)
class CountedTree:
    """A tree for one kind of requests, compared with trees chosen at each step.

    Attributes:
        promises: expected tokens of its first nodes, at the reported numbers of nodes.
        accuracy: `[heads][ranks]`: how often the true token had which rank for each head.
        likeliest: trees chosen at each step: (nodes, replayed tokens per target call), for rising numbers of nodes.
        survival: the scores of these; None is the heads' own probabilities.
        coupled: the same for requests that share their noise with the target.
        chosen: the better trees: "likeliest" or "counted".
        compared: tokens per target call, the mean over `BUDGETS`: of trees chosen by calibrated survival
            ("calibrated"), by probability ("raw"), and counted, each fitted to one half of the text and replayed on the
            other; {} if a half is too short.
    """

    tree: RankTree
    promises: tuple[TreeTokens, ...]
    accuracy: tuple[tuple[float, ...], ...]
    positions: int
    likeliest: tuple[tuple[int, float], ...]
    survival: AcceptanceOdds | None = None
    coupled: AcceptanceOdds | None = None
    chosen: str = LIKELIEST
    compared: Mapping[str, float] = field(default_factory=dict)

    def promised(self, nodes: int) -> float:
        return next(each.replayed for each in self.promises if each.nodes == min(nodes, len(self.tree)))

    def promised_by_likeliest(self, nodes: int) -> float:
        """The same for trees chosen at each step, at a replayed number of nodes."""
        return dict(self.likeliest)[nodes]

    def as_dict(self) -> dict[str, Any]:
        return {
            "nodes": len(self.tree),
            "positions": self.positions,
            "promises": [asdict(each) for each in self.promises],
            "accuracy": [{"top_1": ranks[0], f"top_{_TOP}": sum(ranks[:_TOP])} for ranks in self.accuracy],
            "rank_accuracy": [list(ranks) for ranks in self.accuracy],
            LIKELIEST: {
                "nodes": [nodes for nodes, _ in self.likeliest],
                "tokens": [tokens for _, tokens in self.likeliest],
            },
            "chosen": self.chosen,
            "compared": dict(self.compared),
        }


def survival_of(trees: Mapping[str, CountedTree]) -> dict[str, AcceptanceOdds]:
    """The calibrated scores of trees, by the kind of requests."""
    found = {kind: each.survival for kind, each in trees.items()}
    found[COUPLED] = next((each.coupled for each in trees.values() if each.coupled is not None), None)
    return {kind: survival for kind, survival in found.items() if survival is not None}


def count_trees(heads: MedusaHeads, lm_head: LmHead, text: WrittenText) -> dict[str, CountedTree]:
    """Trees for greedy and for sampled requests, from otherwise unused text written at both of `TREE_TEMPERATURES`.

    Raises `DataError` for answers shorter than the heads require.
    """
    found = {}
    for kind, temperature in TREE_TEMPERATURES.items():
        traces = text.traces(temperature)
        halves = [HeadGuesses.along(heads, lm_head, traces[first::2], MOST_RANKS) for first in range(2)]
        coupled = None
        if temperature:
            some = traces[:: max(1, sum(trace.steps for trace in traces) // _COUPLED)]
            guesses = [HeadGuesses.coupled(heads, lm_head, some[first::2], MOST_RANKS, first) for first in range(2)]
            worse = raw_is_kept(compare(guesses), 0.0)  # coupled choices are as certain as greedy ones
            coupled = None if worse else _survival(HeadGuesses.joined(guesses))
        found[kind] = _count(halves, temperature, coupled)
    return found


def _count(halves: Sequence[HeadGuesses], temperature: float, coupled: AcceptanceOdds | None) -> CountedTree:
    guesses, compared = HeadGuesses.joined(halves), compare(halves)
    table = RankTable.of(guesses)
    tree = choose_tree(table)
    expected = tuple(tokens_of_tree(table, tree, BUDGETS))
    survival = None if raw_is_kept(compared, temperature) else _survival(guesses)
    points = replay_likeliest(guesses, survival).points()
    best = max(compared, key=lambda way: compared[way], default=CALIBRATED)  # the first of equal ones
    chosen = COUNTED if best == COUNTED else LIKELIEST
    return CountedTree(tree, expected, table.accuracy, len(table.whole), points, survival, coupled, chosen, compared)


def _survival(guesses: HeadGuesses) -> AcceptanceOdds:
    return fit_survival(guesses.log_probs, guesses.ranks)


def compare(halves: Sequence[HeadGuesses]) -> dict[str, float]:
    """Tokens per call of each way to make trees, see `CountedTree.compared`."""

    def ways(fitted: HeadGuesses, other: HeadGuesses) -> Mapping[str, TraceReplay]:
        return {
            CALIBRATED: replay_likeliest(other, _survival(fitted)),
            RAW: replay_likeliest(other),
            COUNTED: RankTable.of(other).replay(choose_tree(RankTable.of(fitted))),
        }

    enough = all(len(RankTable.of(half).whole) for half in halves)
    return cross_replayed(halves, ways, BUDGETS) if enough else {}


def replay_likeliest(
    guesses: HeadGuesses, survival: AcceptanceOdds | None = None, *, most: int = CURVE_NODES[-1]
) -> TraceReplay:
    """Replay the trees of the likeliest paths at every position. Raises `OptionError` if `most` is below 1.

    Args:
        guesses: at each position, as many of each head as a tree of `most` nodes may use (`MOST_RANKS`).
        survival: scores of paths; None uses the heads' own probabilities.
    """
    heads, positions, count = guesses.log_probs.shape
    kept = min(most, MOST_RANKS, count)
    by_depth = [candidate_paths(depth, kept, most) for depth in range(1, heads + 1)]
    fewest = torch.full((positions, heads), NEVER)
    for first in range(0, positions, _ROWS):
        here = slice(first, first + _ROWS)
        scores = guesses.log_probs[:, here, :kept]
        if survival is not None:
            scores = torch.stack([survival(own, depth) for depth, own in enumerate(scores, 1)])
        ranks = torch.where(guesses.ranks[here] < 0, count, guesses.ranks[here]).numpy()
        depths = guesses.depths[here]
        for depth, candidates in enumerate(by_depth, 1):
            rows = np.flatnonzero(depths == depth)
            if len(rows):
                places = _places(candidates, scores[:depth, rows].numpy(), ranks[rows, :depth])
                fewest[first + torch.from_numpy(rows), :depth] = torch.from_numpy(places)
    return TraceReplay(fewest, guesses.starts, most)


def _places(candidates: CandidatePaths, log_probs: Numbers, ranks: Numbers) -> Numbers:
    """The rank `[rows, depth]`, from 1, of each true path and its prefixes in the order in which paths are added.

    `log_probs` are `[depth, rows, ranks]`; paths that are not candidates get `NEVER`.
    """
    scores = candidates.scores(log_probs)  # [rows, candidates]
    found = candidates.find(ranks)
    numbers = np.arange(scores.shape[1])
    places = np.full(found.shape, NEVER)
    for head, own in enumerate(found.T):
        score = np.take_along_axis(scores, own[:, None], axis=1)  # arbitrary for paths that are no candidates
        before = (scores > score) | ((scores == score) & (numbers < own[:, None]))
        places[:, head] = np.where(own < 0, NEVER, before.sum(axis=1) + 1)
    return places
