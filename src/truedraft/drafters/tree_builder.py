"""The draft tree builder: trees and chains that a draft model draws level by level, on the host or on a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Draw, Proposal
from truedraft.core.rank_tree import RankPath, RankTree
from truedraft.core.tree import TokenTree, chain_shape, path_to, shape_of
from truedraft.drafters.base import CutShortError, DraftRequest
from truedraft.drafters.draws import DraftIds, OpenNode, drawing_for, existing, fetch_children
from truedraft.models.base import Choose, Segment
from truedraft.models.cache import RequestCache


class TreeBuilder:
    """Builds the draft tree of one request, level by level, which is also the order of its nodes.

    The number of children and the nodes that grow may depend on the draws; then the host reads each level. A chain
    without a probability threshold is as long as its budget allows: on a device its tokens are not read, and each feeds
    the next.

    Args:
        branching: draws at each node of depth 0, 1, ...; with `ranks` at most so many.
        behind: number of the text's last tokens that were fed and not committed; the tree is below them.
        ranks: the draws by their ranks at their node, the best ones first; a budget of n nodes gets the first n.

    Attributes:
        on_device: whether the tokens stay on the device.
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
        behind: int = 0,
        ranks: RankTree | None = None,
    ) -> None:
        self.cache = cache
        self.request = request
        self.budget = budget
        self.drawing = drawing_for(request.params, max(branching))
        self.on_device = transfers.waits(device) and is_fixed_chain(budget, branching) and not _reads_paths(request)
        self.draws_alike = (self.on_device, *request.params.probs_key, request.params.seeded)
        self._noise = noise
        self._branching = branching
        self._counts = None if ranks is None else ranks.first(budget.nodes).children
        self._ranks: list[RankPath] = [()]  # by tree row
        self._depth = 0
        self._tokens: list[Any] = []  # ids; tensors [1] where they stay on the device
        self._parents: list[int] = []
        self._draws: list[tuple[Draw, ...]] = [()]  # by tree row
        self._confidence: list[float] = []  # the drafter's probabilities of the tokens
        self._survival = [1.0]  # by tree row
        self._probs: list[Tensor] = []  # [nodes of a level, vocab]
        self._dists = 0  # nodes with drawn children
        self._open = [-1]  # nodes with children still to draw; -1 is the root
        self._fed = 0
        self._behind = behind
        self._whole: Proposal | None = None

    @property
    def grows(self) -> bool:
        return bool(self._open)

    @property
    def open(self) -> Sequence[int]:
        """Nodes with children still to draw; -1 is the root."""
        return self._open

    @property
    def unfed_parents(self) -> Sequence[int]:
        return self._parents[self._fed :]

    def keep_open(self, nodes: Sequence[int]) -> None:
        """Close all open nodes except these; the choice may depend only on what was drawn so far."""
        self._open = list(nodes)

    def open_nodes(self) -> list[OpenNode]:
        """The next draws; the node budget cuts in node order, so before anything is drawn."""
        first, found, most = len(self._tokens), [], self.budget.nodes
        for node in self._open:
            width = max(0, min(self._width(node), self.budget.width, most - first))
            found.append(OpenNode(self._noise, self._depth, first, width))
            first += width
        return found

    def _width(self, node: int) -> int:
        return self._branching[self._depth] if self._counts is None else self._counts[self._ranks[node + 1]]

    def shaped(self, logits: Tensor) -> Tensor:
        """Logits `[open nodes, vocab]` after the request's options, each for its node's path."""
        shaping = self.request.shaping
        if shaping is None:
            return logits
        return shaping.of_paths(logits, self.open_paths())

    def open_paths(self) -> list[tuple[int, ...]]:
        """The tokens from the root to each open node; on a device only their number is correct."""
        paths = (path_to(node, self._parents) for node in self._open)
        return [tuple(0 if self.on_device else self._tokens[node] for node in path) for path in paths]

    def add(self, children: Sequence[Sequence[tuple[int | Tensor, float]]], probs: Tensor | None) -> None:
        """Add children below the open nodes; those that may grow become open.

        Args:
            children: per open node, tokens and their probabilities.
            probs: `[open nodes, vocab]` that they were drawn from; None: one-hot distributions.
        """
        if probs is not None:
            self._probs.append(probs)
        opened: list[int] = []
        for dist, (parent, own) in enumerate(zip(self._open, children, strict=True), self._dists):
            draws = []
            for rank, (token, probability) in enumerate(own):
                first = len(self._tokens)
                node = self._child(parent, token)
                if node == first:
                    self._ranks.append((*self._ranks[parent + 1], rank))
                draws.append(Draw(node, -1 if probs is None else dist, self.drawing.kind))
                # A too unlikely token is kept because it was drawn; nothing is drafted below it.
                if node == first and (not self.budget.looks or self._continues(parent, probability)):
                    opened.append(node)
            self._draws[parent + 1] = tuple(draws)
        self._dists += len(self._open)
        self._depth += 1
        if self._counts is not None:
            opened = [node for node in opened if self._counts[self._ranks[node + 1]]]
        grows = self._depth < self.budget.depth and len(self._tokens) < self.budget.nodes
        self._open = opened if grows else []

    def _child(self, parent: int, token: int | Tensor) -> int:
        self._tokens.append(token)
        self._parents.append(parent)
        self._draws.append(())
        return len(self._tokens) - 1

    def _continues(self, parent: int, probability: float) -> bool:
        survival = self._survival[parent + 1] * self.budget.chance(probability)
        self._confidence.append(probability)
        self._survival.append(survival)
        return self.budget.continues(probability, survival)

    def segment(self) -> Segment:
        written, self._fed = self._fed, len(self._tokens)
        rows = [node - written for node in self._open]
        pending = self._behind
        parents = (*range(-1, pending - 1), *(pending + parent for parent in self._parents))
        return Segment(self.cache, self._ids(written), shape_of(parents), rows, pending + written)

    def chain_numbers(self) -> Sequence[Sequence[float]] | None:
        """The numbers that draw its tokens, if the whole chain can be drafted at once; otherwise None."""
        if not self.on_device or self.request.shaping is not None or self.drawing.choose(self.request.params) is None:
            return None
        return self.drawing.chain_numbers(self.request.params, self._noise, self.length)

    @property
    def length(self) -> int:
        return min(self.budget.depth, self.budget.nodes, len(self._branching))

    def take_chain(self, tokens: Tensor, probs: Tensor | None) -> None:
        """Take a drafted chain of tokens `[levels]` on the device, at least as long as its budget.

        Args:
            probs: `[levels, vocab]` that they were drawn from; None: one-hot distributions.
        """
        depth, kind = self.length, self.drawing.kind
        draws = [(Draw(node, -1 if probs is None else node, kind),) for node in range(depth)]
        tree = TokenTree(tokens[:depth], chain_shape(depth))
        self._whole = Proposal(tree, (*draws, ()), None if probs is None else probs[:depth], ())
        self._open = []

    def proposal(self) -> Proposal:
        if self._whole is not None:
            return self._whole
        if not self._tokens:
            return Proposal.empty()
        tree = TokenTree(self._ids(0), shape_of(tuple(self._parents)))
        if not self.on_device:
            tree.keep_host_ids(self._tokens)
        probs = torch.cat(self._probs) if self._probs else None
        return Proposal(tree, tuple(self._draws), probs, tuple(self._confidence))

    def _ids(self, first: int) -> Tensor:
        """Tokens `[nodes]` of the nodes from `first` on, on the device if `on_device`."""
        tokens = self._tokens[first:]
        if not self.on_device:
            return torch.tensor(tokens)
        return torch.cat(tokens) if len(tokens) > 1 else tokens[0]


def chains_alike(
    builders: Sequence[TreeBuilder],
) -> dict[Choose, list[tuple[TreeBuilder, Sequence[Sequence[float]]]]]:
    """Chains that can be drafted at once, and the numbers that draw them, by way of drawing."""
    alike: dict[Choose, list[tuple[TreeBuilder, Sequence[Sequence[float]]]]] = {}
    for builder in builders:
        choose, numbers = builder.drawing.choose(builder.request.params), builder.chain_numbers()
        if choose is not None and numbers is not None:
            alike.setdefault(choose, []).append((builder, numbers))
    return alike


def chain_numbers_of(numbers: Sequence[Sequence[Sequence[float]]], levels: int, device: torch.device) -> list[Tensor]:
    """Numbers `[kinds, depth]` of chains as one tensor `[chains, levels]` per kind; shorter chains are padded."""
    return [
        transfers.upload(np.array([[*own, *own[-1:] * (levels - len(own))] for own in kind]), device)
        for kind in zip(*numbers, strict=True)
    ]


def _reads_paths(request: DraftRequest) -> bool:
    return request.shaping is not None and request.shaping.reads_paths


def is_fixed_chain(budget: Budget, branching: Sequence[int]) -> bool:
    """Whether a tree within a budget is a chain of fixed length."""
    widths = branching[: budget.depth]
    return not budget.looks and all(min(width, budget.width) == 1 for width in widths)


class Growing(Protocol):
    """A tree that is drafted level by level."""

    cache: RequestCache

    def proposal(self) -> Proposal:
        """What was drafted so far."""


@contextmanager
def judged_if_it_fails(trees: Sequence[Growing]) -> Iterator[None]:
    """If a single tree fails after its first level, what was drafted is still verified.

    A level may fail because of tokens of earlier levels, never because of its own, which are not drawn yet. So which
    draws exist is a predictable choice (docs/lossless.md). Uncommitted cache entries are dropped.

    Raises:
        CutShortError: it failed for a single tree that has nodes.
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
    """Draw the children of all open nodes; returns the builders of trees that continue.

    Consecutive builders with the same way of drawing share one computation.

    Args:
        logits: `[nodes, guessed]`, the open nodes of all trees in order.
        ids: the token ids of the logits' columns; None for the whole vocabulary.
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
    """Draw the open nodes of each builder from logits `[nodes, guessed]`, in one computation."""
    first, together = builders[0], list(itertools.chain.from_iterable(nodes))
    shaped = any(builder.request.shaping is not None for builder in builders)
    if ids is not None and (shaped or first.drawing.by_ids):
        logits, ids = ids.whole(logits), None
    if shaped:
        parts = logits.split(list(map(len, nodes)))
        logits = torch.cat([builder.shaped(own) for builder, own in zip(builders, parts, strict=True)])
    tokens, probs = first.drawing.draw(logits, first.request.params, together)  # [nodes, draws], [nodes, vocab]
    children: Sequence[Sequence[tuple[int | Tensor, float]]]
    if first.on_device:
        children = _unread_children(tokens, probs, logits.shape[-1])
    else:
        looked_at = None
        if any(builder.budget.looks for builder in builders):
            looked_at = torch.softmax(logits.float(), dim=-1) if probs is None else probs  # [nodes, vocab]
        children = fetch_children(tokens, looked_at, together, logits.shape[-1])
    if ids is not None:
        names: Any = ids.ids if first.on_device else ids.on_host
        children = [[(names[place], chance) for place, chance in own] for own in children]
        probs = None if probs is None else ids.whole(probs, 0.0)
    start = 0
    for builder, own in zip(builders, nodes, strict=True):
        rows = slice(start, start + len(own))
        builder.add(children[rows], None if probs is None else probs[rows])
        start = rows.stop


def _unread_children(tokens: Tensor, probs: Tensor | None, vocab: int) -> list[list[tuple[Tensor, float]]]:
    """The one child of each node, `[1]` on the device, from tokens `[nodes, 1]`; changes `probs`, see `existing`."""
    return [[(token, 1.0)] for token in existing(tokens[:, 0], probs, vocab)[0].split(1)]
