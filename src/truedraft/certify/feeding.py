"""A text fed to a model in the shapes in which engines feed it: token by token, as drafted trees, beside others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.core.budget import Budget
from truedraft.core.trees import TreeShape, chain_shape
from truedraft.engine.scheduler import Scheduler
from truedraft.models.base import LanguageModel, Segment

_MOST_NODES = 32
"""More nodes of a tree than this change nothing about what its rows see, and cost memory."""


@dataclass(frozen=True, slots=True)
class Feeding:
    """What one forward holds of a text and of its neighbours.

    Attributes:
        name: for reports.
        depth: tokens of the text below the last known one in a forward, as if all had been drafted and accepted; 0 is
            plain decoding.
        siblings: wrong guesses beside each of them, which make the chain a tree.
        beside: new tokens of each neighbour in the same forward, all of them with logits.
        at_once: the whole text is one prompt; nothing is decoded.
    """

    name: str
    depth: int = 0
    siblings: int = 0
    beside: tuple[int, ...] = ()
    at_once: bool = False


ALONE = Feeding("one token at a time, alone")
"""Plain decoding of one request: what all others are compared with."""


def plain_feedings(limits: Budget, batch: int) -> list[Feeding]:
    """Shapes of plain decoding under continuous batching, beside `ALONE`: none holds a drafted token.

    Args:
        limits: of the drafter; forwards are made as long as speculation's.
        batch: requests of a step.
    """
    rows = min((1 + min(limits.nodes, _MOST_NODES)) * batch, Scheduler().chunk)
    found = [
        Feeding("as one prompt", at_once=True),
        Feeding("one token at a time beside another", beside=(1,)),
        Feeding(f"one token at a time beside a prompt of {rows}", beside=(rows,)),
    ]
    if batch > 2:
        found.append(Feeding(f"one token at a time, {batch} requests", beside=(1,) * (batch - 1)))
    return found


def drafted_feedings(limits: Budget, batch: int) -> list[Feeding]:
    """Shapes of speculation: a chain, and a tree where the drafter makes trees, alone and in a batch.

    Args:
        limits: of the drafter; nothing may be drafted within a zero budget.
        batch: requests of a step.
    """
    depth, nodes = min(limits.depth, limits.nodes), min(limits.nodes, _MOST_NODES)
    if limits.is_zero:
        return []
    found = [Feeding(f"chains of {depth}", depth), Feeding("chains of 1", 1)]
    width = min(limits.width, math.ceil(nodes / depth))
    if width > 1:
        found.append(Feeding(f"trees of {depth} x {width}", depth, width - 1))
    if batch > 1:
        found += [
            Feeding(f"{own.name}, {batch} requests", own.depth, own.siblings, (1 + nodes,) * (batch - 1))
            for own in list(found)
        ]
    return found


@torch.inference_mode()
def fed_logits(target: LanguageModel, text: Sequence[int], start: int, feeding: Feeding) -> Tensor:
    """Logits of one text, fed in a given shape from `start` on; what comes before is a prompt, in the engine's chunks.

    Drafted tokens are those of the text, so the path of the text is committed after each forward as an accepted one is;
    behind it hangs one wrong guess that is dropped.

    Args:
        target: the model.
        text: token ids, more than `start`.
        start: tokens of the prompt, at least 1.
        feeding: the shape.

    Returns:
        `[len(text) - start, vocab]` in the model's dtype: row i is what `text[start + i]` is chosen by.
    """
    caches = [target.new_cache() for _ in range(1 + len(feeding.beside))]
    try:
        return torch.cat(_Fed(target, text, caches, feeding).rows(start))
    finally:
        for cache in caches:
            target.release_cache(cache)


class _Fed:
    """One text on its way through a model; its neighbours start anew at each forward."""

    def __init__(
        self, target: LanguageModel, text: Sequence[int], caches: Sequence[RequestCache], feeding: Feeding
    ) -> None:
        self._target = target
        self._text = list(text)
        self._cache, *self._others = caches
        self._feeding = feeding

    def rows(self, start: int) -> list[Tensor]:
        """Rows of logits; see `fed_logits`."""
        wanted = len(self._text) - 1 if self._feeding.at_once else start
        chunk = Scheduler().chunk
        found: list[Tensor] = []
        for first in range(0, wanted, chunk):
            ids = self._text[first : min(first + chunk, wanted)]
            rows = [row for row in range(len(ids)) if first + row >= start - 1] if first + len(ids) >= start else []
            logits = self._forward(ids, chain_shape(len(ids)), rows, range(len(ids)))
            found += [logits] if rows else []
        while self._cache.length < len(self._text) - 1:
            ids, shape, path = self._drafted(self._cache.length)
            found.append(self._forward(ids, shape, range(len(ids)), path)[path])
        return found

    def _drafted(self, place: int) -> tuple[list[int], TreeShape, list[int]]:
        """The token at a place and the tree below it: ids, shape, and which nodes carry the text."""
        path = self._text[place : min(place + 1 + self._feeding.depth, len(self._text) - 1)]
        ids, parents, nodes = [path[0]], [-1], [0]
        for token in path[1:]:
            # Wrong guesses come first, so that keeping the path moves entries of the cache.
            ids += [self._other(token, number) for number in range(self._feeding.siblings)] + [token]
            parents += [nodes[-1]] * (self._feeding.siblings + 1)
            nodes.append(len(ids) - 1)
        if self._feeding.depth:
            ids.append(self._other(ids[-1], 0))
            parents.append(nodes[-1])
        return ids, TreeShape(tuple(parents)), nodes

    def _other(self, token: int, number: int) -> int:
        return (token + 1 + number) % self._target.vocab_size

    def _forward(self, ids: Sequence[int], shape: TreeShape, rows: Sequence[int], path: Sequence[int]) -> Tensor:
        """One forward beside the neighbours; keeps the path, and gives the logits of some rows."""
        segments = []
        for number, (cache, count) in enumerate(zip(self._others, self._feeding.beside, strict=True), 1):
            cache.rollback(0)
            tokens = [self._text[(7 * number + i) % len(self._text)] for i in range(count)]
            segments.append(_chain(cache, tokens[: self._target.context_length]))
        segments.append(Segment(self._cache, torch.tensor(list(ids)), shape, rows))
        logits = self._target.forward(segments).logits
        self._cache.commit(path)
        return logits[len(logits) - len(rows) :].clone()


def _chain(cache: RequestCache, tokens: Sequence[int]) -> Segment:
    return Segment(cache, torch.tensor(list(tokens)), chain_shape(len(tokens)), range(len(tokens)))
