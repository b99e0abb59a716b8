"""Heads that read pairs of a vector and the token behind it, level by level: EAGLE-3, and what is built like it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from truedraft.cache import CachePool, RequestCache
from truedraft.core.tree import chain_shape
from truedraft.drafters.heads.levels import LevelDrafter, LikeliestTree, Tree, running
from truedraft.drafters.tree_builder import TreeBuilder
from truedraft.heads.base import Head, over_whole_vocabulary
from truedraft.heads.eagle import Eagle3Head
from truedraft.models.attention import Full, Scoring
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.packing import ForwardPlan

_READ_TOKENS = 512


class PairRunner(Protocol):
    """A head that reads pairs of vectors and tokens, as it runs beside a target.

    Attributes:
        device: where it computes.
        pool: where caches of requests come from.
        token_bytes: of a token's keys and values.
    """

    device: torch.device
    pool: CachePool
    token_bytes: int

    def fuse(self, vectors: Tensor) -> Tensor:
        """Vectors of the target as they were observed, `[rows, layers * width]`, as `forward` reads them."""

    def forward(self, segments: Sequence[Segment], vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Read pairs of vectors and tokens; see `Eagle3Runner.forward`."""


HeadT = TypeVar("HeadT", bound=Head)
PairRunnerT = TypeVar("PairRunnerT", bound=PairRunner)


class Eagle3Runner:
    """An EAGLE-3 head in the dtype and on the device of a target; its weights are copied.

    Args:
        head: of the target's width and vocabulary.
        target: whose embeddings it reads and whose LM head it ends in, where it has none of its own.

    Attributes:
        device: where it computes.
        pool: where caches of requests come from.
        token_bytes: of a token's keys and values.
    """

    def __init__(self, head: Eagle3Head, target: LanguageModel) -> None:
        self._head = running(head, target)
        self._target = target
        self._scoring = Scoring(head.config.head**-0.5)
        self._table = self._head.rotary(self._head.norm.weight)
        self.device = target.device
        self.pool = CachePool(head.config.most_positions)
        entries = 2 * head.config.kv_heads * head.config.head * (1 + head.config.more_layers)
        self.token_bytes = entries * target.dtype.itemsize

    @torch.inference_mode()
    def fuse(self, vectors: Tensor) -> Tensor:
        """Vectors of each layer side by side, `[rows, layers * width]`, merged into one."""
        width = self._head.config.width
        return self._head.fuse([each[:, :width] for each in vectors.chunk(self._head.config.merged, dim=-1)])

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
        attend = partial(self._attend, plan, itertools.count())
        x = head.step(vectors, embedded, self._table.at(plan.positions[0] + start), attend)
        wanted = x.index_select(0, plan.rows)
        return wanted, self._logits(wanted)

    def _attend(self, plan: ForwardPlan, calls: Iterator[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        by_head = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return plan.attend(next(calls), Full(), self._scoring, *by_head).flatten(1)

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
        return over_whole_vocabulary(head.lm_head(leaving), head.draft_ids, target.vocab_size)


class PairDrafter(LevelDrafter[HeadT, PairRunnerT]):
    """Drafts with a head that reads pairs: a vector of the target, and the token behind it.

    A level of the tree is one forward for all requests, in which what the head gave stands for the target's vector.
    """

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

    def _behind(self, tree: TreeBuilder | LikeliestTree) -> tuple[Tensor, Tensor]:
        """Tokens and vectors that are read behind a tree's text in the same forward, and dropped then: none."""
        return torch.empty(0, dtype=torch.int64), torch.empty(0)

    def _catch_up(self, trees: Sequence[TreeBuilder | LikeliestTree]) -> tuple[Tensor, Tensor]:
        """Read pairs of vectors and the tokens behind them; what the runner gives at the last of each, and behind."""
        runner = self._running[0]
        last: list[tuple[RequestCache, Tensor, Tensor]] = []  # what the joint forward reads of each
        for tree in trees:
            text, request = self._texts[tree.request.id], tree.request
            tokens = torch.tensor(request.tokens[-text.behind :])
            fused = runner.fuse(text.take())
            *parts, end = zip(tokens.split(_READ_TOKENS), fused.split(_READ_TOKENS), strict=True)
            for ids, own in parts:
                runner.forward([Segment(text.cache, ids, chain_shape(len(ids)), ())], own)
                text.cache.commit(range(len(ids)))
            last.append((text.cache, *end))
        segments, vectors = [], []
        for (cache, ids, own), tree in zip(last, trees, strict=True):
            more, below = self._behind(tree)
            count = len(ids) + len(more)
            segments.append(Segment(cache, torch.cat([ids, more]), chain_shape(count), range(len(ids) - 1, count)))
            vectors += [own, below] if len(more) else [own]
        found = runner.forward(segments, torch.cat(vectors))
        for cache, ids, _ in last:
            cache.commit(range(len(ids)))
        return found


class Eagle3(PairDrafter[Eagle3Head, Eagle3Runner]):
    """Drafts with an EAGLE-3 head (2503.01840) on vectors of several layers of the target; options: `LevelDrafter`."""

    name: ClassVar[str] = "eagle"

    def _new_runner(self, target: LanguageModel) -> Eagle3Runner:
        return Eagle3Runner(self.head, target)
