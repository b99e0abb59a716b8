"""What trees that heads choose at each step would bring: replayed along traces for all numbers of nodes at once.

As in `rank_paths`, walking along a trace of the target's own draws is exact: the candidates are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from truedraft.core.likeliest_paths import CandidatePaths, Numbers, candidate_paths
from truedraft.drafters.guess_trees import MOST_RANKS
from truedraft.training.guesses import LOGITS, guesses_along, true_ranks
from truedraft.training.traces import Trace
from truedraft.training.walks import Walk

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaHeads
    from truedraft.models.lm_head import LmHead

CURVE_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes at which trees are replayed."""
_ROWS = 1024  # at once


@dataclass(frozen=True)
class LikelyTable:
    """At each position of some traces, how large a tree of the likeliest paths must be to hold the continuation.

    Attributes:
        nodes: `[positions, heads]`, int64: the fewest nodes with which the tree holds the true continuation down to
            this head; one more than `limit` where `limit` do not, or where no token is drafted.
        walk: along the traces.
        limit: the largest number of nodes that was asked for.
    """

    nodes: Tensor
    walk: Walk
    limit: int

    @classmethod
    def of(
        cls,
        heads: MedusaHeads,
        lm_head: LmHead,
        traces: Sequence[Trace],
        *,
        limit: int = CURVE_NODES[-1],
        logits_at_once: int = LOGITS,
    ) -> LikelyTable:
        """Look at every position of some traces.

        Args:
            heads: guess; they compute on their own device and in their own dtype.
            lm_head: of the target that wrote the traces.
            traces: written at the temperature at which the heads are to draft, by the target alone or losslessly.
            limit: as kept.
            logits_at_once: the largest number of logits that is held at a time.

        Raises:
            OptionError: a limit below 1.
        """
        places = _Places(heads.config.heads, min(limit, MOST_RANKS, heads.config.vocab_size), limit)
        depths = tree_depths(traces, heads.config.heads)
        found = [torch.zeros(0, heads.config.heads, dtype=torch.int64)]
        done = 0
        for logits, tokens in guesses_along(heads, lm_head, traces, logits_at_once):
            true, log_probs = true_ranks(logits, tokens).cpu().numpy(), _log_probs(logits, places.ranks).cpu().numpy()
            for first in range(0, len(true), _ROWS):
                rows = slice(first, first + _ROWS)
                here = places(log_probs[:, rows], true[rows], depths[done + first :][: len(true[rows])])
                found.append(torch.from_numpy(here))
            done += len(true)
        return cls(torch.cat(found), Walk.along(traces), limit)

    def accepted(self, nodes: int) -> Tensor:
        """Tokens that a step at each position would accept from a tree of so many nodes, at most `limit`: int64."""
        return (self.nodes <= nodes).sum(dim=1)

    def replay(self, nodes: int) -> float:
        """Mean acceptance length of decoding the traces with trees of so many nodes; see `Walk.mean_length`."""
        return self.walk.mean_length(self.accepted(nodes))

    def points(self, nodes: Iterable[int] = CURVE_NODES) -> tuple[tuple[int, float], ...]:
        """(nodes, replayed tokens per target call) for some numbers of nodes, those above `limit` left out."""
        return tuple((each, self.replay(each)) for each in nodes if each <= self.limit)


def _log_probs(logits: Tensor, count: int) -> Tensor:
    """`Likeliest.log_probs`; which of equally likely ids comes first does not matter here."""
    logits = logits.float()
    return logits.topk(count, dim=-1).values - logits.logsumexp(dim=-1, keepdim=True)


def tree_depths(traces: Sequence[Trace], most: int) -> Numbers:
    """How deep a tree may be at each position: where an answer ends at its length, the engine drafts what is left.

    Args:
        traces: one behind another, as in `Walk.along`.
        most: the depth elsewhere.

    Returns:
        `[positions]`, int64, 0 to `most`; 0 where no token but the last is left.
    """
    found = [np.zeros(0, dtype=np.int64)]
    for trace in traces:
        left = np.arange(trace.steps - 1, -1, -1)
        found.append(np.full_like(left, most) if trace.stopped else left.clip(max=most))
    return np.concatenate(found)


class _Places:
    """The place of each true path, and of those above it, in the order in which paths are taken up, from 1.

    Args:
        heads: that guess.
        ranks: guesses of each.
        limit: places behind it, and of paths that cannot be drafted, are `limit` + 1.
    """

    def __init__(self, heads: int, ranks: int, limit: int) -> None:
        self.ranks = ranks
        self._limit = limit
        self._by_depth = [candidate_paths(depth, ranks, limit) for depth in range(1, heads + 1)]

    def __call__(self, log_probs: Numbers, ranks: Numbers, depths: Numbers) -> Numbers:
        """Places `[rows, heads]`, int64.

        Args:
            log_probs: `[heads, rows, ranks]`.
            ranks: `[rows, heads]` of the true tokens.
            depths: `[rows]` of the trees.
        """
        found = np.full(ranks.shape, self._limit + 1)
        for depth, candidates in enumerate(self._by_depth, 1):
            rows = np.flatnonzero(depths == depth)
            if len(rows):
                found[rows, :depth] = self._of(candidates, log_probs[:depth, rows], ranks[rows, :depth])
        return found

    def _of(self, candidates: CandidatePaths, log_probs: Numbers, ranks: Numbers) -> Numbers:
        scores = candidates.scores(log_probs)
        found = candidates.find(ranks)
        numbers = np.arange(scores.shape[1])
        places = np.full(found.shape, self._limit + 1)
        for head, own in enumerate(found.T):
            score = np.take_along_axis(scores, own[:, None], axis=1)  # of a path that is none, the last one's: not used
            before = (scores > score) | ((scores == score) & (numbers < own[:, None]))
            places[:, head] = np.where(own < 0, self._limit + 1, np.minimum(before.sum(axis=1) + 1, self._limit + 1))
        return places
