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
from truedraft.core.survival import Survival
from truedraft.drafters.guess_trees import MOST_RANKS
from truedraft.training.guesses import LOGITS, guesses_along, true_ranks
from truedraft.training.traces import Trace
from truedraft.training.walks import Walk

if TYPE_CHECKING:
    from truedraft.heads.medusa import MedusaConfig, MedusaHeads
    from truedraft.models.lm_head import LmHead

CURVE_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of nodes at which trees are replayed."""
_ROWS = 1024  # at once


@dataclass(frozen=True)
class HeadGuesses:
    """What heads guessed at each position of some traces, and how they ranked what the target said there.

    Attributes:
        log_probs: float32 `[heads, positions, guesses]`: logs of the probabilities of the likeliest guesses, falling.
        ranks: int64 `[positions, heads]`: ids that rank before the true token; -1 where none is drafted.
        depths: `[positions]`: how deep a tree may be there, see `tree_depths`.
        walk: along the traces.
    """

    log_probs: Tensor
    ranks: Tensor
    depths: Numbers
    walk: Walk

    @classmethod
    def along(
        cls, heads: MedusaHeads, lm_head: LmHead, traces: Sequence[Trace], count: int, logits_at_once: int = LOGITS
    ) -> HeadGuesses:
        """Look at every position.

        Args:
            heads: guess; they compute on their own device and in their own dtype.
            lm_head: of the target that wrote the traces.
            traces: written at the temperature at which the heads are to draft, by the target alone or losslessly.
            count: guesses of a head that are kept; of fewer ids all.
            logits_at_once: the largest number of logits that is held at a time.
        """
        return guessed(guesses_along(heads, lm_head, traces, logits_at_once), traces, heads.config, count)

    @classmethod
    def joined(cls, parts: Sequence[HeadGuesses]) -> HeadGuesses:
        """Those of several traces behind another."""
        log_probs = torch.cat([each.log_probs for each in parts], dim=1)
        depths = np.concatenate([each.depths for each in parts])
        return cls(log_probs, torch.cat([each.ranks for each in parts]), depths, Walk.joined([p.walk for p in parts]))


def guessed(
    logits: Iterable[tuple[Tensor, Tensor]], traces: Sequence[Trace], config: MedusaConfig, count: int
) -> HeadGuesses:
    """The likeliest guesses among logits at every position of some traces, a part after another.

    Args:
        logits: as `guesses_along` yields them.
        traces: on whose positions they are.
        config: of the heads.
        count: guesses of a head that are kept; of fewer ids all.
    """
    count = min(count, config.vocab_size)
    log_probs = [torch.zeros(config.heads, 0, count)]
    ranks = [torch.zeros(0, config.heads, dtype=torch.int64)]
    for own, tokens in logits:
        log_probs.append(_log_probs(own, count).cpu())
        ranks.append(torch.where(tokens < 0, -1, true_ranks(own, tokens)).cpu())
    depths = tree_depths(traces, config.heads)
    return HeadGuesses(torch.cat(log_probs, dim=1), torch.cat(ranks), depths, Walk.along(traces))


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
    def of(cls, guesses: HeadGuesses, survival: Survival | None = None, *, limit: int = CURVE_NODES[-1]) -> LikelyTable:
        """Look at every position.

        Args:
            guesses: at each position, as many of each head as a tree of `limit` nodes may take up (`MOST_RANKS`).
            survival: what paths are chosen by; None takes the heads' own probabilities.
            limit: as kept.

        Raises:
            OptionError: a limit below 1.
        """
        heads, positions, count = guesses.log_probs.shape
        places = _Places(heads, min(limit, MOST_RANKS, count), limit)
        found = [torch.zeros(0, heads, dtype=torch.int64)]
        for first in range(0, positions, _ROWS):
            rows = slice(first, first + _ROWS)
            scores = guesses.log_probs[:, rows, : places.ranks]
            if survival is not None:
                scores = torch.stack([survival(own, depth) for depth, own in enumerate(scores, 1)])
            ranks = guesses.ranks[rows]
            true = torch.where(ranks < 0, count, ranks).numpy()
            found.append(torch.from_numpy(places(scores.numpy(), true, guesses.depths[rows])))
        return cls(torch.cat(found), guesses.walk, limit)

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
