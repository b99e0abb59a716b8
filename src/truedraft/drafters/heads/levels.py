"""Drafters with a KV cache of their own that read several layers of the target, and grow trees level by level."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import NO_DRAFT, Budget, Hint, check_nodes, nodes_of
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.rank_tree import RankPath, RankTree
from truedraft.drafters.base import DraftRequest, Features, StepOutcome
from truedraft.drafters.draws import DraftIds
from truedraft.drafters.heads.base import HeadDrafter, trees_of
from truedraft.drafters.heads.head import Head
from truedraft.drafters.heads.layers import LayerConfig
from truedraft.drafters.heads.texts import HeadTexts, LayerText
from truedraft.drafters.held import HeadCaches, Held
from truedraft.drafters.tree_builder import (
    LikeliestTree,
    TextPath,
    TreeBuilder,
    draw_chains,
    draw_level,
    follow_texts,
    grow_likeliest,
    judged_if_it_fails,
)
from truedraft.errors import CompositionError, OptionError
from truedraft.models.backends.graphs.heads import ChosenChains, GraphBlocks, GraphPairs, Grow, LikeliestNodes
from truedraft.models.backends.graphs.replay import Outputs
from truedraft.models.backends.native.linear import likeliest_of
from truedraft.models.base import Choose, LanguageModel
from truedraft.models.cache import CachePool, RequestCache, bounded

BEAMS = 8
UNRECORDED_WINDOWS = "its windows are too short for that, or keep first tokens, or hide later rows of a block"


class LevelRunner:
    """A head in the dtype and on the device of a target.

    Attributes:
        pool: of the requests' caches.
        token_bytes: bytes of one token's keys and values.
        graphs: a whole draft as one recorded graph; None: nothing is recorded.
    """

    layers: int = 1
    graphs: GraphPairs | GraphBlocks | None = None

    def __init__(self, config: LayerConfig, target: LanguageModel, graphs: GraphPairs | GraphBlocks | None) -> None:
        self.device, self.layers, self.graphs = target.device, config.decoders, graphs
        self.pool = CachePool(config.most_positions) if graphs is None else graphs.pool
        self.token_bytes = 2 * config.kv_heads * config.head * self.layers * target.dtype.itemsize

    @property
    def records(self) -> bool:
        return self.graphs is not None

    @property
    def warmups(self) -> int:
        """Number of forwards slower than later ones of their shape."""
        return 0 if self.graphs is None else self.graphs.warmups


HeadT = TypeVar("HeadT", bound=Head)
LevelRunnerT = TypeVar("LevelRunnerT", bound=LevelRunner)
Tree = TypeVar("Tree", TreeBuilder, LikeliestTree, TextPath)


@lru_cache
def drawn_tree(nodes: int, depth: int) -> RankTree:
    """The most valuable draws, at most `nodes` of them and `depth` deep, the best first (as in Sequoia, 2402.12374).

    A draw of rank r is the first accepted one at its node with probability `_chance(r)`; the value of a path is the
    product over its ranks. Worked example: (0), (0, 0), (0, 0, 0), (1) of 0.48, 0.23, 0.11, 0.10.
    """
    chances: dict[RankPath, float] = {}
    waiting: list[tuple[float, RankPath]] = [(-_chance(0), (0,))]
    while len(chances) < nodes:
        less, path = heapq.heappop(waiting)
        chances[path] = -less
        above, rank = path[:-1], path[-1]
        heapq.heappush(waiting, (less / _chance(rank) * _chance(rank + 1), (*above, rank + 1)))
        if len(path) < depth:
            heapq.heappush(waiting, (less * _chance(0), (*path, 0)))
    return RankTree.counted(chances)


def _chance(rank: int) -> float:
    """Measured on EAGLE-3 at temperature 1: 0.46 to 0.6 of the first draws, 0.1 of the second, 0.05, 0.035, 0.027."""
    return 0.48 if rank == 0 else 0.1 * 0.65 ** (rank - 1)


class LevelDrafter(HeadDrafter[HeadT, LevelRunnerT]):
    """Drafts with a head that has its own KV cache, on hidden states of several layers of the target.

    After each verification accepted tokens are read with the target's own hidden states. Requests get a chain, or with
    `branching` a tree. With `nodes`, greedy requests get the likeliest tree (`LikeliestTree`), and sampled ones a tree
    of draws of that size (`drawn_tree`). With a reduced vocabulary this is still exact: other ids have probability 0.
    Raises `OptionError` for an option out of range.

    Args:
        num_speculative_tokens: length of a chain without `branching`; None is what it was trained for.
        branching: draws at each node of depth 0, 1, ...; (3, 2, 1) makes 3 + 6 + 6 nodes at most.
        min_probability: draft no further below a token that the head gave less than this; the token stays.
        nodes: size of the likeliest tree, and the maximum for a tree of draws.
        beams: open nodes per level of the likeliest tree, and tokens that each proposes.
        context: most tokens of a text that it sees and keeps, the first and the last ones (`BoundedContext`).
    """

    observes_lazily = False
    walks_along = True
    _reads_pairs = True  # of a hidden state and the next token; otherwise hidden states only

    def __init__(
        self,
        head: HeadT,
        *,
        num_speculative_tokens: int | None = None,
        branching: Sequence[int] | None = None,
        min_probability: float = 0.0,
        nodes: int | None = None,
        beams: int = BEAMS,
        context: int | None = None,
    ) -> None:
        super().__init__(head)
        self.context = context
        self._bounds = bounded(context, drops=True, name=self.name)
        self.features = self._features()
        length = head.reach if num_speculative_tokens is None else num_speculative_tokens
        check_nodes("num_speculative_tokens", length)
        self.branching = tuple(branching) if branching is not None else (1,) * length
        widest, most = max(self.branching, default=0), nodes_of(self.branching)
        if nodes is not None:
            if branching is not None:
                raise OptionError(f"drafter {self.name!r} takes branching or nodes, not both")
            check_nodes("nodes", nodes)
            check_nodes("beams", beams)
            self.ranks, beams = drawn_tree(nodes, length), min(beams, nodes)
            self.branching = self.ranks.branching
            widest, most = max(beams, *self.branching), nodes
        depth = length if nodes is not None else len(self.branching)
        if self.levels is not None and depth > head.reach:
            raise OptionError(f"this head guesses {head.reach} tokens at once, and {depth} are asked for")
        self._chooses, self._beams = nodes is not None, beams
        self.limits = Budget(depth, widest, most, min_probability)
        self._shared = self._new_texts()
        self._ids: DraftIds | None = None
        self._grows: dict[Choose | None, Grow] = {}  # by way of drawing; None: the likeliest tree
        self.held = Held(noted=[self._texts], tokens=self._held_tokens, shared=[self._shared])

    def _features(self) -> Features:
        config: Any = self.head.config
        if min(config.layers, default=-1) < 0 or getattr(config, "layers_unsettled", False):
            raise OptionError(
                "a head whose layers are not named, or that reads the target's embedding as one, cannot be run here; "
                "give its config at_usual_layers of the target"
            )
        return Features("kept", layers=config.layers)

    def _observed(self, outcome: StepOutcome) -> Tensor | None:
        """The target's hidden states at accepted tokens, `[rows, layers * width]`."""
        width = self.head.config.width  # a padded target has zeros after it
        return torch.cat([each[:, :width] for each in outcome.layers], dim=-1) if outcome.layers else None

    @property
    def kinds(self) -> frozenset[DrawKind]:
        single = max(self.branching, default=1) == 1
        return frozenset({DrawKind.INDEPENDENT if single else DrawKind.WITHOUT_REPLACEMENT})

    def _runner_for(self, target: LanguageModel) -> LevelRunnerT:
        layers = self.features.layers if self.features is not None else ()
        if max(layers, default=-1) >= target.shown_layers:
            raise CompositionError(
                f"this head reads layers {', '.join(map(str, layers))}, and {target.name} shows "
                f"{target.shown_layers}; take a head that was trained for it"
            )
        ids: Any = getattr(self.head, "draft_ids", None)
        self._ids = None if ids is None else DraftIds(ids.to(target.device), target.vocab_size)
        self._grows = {}
        return self._new_runner(target)

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        read = len(self.features.layers) if self.features is not None else 0
        unread = max(read, 1) * target.head_width * target.dtype.itemsize
        runner = self._running[0]
        self._shared.layers = runner.layers
        bounded(self.context, drops=runner.pool.drops, name=target.name)
        cached = 0 if runner.records else runner.token_bytes
        kept = 0 if self.context is None else self.context + self._most_drafted
        self.held.request_bytes = cached * kept
        self.held.token_bytes = unread + (0 if kept else cached)
        self.held.heads = self._heads()

    def with_head(self, head: HeadT) -> Self:
        other = super().with_head(head)
        other._shared = other._new_texts()
        other.held = replace(
            self.held, noted=[other._texts], tokens=other._held_tokens, heads=other._heads(), shared=[other._shared]
        )
        return other

    def take(self, head: HeadT) -> None:
        super().take(head)
        self._shared.prefixes.trim(0)  # made by other weights

    def _new_texts(self) -> HeadTexts:
        return HeadTexts(self._read, self._reads_pairs, lambda: self._running[0].pool, bounds=self._bounds)

    @property
    def _texts(self) -> dict[int, LayerText]:
        return self._shared.texts

    def _heads(self) -> list[HeadCaches]:
        runner = self._running[0]
        caches, drafted = self._shared.caches, self._most_drafted
        return [HeadCaches(runner.pool, caches, drafted, self.context)] if runner.records else []

    @property
    def _most_drafted(self) -> int:
        return max(self.limits.nodes, self.limits.depth * (self._beams if self._chooses else 1))

    def _replaced(self, target: LanguageModel) -> LevelRunnerT | None:
        """The previous runner for the target, so that its pages are reused."""
        return self._runner if target is self._runs_with else None

    def _unrecorded(self, why: str) -> None:
        detail = f"its drafts are not recorded as CUDA graphs: {why}"
        self.note = "; ".join(filter(None, [self.head.record.note, detail]))

    def _held_tokens(self) -> int:
        texts = list(self._texts.values())
        return sum(text.unread_rows + (text.cache.length if self.context is None else 0) for text in texts)

    @abstractmethod
    def _new_runner(self, target: LanguageModel) -> LevelRunnerT: ...
    def hint(self, request: DraftRequest) -> Hint:
        text = self._texts.get(request.id)
        if text is None or not (text.cache.length or text.unread):
            return Hint(finds=False)
        return Hint(behind=text.unread_rows + 1, confident=self.limits.width == 1)

    def begin(self, request: DraftRequest) -> None:
        self._shared.begin(request)

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        for request, outcome in zip(batch, outcomes, strict=True):
            text = self._texts[request.id]
            text.settle()
            vectors = self._observed(outcome)
            if vectors is not None:
                text.unread.append(vectors)

    def end(self, request: DraftRequest) -> None:
        self._shared.end(request)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        chosen: list[LikeliestTree] = []
        drawn: list[TreeBuilder] = []
        trees: list[LikeliestTree | TreeBuilder] = []
        for request, budget, own in zip(batch, budgets, noise, strict=True):
            text = self._texts[request.id]
            text.start()
            within = budget.within(self.limits) if text.unread else NO_DRAFT
            if self._chooses and request.params.greedy:
                searched = within if within.is_zero else replace(within, width=min(within.width, self._beams))
                chosen.append(LikeliestTree(text.cache, request, searched))
                trees.append(chosen[-1])
            else:
                within = within.cut(len(self.branching))
                device = self._running[0].device
                drawn.append(TreeBuilder(text.cache, request, within, own, self.branching, device, ranks=self.ranks))
                trees.append(drawn[-1])
        with judged_if_it_fails(trees):
            level = [each for each in chosen if not each.budget.is_zero]
            drawing = [each for each in drawn if not each.budget.is_zero]
            if self._drafts_at_once:
                level = self._choose_at_once(level)
            drawing = self._draw_at_once(drawing)
            if level:
                self._grow(level, partial(grow_likeliest, ids=self._ids, likeliest=likeliest_of))
            if drawing:
                self._grow(drawing, partial(draw_level, ids=self._ids))
        return [each.proposal() for each in trees]

    def along(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], texts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        paths = []
        for request, budget, text in zip(batch, budgets, texts, strict=True):
            own = self._texts[request.id]
            own.start()
            within = budget.within(self.limits) if own.unread else NO_DRAFT
            paths.append(TextPath(own.cache, request, within, text))
        if level := [each for each in paths if not each.budget.is_zero]:
            self._grow(level, partial(follow_texts, ids=self._ids))
        return [torch.stack(each.probs) if each.probs else torch.empty(0, 0) for each in paths]

    @property
    def _drafts_at_once(self) -> bool:
        """As long as the host need not read tokens in between."""
        return self._running[0].records

    def _choose_at_once(self, trees: Sequence[LikeliestTree]) -> list[LikeliestTree]:
        """In one recorded graph; returns the trees of requests with logits options."""
        chosen = [tree for tree in trees if tree.request.shaping is None]
        if chosen:
            target = self._running[1]
            beams = min(self._beams, target.vocab_size if self._ids is None else len(self._ids.on_host))
            ids = None if self._ids is None else self._ids.ids
            grow = self._grows.setdefault(None, partial(LikeliestNodes, beams, self.limits.nodes, ids))
            # A node deeper than there are nodes is not among the best.
            levels = max(tree.levels for tree in chosen)
            limits = np.array([(tree.budget.width, tree.budget.depth) for tree in chosen])
            numbers = [transfers.upload(limits, target.device)]
            found = trees_of(*self._run_at_once(chosen, levels, beams, grow, numbers))
            for tree, own in zip(chosen, found, strict=True):
                tree.take_tree(own)
        return [tree for tree in trees if tree not in chosen]

    def _draw_at_once(self, builders: Sequence[TreeBuilder]) -> list[TreeBuilder]:
        """Draw what is a chain in one call; returns the trees that cannot be drawn so."""
        if not self._drafts_at_once:
            return list(builders)
        return draw_chains(builders, self._running[0].device, self._run_chains, TreeBuilder.chain_numbers)

    def _run_chains(
        self, choose: Choose, chains: Sequence[TreeBuilder], levels: int, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        whole = None if self._ids is None else self._ids.whole
        grow = self._grows.setdefault(choose, partial(ChosenChains, choose, whole))
        tokens, *probs = self._run_at_once(chains, levels, 1, grow, numbers)
        return tokens, probs[0] if probs else None

    def _run_at_once(
        self, trees: Sequence[Tree], levels: int, beams: int, grow: Grow, numbers: Sequence[Tensor]
    ) -> Outputs:
        raise NotImplementedError

    @abstractmethod
    def _read(self, cache: RequestCache, tokens: Sequence[int], vectors: Tensor) -> None:
        """Read and commit rows of a text, from the token after each, and `[rows, layers * width]` of the target."""

    @abstractmethod
    def _grow(self, level: Sequence[Tree], grow: Callable[[Sequence[Tree], Tensor], Sequence[Tree]]) -> None:
        """Read the unread tokens of trees, then `grow` them by levels, from logits `[nodes, guessed]`."""
