"""Draft trees of requests, which grow level by level, on the host or on a device: drawn, likeliest, or along a text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.probs import probs_at, probs_from_logits, token_probs
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.rank_tree import RankPath, RankTree
from truedraft.core.top_k import TopK
from truedraft.core.tree import TokenTree, chain_shape, path_to, shape_of
from truedraft.drafters.base import CutShortError, DraftRequest
from truedraft.drafters.draws import INDEPENDENT_DRAWS, DraftIds, OpenNode, drawing_for, existing, fetch_children
from truedraft.models.base import Choose, Segment
from truedraft.models.cache import RequestCache


class DraftTree:
    """The tree of one request while it grows level by level.

    Attributes:
        cache: of the request; None for trees drawn without a cache.
        tokens: of the nodes; tensors `[1]` if `on_device`.
        open: nodes with children still to add; -1 is the root.
    """

    on_device = False
    cache: RequestCache

    def __init__(self, request: DraftRequest, budget: Budget) -> None:
        self.request, self.budget = request, budget
        self.tokens: list[Any] = []
        self.parents: list[int] = []
        self.open: Sequence[int] = [-1]

    @property
    def levels(self) -> int:
        return min(self.budget.depth, self.budget.nodes)

    @property
    def unfed_parents(self) -> Sequence[int]:
        return [self.parents[node] for node in self.open]

    def open_paths(self) -> list[tuple[int, ...]]:
        """The tokens from the root to each open node; on a device only their number is correct."""
        paths = (path_to(node, self.parents) for node in self.open)
        return [tuple(0 if self.on_device else self.tokens[node] for node in path) for path in paths]

    def shaped(self, logits: Tensor) -> Tensor:
        """Logits `[open nodes, vocab]` after the request's options."""
        shaping = self.request.shaping
        return logits if shaping is None else shaping.of_paths(logits, self.open_paths())

    def segment(self) -> Segment:
        """The nodes to feed next, with the rows of the open ones."""
        raise NotImplementedError

    def proposal(self) -> Proposal:
        raise NotImplementedError


class TreeBuilder(DraftTree):
    """Builds the draft tree of one request, level by level, which is also the order of its nodes.

    Shapes may depend on the draws; then the host reads each level. A chain without a probability threshold is as long
    as its budget allows: on a device its tokens are not read, and each feeds the next.

    Args:
        branching: draws at each node of depth 0, 1, ...; with `ranks` at most so many.
        uncommitted: number of the text's last tokens that were fed and not committed; the tree is below them.
        ranks: the draws by their ranks at their node, the best ones first; a budget of n nodes gets the first n.

    Attributes:
        draws_alike: builders with equal values share one computation.
    """

    def __init__(
        self,
        cache: RequestCache,
        request: DraftRequest,
        budget: Budget,
        noise: Noise,
        branching: Sequence[int],
        device: torch.device,
        uncommitted: int = 0,
        ranks: RankTree | None = None,
    ) -> None:
        super().__init__(request, budget.cut(len(branching)))
        self.cache = cache
        self.drawing = drawing_for(request.params, max(branching))
        reads_paths = request.shaping is not None and request.shaping.reads_paths
        self.on_device = transfers.waits(device) and is_fixed_chain(budget, branching) and not reads_paths
        self.draws_alike = (self.on_device, *request.params.probs_key, request.params.seeded)
        self._noise = noise
        self._branching = branching
        self._counts = None if ranks is None else ranks.first(budget.nodes).children
        self._ranks: list[RankPath] = [()]  # by tree row
        self._depth = 0
        self._draws: list[tuple[Draw, ...]] = [()]  # by tree row
        self._confidence: list[float] = []  # the drafter's probabilities of the tokens
        self._survival = [1.0]  # by tree row
        self._probs: list[Tensor] = []  # [nodes of a level, guessed]
        self._ids_of_probs: list[DraftIds | None] = []  # of their columns; None is the whole vocabulary
        self._dists = 0  # nodes with drawn children
        self._fed = 0
        self._uncommitted = uncommitted
        self._whole: Proposal | None = None

    @property
    def grows(self) -> bool:
        return bool(self.open)

    @property
    def unfed_parents(self) -> Sequence[int]:
        return self.parents[self._fed :]

    def open_nodes(self) -> list[OpenNode]:
        """The next draws; the node budget cuts in node order, so before anything is drawn."""
        first, found, most = len(self.tokens), [], self.budget.nodes
        for node in self.open:
            width = max(0, min(self._width(node), self.budget.width, most - first))
            found.append(OpenNode(self._noise, self._depth, first, width))
            first += width
        return found

    def _width(self, node: int) -> int:
        return self._branching[self._depth] if self._counts is None else self._counts[self._ranks[node + 1]]

    def add(
        self,
        children: Sequence[Sequence[tuple[int | Tensor, float]]],
        probs: Tensor | None,
        ids: DraftIds | None = None,
    ) -> None:
        """Add children below the open nodes; `probs`, `[open nodes, guessed]`: their distributions, or one-hot."""
        if probs is not None:
            self._probs.append(probs)
            self._ids_of_probs.append(ids)
        opened: list[int] = []
        for dist, (parent, own) in enumerate(zip(self.open, children, strict=True), self._dists):
            draws = []
            for rank, (token, probability) in enumerate(own):
                first = len(self.tokens)
                node = self._child(parent, token)
                if node == first:
                    self._ranks.append((*self._ranks[parent + 1], rank))
                draws.append(Draw(node, -1 if probs is None else dist, self.drawing.kind))
                # An unlikely token is kept because it was drawn.
                if node == first and (not self.budget.looks or self._continues(parent, probability)):
                    opened.append(node)
            self._draws[parent + 1] = tuple(draws)
        self._dists += len(self.open)
        self._depth += 1
        if self._counts is not None:
            opened = [node for node in opened if self._counts[self._ranks[node + 1]]]
        grows = self._depth < self.budget.depth and len(self.tokens) < self.budget.nodes
        self.open = opened if grows else []

    def _child(self, parent: int, token: int | Tensor) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self._draws.append(())
        return len(self.tokens) - 1

    def extends(self, level: int, probability: float) -> bool:
        """Whether a chain goes on below its token at a level, of this probability; call it once for each, in order."""
        goes_on = not self.budget.looks or self._continues(level - 1, probability)
        return goes_on and level + 1 < self.levels

    def _continues(self, parent: int, probability: float) -> bool:
        survival = self._survival[parent + 1] * self.budget.chance(probability)
        self._confidence.append(probability)
        self._survival.append(survival)
        return self.budget.continues(probability, survival)

    def segment(self) -> Segment:
        written, self._fed = self._fed, len(self.tokens)
        rows = [node - written for node in self.open]
        pending = self._uncommitted
        parents = (*range(-1, pending - 1), *(pending + parent for parent in self.parents))
        return Segment(self.cache, self._ids(written), shape_of(parents), rows, pending + written)

    def chain_numbers(self) -> Sequence[Sequence[float]] | None:
        """The numbers that draw a whole chain at once; None if that is not possible."""
        if not self.on_device or self.request.shaping is not None or self.drawing.choose(self.request.params) is None:
            return None
        return self.drawing.chain_numbers(self.request.params, self._noise, self.levels)

    def host_numbers(self) -> Sequence[Sequence[float]] | None:
        """The numbers of `LanguageModel.draft_chain`; None if it cannot draw this tree."""
        params, drawing = self.request.params, self.drawing
        if self._counts is not None or not _is_chain(self.budget, self._branching) or self.request.shaping is not None:
            return None
        if drawing.kind is DrawKind.COUPLED or drawing.choose(params) is None:
            return None
        return drawing.chain_numbers(params, self._noise, self.levels)

    def take_chain(self, tokens: Tensor, probs: Tensor | None, confidence: Sequence[float] = ()) -> None:
        """Take `[drawn]` tokens, at least the budget on a device, drawn from `[drawn, vocab]`; None: one-hot.

        `confidence`: the drafter's probabilities of the tokens, where `extends`, which ends a chain, was not called.
        """
        depth, kind = len(self._confidence) or min(self.levels, len(tokens)), self.drawing.kind
        draws = [(Draw(node, -1 if probs is None else node, kind),) for node in range(depth)]
        tree = TokenTree(tokens[:depth], chain_shape(depth))
        if not self.on_device:
            tree.keep_host_ids(tree.tokens.tolist())
        self._whole = Proposal(
            tree, (*draws, ()), None if probs is None else probs[:depth], tuple(confidence or self._confidence)
        )
        self.open = []

    def proposal(self) -> Proposal:
        if self._whole is not None:
            return self._whole
        if not self.tokens:
            return Proposal.empty()
        tree = TokenTree(self._ids(0), shape_of(tuple(self.parents)))
        if not self.on_device:
            tree.keep_host_ids(self.tokens)
        return Proposal(tree, tuple(self._draws), self._whole_probs(), tuple(self._confidence))

    def _whole_probs(self) -> Tensor | None:
        """All distributions `[dists, vocab]`. Levels drawn beside a shaped request have whole ones already."""
        parts = []
        for ids, group in itertools.groupby(zip(self._ids_of_probs, self._probs, strict=True), lambda each: each[0]):
            levels = [probs for _, probs in group]
            probs = torch.cat(levels) if len(levels) > 1 else levels[0]
            parts.append(probs if ids is None else ids.whole(probs, 0.0))
        return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)

    def _ids(self, first: int) -> Tensor:
        tokens = self.tokens[first:]
        if not self.on_device:
            return torch.tensor(tokens)
        return torch.cat(tokens) if len(tokens) > 1 else tokens[0]


class SiblingChains(TreeBuilder):
    """Builds the tree of several chains, each drawn from the draft independently (SpecTr, Sun et al. 2310.15141).

    Equal prefixes are one path, so a node on m chains has m independent draws; two of them may have one child, and both
    count. That number depends on the tokens above the node, so it is known before the first is drawn.

    Worked example: three chains 5 7, 5 8 and 5 7 are node 0 = 5 with three draws at the root that all name it, and its
    children 1 = 7, named by two of the three draws there, and 2 = 8. The request is sampled, without a seed; a budget's
    width limits the number of chains.
    """

    def __init__(
        self,
        cache: RequestCache,
        request: DraftRequest,
        budget: Budget,
        noise: Noise,
        chains: int,
        device: torch.device,
    ) -> None:
        count = min(chains, budget.width)
        super().__init__(cache, request, budget, noise, (max(1, count),) * max(1, budget.depth), device)
        self.drawing = INDEPENDENT_DRAWS
        self._passing = {-1: count}  # by node: number of chains through it; -1 is the root
        self._known: dict[tuple[int, int | Tensor], int] = {}  # children by parent and token

    def open_nodes(self) -> list[OpenNode]:
        """As many draws at each node as chains through it; the node budget cuts as if no two agreed."""
        widths = [self._passing[node] for node in self.open]
        first, left = len(self.tokens), self.budget.nodes - len(self.tokens)
        return [
            OpenNode(self._noise, self._depth, first + before, max(0, min(width, left - before)))
            for before, width in zip(itertools.accumulate(widths, initial=0), widths, strict=False)
        ]

    def _child(self, parent: int, token: int | Tensor) -> int:
        key = parent, token
        if key not in self._known:
            self._known[key] = super()._child(parent, token)
        node = self._known[key]
        self._passing[node] = self._passing.get(node, 0) + 1
        return node


class ScoredTree(DraftTree):
    """A tree of which the nodes with the best scores are kept; no node has a better score than its parent."""

    def __init__(self, request: DraftRequest, budget: Budget) -> None:
        super().__init__(request, budget)
        self.scores: list[float] = []
        self.depths: list[int] = []

    def add(self, parent: int, token: int, score: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)

    def best(self) -> tuple[list[int], TokenTree]:
        """The best nodes within the budget, and their tree; of equal scores the shallower, then the first."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], self.depths[node]))
        kept = order[: self.budget.nodes]
        place = {node: number for number, node in enumerate(kept)} | {-1: -1}
        shape = shape_of(tuple(place[self.parents[node]] for node in kept))
        return kept, TokenTree.of_ids([self.tokens[node] for node in kept], shape)


class LikeliestTree(ScoredTree):
    """The nodes with the largest products of probabilities, found by a beam search.

    EAGLE-2 (Li et al., arXiv 2406.16858), section 4: each open node proposes its likeliest tokens, the best of all of
    them are opened next, and at the end the best nodes of all levels are kept. A node is never likelier than its
    parent, so these nodes form a tree. They are deterministic candidates, which every rule verifies exactly.

    Worked example, two open nodes per level: the root proposes a with 0.6 and b with 0.3, a proposes c with 0.4 and d
    with 0.2, b proposes e with 0.9 and f with 0.1. The products are 0.24, 0.12, 0.27 and 0.03, so c and e are opened,
    and the best four nodes are a, b, e and c. A budget's width is the number of open nodes, and of tokens that each
    proposes.
    """

    def __init__(self, cache: RequestCache, request: DraftRequest, budget: Budget) -> None:
        super().__init__(request, budget)
        self.cache = cache
        self._fed: list[int] = []
        self._whole: TokenTree | None = None

    def grow(self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> None:
        first = len(self.tokens)
        for parent, tokens, logs in zip(self.open, ids, log_probs, strict=True):
            above = self.scores[parent] if parent >= 0 else 0.0
            for token, log in zip(tokens, logs, strict=True):
                if log > -math.inf:
                    self.add(parent, token, above + log)
        best = sorted(range(first, len(self.tokens)), key=lambda node: -self.scores[node])[: self.budget.width]
        grows = best and self.depths[best[0]] < self.budget.depth
        self.open = sorted(best) if grows else ()

    def segment(self) -> Segment:
        written = len(self._fed)
        self._fed += self.open
        place = {node: number for number, node in enumerate(self._fed)} | {-1: -1}
        shape = shape_of(tuple(place[self.parents[node]] for node in self._fed))
        tokens = torch.tensor([self.tokens[node] for node in self.open])
        return Segment(self.cache, tokens, shape, range(len(self.open)), written)

    def take_tree(self, tree: TokenTree) -> None:
        """Take a tree that was found at once; its first nodes fit a smaller budget."""
        self._whole, self.open = tree.first(self.budget.nodes), ()

    def proposal(self) -> Proposal:
        return Proposal.deterministic(self.best()[1] if self._whole is None else self._whole)


def grow_likeliest(
    trees: Sequence[LikeliestTree], logits: Tensor, ids: DraftIds | None, likeliest: Callable[[Tensor, int], TopK]
) -> list[LikeliestTree]:
    """Grow trees by one level, from logits `[nodes, guessed]` of all open nodes; returns those that continue.

    `ids` are the token ids of the logits' columns; None for the whole vocabulary.
    """
    counts = [len(tree.open) for tree in trees]
    if any(tree.request.shaping is not None for tree in trees):
        logits, ids, likeliest = _shaped(trees, logits if ids is None else ids.whole(logits), counts), None, TopK.of
    top = likeliest(logits, min(max(tree.budget.width for tree in trees), logits.shape[1]))
    tokens = top.ids if ids is None else ids.ids[top.ids]
    start = 0
    for tree, count in zip(trees, counts, strict=True):
        here = slice(start, start + count), slice(tree.budget.width)
        tree.grow(tokens[here].tolist(), top.log_probs[here].tolist())
        start += count
    return [tree for tree in trees if tree.open]


class TextPath(LikeliestTree):
    """A chain along a given text, with the distributions `[vocab]` that its tokens would be drawn from."""

    def __init__(self, cache: RequestCache, request: DraftRequest, budget: Budget, text: Sequence[int]) -> None:
        super().__init__(cache, request, replace(budget.cut(len(text)), width=1))
        self._text = text
        self.probs: list[Tensor] = []


def follow_texts(paths: Sequence[TextPath], logits: Tensor, ids: DraftIds | None = None) -> list[TextPath]:
    """Extend paths by one token, with distributions from logits `[paths, guessed]`; returns those that continue."""
    for path, own in zip(paths, (logits if ids is None else ids.whole(logits)).split(1), strict=True):
        path.probs.append(probs_from_logits(path.shaped(own), path.request.params)[0])
        path.grow([[path._text[len(path.probs) - 1]]], [[0.0]])
    return [path for path in paths if path.open]


def _shaped(trees: Sequence[DraftTree], logits: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.cat([tree.shaped(own) for tree, own in zip(trees, logits.split(list(counts)), strict=True)])


def draw_chains(
    builders: Sequence[TreeBuilder],
    device: torch.device,
    run: Callable[[Choose, Sequence[TreeBuilder], int, Sequence[Tensor]], tuple[Tensor, Tensor | None]],
    numbers_of: Callable[[TreeBuilder], Sequence[Sequence[float]] | None],
) -> list[TreeBuilder]:
    """Draw whole chains, one call per way of drawing; returns the builders that cannot be drawn so.

    Args:
        run: called with a way of drawing, chains, a number of levels and the numbers that draw their tokens, each
            `[chains, levels]`; returns tokens `[chains, levels]` and distributions `[chains, levels, vocab]`, None:
            one-hot.
        numbers_of: `TreeBuilder.chain_numbers`, for chains of fixed length; `host_numbers`, for a `run` that reads
            tokens and calls `TreeBuilder.extends`.
    """
    alike: dict[Choose, list[tuple[TreeBuilder, Sequence[Sequence[float]]]]] = {}
    for builder in builders:
        choose, numbers = builder.drawing.choose(builder.request.params), numbers_of(builder)
        if choose is not None and numbers is not None:
            alike.setdefault(choose, []).append((builder, numbers))
    for choose, group in alike.items():
        chains = [chain for chain, _ in group]
        levels = max(chain.levels for chain in chains)
        by_kind = [
            transfers.upload(np.array([[*own, *own[-1:] * (levels - len(own))] for own in kind]), device)
            for kind in zip(*(numbers for _, numbers in group), strict=True)
        ]
        take_chains(chains, *run(choose, chains, levels, by_kind))
    return [builder for builder in builders if builder.grows]


def take_chains(chains: Sequence[TreeBuilder], tokens: Tensor, probs: Tensor | None) -> None:
    """Give chains what was drawn for them, as of `draw_chains`."""
    for row, chain in enumerate(chains):
        chain.take_chain(tokens[row], None if probs is None else probs[row])


def is_fixed_chain(budget: Budget, branching: Sequence[int]) -> bool:
    """Whether a tree within a budget is a chain of fixed length."""
    return not budget.looks and _is_chain(budget, branching)


def _is_chain(budget: Budget, branching: Sequence[int]) -> bool:
    return all(min(width, budget.width) == 1 for width in branching[: budget.depth])


@contextmanager
def judged_if_it_fails(trees: Sequence[DraftTree]) -> Iterator[None]:
    """If a single tree fails after its first level, what was drafted is still verified.

    A level may fail because of tokens of earlier levels, never of its own, which are not drawn yet: which draws exist
    is a predictable choice (docs/lossless.md). A single tree with nodes raises `CutShortError`, without uncommitted
    entries.
    """
    try:
        yield
    except Exception as error:
        for tree in trees:
            tree.cache.rollback(tree.cache.length)
        if len(trees) == 1 and len((drawn := trees[0].proposal()).tree):
            raise CutShortError(drawn) from error
        raise


def draw_level(builders: Sequence[TreeBuilder], logits: Tensor, ids: DraftIds | None = None) -> list[TreeBuilder]:
    """Draw the children of all open nodes, from logits `[nodes, guessed]`; returns the trees that continue.

    Consecutive builders with the same way of drawing share one computation. `ids` are the ids of the logits' columns.
    """
    start = 0
    for _, group in itertools.groupby(builders, key=lambda builder: builder.draws_alike):
        alike = list(group)
        nodes = [builder.open_nodes() for builder in alike]
        rows = slice(start, start + sum(map(len, nodes)))
        _draw_alike(alike, nodes, logits[rows], ids)
        start = rows.stop
    return [builder for builder in builders if builder.grows]


def _draw_alike(
    builders: Sequence[TreeBuilder], nodes: Sequence[Sequence[OpenNode]], logits: Tensor, ids: DraftIds | None
) -> None:
    first, together = builders[0], list(itertools.chain.from_iterable(nodes))
    shaped = any(builder.request.shaping is not None for builder in builders)
    if ids is not None and (shaped or first.drawing.by_ids):
        logits, ids = ids.whole(logits), None
    if shaped:
        logits = _shaped(builders, logits, list(map(len, nodes)))
    tokens, probs = first.drawing.draw(logits, first.request.params, together)  # [nodes, draws], [nodes, vocab]
    children: Sequence[Sequence[tuple[int | Tensor, float]]]
    if first.on_device:
        unread = existing(tokens[:, 0], probs, logits.shape[-1])[0]  # [nodes]; changes `probs`
        children = [[(token, 1.0)] for token in unread.split(1)]
    else:
        confidence = None  # [nodes, draws]
        if any(builder.budget.looks for builder in builders):
            confidence = token_probs(logits, tokens) if probs is None else probs_at(probs, tokens)
        children = fetch_children(tokens, confidence, together, logits.shape[-1])
    if ids is not None:
        names: Any = ids.ids if first.on_device else ids.on_host
        children = [[(names[place], chance) for place, chance in own] for own in children]
    start = 0
    for builder, own in zip(builders, nodes, strict=True):
        rows = slice(start, start + len(own))
        builder.add(children[rows], None if probs is None else probs[rows], ids)
        start = rows.stop
