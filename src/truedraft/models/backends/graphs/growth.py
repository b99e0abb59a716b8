"""Trees that grow on a device, level by level, within a recording: drafted tokens are chosen there, too.

Each level of each tree has the same number of open nodes, so one recording serves all drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from truedraft.core.top_k import TopK
from truedraft.models.backends.graphs.batch import WORD_BITS
from truedraft.models.backends.graphs.replay import Outputs
from truedraft.models.base import Choose


class Growth(ABC):
    """Trees of some requests during one recorded forward, with `beams` open nodes each after the root."""

    beams: int

    @abstractmethod
    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Add children to the open nodes, and choose the next open nodes.

        Logits are `[requests, ids]` in the first call, then `[requests * beams, ids]`. Returns the new open nodes'
        tokens, and the rows of `logits` at their parents; both `[requests * beams]`, int64.
        """

    @abstractmethod
    def found(self) -> Outputs:
        """The drafts, `[requests, ...]` each."""


Grow: TypeAlias = Callable[..., Growth]
"""Makes trees with only their roots, from numbers `[requests, ...]` on the device. It is part of a recording's key."""


class LikeliestNodes(Growth):
    """Builds the tree of `truedraft.drafters.tree_builder.LikeliestTree`, node for node, with tensor operations.

    Nodes are numbered level by level, in the order of their parents. Where fewer than `beams` nodes are open, the
    others are children of a node that does not exist: their log probabilities are -inf.

    Args:
        beams: open nodes at each level, and children of each; at most the number of ids.
        ids: `[guessed]`: token ids of the logits; None for the whole vocabulary.
        limits: `[requests, 2]`: open nodes and depth of each tree.
    """

    def __init__(self, beams: int, nodes: int, ids: Tensor | None, limits: Tensor) -> None:
        self.beams, self._nodes, self._ids = beams, nodes, ids
        self._widths, self._depths = limits[:, :1], limits[:, 1:]
        self._open = torch.full_like(self._widths, -1)  # [requests, open]: node numbers
        self._products = torch.zeros_like(self._open, dtype=torch.float64)  # [requests, open]: log probabilities
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents and logs [requests, open * beams]

    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        requests, opened = self._open.shape
        top, rank = TopK.of(logits, self.beams), torch.arange(self.beams, device=logits.device)
        tokens = top.ids if self._ids is None else self._ids[top.ids]
        gains = top.log_probs.double().view(requests, opened, self.beams)
        # As on the host, no node has a child of probability 0 or with a log probability of NaN.
        possible = (gains > -torch.inf) & (rank < self._widths[:, None]) & (len(self._levels) < self._depths[:, None])
        logs = (self._products[:, :, None] + gains).masked_fill(~possible, -torch.inf).flatten(1)
        tokens, parents = tokens.view(requests, -1), self._open.repeat_interleave(self.beams, dim=1)
        before = sum(each.shape[1] for each, *_ in self._levels)
        self._levels.append((tokens, parents, logs))
        # The likeliest nodes in the order of their numbers, then those that are not open.
        count = logs.shape[1]
        best = _first(logs, self.beams)
        closed = (rank >= self._widths) | (logs.gather(1, best) == -torch.inf)
        best = (best + count * closed).sort(dim=1).values
        closed, best = best >= count, best % count
        self._products = logs.gather(1, best).masked_fill(closed, -torch.inf)
        self._open = best + before
        above = best // self.beams + opened * torch.arange(requests, device=logits.device)[:, None]
        return tokens.gather(1, best).flatten(), above.flatten()

    def found(self) -> Outputs:
        """Tokens and parents `[requests, nodes]` of the likeliest nodes, likeliest first, and each tree's size."""
        tokens, parents, logs = (torch.cat(each, dim=1) for each in zip(*self._levels, strict=True))
        kept = _first(logs, min(self._nodes, logs.shape[1]))
        place = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        numbers = torch.zeros_like(parents).scatter_(1, kept, place)
        parents = parents.gather(1, kept)
        above = numbers.gather(1, parents.clamp_min(0)).masked_fill_(parents < 0, -1)
        return tokens.gather(1, kept), above, (logs.gather(1, kept) > -torch.inf).sum(dim=1)


def _first(logs: Tensor, count: int) -> Tensor:
    """Indices of the largest entries of each row, the first of equal ones, as Python sorts: `[requests, count]`."""
    return logs.sort(dim=1, descending=True, stable=True).indices[:, :count]


class ChosenChains(Growth):
    """Chains with tokens drawn one by one by `choose` with `numbers` `[requests, levels]`.

    `whole` maps logits of the head's ids to logits of the whole vocabulary; None where they have it already.
    """

    beams = 1

    def __init__(self, choose: Choose, whole: Callable[[Tensor], Tensor] | None, *numbers: Tensor) -> None:
        self._choose, self._whole, self._numbers = choose, whole, numbers
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []

    def choose(self, logits: Tensor) -> Tensor:
        level = len(self._tokens)
        logits = logits if self._whole is None else self._whole(logits)
        tokens, probs = self._choose(logits, *(each[:, level] for each in self._numbers))
        self._tokens.append(tokens)
        self._probs += [] if probs is None else [probs]
        return tokens

    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.choose(logits)
        return tokens, torch.arange(len(tokens), device=tokens.device)

    def found(self) -> Outputs:
        """Tokens `[requests, levels]`, and where they were sampled their distributions `[requests, levels, vocab]`."""
        return torch.stack(self._tokens, 1), *([torch.stack(self._probs, 1)] if self._probs else [])


def own_bits(beams: int, level: int, words: int, like: Tensor) -> Tensor:
    """The mask bits of the nodes that are open after a level, from 0: `[beams, words]`, int64, on the device of `like`.

    Worked example: with two at each level, those open after level 1 are nodes 2 and 3, with the bits 0b100 and 0b1000.
    """
    node = torch.arange(beams * level, beams * (level + 1), device=like.device)[:, None]
    word = torch.arange(words, device=like.device)
    return torch.where(word == node // WORD_BITS, torch.ones_like(node) << node % WORD_BITS, 0)
