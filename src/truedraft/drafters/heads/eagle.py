"""EAGLE-3 as drafter: a layer of its own over vectors of several layers of the target, level by level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.cache import CachePool, RequestCache
from truedraft.core.tree import chain_shape
from truedraft.drafters.heads.levels import LevelDrafter, LikeliestTree, Tree, over_all_ids, running
from truedraft.drafters.tree_builder import TreeBuilder
from truedraft.heads.eagle import Eagle3Head
from truedraft.models.attention import Full, Scoring
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.packing import ForwardPlan

_READ_TOKENS = 512


class Eagle3Runner:
    """An EAGLE-3 head in the dtype and on the device of a target; its weights are copied.

    Args:
        head: of the target's width and vocabulary.
        target: whose embeddings it reads and whose LM head it ends in, where it has none of its own.

    Attributes:
        device: where it computes.
        pool: where caches of requests come from.
    """

    def __init__(self, head: Eagle3Head, target: LanguageModel) -> None:
        self._head = running(head, target)
        self._target = target
        self._scoring = Scoring(head.config.head**-0.5)
        self._table = self._head.rotary(self._head.fc.weight)
        self.device = target.device
        self.pool = CachePool(head.config.most_positions)

    @torch.inference_mode()
    def fuse(self, layers: Sequence[Tensor]) -> Tensor:
        """Vectors `[rows, width]` of each layer, merged into one."""
        width = self._head.config.width
        return self._head.fuse([each[:, :width] for each in layers])

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Read pairs of vectors and tokens; caches take their keys and values.

        Args:
            segments: tokens of each request, with the rows that are wanted.
            vectors: `[total, width]`: that which stands before each token.

        Returns:
            What stands in for the target's vectors at the wanted rows, `[rows, width]`, and logits `[rows, vocab]`.
        """
        head, start = self._head, self._head.config.rope_start
        plan = ForwardPlan.of(segments, self.device, 1)
        self._table.reach(plan.furthest + start)
        embedded = self._embed(plan.tokens[0])
        x = head.step(vectors, embedded, self._table.at(plan.positions[0] + start), partial(self._attend, plan))
        wanted = x.index_select(0, plan.rows)
        return wanted, self._logits(wanted)

    def _attend(self, plan: ForwardPlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        by_head = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return plan.attend(0, Full(), self._scoring, *by_head).flatten(1)

    def _embed(self, tokens: Tensor) -> Tensor:
        own = self._head.embed_tokens
        found: Tensor = self._target.embed(tokens) if own is None else own(tokens)
        return found.to(self._target.dtype)

    def _logits(self, x: Tensor) -> Tensor:
        """`[rows, vocab]`; ids that the head does not guess among have no mass."""
        head, target = self._head, self._target
        leaving = head.leaving(x)
        if head.lm_head is None:
            return target.unembed(leaving)
        return over_all_ids(head.lm_head(leaving), head.draft_ids, target.vocab_size)


class Eagle3(LevelDrafter[Eagle3Head, Eagle3Runner]):
    """Drafts with an EAGLE-3 head (2503.01840): a level of the tree is one forward for all requests."""

    name: ClassVar[str] = "eagle"

    def _new_runner(self, target: LanguageModel) -> Eagle3Runner:
        return Eagle3Runner(self.head, target)

    def _grow(self, level: Sequence[Tree], grow: Callable[[Sequence[Tree], Tensor], Sequence[Tree]]) -> None:
        """Read what trees stand behind, then grow them level by level."""
        runner = self._running[0]
        vectors, logits = self._catch_up(level)
        while level:
            rows = {each: row for row, each in enumerate((own, node) for own in level for node in own.open)}
            level = grow(level, logits)
            if level:
                above = [rows[own, parent] for own in level for parent in own.unfed_parents]
                vectors, logits = runner.forward([own.segment() for own in level], vectors[above])

    def _catch_up(self, trees: Sequence[TreeBuilder | LikeliestTree]) -> tuple[Tensor, Tensor]:
        """Read pairs of vectors and the tokens behind them; what `Eagle3Runner.forward` gives at the last of each."""
        runner = self._running[0]
        last: list[tuple[RequestCache, Tensor, Tensor]] = []  # what the joint forward reads of each
        for tree in trees:
            text, request = self._texts[tree.request.id], tree.request
            tokens = torch.tensor(request.tokens[-text.behind :])
            vectors = runner.fuse(text.take(self.head.config.merged))
            *parts, end = zip(tokens.split(_READ_TOKENS), vectors.split(_READ_TOKENS), strict=True)
            for ids, own in parts:
                runner.forward([Segment(text.cache, ids, chain_shape(len(ids)), ())], own)
                text.cache.commit(range(len(ids)))
            last.append((text.cache, *end))
        segments = [Segment(cache, ids, chain_shape(len(ids)), (len(ids) - 1,)) for cache, ids, _ in last]
        found = runner.forward(segments, torch.cat([vectors for *_, vectors in last]))
        for cache, ids, _ in last:
            cache.commit(range(len(ids)))
        return found
