"""The trees stored with Medusa heads: counted ones, those chosen at each step, and their expected tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from truedraft.core.rank_tree import CandidatePaths, Numbers, RankTree, candidate_paths
from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.drafters.heads.calibration import COUNTED, COUPLED, LIKELIEST
from truedraft.kinds.medusa.guess_trees import MOST_RANKS
from truedraft.kinds.medusa.rank_paths import RankTable, TreeTokens, choose_tree, tokens_of_tree
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

if TYPE_CHECKING:
    from truedraft.kinds.medusa.module import MedusaHeads
    from truedraft.models.lm_head import LmHead

_TOP = 5
_ROWS = 1024  # positions per batch
_COUPLED = 3000  # approximate number of positions with noise for every token id


@dataclass(frozen=True)
class CountedTree:
    """A tree for one kind of requests, compared with trees chosen at each step.

    Attributes:
        tree: nodes in the order of a greedy choice.
        promises: expected tokens of its first nodes, at the reported numbers of nodes.
        accuracy: `[heads][ranks]`: how often the true token had which rank for each head.
        likeliest: expected tokens of trees chosen at each step: (nodes, tokens per target call), replayed, for rising
            numbers of nodes.
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
        """Expected tokens per target call of the first `nodes` nodes, or of all if there are fewer."""
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
    """Trees for greedy and for sampled requests.

    Args:
        text: written by their target at both of `TREE_TEMPERATURES`, used for nothing else.

    Raises:
        DataError: the answers are shorter than the number of heads requires.
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
    """Tokens per call of each way to make trees, on text that it was not fitted to; see `CountedTree.compared`."""

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
    """Replay the trees of the likeliest paths at every position.

    Args:
        guesses: at each position, as many of each head as a tree of `most` nodes may use (`MOST_RANKS`).
        survival: scores of paths; None uses the heads' own probabilities.

    Raises:
        OptionError: `most` is below 1.
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
    """The rank, from 1, of each true path and its prefixes in the order in which paths are added.

    Args:
        log_probs: `[depth, rows, ranks]`.
        ranks: `[rows, depth]` of the true tokens.

    Returns:
        `[rows, depth]`, int64; `NEVER` for paths that are not candidates.
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
