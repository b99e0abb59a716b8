"""Trees that a draft model draws level by level: on the host, or as chains that stay on the device."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.tree import TokenTree, chain_shape, shape_of
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draws import Drawing, DrawnChildren, OpenNode, drawing_for
from truedraft.models.base import LanguageModel, Segment


class Growing(ABC):
    """A tree being drawn for one request.

    Args:
        cache: of the draft model.
        request: what is drafted for.
        budget: what may be drawn.
        noise: of the request at this step.
        branching: draws at each node of depth 0, 1, ...
    """

    def __init__(
        self, cache: RequestCache, request: DraftRequest, budget: Budget, noise: Noise, branching: Sequence[int]
    ) -> None:
        self.cache = cache
        self.request = request
        self.budget = budget
        self.noise = noise
        self.branching = branching
        self.depth = 0

    @property
    def missed(self) -> int:
        """Committed tokens that the draft has not seen."""
        return len(self.request.tokens) - self.cache.length

    @property
    def draws_alike(self) -> tuple[object, ...]:
        """Trees with equal ones share one computation."""
        params = self.request.params
        return (type(self), *params.probs_key, params.coupled)

    @property
    @abstractmethod
    def grows(self) -> bool:
        """Whether another level is drawn."""

    @abstractmethod
    def open_nodes(self) -> list[OpenNode]:
        """What is drawn next."""

    @abstractmethod
    def draw(
        self, group: Sequence[Growing], logits: Tensor, nodes: Sequence[Sequence[OpenNode]], drawing: Drawing
    ) -> None:
        """Draw the next level of trees that draw alike, all of this class.

        Args:
            group: the trees.
            logits: `[nodes, vocab]`, the trees' rows one behind another.
            nodes: the open nodes of each tree.
            drawing: how to draw.
        """

    @abstractmethod
    def segment(self) -> Segment:
        """The nodes not yet fed, with logits at those that are open."""

    @abstractmethod
    def proposal(self) -> Proposal:
        """What was drawn."""


class HostTree(Growing):
    """A tree whose tokens the host looks at, level by level. Nodes are numbered level by level; see `Growing`."""

    def __init__(
        self, cache: RequestCache, request: DraftRequest, budget: Budget, noise: Noise, branching: Sequence[int]
    ) -> None:
        super().__init__(cache, request, budget, noise, branching)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._draws: dict[int, tuple[Draw, ...]] = {}  # by slot
        self._probs: list[Tensor] = []
        self._dist_rows = 0
        self._open = [-1]  # nodes whose children are drawn next; -1 is the root
        self._fed = 0

    @property
    def grows(self) -> bool:
        """See `Growing.grows`."""
        return bool(self._open)

    def open_nodes(self) -> list[OpenNode]:
        """What is drawn next; the node budget cuts by order, so before anything is drawn."""
        width = min(self.branching[self.depth], self.budget.width)
        left = self.budget.nodes - len(self._tokens)
        wants = self.budget.min_probability > 0.0
        nodes = []
        for number in range(len(self._open)):
            index = len(self._tokens) + number * width
            nodes.append(OpenNode(self.noise, self.depth, index, max(0, min(width, left - number * width)), wants))
        return nodes

    def draw(
        self, group: Sequence[Growing], logits: Tensor, nodes: Sequence[Sequence[OpenNode]], drawing: Drawing
    ) -> None:
        """See `Growing.draw`."""
        flat = [node for own in nodes for node in own]
        children, probs = drawing.draw(logits, self.request.params, flat)
        done = 0
        for tree, own in zip(group, nodes, strict=True):
            assert isinstance(tree, HostTree)
            rows = slice(done, done + len(own))
            tree._add(children[rows], drawing.kind, None if probs is None else probs[rows])
            done += len(own)

    def _add(self, children: Sequence[DrawnChildren], kind: DrawKind, probs: Tensor | None) -> None:
        """Hang drawn children below the open nodes; those that may grow become open."""
        first_dist = self._dist_rows
        if probs is not None:
            self._probs.append(probs)
            self._dist_rows += len(probs)
        opened: list[int] = []
        for row, (parent, drawn) in enumerate(zip(self._open, children, strict=True)):
            draws = []
            for token, probability in zip(drawn.tokens, drawn.probabilities, strict=True):
                node = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(parent)
                draws.append(Draw(node, -1 if probs is None else first_dist + row, kind))
                # A token too unlikely is kept, for it was drawn; nothing is drafted below it.
                if probability >= self.budget.min_probability:
                    opened.append(node)
            self._draws[parent + 1] = tuple(draws)
        self.depth += 1
        grows = self.depth < self.budget.depth and len(self._tokens) < self.budget.nodes
        self._open = opened if grows else []

    def segment(self) -> Segment:
        """See `Growing.segment`."""
        written, self._fed = self._fed, len(self._tokens)
        rows = [node - written for node in self._open]
        ids = torch.tensor(self._tokens[written:])
        return Segment(self.cache, ids, shape_of(tuple(self._parents)), rows, written)

    def proposal(self) -> Proposal:
        """See `Growing.proposal`."""
        if not self._tokens:
            return Proposal.empty()
        tree = TokenTree.of_ids(self._tokens, shape_of(tuple(self._parents)))
        draws = tuple(self._draws.get(slot, ()) for slot in range(len(self._tokens) + 1))
        return Proposal(tree, draws, torch.cat(self._probs) if self._probs else None)


class DeviceChain(Growing):
    """One draw after another, none of which the host looks at: each feeds the next on the device; see `Growing`.

    How long it gets is known beforehand, for every distribution gives one token; see `Drawing.draw_unseen`.
    """

    def __init__(
        self, cache: RequestCache, request: DraftRequest, budget: Budget, noise: Noise, branching: Sequence[int]
    ) -> None:
        super().__init__(cache, request, budget, noise, branching)
        self._length = min(budget.depth, budget.nodes)
        self._tokens: list[Tensor] = []  # each [1]
        self._probs: list[Tensor] = []  # each [1, vocab]
        self._kind = DrawKind.DETERMINISTIC

    @staticmethod
    def fits(budget: Budget, branching: Sequence[int]) -> bool:
        """Whether a tree within a budget is a chain whose length no token decides."""
        widths = branching[: budget.depth]
        return budget.min_probability == 0.0 and all(min(width, budget.width) == 1 for width in widths)

    @property
    def grows(self) -> bool:
        """See `Growing.grows`."""
        return self.depth < self._length

    def open_nodes(self) -> list[OpenNode]:
        """See `Growing.open_nodes`."""
        return [OpenNode(self.noise, self.depth, self.depth, 1, False)]

    def draw(
        self, group: Sequence[Growing], logits: Tensor, nodes: Sequence[Sequence[OpenNode]], drawing: Drawing
    ) -> None:
        """See `Growing.draw`."""
        tokens, probs = drawing.draw_unseen(logits, self.request.params, [node for own in nodes for node in own])
        for row, chain in enumerate(group):
            assert isinstance(chain, DeviceChain)
            chain._kind = drawing.kind
            chain._tokens.append(tokens[row : row + 1])
            if probs is not None:
                chain._probs.append(probs[row : row + 1])
            chain.depth += 1

    def segment(self) -> Segment:
        """See `Growing.segment`."""
        return Segment(self.cache, self._tokens[-1], chain_shape(self.depth), (0,), self.depth - 1)

    def proposal(self) -> Proposal:
        """See `Growing.proposal`."""
        if not self._tokens:
            return Proposal.empty()
        tokens = torch.cat(self._tokens)
        if not self._probs:
            return Proposal.deterministic(TokenTree.chain(tokens))
        return Proposal.chain(tokens, torch.cat(self._probs), self._kind)


def growing(
    cache: RequestCache,
    request: DraftRequest,
    budget: Budget,
    noise: Noise,
    branching: Sequence[int],
    model: LanguageModel,
) -> Growing:
    """A tree to be drawn from a model: on the host where looking costs nothing, or where its shape wants a look."""
    stays = transfers.waits(model.device) and DeviceChain.fits(budget, branching)
    return (DeviceChain if stays else HostTree)(cache, request, budget, noise, branching)


def draw_level(level: Sequence[Growing], logits: Tensor) -> list[Growing]:
    """Draw the children of all open nodes; returns the trees that grow on.

    Neighbours that draw alike share one computation.

    Args:
        level: the trees.
        logits: `[nodes, vocab]`, the trees' open nodes one behind another.
    """
    start = 0
    for _, trees in itertools.groupby(level, key=lambda tree: tree.draws_alike):
        group = list(trees)
        first = group[0]
        nodes = [tree.open_nodes() for tree in group]
        count = sum(map(len, nodes))
        drawing = drawing_for(first.request.params, max(first.branching))
        first.draw(group, logits[start : start + count], nodes, drawing)
        start += count
    return [tree for tree in level if tree.grows]
