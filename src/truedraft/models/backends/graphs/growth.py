"""Trees that grow on a device, level by level, as a part of a recording: what is drafted is chosen there, too.

A level of each tree has the same number of nodes, those that are open; which tokens they carry and what they hang below
is known on the device alone, so recordings are of one shape whatever is drafted. Nothing here waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from truedraft.core.top_k import TopK
from truedraft.models.backends.graphs.batch import WORD_BITS, Inputs, PagedBatch, load_in_a_row
from truedraft.models.backends.graphs.replay import Outputs, Work
from truedraft.models.base import Choose


class Growth(ABC):
    """Trees of some requests, while one forward of a recording runs.

    Attributes:
        beams: open nodes of each tree, but for the root alone at first.
    """

    beams: int

    @abstractmethod
    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Hang tokens below the open nodes, and open some of them.

        Args:
            logits: `[requests, ids]` at first, then `[requests * beams, ids]`: at the open nodes.

        Returns:
            The tokens `[requests * beams]`, int64, of the nodes that are open now, and the rows of the logits that they
            hang below, likewise.
        """

    @abstractmethod
    def found(self) -> Outputs:
        """What was drafted, `[requests, ...]` each."""


Grow: TypeAlias = Callable[..., Growth]
"""Makes trees that have their roots, given numbers `[requests, ...]` on the device. A recording is known by it."""


class LikeliestNodes(Growth):
    """Node for node what `truedraft.drafters.heads.levels.LikeliestTree` finds, in tensors.

    Nodes are numbered level by level, and below their parents in turn. Where fewer are open than there may be, the
    others hang below a node that does not exist: logs of their products are -inf.

    Args:
        beams: nodes that are open at each level, and tokens that each brings; no more than there are ids.
        nodes: most nodes of a tree.
        ids: `[guessed]`: that the logits are about; None for all of the vocabulary.
        limits: `[requests, 2]`: of these, how many are open, and how deep a tree is.
    """

    def __init__(self, beams: int, nodes: int, ids: Tensor | None, limits: Tensor) -> None:
        self.beams, self._nodes, self._ids = beams, nodes, ids
        self._widths, self._depths = limits[:, :1], limits[:, 1:]
        self._open = torch.full_like(self._widths, -1)  # [requests, open]: their numbers
        self._products = torch.zeros_like(self._open, dtype=torch.float64)  # likewise: logs
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents and logs [requests, open * beams]

    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        requests, opened = self._open.shape
        top, rank = TopK.of(logits, self.beams), torch.arange(self.beams, device=logits.device)
        tokens = top.ids if self._ids is None else self._ids[top.ids]
        gains = top.log_probs.double().view(requests, opened, self.beams)
        # On the host a node has no child without mass, nor one whose log is no number.
        possible = (gains > -torch.inf) & (rank < self._widths[:, None]) & (len(self._levels) < self._depths[:, None])
        logs = (self._products[:, :, None] + gains).masked_fill(~possible, -torch.inf).flatten(1)
        tokens, parents = tokens.view(requests, -1), self._open.repeat_interleave(self.beams, dim=1)
        before = sum(each.shape[1] for each, *_ in self._levels)
        self._levels.append((tokens, parents, logs))
        # The likeliest ones, by their numbers; those that are not open lie behind.
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
        """As `truedraft.kinds.redrafter.beams.trees_of` takes them: tokens and parents `[requests, nodes]` of the
        likeliest nodes, the likeliest first, and how many of them there are."""
        tokens, parents, logs = (torch.cat(each, dim=1) for each in zip(*self._levels, strict=True))
        kept = _first(logs, min(self._nodes, logs.shape[1]))
        place = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        numbers = torch.zeros_like(parents).scatter_(1, kept, place)
        parents = parents.gather(1, kept)
        above = numbers.gather(1, parents.clamp_min(0)).masked_fill_(parents < 0, -1)
        return tokens.gather(1, kept), above, (logs.gather(1, kept) > -torch.inf).sum(dim=1)


def _first(logs: Tensor, count: int) -> Tensor:
    """The places of the largest of each row, of equal ones the first, as Python sorts: `[requests, count]`."""
    return logs.sort(dim=1, descending=True, stable=True).indices[:, :count]


class ChosenChains(Growth):
    """Chains whose tokens are drawn one by one.

    Args:
        choose: draws them.
        whole: makes logits of all ids of those that are guessed; None: they are of all.
        numbers: `[requests, levels]` each, of what is chosen.
    """

    beams = 1

    def __init__(self, choose: Choose, whole: Callable[[Tensor], Tensor] | None, *numbers: Tensor) -> None:
        self._choose, self._whole, self._numbers = choose, whole, numbers
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []

    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        level = len(self._tokens)
        logits = logits if self._whole is None else self._whole(logits)
        tokens, probs = self._choose(logits, *(each[:, level] for each in self._numbers))
        self._tokens.append(tokens)
        self._probs += [] if probs is None else [probs]
        return tokens, torch.arange(len(tokens), device=tokens.device)

    def found(self) -> Outputs:
        """Tokens `[requests, levels]`, and where they are drawn the distributions `[requests, levels, vocab]`."""
        return torch.stack(self._tokens, 1), *([torch.stack(self._probs, 1)] if self._probs else [])


def own_bits(beams: int, level: int, words: int, like: Tensor) -> Tensor:
    """The bits of the nodes that are open behind level 0, 1, ..., among all that were: `[beams, words]`, int64.

    Worked example: of two at each level those behind level 1 are nodes 2 and 3, whose bits are 0b100 and 0b1000.

    Args:
        beams: open nodes at each level.
        level: as said.
        words: numbers of 64 bits.
        like: a tensor on the device.
    """
    node = torch.arange(beams * level, beams * (level + 1), device=like.device)[:, None]
    word = torch.arange(words, device=like.device)
    return torch.where(word == node // WORD_BITS, torch.ones_like(node) << node % WORD_BITS, 0)


def joined_work(
    batches: Sequence[PagedBatch],
    numbers: Sequence[Tensor],
    vectors: Tensor,
    forward: Callable[[list[Inputs], list[Tensor]], Outputs],
) -> Work[tuple[list[Inputs], list[Tensor]]]:
    """Forwards behind each other, of which the first reads vectors beside tokens.

    Args:
        batches: of each forward.
        numbers: `[requests, ...]` each, that are read beside.
        vectors: for one row of the first one, `[width]`.
        forward: computes from inputs and numbers of requests, padding included.
    """
    requests, buckets = len(batches[0].parts), [batch.bucket for batch in batches]

    def make() -> tuple[list[Inputs], list[Tensor]]:
        inputs = Inputs.in_a_row(buckets, len(batches[0].patterns), vectors.device, vectors)
        return inputs, [each.new_zeros(buckets[0].requests, *each.shape[1:]) for each in numbers]

    def load(held: tuple[list[Inputs], list[Tensor]]) -> None:
        load_in_a_row(held[0], batches)
        for memory, given in zip(held[1], numbers, strict=True):
            memory[:requests].copy_(given)

    return Work(make, load, lambda held: forward(*held), requests)
