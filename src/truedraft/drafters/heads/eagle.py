"""EAGLE-3 as drafter: a layer of its own over vectors of several layers of the target, level by level."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from truedraft.cache import CachePool, RequestCache
from truedraft.core.budget import NO_DRAFT, Budget, Hint, check_nodes, nodes_of
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.top_k import TopK
from truedraft.core.tree import TokenTree, chain_shape, path_to, shape_of
from truedraft.drafters.base import DraftRequest, Features, StepOutcome
from truedraft.drafters.heads.base import HeadDrafter, HeadT
from truedraft.drafters.held import Held
from truedraft.drafters.tree_builder import TreeBuilder, draw_level
from truedraft.errors import CompositionError, OptionError
from truedraft.heads.base import over_whole_vocabulary
from truedraft.heads.eagle import Eagle3Head
from truedraft.models.attention import Full, Scoring
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.packing import ForwardPlan

_READ_TOKENS, _BEAMS = 512, 8

RunnerT = TypeVar("RunnerT", bound="HeadRunner")


class HeadRunner(Protocol):
    """A head that reads pairs of vectors and tokens, as it runs beside a target.

    Attributes:
        device: where it computes.
        pool: where caches of requests come from.
    """

    device: torch.device
    pool: CachePool

    def fuse(self, vectors: Tensor) -> Tensor:
        """Vectors of the target as they were observed, `[rows, layers * width]`, as `forward` reads them."""

    def forward(self, segments: Sequence[Segment], vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Read pairs of vectors and tokens; see `Eagle3Runner.forward`."""


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
        weights = {
            name: each.to(target.device, target.dtype if each.is_floating_point() else each.dtype, copy=True)
            for name, each in head.state_dict().items()
        }
        with torch.device("meta"):
            own = type(head)(head.config)
        own.load_state_dict(weights, assign=True)
        self._head = own.eval().requires_grad_(False)
        self._target = target
        self._scoring = Scoring(head.config.head**-0.5)
        self._table = own.rotary(own.fc.weight)
        self.device = target.device
        self.pool = CachePool(head.config.most_positions)

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


@dataclass(slots=True, eq=False)
class _Text:
    """What the head knows of a request: keys and values of pairs that it read, and vectors that it did not read yet."""

    cache: RequestCache
    unread: list[Tensor] = field(default_factory=list)  # of each layer side by side, [rows, layers * width]

    @property
    def behind(self) -> int:
        """Rows that were not read."""
        return sum(map(len, self.unread))


class LikeliestTree:
    """The nodes with the largest products of probabilities, of a search that keeps so many open at each level.

    EAGLE-2 (Li et al., arXiv 2406.16858), section 4: each open node brings its likeliest tokens, the best of all of
    them are opened next, and in the end the best nodes of all levels are kept. A node is never likelier than its
    parent, so these are a tree. They are chosen, not drawn: candidates, which every rule judges exactly.

    Worked example, two open at a level: the root brings a of 0.6 and b of 0.3, a brings c of 0.4 and d of 0.2, b brings
    e of 0.9 and f of 0.1. Products are 0.24, 0.12, 0.27 and 0.03, so c and e are opened, and the best four nodes are a,
    b, e and c.

    Args:
        cache: of the head.
        request: what is drafted for.
        budget: its width is how many are open, and how many tokens each brings.
    """

    def __init__(self, cache: RequestCache, request: DraftRequest, budget: Budget) -> None:
        self.cache, self.request, self.budget = cache, request, budget
        self.open: Sequence[int] = [-1]
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []  # logs of products
        self._depths: list[int] = []
        self._fed: list[int] = []

    @property
    def unfed_parents(self) -> Sequence[int]:
        """The parent of each node that is opened; -1 is the root."""
        return [self._parents[node] for node in self.open]

    def open_paths(self) -> list[tuple[int, ...]]:
        """The tokens from the root to each open node."""
        return [tuple(self._tokens[each] for each in path_to(node, self._parents)) for node in self.open]

    def grow(self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> None:
        """Hang the likeliest tokens of each open node below it, and open the best of them."""
        first = len(self._tokens)
        for parent, tokens, logs in zip(self.open, ids, log_probs, strict=True):
            above, depth = (self._scores[parent], self._depths[parent]) if parent >= 0 else (0.0, 0)
            for token, log in zip(tokens, logs, strict=True):
                if log > -math.inf:
                    self._tokens.append(token)
                    self._parents.append(parent)
                    self._scores.append(above + log)
                    self._depths.append(depth + 1)
        best = sorted(range(first, len(self._tokens)), key=lambda node: -self._scores[node])[: self.budget.width]
        grows = best and self._depths[best[0]] < self.budget.depth
        self.open = sorted(best) if grows else ()

    def segment(self) -> Segment:
        """The open nodes, with logits at each."""
        written = len(self._fed)
        self._fed += self.open
        place = {node: number for number, node in enumerate(self._fed)} | {-1: -1}
        shape = shape_of(tuple(place[self._parents[node]] for node in self._fed))
        tokens = torch.tensor([self._tokens[node] for node in self.open])
        return Segment(self.cache, tokens, shape, range(len(self.open)), written)

    def proposal(self) -> Proposal:
        """The best nodes, the likeliest first."""
        order = sorted(range(len(self._tokens)), key=lambda node: (-self._scores[node], self._depths[node]))
        kept = order[: self.budget.nodes]
        if not kept:
            return Proposal.empty()
        place = {node: number for number, node in enumerate(kept)} | {-1: -1}
        shape = shape_of(tuple(place[self._parents[node]] for node in kept))
        return Proposal.deterministic(TokenTree.of_ids([self._tokens[node] for node in kept], shape))


def grow_likeliest(trees: Sequence[LikeliestTree], logits: Tensor) -> list[LikeliestTree]:
    """Grow trees by a level; returns those that grow on.

    Args:
        trees: some.
        logits: `[nodes, vocab]`, the trees' open nodes one behind another.
    """
    counts = [len(tree.open) for tree in trees]
    if any(tree.request.shaping is not None for tree in trees):
        parts = zip(trees, logits.split(counts), strict=True)
        logits = torch.cat(
            [own if tree.request.shaping is None else tree.request.shaping.of_paths(own, tree.open_paths())
             for tree, own in parts]
        )  # fmt: skip
    top = TopK.of(logits, min(max(tree.budget.width for tree in trees), logits.shape[1]))
    start = 0
    for tree, count in zip(trees, counts, strict=True):
        here = slice(start, start + count), slice(tree.budget.width)
        tree.grow(top.ids[here].tolist(), top.log_probs[here].tolist())
        start += count
    return [tree for tree in trees if tree.open]


Tree = TypeVar("Tree", TreeBuilder, LikeliestTree)


class PairDrafter(HeadDrafter[HeadT, RunnerT]):
    """Drafts with a head that reads pairs: a vector of the target, and the token behind it.

    The head has a cache of its own: what it drafted is dropped after each verdict, and committed tokens are read again
    with the target's own vectors. A level of the tree is one forward for all requests. Greedy requests get a chain, a
    tree of so many draws at each node, or with `nodes` the likeliest tree (`LikeliestTree`). Sampled requests get draws
    from the head's distribution.

    It sees the rows of all tokens of a prompt, so the target computes them: no prefix of another request is copied.

    Args:
        head: of the target.
        num_speculative_tokens: length of a chain; ignored when `branching` is given; None is what it was trained for.
        branching: draws at each node of depth 0, 1, ...; (3, 2, 1) makes 3 + 6 + 6 nodes at most.
        min_probability: draft no further below a token that the head gave less than this; the token stays.
        nodes: of the likeliest tree, which greedy requests then get.
        beams: nodes of it that are open at each level, and tokens that each brings.

    Raises:
        OptionError: an option is out of range.
    """

    observes_lazily = False

    def __init__(
        self,
        head: HeadT,
        *,
        num_speculative_tokens: int | None = None,
        branching: Sequence[int] | None = None,
        min_probability: float = 0.0,
        nodes: int | None = None,
        beams: int = _BEAMS,
    ) -> None:
        super().__init__(head)
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
            widest, most = beams, nodes
        self._chooses = nodes is not None
        self.limits = Budget(len(self.branching), widest, most, min_probability)
        self._texts: dict[int, _Text] = {}
        self.held = Held(noted=[self._texts])

    @abstractmethod
    def _features(self) -> Features:
        """What the head reads of the target, as far as is known without it."""

    @abstractmethod
    def _observed(self, outcome: StepOutcome) -> Tensor | None:
        """The target's vectors at tokens that stay, `[rows, layers * width]`; None where there are none."""

    @property
    def kinds(self) -> frozenset[DrawKind]:
        single = max(self.branching, default=1) == 1
        return frozenset({DrawKind.INDEPENDENT if single else DrawKind.WITHOUT_REPLACEMENT})

    def hint(self, request: DraftRequest) -> Hint:
        text = self._texts.get(request.id)
        if text is None or not (text.cache.length or text.unread):
            return Hint(finds=False)
        return Hint(behind=text.behind + 1, confident=self.limits.width == 1)

    def begin(self, request: DraftRequest) -> None:
        self._texts[request.id] = _Text(self._running[0].pool.acquire())

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        """Drop what was drafted, and keep the vectors of tokens that stay."""
        for request, outcome in zip(batch, outcomes, strict=True):
            text = self._texts[request.id]
            text.cache.rollback(text.cache.length)
            vectors = self._observed(outcome)
            if vectors is not None:
                text.unread.append(vectors)

    def end(self, request: DraftRequest) -> None:
        text = self._texts.pop(request.id, None)
        if text is not None:
            self._running[0].pool.release(text.cache)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """Read what was committed since the last proposal, then draw level by level."""
        chosen: list[LikeliestTree] = []
        drawn: list[TreeBuilder] = []
        trees: list[LikeliestTree | TreeBuilder] = []
        for request, budget, own in zip(batch, budgets, noise, strict=True):
            text = self._texts[request.id]
            text.cache.rollback(text.cache.length)
            within = budget.within(self.limits) if text.unread else NO_DRAFT
            if self._chooses and request.params.greedy:
                chosen.append(LikeliestTree(text.cache, request, within))
                trees.append(chosen[-1])
            else:
                drawn.append(TreeBuilder(text.cache, request, within, own, self.branching, self._running[0].device))
                trees.append(drawn[-1])
        self._grow([each for each in chosen if not each.budget.is_zero], grow_likeliest)
        self._grow([each for each in drawn if not each.budget.is_zero], draw_level)
        return [each.proposal() for each in trees]

    def _grow(self, level: Sequence[Tree], grow: Callable[[Sequence[Tree], Tensor], Sequence[Tree]]) -> None:
        """Read what trees stand behind, then grow them level by level."""
        runner = self._running[0]
        vectors, logits = self._catch_up(level) if level else (torch.empty(0), torch.empty(0))
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
            tokens, fused = torch.tensor(request.tokens[-text.behind :]), runner.fuse(torch.cat(text.unread))
            text.unread.clear()
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
    """Drafts with an EAGLE-3 head (2503.01840) on vectors of several layers of the target; options: `PairDrafter`.

    Draws of a head with a reduced vocabulary are exact over the whole one, as ids that it never guesses have no
    probability there.

    Raises:
        OptionError: an option is out of range, or the head does not name its layers.
    """

    name: ClassVar[str] = "eagle"

    def _features(self) -> Features:
        layers = self.head.config.layers
        if min(layers, default=-1) < 0:
            raise OptionError(
                "a head whose layers are not named, or that reads the target's embedding as one, cannot be run here; "
                "give its config at_usual_layers of the target"
            )
        return Features("kept", layers=layers)

    def _runner_for(self, target: LanguageModel) -> Eagle3Runner:
        if max(self.head.config.layers) >= target.shown_layers:
            raise CompositionError(
                f"this head reads layers {', '.join(map(str, self.head.config.layers))}, and {target.name} shows "
                f"{target.shown_layers}; take a head that was trained for it"
            )
        return Eagle3Runner(self.head, target)

    def _observed(self, outcome: StepOutcome) -> Tensor | None:
        return torch.cat(outcome.layers, dim=-1) if outcome.layers else None
