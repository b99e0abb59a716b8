"""DFlash and DSpark as drafters: a block of tokens from one forward, on several layers of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.probs import probs_at, token_probs
from truedraft.core.tree import chain_shape
from truedraft.drafters.heads.layers import bits_for, copied, packed
from truedraft.drafters.heads.levels import BEAMS, UNRECORDED_WINDOWS, LevelDrafter, LevelRunner, Tree
from truedraft.drafters.tree_builder import TreeBuilder, draw_chains, take_chains
from truedraft.errors import OptionError
from truedraft.kinds.block.module import Attend, BlockHead, DFlashHead, DSparkHead
from truedraft.models.attention import AttentionPattern, Blocked, ChainLayout, ForwardPlan, Scoring
from truedraft.models.backends.graphs.heads import GraphBlocks, Grow
from truedraft.models.backends.graphs.replay import Outputs, Recorder
from truedraft.models.base import Choose, LanguageModel, Segment
from truedraft.models.cache import FIRST, RequestCache
from truedraft.models.cache.buffers import key_span
from truedraft.options import check_share

BlockT = TypeVar("BlockT", bound=BlockHead)
_Level: TypeAlias = tuple[Tensor, Sequence[float], Tensor | None]
"""A level of chains: tokens `[chains]`, their probabilities, and the distributions over the draft's ids that they were
drawn from, `[chains, guessed]`; None: one-hot."""
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
        self._target, like = target, own.norm.weight
        self._scoring = Scoring(config.head**-0.5)
        self._table = own.rotary(like)
        bits = bits_for(own)
        self.native = own.native_blocks(self._table, bits) if recorder is None else None
        self.head = packed(own, bits)
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
        """What `guess` reads at each guessed token, `[blocks, reach, ...]` each."""
        inputs = self.head.inputs(anchors, self._target.embed)
        return self.ends(self.head.vectors(inputs, self._table.at(positions), attend))

    def ends(self, x: Tensor) -> Outputs:
        """`slots` of inputs `[blocks, reach, width]` of the LM head: these, and its logits."""
        return x, self.head.base_logits(x, self._target.unembed)[..., : self._target.vocab_size]

    @torch.inference_mode()
    def guess(self, slot: Sequence[Tensor], tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        leaving = self.head.leaving_after(slot[0], tokens, state)
        return self.head.added_to(slot[1], leaving), leaving.state

    @torch.inference_mode()
    def run(self, caches: Sequence[RequestCache], vectors: Sequence[Tensor], anchors: Sequence[int]) -> Outputs:
        if self.graphs is not None:
            return self.graphs.run(caches, vectors, anchors)
        self.read(caches, vectors)
        return self.draft(caches, transfers.upload(anchors, self.device))

    @torch.inference_mode()
    def read_rows(self, cache: RequestCache, vectors: Tensor) -> None:
        """`read` of one text's next hidden states `[rows, layers * width]`, in parts."""
        if self.graphs is not None:
            self.graphs.read(cache, vectors)
            return
        for part in vectors.split(_READ_ROWS):
            self.read([cache], [part])

    @torch.inference_mode()
    def read(self, caches: Sequence[RequestCache], vectors: Sequence[Tensor]) -> None:
        """Store keys and values of texts' next positions, from `[rows, layers * width]` of each text."""
        counts, together = list(map(len, vectors)), torch.cat(list(vectors))
        if self.native is not None:
            self.native.read(ForwardPlan.of(list(map(_chain, caches, counts)), self.device, 1), together)
        else:
            every = zip(caches, counts, strict=True)
            places = self._positions([range(each.length, each.length + count) for each, count in every])
            for cache, count in zip(caches, counts, strict=True):
                cache.reserve(count)
            for call, made in enumerate(self.context_keys(together, places)):
                parts = (each.transpose(0, 1).split(counts, dim=1) for each in made)
                for cache, key, value in zip(caches, *parts, strict=True):
                    cache.write(call, key, value)
        for cache, count in zip(caches, counts, strict=True):
            cache.commit(range(count))

    @torch.inference_mode()
    def draft(self, caches: Sequence[RequestCache], anchors: Tensor) -> Outputs:
        """The slots of blocks after texts; caches hold all before the anchors."""
        config = self.head.config
        if self.native is not None:
            rows = range(config.block - config.reach, config.block)
            plan = ForwardPlan.of([_chain(each, config.block, rows) for each in caches], self.device, 1)
            inputs = self.head.inputs(anchors, self._target.embed).flatten(0, 1)
            return self.ends(self.native.run_blocks(plan, inputs).unflatten(0, (len(caches), -1)))
        block, seen = config.block, list(zip(config.patterns, config.causal, strict=True))
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


def _chain(cache: RequestCache, count: int, rows: Sequence[int] = ()) -> Segment:
    """So many rows after a text, read by their vectors instead of tokens; `rows` of them have outputs."""
    return Segment(cache, torch.zeros(count, dtype=torch.int64), chain_shape(count), rows)


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

    def _draw_at_once(self, builders: Sequence[TreeBuilder]) -> list[TreeBuilder]:
        if self._drafts_at_once or self._least > 0.0 or transfers.waits(device := self._running[0].device):
            return super()._draw_at_once(builders)
        return draw_chains(builders, device, self._run_chains, TreeBuilder.host_numbers)

    def _run_chains(
        self, choose: Choose, chains: Sequence[TreeBuilder], levels: int, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """As of `LevelDrafter`; on the host up to where the last chain stops, without what trees need in between."""
        if self._drafts_at_once:
            return super()._run_chains(choose, chains, levels, numbers)
        open_rows: Sequence[int] = range(len(chains))
        drawn: list[_Level] = []
        try:
            for level in self._draw_levels(choose, chains, numbers):
                drawn.append(level)
                open_rows = [row for row in open_rows if chains[row].extends(len(drawn) - 1, level[1][row])]
                if not open_rows:
                    break
        except Exception:
            if drawn:  # verified all the same, see `judged_if_it_fails`
                take_chains(chains, *self._together(drawn))
            raise
        return self._together(drawn)

    def _draw_levels(
        self, choose: Choose, chains: Sequence[TreeBuilder], numbers: Sequence[Tensor]
    ) -> Iterator[_Level]:
        slots, before = self._slots_after(chains)
        state: Tensor | None = None
        looks = any(chain.budget.looks for chain in chains)
        for level in range(self.head.reach):
            logits, state = self._running[0].guess([each[:, level] for each in slots], before, state)
            places, probs = choose(logits, *(each[:, level] for each in numbers))
            before = places if self._ids is None else self._ids.ids[places]
            chances = [1.0] * len(chains)
            if looks:
                drawn = places[:, None]
                chances = (token_probs(logits, drawn) if probs is None else probs_at(probs, drawn))[:, 0].tolist()
            yield before, chances, probs

    def _together(self, levels: Sequence[_Level]) -> tuple[Tensor, Tensor | None]:
        """Tokens `[chains, levels]`, and distributions over the vocabulary `[chains, levels, vocab]`, None: one-hot."""
        tokens, dists = torch.stack([each for each, *_ in levels], 1), [each for *_, each in levels if each is not None]
        probs = torch.stack(dists, 1) if dists else None
        if probs is not None and self._ids is not None:
            probs = self._ids.whole(probs.flatten(0, 1), 0.0).unflatten(0, probs.shape[:2])
        return tokens, probs

    def _slots_after(self, trees: Sequence[Tree]) -> tuple[Outputs, Tensor]:
        """The slots of trees' blocks, and their anchors."""
        vectors = [self._shared.unread(tree.request) for tree in trees]
        caches = [self._texts[tree.request.id].cache for tree in trees]
        anchors = [tree.request.tokens[-1] for tree in trees]
        runner = self._running[0]
        return runner.run(caches, vectors, anchors), transfers.upload(anchors, runner.device)

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
        slots, tokens = self._slots_after(level)
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
