"""DFlash and DSpark as drafters: a block of tokens from one forward, on vectors of several layers of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from truedraft.cache import CachePool, RequestCache
from truedraft.cache.buffers import key_span
from truedraft.core import transfers
from truedraft.drafters.heads.levels import BEAMS, LevelDrafter, Tree, running
from truedraft.errors import OptionError
from truedraft.heads.block import BlockHead, DFlashHead, DSparkHead, Leaving
from truedraft.models.attention import Blocked, ChainLayout, Scoring
from truedraft.models.base import LanguageModel
from truedraft.options import check_share

BlockT = TypeVar("BlockT", bound=BlockHead)


class BlockRunner:
    """A block drafter in the dtype and on the device of a target; its weights are copied.

    Args:
        head: of the target's width and vocabulary.
        target: whose embeddings it reads and whose LM head it ends in, where it has none of its own.

    Attributes:
        head: the copy.
        device: where it computes.
        pool: where caches of requests come from.
        token_bytes: of a token's keys and values.
    """

    def __init__(self, head: BlockHead, target: LanguageModel) -> None:
        self.head = running(head, target)
        self._target = target
        self._scoring = Scoring(head.config.head**-0.5)
        self._table = self.head.rotary(self.head.norm.weight)
        self.device, self.records = target.device, False
        self.pool = CachePool(head.config.most_positions)
        self.token_bytes = 2 * head.config.kv_heads * head.config.head * head.config.depth * target.dtype.itemsize

    @torch.inference_mode()
    def read(self, caches: Sequence[RequestCache], vectors: Sequence[Sequence[Tensor]]) -> None:
        """Make keys and values of texts' next positions; caches keep them.

        Args:
            caches: of the texts.
            vectors: of each, those of each layer `[rows, width]`.
        """
        head = self.head
        counts = [len(own[0]) for own in vectors]
        together = [torch.cat(layer) for layer in zip(*vectors, strict=True)]
        rotation = self._at([range(each.length, each.length + n) for each, n in zip(caches, counts, strict=True)])
        for cache, count in zip(caches, counts, strict=True):
            cache.reserve(count)
        for call, made in enumerate(head.context_keys(head.context(together), rotation)):
            parts = (each.transpose(0, 1).split(counts, dim=1) for each in made)
            for cache, key, value in zip(caches, *parts, strict=True):
                cache.write(call, key, value)
        for cache, count in zip(caches, counts, strict=True):
            cache.commit(range(count))

    @torch.inference_mode()
    def draft(self, caches: Sequence[RequestCache], anchors: Tensor) -> Tensor:
        """What enters the LM head at each token that blocks guess: `[blocks, reach, width]`.

        Args:
            caches: of the blocks' texts, that hold all positions before the anchors.
            anchors: `[blocks]`: their last tokens.
        """
        block = self.head.config.block
        layouts = [_own_block(each.length, block, self.device) for each in caches]
        for cache in caches:
            cache.reserve(block)

        def attend(call: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mixed = []
            parts = (each.transpose(0, 1).split(block, dim=1) for each in (query, key, value))
            for cache, layout, *own in zip(caches, layouts, *parts, strict=True):
                keys, values = cache.write(call, own[1], own[2])
                mixed.append(layout.attend(own[0], keys, values, self._scoring))
            return torch.cat(mixed).flatten(1)

        embedded = self.head.inputs(anchors, self._target.embed)
        return self.head.vectors(embedded, self._at([range(e.length, e.length + block) for e in caches]), attend)

    @torch.inference_mode()
    def behind(self, x: Tensor, tokens: Tensor, state: Tensor | None) -> Leaving:
        """As `BlockHead.behind`."""
        return self.head.behind(x, tokens, state)

    @torch.inference_mode()
    def logits(self, leaving: Leaving) -> Tensor:
        """`[rows, guessed]`, of no more ids than the target has."""
        return self.head.logits(leaving, self._target.unembed)[:, : self._target.vocab_size]

    @torch.inference_mode()
    def chances(self, leaving: Leaving) -> list[float]:
        """That the target accepts the token of each row, by the confidence head."""
        return transfers.fetch([torch.sigmoid(self.head.acceptance(leaving).float())])[0]

    def _at(self, positions: Sequence[range]) -> Any:
        self._table.reach(max(each.stop for each in positions))
        return self._table.at(transfers.upload([place for each in positions for place in each], self.device))


def _own_block(length: int, block: int, device: torch.device) -> ChainLayout:
    """Rows that see `length` keys and all of their own block, and none of the slots behind that."""
    hidden = torch.arange(key_span(length + block) - length, device=device) >= block
    return ChainLayout(Blocked(length, hidden.expand(block, -1)))


class BlockDrafter(LevelDrafter[BlockT, BlockRunner]):
    """Drafts with a block drafter: all levels of a tree come from one forward of it for all requests.

    Rows of the block do not know what was drawn for those before them, so without a Markov head all nodes of a depth
    draw from one distribution. Arguments are those of `LevelDrafter`."""

    levels = 1
    _least = 0.0  # of the product of the confidence head's probabilities

    def _new_runner(self, target: LanguageModel) -> BlockRunner:
        return BlockRunner(self.head, target)

    def _grow(self, level: Sequence[Tree], grow: Callable[[Sequence[Tree], Tensor], Sequence[Tree]]) -> None:
        runner = self._running[0]
        texts = [self._texts[tree.request.id] for tree in level]
        caches = [text.cache for text in texts]
        runner.read(caches, [text.vectors().chunk(self.head.config.merged, dim=-1) for text in texts])
        tokens = transfers.upload([tree.request.tokens[-1] for tree in level], runner.device)
        x = runner.draft(caches, tokens)
        block = {tree: number for number, tree in enumerate(level)}
        state: Tensor | None = None
        alive = [1.0] * len(level)  # that the target comes to each open node, by the confidence head
        for slot in range(self.limits.depth):
            of = [block[tree] for tree in level for _ in tree.open]
            leaving = runner.behind(x[of, slot], tokens, state)
            if self._least > 0.0:
                alive = [before * own for before, own in zip(alive, runner.chances(leaving), strict=True)]
                kept = [row for row, survival in enumerate(alive) if survival >= self._least]
                level, leaving, alive = _kept(level, kept), leaving.at(kept), [alive[row] for row in kept]
                if not level:
                    return
            rows = {each: row for row, each in enumerate((own, node) for own in level for node in own.open)}
            level = grow(level, runner.logits(leaving))
            if not level:
                return
            tokens, parents = _opened(level, runner.device)
            above = [rows[each] for each in parents]
            state, alive = leaving.state[above], [alive[row] for row in above]


def _kept(level: Sequence[Tree], rows: Sequence[int]) -> list[Tree]:
    """Trees that have an open node of some rows, which stay open alone; rows are open nodes one behind another."""
    every, first = set(rows), 0
    for tree in level:
        count = len(tree.open)
        tree.keep_open([node for row, node in enumerate(tree.open, first) if row in every])
        first += count
    return [tree for tree in level if tree.open]


def _opened(level: Sequence[Tree], device: torch.device) -> tuple[Tensor, list[tuple[Tree, int]]]:
    """The tokens of trees' open nodes, one behind another, and the parent of each."""
    tokens, parents = [], []
    for tree in level:
        above = tree.unfed_parents  # before the nodes count as fed
        segment = tree.segment()
        rows = list(segment.rows)
        tokens.append(segment.tokens if len(rows) == len(segment.tokens) else segment.tokens[rows])
        parents += [(tree, above[row]) for row in rows]
    return torch.cat([each.to(device) for each in tokens]), parents


class DFlash(BlockDrafter[DFlashHead]):
    """Drafts with a DFlash head (arXiv 2602.06036)."""

    name: ClassVar[str] = "dflash"


class DSpark(BlockDrafter[DSparkHead]):
    """Drafts with a DSpark head (arXiv 2607.05147).

    Args:
        head: trained for the target.
        num_speculative_tokens: as of `LevelDrafter`, and all others but the last.
        branching: likewise.
        min_probability: likewise.
        nodes: likewise.
        beams: likewise.
        min_acceptance: draw no token that the target comes to and accepts with less than this probability by the
            confidence head, which knows the tokens before it, and neither this one nor later ones.

    Raises:
        OptionError: an option is out of range, or the head has no confidence head that is asked for.
    """

    name: ClassVar[str] = "dspark"

    def __init__(
        self,
        head: DSparkHead,
        *,
        num_speculative_tokens: int | None = None,
        branching: Sequence[int] | None = None,
        min_probability: float = 0.0,
        nodes: int | None = None,
        beams: int = BEAMS,
        min_acceptance: float = 0.0,
    ) -> None:
        super().__init__(
            head,
            num_speculative_tokens=num_speculative_tokens,
            branching=branching,
            min_probability=min_probability,
            nodes=nodes,
            beams=beams,
        )
        check_share("min_acceptance", min_acceptance)
        if min_acceptance and head.confidence_head is None:
            raise OptionError("goes by a confidence head, and this head has none; leave it out", field="min_acceptance")
        self._least = min_acceptance
