"""DFlash and DSpark as drafters: a block of tokens from one forward, on several layers of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.drafters.heads.layers import bits_for, copied, packed
from truedraft.drafters.heads.levels import BEAMS, UNRECORDED_WINDOWS, LevelDrafter, LevelRunner, Tree
from truedraft.errors import OptionError
from truedraft.kinds.block.module import Attend, BlockHead, DFlashHead, DSparkHead
from truedraft.models.attention import AttentionPattern, Blocked, ChainLayout, Scoring
from truedraft.models.backends.graphs.heads import GraphBlocks, Grow
from truedraft.models.backends.graphs.replay import Outputs, Recorder
from truedraft.models.base import LanguageModel
from truedraft.models.cache import FIRST, RequestCache
from truedraft.models.cache.buffers import key_span
from truedraft.options import check_share

BlockT = TypeVar("BlockT", bound=BlockHead)
_READ_ROWS = 512  # of a text per forward


class BlockRunner(LevelRunner):
    """A block drafter with copied weights.

    Args:
        recorder: makes its recorded graphs; None: nothing is recorded.
        before: of the same sizes and target; its pages are reused.
    """

    graphs: GraphBlocks | None

    def __init__(
        self,
        head: BlockHead,
        target: LanguageModel,
        recorder: Recorder | None = None,
        before: BlockRunner | None = None,
    ) -> None:
        own, config = copied(head, target), head.config
        self.head = packed(own, bits_for(own))
        self._target, like = target, self.head.norm.weight
        self._scoring = Scoring(config.head**-0.5)
        self._table = self.head.rotary(like)
        graphs = None
        if recorder is not None:
            sizes, width = (config.depth, config.kv_heads, config.head), config.merged * config.width
            block, patterns, most = config.block, config.patterns, config.most_positions
            reused = None if before is None else before.graphs
            graphs = GraphBlocks(self, self._table, block, patterns, sizes, width, like, most, recorder, reused)
        super().__init__(config, target, graphs)

    def context_keys(self, vectors: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return self.head.context_keys(self.head.context([vectors]), self._table.at(positions))

    def slots(self, anchors: Tensor, positions: Tensor, attend: Attend) -> Outputs:
        """Input of the LM head at each guessed token: `[blocks, reach, width]`."""
        return (self.head.vectors(self.head.inputs(anchors, self._target.embed), self._table.at(positions), attend),)

    @torch.inference_mode()
    def guess(self, slot: Sequence[Tensor], tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        leaving = self.head.leaving_after(slot[0], tokens, state)
        return self.head.logits(leaving, self._target.unembed)[:, : self._target.vocab_size], leaving.state

    @torch.inference_mode()
    def run(self, caches: Sequence[RequestCache], vectors: Sequence[Tensor], anchors: Sequence[int]) -> Outputs:
        if self.graphs is not None:
            return self.graphs.run(caches, vectors, anchors)
        self.read(caches, [each.chunk(self.head.config.merged, dim=-1) for each in vectors])
        return self.draft(caches, transfers.upload(anchors, self.device))

    @torch.inference_mode()
    def read_rows(self, cache: RequestCache, vectors: Tensor) -> None:
        """`read` of one text's next hidden states `[rows, layers * width]`, in parts."""
        if self.graphs is not None:
            self.graphs.read(cache, vectors)
            return
        for part in vectors.split(_READ_ROWS):
            self.read([cache], [part.chunk(self.head.config.merged, dim=-1)])

    @torch.inference_mode()
    def read(self, caches: Sequence[RequestCache], vectors: Sequence[Sequence[Tensor]]) -> None:
        """Store keys and values of texts' next positions, from `[rows, width]` per text and layer."""
        head = self.head
        counts = [len(own[0]) for own in vectors]
        together = [torch.cat(layer) for layer in zip(*vectors, strict=True)]
        places = self._positions([range(each.length, each.length + n) for each, n in zip(caches, counts, strict=True)])
        for cache, count in zip(caches, counts, strict=True):
            cache.reserve(count)
        for call, made in enumerate(head.context_keys(head.context(together), self._table.at(places))):
            parts = (each.transpose(0, 1).split(counts, dim=1) for each in made)
            for cache, key, value in zip(caches, *parts, strict=True):
                cache.write(call, key, value)
        for cache, count in zip(caches, counts, strict=True):
            cache.commit(range(count))

    @torch.inference_mode()
    def draft(self, caches: Sequence[RequestCache], anchors: Tensor) -> Outputs:
        """The slots of blocks after texts; caches hold all before the anchors."""
        block, seen = self.head.config.block, list(zip(self.head.config.patterns, self.head.config.causal, strict=True))
        layouts = [{own: _block_layout(each, block, *own, self.device) for own in {*seen}} for each in caches]
        for cache in caches:
            cache.reserve(block)

        def attend(call: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mixed = []
            parts = (each.transpose(0, 1).split(block, dim=1) for each in (query, key, value))
            for cache, layout, *own in zip(caches, layouts, *parts, strict=True):
                keys, values = cache.write(call, own[1], own[2])
                mixed.append(layout[seen[call]].attend(own[0], keys, values, self._scoring))
            return torch.cat(mixed).flatten(1)

        return self.slots(anchors, self._positions([range(e.length, e.length + block) for e in caches]), attend)

    @torch.inference_mode()
    def chances(self, slot: Sequence[Tensor], tokens: Tensor, state: Tensor | None) -> list[float]:
        """Acceptance probability of each row's token, by the confidence head; arguments as of `guess`."""
        said = self.head.acceptance(self.head.leaving_after(slot[0], tokens, state))
        return transfers.fetch([torch.sigmoid(said.float())])[0]

    def _positions(self, places: Sequence[range]) -> Tensor:
        self._table.reach(max(each.stop for each in places))
        return transfers.upload([place for each in places for place in each], self.device)


def _block_layout(
    cache: RequestCache, block: int, pattern: AttentionPattern, causal: bool, device: torch.device
) -> ChainLayout:
    """Rows see what the anchor, after the cached keys, sees of these, and their own block, but no unused slots."""
    length = cache.stored
    first = length if pattern.reaches(cache.length + 1) else 0
    key, anchor = (
        torch.arange(first, key_span(length + block), device=device),
        torch.tensor(cache.length, device=device),
    )
    rows = torch.arange(block, device=device)[:, None] if causal else block - 1
    unseen = pattern.hides(anchor, torch.where(key < FIRST, key, key + cache.dropped))
    hidden = torch.where(key < length, unseen, key > length + rows)
    return ChainLayout(Blocked(first, hidden.expand(block, -1)))


class BlockDrafter(LevelDrafter[BlockT, BlockRunner]):
    """Drafts with all levels of a tree from one forward; arguments: `LevelDrafter`.

    Without a Markov head all nodes of a depth draw from one distribution.
    """

    levels = 1
    runs: ClassVar[type[BlockRunner]] = BlockRunner
    _reads_pairs = False
    _least = 0.0  # minimum product of the confidence head's probabilities

    def _new_runner(self, target: LanguageModel) -> BlockRunner:
        recorder = self._recorder(target) if self.head.config.recordable else None
        if recorder is None and target.device.type == "cuda":
            forwards = f"the forwards of {target.name} are not"
            self._unrecorded(forwards if self.head.config.recordable else UNRECORDED_WINDOWS)
        return self.runs(self.head, target, recorder, self._replaced(target))

    @property
    def _most_drafted(self) -> int:
        return self.head.config.block

    @property
    def _drafts_at_once(self) -> bool:
        return super()._drafts_at_once and self._least == 0.0

    def _read(self, cache: RequestCache, tokens: Sequence[int], vectors: Tensor) -> None:
        self._running[0].read_rows(cache, vectors)

    @torch.inference_mode()
    def _run_at_once(
        self, trees: Sequence[Tree], levels: int, beams: int, grow: Grow, numbers: Sequence[Tensor]
    ) -> Outputs:
        vectors = [self._shared.unread(tree.request) for tree in trees]
        caches = [self._texts[tree.request.id].cache for tree in trees]
        anchors = [tree.request.tokens[-1] for tree in trees]
        graphs = self._running[0].graphs
        assert graphs is not None
        return graphs.run_trees(caches, vectors, anchors, levels, beams, grow, numbers)

    def _grow(self, level: Sequence[Tree], grow: Callable[[Sequence[Tree], Tensor], Sequence[Tree]]) -> None:
        runner = self._running[0]
        vectors = [self._shared.unread(tree.request) for tree in level]
        anchors = [tree.request.tokens[-1] for tree in level]
        slots = runner.run([self._texts[tree.request.id].cache for tree in level], vectors, anchors)
        tokens = transfers.upload(anchors, runner.device)
        block = {tree: number for number, tree in enumerate(level)}
        state: Tensor | None = None
        alive = [1.0] * len(level)  # probability that each open node's parent path is accepted, by the confidence head
        for slot in range(self.limits.depth):
            of = transfers.upload([block[tree] for tree in level for _ in tree.open], runner.device)
            read = [each[:, slot].index_select(0, of) for each in slots]
            if self._least > 0.0:
                alive = [before * own for before, own in zip(alive, runner.chances(read, tokens, state), strict=True)]
                kept = [row for row, survival in enumerate(alive) if survival >= self._least]
                level, alive = _kept(level, kept), [alive[row] for row in kept]
                if not level:
                    return
                at = transfers.upload(kept, runner.device)
                read, tokens = [each.index_select(0, at) for each in read], tokens.index_select(0, at)
                state = None if state is None else state.index_select(0, at)
            rows = {each: row for row, each in enumerate((own, node) for own in level for node in own.open)}
            logits, state = runner.guess(read, tokens, state)
            level = grow(level, logits)
            if not level:
                return
            tokens, parents = _open_tokens(level, runner.device)
            above = [rows[each] for each in parents]
            state = state.index_select(0, transfers.upload(above, runner.device))
            alive = [alive[row] for row in above]


def _kept(level: Sequence[Tree], rows: Sequence[int]) -> list[Tree]:
    """Only trees with rows among `rows`, which number all open nodes in order."""
    every, first = set(rows), 0
    for tree in level:
        count = len(tree.open)
        tree.open = [node for row, node in enumerate(tree.open, first) if row in every]
        first += count
    return [tree for tree in level if tree.open]


def _open_tokens(level: Sequence[Tree], device: torch.device) -> tuple[Tensor, list[tuple[Tree, int]]]:
    """The tokens of all open nodes in order, and their parents."""
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

    name = "dflash"


class DSpark(BlockDrafter[DSparkHead]):
    """Drafts with a DSpark head (arXiv 2607.05147); arguments as of `LevelDrafter`, and one more.

    Raises `OptionError` for an option out of range, or `min_acceptance` without a confidence head.

    Args:
        min_acceptance: draw no token with a smaller probability of being reached and accepted, by the confidence head.
    """

    name = "dspark"

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
        context: int | None = None,
    ) -> None:
        super().__init__(
            head,
            num_speculative_tokens=num_speculative_tokens,
            branching=branching,
            min_probability=min_probability,
            nodes=nodes,
            beams=beams,
            context=context,
        )
        check_share("min_acceptance", min_acceptance)
        if min_acceptance and head.confidence_head is None:
            raise OptionError("goes by a confidence head, and this head has none; leave it out", field="min_acceptance")
        self._least = min_acceptance
